"""Manage the allocations of an emulated device in host memory, and find the program's arrays by address."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.emulator.api import natural
from cudatma.emulator.machine.memory import address_of
from cudatma.emulator.ptx.types import Array
from cudatma.errors import ArgumentError
from cudatma.programs.device import TOTAL_BYTES

#: Alignment, in bytes, of memory from cuMemAlloc. Kernels rely on this alignment.
ALIGNMENT = 512
#: Initial value of the bytes of an allocation. Floating-point elements are NaN, which makes their use visible.
_FILL = 0xFF
POINTER_BYTES = 8
#: Numbers below this one are not treated as addresses.
LOWEST_ADDRESS = 1 << 16


def bytes_at(address: int, size: int) -> Array:
    """Return the bytes at a host address without copying them. The caller must keep the memory alive."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)


def aligned_bytes(size: int, alignment: int = ALIGNMENT, fill: int = 0) -> Array:
    """Return new memory at an aligned address."""
    padded = np.full(size + alignment, fill, np.uint8)
    start = -address_of(padded) % alignment
    memory: Array = padded[start : start + size]
    return memory


def host_array(value: object) -> Array | None:
    """Return an array or tensor in host memory as a NumPy array without copying it, or None for any other object."""
    if isinstance(value, np.ndarray):
        return value
    if not type(value).__module__.startswith("torch"):
        return None
    info = array_info(value)
    if info is None or info.device is not None:
        return None
    torch: Any = sys.modules["torch"]
    tensor: Any = value
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[info.dtype.itemsize]
    plain: Array = tensor.detach().view(words).numpy().view(info.dtype)
    return plain


def array_info(value: object) -> ArrayInfo | None:
    """Return the description of an array from any library, or None for any other object."""
    if isinstance(value, int | float | str | bytes) or value is None:
        return None
    try:
        return describe(value)
    except Exception:  # objects of other libraries, such as torch's fake tensors, can raise any exception
        return None


def callers_arrays() -> Iterator[tuple[str, ArrayInfo]]:
    """Yield the name and description of each array in the variables of the calling functions, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    modules = set()
    while frame is not None:
        is_ours = str(frame.f_globals.get("__name__", "")).startswith("cudatma.programs")
        scopes = [] if is_ours else [frame.f_locals]
        if not is_ours and id(frame.f_globals) not in modules and frame.f_locals is not frame.f_globals:
            modules.add(id(frame.f_globals))
            scopes.append(frame.f_globals)
        for scope in scopes:
            for name, value in list(scope.items()):
                yield from _arrays_in(name, value)
        frame = frame.f_back


def _arrays_in(name: str, value: object) -> Iterator[tuple[str, ArrayInfo]]:
    items: Iterable[tuple[str, object]] = [(name, value)]
    if isinstance(value, list | tuple) and len(value) <= 64:
        items = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, dict) and len(value) <= 64:
        items = [(f"{name}[{key!r}]", item) for key, item in value.items()]
    for label, item in items:
        if hasattr(type(item), "__dlpack__") or hasattr(type(item), "__cuda_array_interface__"):
            info = array_info(item)
            if info is not None:
                yield label, info


def arrays_at(addresses: Iterable[int]) -> Iterator[tuple[str, ArrayInfo]]:
    """Yield the name and description of each program array that contains one of the addresses.

    Search the variables of the calling functions, and all torch tensors on the CPU.
    """
    remaining = np.unique(np.fromiter(addresses, np.uint64))

    def remove_range(info: ArrayInfo) -> bool:
        nonlocal remaining
        first, last = np.searchsorted(remaining, np.array(info.extent, np.uint64))
        remaining = np.delete(remaining, slice(first, last))
        return bool(first < last)

    for name, info in callers_arrays() if remaining.size else ():
        if remove_range(info):
            yield name, info
    if "torch" not in sys.modules or not mapped(remaining).size:
        return
    torch = sys.modules["torch"]
    for tensor in gc.get_objects():
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
            tensor_info = array_info(tensor)
            if tensor_info is not None and remove_range(tensor_info):
                yield "a torch tensor", tensor_info


class HostMemory:
    """The allocations of an emulated device. Each allocation is a NumPy array."""

    def __init__(self) -> None:
        self._blocks: dict[int, Array] = {}
        self._variables: dict[int, Array] = {}

    @property
    def blocks(self) -> tuple[Array, ...]:
        """The live allocations, followed by the registered module variables."""
        return *self._blocks.values(), *self._variables.values()

    def allocate(self, size: int, field: str) -> int | None:
        """Return the address of a new allocation, or None if the size is 0 or exceeds the available memory."""
        natural(field, size)
        try:
            block = aligned_bytes(int(size), fill=_FILL) if 0 < size <= TOTAL_BYTES else None
        except MemoryError:
            block = None
        if block is None:
            return None
        self._blocks[address_of(block)] = block
        return address_of(block)

    def add(self, variable: Array) -> None:
        """Register a module variable as memory that copies may access."""
        self._variables[address_of(variable)] = variable

    def remove(self, variable: Array) -> None:
        """Unregister a module variable."""
        self._variables.pop(address_of(variable), None)

    def free(self, address: int, field: str) -> None:
        """Free an allocation. A null pointer has no effect."""
        if address and self._blocks.pop(address, None) is None:
            raise ArgumentError(field, hex(address), "the address of an allocation that has not been freed")

    def discard(self, address: int) -> None:
        """Free an allocation that may already be free."""
        self._blocks.pop(address, None)

    def find(self, address: int) -> tuple[int, int] | None:
        """Return the address and the size of the allocation that contains an address, or None if there is none."""
        for base, block in (*self._blocks.items(), *self._variables.items()):
            if base <= address < base + max(1, block.size):
                return base, block.size
        return None

    def range(self, address: int, size: int, field: str) -> Array:
        """Return bytes in an allocation or in an array of the program. Raise ArgumentError for other addresses."""
        if not natural(f"{field.partition(':')[0]}: ByteCount", size):
            return np.empty(0, np.uint8)
        known = self.find(address)
        if known is None:
            known = next(((info.extent[0], info.extent[1] - info.extent[0]) for _, info in arrays_at([address])), None)
        if known is None:
            raise ArgumentError(
                field, hex(address), "an address in memory from cuMemAlloc or in an array of the program"
            )
        base, length = known
        if address + size > base + length:
            got = f"{size} bytes at byte {address - base} of an allocation of {length} bytes"
            raise ArgumentError(field, got, "a range inside one allocation")
        return bytes_at(address, size)

    def program_arrays(self, words: Iterable[int]) -> list[tuple[str, Array]]:
        """Return the arrays of the program that contain the addresses, each with its name.

        Skip addresses in allocations. Raise ArgumentError for any other address that is mapped in this process.
        """
        addresses = [word for word in words if LOWEST_ADDRESS <= word < 1 << 64 and not self.find(word)]
        arrays = [(name, host_array(info.owner), info) for name, info in arrays_at(addresses)]
        spans = [info.extent for _, array, info in arrays if array is not None]
        unknown = [word for word in addresses if not any(low <= word < high for low, high in spans)]
        for word in mapped(np.array(unknown, np.uint64)):
            raise ArgumentError(
                "args",
                hex(word),
                "an address in memory from cuMemAlloc or in an array of the program",
                "store the array in a variable, so that the emulator can find its size",
            )
        return [(name, array) for name, array, _ in arrays if array is not None]


def words_of(parameters: Iterable[bytes]) -> Iterator[int]:
    """Yield the aligned 64-bit words of kernel parameters, each of which may be an address."""
    for raw in parameters:
        for at in range(0, len(raw) - POINTER_BYTES + 1, POINTER_BYTES):
            yield int.from_bytes(raw[at : at + POINTER_BYTES], "little")


def mapped(addresses: Array) -> Array:
    """Return the addresses that are mapped in this process, or no addresses if the system has no /proc."""
    try:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
            spans = [[int(end, 16) for end in line.split(" ", 1)[0].split("-")] for line in maps]
    except OSError:
        return addresses[:0]
    starts, ends = np.array(spans, np.uint64).T
    at = np.searchsorted(starts, addresses, side="right")
    inside: Array = addresses[(at > 0) & (addresses < ends[at - 1])]
    return inside
