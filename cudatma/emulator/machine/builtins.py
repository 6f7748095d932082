"""Functions of the CUDA runtime that kernels can call: vprintf, __assertfail, malloc and free.

Source: CUDA C++ Programming Guide, "Formatted Output", "Assertion", "Dynamic Global Memory Allocation".
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import numpy as np

from cudatma.emulator.errors import TrapError
from cudatma.emulator.machine.memory import address_of
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import LANES

#: Size of the heap in bytes, the default of cudaLimitMallocHeapSize.
HEAP_BYTES = 8 << 20
_ALIGN = 16


def allocate(launch: Launch, size: int) -> int:
    """Allocate ``size`` bytes and return their address, or 0 if the heap is full."""
    if not 0 <= size <= HEAP_BYTES - sum(launch.heap.values()):
        return 0
    raw = np.full(max(size, 1) + _ALIGN, 0xA5, np.uint8)
    skip = -address_of(raw) % _ALIGN
    address = launch.memory.add(raw[skip : skip + max(size, 1)], "memory from malloc")
    launch.heap[address] = size
    return address


def release(launch: Launch, address: int) -> None:
    """Free memory from allocate(). Address 0 is ignored. Raise TrapError if the memory is not allocated."""
    if address:
        if launch.heap.pop(address, None) is None:
            raise TrapError(f"free is called with {address:#x}, which is not the address of allocated memory")
        launch.memory.remove(address)


_FORMAT = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(hh|h|ll|l|z)?([diouxXeEfFgGcsp%])")
_LONGEST_STRING = 4096


def _argument(w: Warp, name: str, lane: int) -> int:
    """Return an argument of 32 or 64 bits in one lane."""
    buffer = w.param_buffer(w.split.frame, name, 8).data.reshape(LANES, -1)[lane]
    return int.from_bytes(bytes(buffer[:8]), "little")


def _string(w: Warp, address: int) -> str:
    region = w.launch.memory.find(address)
    if region is None:
        raise TrapError(f"the string at {address:#x} is not in mapped memory")
    start = address - region.base
    raw = bytes(region.data[start : start + _LONGEST_STRING])
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def _vprintf(w: Warp, arguments: list[str], results: list[str]) -> None:
    """Format and collect the text of each lane. The values in local memory have their natural alignment."""
    for lane in w.split.mask.nonzero()[0].tolist():
        text = _string(w, _argument(w, arguments[0], lane))
        pointer = _argument(w, arguments[1], lane)
        at = pointer & 0xFFFFFFFF
        local = bytes(w.local.data.reshape(LANES, -1)[lane]) if pointer else b""
        values: list[object] = []
        for length, kind in _FORMAT.findall(text):
            if kind == "%":
                continue
            is_wide = kind in "eEfFgGsp" or length in ("l", "ll", "z")
            size = 8 if is_wide else 4
            at = -(-at // size) * size
            raw = local[at : at + size].ljust(size, b"\0")
            at += size
            if kind in "eEfFgG":
                values.append(struct.unpack("<d", raw)[0])
            elif kind == "s":
                values.append(_string(w, int.from_bytes(raw, "little")))
            else:
                values.append(int.from_bytes(raw, "little", signed=kind in "di"))
        pattern = _FORMAT.sub(
            lambda m: m[0].replace(m[1] or "", "").replace("p", "#x") if m[1] or m[2] == "p" else m[0], text
        )
        w.launch.printed.append(pattern % tuple(values))


def _assertfail(w: Warp, arguments: list[str], results: list[str]) -> None:
    lane = int(w.split.mask.argmax())
    message = _string(w, _argument(w, arguments[0], lane))
    raise TrapError(f"device assertion `{message}` failed in lane {lane}")


def _malloc(w: Warp, arguments: list[str], results: list[str]) -> None:
    out = w.param_buffer(w.split.frame, results[0], 8).data.reshape(LANES, -1)
    for lane in w.split.mask.nonzero()[0].tolist():
        address = allocate(w.launch, _argument(w, arguments[0], lane))
        out[lane, :8] = np.frombuffer(address.to_bytes(8, "little"), np.uint8)


def _free(w: Warp, arguments: list[str], results: list[str]) -> None:
    for lane in w.split.mask.nonzero()[0].tolist():
        release(w.launch, _argument(w, arguments[0], lane))


BUILTINS: dict[str, Callable[[Warp, list[str], list[str]], None]] = {
    "vprintf": _vprintf,
    "__assertfail": _assertfail,
    "malloc": _malloc,
    "free": _free,
}
