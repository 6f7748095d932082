"""Record the launches of a program on a machine with a GPU.

The recorder replaces the Python functions that launch kernels:

- CompiledKernel.run in Triton
- RawKernel and RawModule in CuPy
- launch() in cuda.core
- cuLaunchKernel and cuLaunchKernelEx in cuda-python
- LaunchPlan.launch in cudatma

Before and after each launch, the recorder waits for the GPU and copies the allocations to which the kernel's parameters
point.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cudatma.arrays import ArrayInfo, is_torch
from cudatma.context import Runtime, using_runtime
from cudatma.descriptor import codec
from cudatma.emulator.api import natural
from cudatma.emulator.ptx.types import Array
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, DriverError, RecordingError, check, reason_of
from cudatma.programs.host_memory import LOWEST_ADDRESS, POINTER_BYTES, array_info, bytes_at, callers_arrays
from cudatma.programs.launch import ProgramLaunch, calling_place
from cudatma.programs.log import intercepting, only_block
from cudatma.programs.patches import Patches
from cudatma.programs.recording import (
    FILE,
    TYPES,
    Pointer,
    RecordedLaunch,
    RecordedMemory,
    RecordedParameter,
    describe_recording,
    read_recording,
    write_aside,
    write_memory,
    write_text,
)
from cudatma.target import Target, target_for

_Result = TypeVar("_Result")

#: Maps a module of a library to the function that records the library's launches, as "module:function".
RECORDERS: dict[str, str] = {
    "torch": "cudatma.programs.torch:record",
    "torch._inductor.config": "cudatma.programs.torch:record_inductor",
    "torch._inductor.runtime.triton_heuristics": "cudatma.programs.torch:pause_for_inductor",
    "triton": "cudatma.programs.triton:record",
    "cupy": "cudatma.programs.cupy:record",
    "cuda.core": "cudatma.programs.cuda_core:record",
    "cuda.bindings.driver": "cudatma.programs.driver:record",
    "cudatma.runtime.launch": "cudatma.programs.own_kernels:record",
}
DEFAULT_LIMIT_MIB = 256
_TENSOR_MAP_BYTES = 128
#: Maximum number of characters of a kernel name from a profile.
_MAX_NAME = 100


@dataclass(frozen=True, slots=True)
class _Allocation:
    """An allocation on a device or on the host."""

    base: int
    size: int
    dtype: str | None
    on_host: bool


@dataclass(slots=True)
class _PreparedLaunch:
    """A launch, its parameters, and the allocations to which they point, with the names of the allocations."""

    launch: ProgramLaunch
    parameters: tuple[RecordedParameter, ...]
    allocations: list[_Allocation]
    names: list[str]


class Recorder:
    """Records launches in a folder. `record` creates this object.

    Parameters
    ----------
    folder : Path
        Output folder.
    limit_bytes : int
        Maximum total size, in bytes, of the allocations to which the parameters of a launch point.
    only : str or None
        Text that the names of recorded kernels must contain, or None to record all kernels.
    """

    def __init__(self, folder: Path, limit_bytes: int, only: str | None) -> None:
        self.folder = folder
        self._limit, self._only = limit_bytes, only
        self._launches: list[RecordedLaunch] = []
        self._refused: Counter[tuple[str, str]] = Counter()
        #: Held during a launch, so that the recorded memory contains the results of this launch only.
        self._lock = threading.RLock()
        self._thread = threading.local()
        self.other_kernels: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._launches)

    def __str__(self) -> str:
        return str(read_recording(self.folder))

    @cached_property
    def target(self) -> Target:
        """Target for which sources are recompiled to PTX."""
        driver = _driver()
        names, device = driver.CUdevice_attribute, _device(driver)
        major, minor = (
            int(check(driver.cuDeviceGetAttribute(name, device), "cuDeviceGetAttribute"))
            for name in (
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        return target_for((major, minor))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record the launches of this thread in the block, for example during autotuning."""
        before = self._is_paused
        self._thread.is_paused = True
        try:
            yield
        finally:
            self._thread.is_paused = before

    @property
    def _is_paused(self) -> bool:
        return getattr(self._thread, "is_paused", False)

    def pause_during(self, patches: Patches, owner: Any, name: str) -> None:
        """Do not record launches during calls to a method."""

        def without_recording(*args: Any, **options: Any) -> Any:
            with self.paused():
                return original(*args, **options)

        original = patches.set(owner, name, without_recording)

    def around(
        self,
        describe: Callable[[], ProgramLaunch],
        execute: Callable[[], _Result],
        *,
        entry: str,
        library: str,
        stream: int = 0,
    ) -> _Result:
        """Execute a launch, and record the memory before and after the launch.

        ``describe`` returns the launch with the program's arguments. A launch that cannot be recorded is executed and
        listed with the reason.
        """
        if self._is_paused or (self._only is not None and self._only not in entry):
            return execute()
        what = f"{entry} ({library}) at {calling_place()}"
        with self._lock, self.paused():
            try:
                prepared = self._prepare(describe(), stream)
                before = self._read(prepared.allocations)
            except Exception as error:  # the libraries can raise any exception
                self.refuse(what, error)
                return execute()
            result = execute()
            try:
                self._write(prepared, before, self._read(prepared.allocations))
            except Exception as error:
                self.refuse(what, error)
            return result

    def refuse(self, what: str, reason: object) -> None:
        """Add a launch to the list of launches that are not recorded."""
        first_line = (str(reason) or type(reason).__name__).splitlines()[0]
        self._refused[what, first_line] += 1

    def finish(self) -> None:
        """Write launches.json."""
        refused = [
            (what if count == 1 else f"{what}, {count} times", why) for (what, why), count in self._refused.items()
        ]
        recorded = {launch.entry for launch in self._launches}
        others = Counter[str]()
        for kernel, count in self.other_kernels.items():
            name = _plain_name(kernel)
            if not any(name == entry or (entry.startswith("_Z") and name in entry) for entry in recorded):
                others[name] += count
        text = describe_recording(self._launches, _device_name(), refused, others)
        try:
            write_aside(self.folder / FILE, text.encode("utf-8"))
        except OSError as error:
            remedy = "record again in a writable folder with enough disk space"
            raise RecordingError(
                FILE, f"a file that cannot be written ({reason_of(error)})", "a writable file", remedy
            ) from None

    def _prepare(self, launch: ProgramLaunch, stream: int) -> _PreparedLaunch:
        """Return a launch with its parameters and the allocations to which they point."""
        driver = _driver()
        if int(check(driver.cuStreamIsCapturing(stream), "cuStreamIsCapturing")):
            raise ArgumentError("stream", "a stream in graph capture", "a stream that is not capturing a CUDA graph")
        module = launch.module
        declared = module.parameters(launch.entry)
        infos = [array_info(value) for value in (*launch.args, *launch.arrays)]
        known = [info for info in infos if info is not None]
        known += [info for _, info in callers_arrays()]
        args = [
            info.pointer if info is not None and parameter.size_bytes == POINTER_BYTES else value
            for info, parameter, value in zip(infos, declared, launch.args, strict=False)
        ]
        names = launch.names[: len(args)] or [f"args[{index}]" for index in range(len(args))]
        packed = module.pack(launch.entry, args if len(args) == len(launch.args) else launch.args, names=names)
        prepared = _PreparedLaunch(launch, (), [], [])
        prepared.parameters = tuple(
            RecordedParameter(name, raw, tuple(self._pointers(prepared, name, raw, known)))
            for name, raw in zip(names, packed, strict=True)
        )
        size = sum(allocation.size for allocation in prepared.allocations)
        if size > self._limit:
            remedy = f"increase --limit-mib (limit_mib in Python), which is {self._limit >> 20}"
            raise ArgumentError("memory", f"{size / 2**20:.1f} MiB", f"at most {self._limit >> 20} MiB", remedy)
        return prepared

    def _pointers(
        self, prepared: _PreparedLaunch, name: str, raw: bytes, known: Sequence[ArrayInfo]
    ) -> Iterator[Pointer]:
        offsets: Sequence[int] = range(0, len(raw) - POINTER_BYTES + 1, POINTER_BYTES)
        map_type = _tensor_map_type(raw)
        if map_type is not None:
            offsets = [0]
        for at in offsets:
            address = int.from_bytes(raw[at : at + POINTER_BYTES], "little")
            if address < LOWEST_ADDRESS:
                continue
            allocation = next((p for p in prepared.allocations if p.base <= address < p.base + p.size), None)
            if allocation is None:
                allocation = _allocation_of(address, known, map_type)
                if allocation is None:
                    continue
                prepared.allocations.append(allocation)
                prepared.names.append(name)
            yield Pointer(at, prepared.allocations.index(allocation), address - allocation.base)

    def _read(self, allocations: Sequence[_Allocation]) -> list[Array]:
        """Wait for the GPU, and return the contents of the allocations."""
        driver = _driver()
        check(driver.cuCtxSynchronize(), "cuCtxSynchronize")
        contents = []
        for allocation in allocations:
            if allocation.on_host:
                contents.append(bytes_at(allocation.base, allocation.size).copy())
                continue
            data = np.empty(allocation.size, np.uint8)
            check(
                driver.cuMemcpyDtoH(data.ctypes.data, driver.CUdeviceptr(allocation.base), allocation.size),
                "cuMemcpyDtoH",
            )
            contents.append(data)
        return contents

    def _write(self, prepared: _PreparedLaunch, before: Sequence[Array], after: Sequence[Array]) -> None:
        launch = prepared.launch
        memory = [
            RecordedMemory(
                name, allocation.size, allocation.dtype, write_memory(self.folder, old), write_memory(self.folder, new)
            )
            for name, allocation, old, new in zip(prepared.names, prepared.allocations, before, after, strict=True)
        ]
        parameters = list(prepared.parameters)
        for index, (parameter, value) in enumerate(zip(parameters, launch.args, strict=True)):
            if isinstance(value, Scratch):
                memory.append(RecordedMemory(parameter.name, value.size, None, None, None))
                pointer = Pointer(0, len(memory) - 1, 0)
                parameters[index] = RecordedParameter(parameter.name, bytes(POINTER_BYTES), (pointer,))
        sources = launch.sources if launch.sources is not None else ()
        self._launches.append(
            RecordedLaunch(
                folder=self.folder,
                modules={},
                **launch.fields(),
                module=write_text(self.folder, launch.ptx),
                parameters=tuple(parameters),
                memory=tuple(memory),
                sources=tuple((name, write_text(self.folder, text)) for name, text in dict(sources).items()),
            )
        )


class Scratch(bytes):
    """A null pointer that represents scratch memory allocated by the library."""

    size: int

    def __new__(cls, size: int) -> Scratch:
        pointer = super().__new__(cls, POINTER_BYTES)
        pointer.size = size
        return pointer


@contextmanager
def record(folder: str | Path, *, limit_mib: int = DEFAULT_LIMIT_MIB, only: str | None = None) -> Iterator[Recorder]:
    """Write the kernel launches in a ``with`` block, and the memory that they can access, to a folder.

    The recording contains the launches of Triton, Gluon, torch.compile, CuPy's RawKernel, cuda.core, cuda-python and
    cudatma. If the program uses torch, the recording also lists the names of all other kernels, such as those of
    cuBLAS.

    Parameters
    ----------
    folder : str or Path
        Output folder, which must be empty or must not exist.
    limit_mib : int, default 256
        Maximum total size, in MiB, of the allocations to which the parameters of a launch point. A launch that exceeds
        it is listed but not recorded.
    only : str, optional
        Record only kernels whose names contain this text.

    Yields
    ------
    Recorder
        The recorder. After the block, ``str(recorder)`` lists the launches.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the folder is not empty or cannot be created, or an option is invalid.
    DriverError
        If there is no GPU.
    LaunchError
        If another recording is open in any thread.
    RecordingError
        If launches.json cannot be written at the end of the block.

    Notes
    -----
    Functions passed to torch.compile must be compiled inside the block. The recording does not contain launches for
    autotuning, launches in CUDA graphs, or memory that a kernel can access only through pointers in memory.

    Examples
    --------
    >>> with cudatma.record("softmax.rec"):  # doctest: +SKIP
    ...     softmax[(rows,)](x, y, columns)
    >>> cudatma.read_recording("softmax.rec")[0].run().passes(tolerance=1e-6)  # doctest: +SKIP
    True
    """
    if not isinstance(folder, str | Path):
        raise ArgumentTypeError("folder", type(folder).__name__, "a str or a Path")
    if not isinstance(only, str | None):
        raise ArgumentTypeError("only", type(only).__name__, "a str or None")
    recorder = Recorder(Path(folder), natural("limit_mib", limit_mib, 1) << 20, only)
    with only_block("record"):
        _require_gpu()
        _create(recorder.folder)
        try:
            # A new Runtime contains no plans from before the recording.
            with using_runtime(Runtime()), intercepting(RECORDERS, recorder):
                yield recorder
        finally:
            recorder.finish()


def _create(folder: Path) -> None:
    """Create a folder. Raise ArgumentError if it is not empty or cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise ArgumentError("folder", f"{folder} ({reason_of(error)})", "a folder that can be created") from None
    if not is_empty:
        raise ArgumentError("folder", f"{folder}, which contains files", "a new or empty folder")


def _tensor_map_type(raw: bytes) -> str | None:
    """Return the NumPy element type of a tensor map, or None if these bytes are not a tensor map."""
    if len(raw) != _TENSOR_MAP_BYTES:
        return None
    try:
        decoded = codec.decode(raw)
    except CudaTmaError:
        return None
    return None if decoded.unknown else str(decoded.spec.dtype.numpy or "uint8")


def _allocation_of(address: int, known: Sequence[ArrayInfo], dtype: str | None) -> _Allocation | None:
    """Return the allocation that contains an address, or None if there is none."""
    arrays = [info for info in known if info.extent[0] <= address < info.extent[1]]
    names = [str(info.dtype) for info in sorted(arrays, key=lambda info: info.dtype.itemsize == 1)]
    dtype = next((name for name in ([dtype] if dtype else []) + names if name in TYPES), None)
    spans = [span for span in map(_storage, arrays) if span[0] <= address < span[0] + span[1]]
    if spans:
        base, size = max(spans, key=lambda span: span[1])
        return _Allocation(base, size, dtype, arrays[0].device is None)
    block = _torch_block(address)
    if block is not None:
        return _Allocation(*block, dtype, False)
    driver = _driver()
    result = driver.cuMemGetAddressRange(address)
    if int(result[0]) != 0:
        return None
    return _Allocation(int(result[1]), int(result[2]), dtype, False)


def _storage(info: ArrayInfo) -> tuple[int, int]:
    """Return the address and the size of the memory that contains an array."""
    owner: Any = info.owner
    if is_torch(owner):
        storage = owner.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    if info.kind == "cupy":
        return owner.data.mem.ptr, owner.data.mem.size
    while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
        owner = owner.base
    if isinstance(owner, np.ndarray):
        info = array_info(owner) or info
    low, high = info.extent
    return low, high - low


def _torch_block(address: int) -> tuple[int, int] | None:
    """Return the address and the requested size of the block of torch's allocator that contains an address."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return None
    for segment in torch.cuda.memory_snapshot():
        base = segment["address"]
        if base <= address < base + segment["total_size"]:
            for block in segment["blocks"]:
                if base <= address < base + block["size"]:
                    return base, block.get("requested_size") or block["size"]
                base += block["size"]
    return None


def _require_gpu() -> None:
    """Raise DriverError if there is no GPU."""
    try:
        from cuda.bindings import driver

        check(driver.cuInit(0), "cuInit")
    except (ImportError, RuntimeError) as error:
        if isinstance(error, DriverError):
            raise
        remedy = "record on a machine with a GPU, or use emulate_launches() to run the launches on the emulator"
        raise DriverError("cuInit", None, f"no CUDA driver on this machine ({error})", remedy) from error


def _driver() -> Any:
    """Return cuda.bindings.driver. Make the primary context current if no context is current."""
    from cuda.bindings import driver

    if int(check(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")) == 0:
        context = check(driver.cuDevicePrimaryCtxRetain(_device(driver)), "cuDevicePrimaryCtxRetain")
        check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return driver


def _device(driver: Any) -> Any:
    return check(driver.cuDeviceGet(0), "cuDeviceGet")


def _device_name() -> str:
    from cuda.bindings import driver

    name: bytes = check(driver.cuDeviceGetName(100, _device(driver)), "cuDeviceGetName")
    return name.partition(b"\0")[0].decode()


def _plain_name(kernel: str) -> str:
    """Remove the template arguments, parameters and return type from the name of a kernel in a profile."""
    name = re.split(r"[<(]", kernel.replace("(anonymous namespace)::", ""), maxsplit=1)[0].removeprefix("void ")
    return name[:_MAX_NAME]


__all__ = ["Recorder", "Scratch", "record"]
