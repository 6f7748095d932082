"""Programs that use cuda.core on the emulator.

cuda.core calls libcuda below Python, so these classes take the places of its own. Device memory is host memory, and
every call ends before it returns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from cudatma.errors import ArgumentError, ArgumentTypeError, LaunchError, counted
from cudatma.programs.arguments import argument_of
from cudatma.programs.compiling import compile_to_ptx, entry_of
from cudatma.programs.driver import device_attributes, ptx_of
from cudatma.programs.host_memory import HostMemory, bytes_at, words_of
from cudatma.programs.launch import ProgramLaunch, calling_place, module_of
from cudatma.programs.log import LaunchLog
from cudatma.programs.patches import Patches
from cudatma.runtime.launch_config import dim3


class State:
    """What the objects of one emulated device share."""

    def __init__(self, log: LaunchLog) -> None:
        self.log, self.memory = log, HostMemory()


class CoreInterceptor:
    """Replaces the public classes of cuda.core and its function ``launch``, and sends launches to the log."""

    def __init__(self) -> None:
        self._patches = Patches()

    def install(self, log: LaunchLog) -> None:
        """Replace the names in cuda.core and in the program's modules."""
        import cuda.core as core

        state = State(log)
        bound = {
            kind.__name__: type(kind.__name__, (kind,), {"state": state}) for kind in (Device, Program, ObjectCode)
        }
        resource = type("MemoryResource", (MemoryResource,), {"state": state})
        options = type("ProgramOptions", (core.ProgramOptions,), {"__post_init__": lambda self: None})
        names = [name for name in dir(core) if name.endswith("MemoryResource") and name != "MemoryResource"]
        self._patches.set_everywhere(
            core,
            {
                **bound,
                **dict.fromkeys(names, resource),
                "ProgramOptions": options,
                "LaunchConfig": LaunchConfig,
                "Buffer": Buffer,
                "Stream": Stream,
                "Event": Event,
                "launch": lambda stream, config, kernel, *args: _launch(state, config, kernel, args),
            },
        )

    def remove(self) -> None:
        """Put cuda.core's own names back."""
        self._patches.undo()


class ComputeCapability(NamedTuple):
    """Compute capability of the emulated device."""

    major: int
    minor: int


class Device:
    """The emulated device."""

    state: State

    def __init__(self, device_id: Any = None) -> None:
        if device_id not in (None, 0) and not isinstance(device_id, Device):
            raise ArgumentError("device_id", device_id, "0: the emulator has one device")
        self.device_id = 0
        self.default_stream = Stream()
        self.memory_resource = type("MemoryResource", (MemoryResource,), {"state": self.state})()
        target = self.state.log.target
        self.name = f"cudatma emulator ({target.name})"
        self.compute_capability = ComputeCapability(*target.compute_capability)
        self.arch = "".join(map(str, target.compute_capability))
        attributes = device_attributes(target)
        self.properties = SimpleNamespace(**{name.lower(): value for name, value in attributes.items()})

    @classmethod
    def get_all_devices(cls) -> tuple[Device, ...]:
        """Return the only device."""
        return (cls(),)

    def set_current(self, context: Any = None) -> None:
        """Do nothing: there is one device."""

    def sync(self) -> None:
        """Do nothing: every call has ended."""

    def create_stream(self, obj: Any = None, options: Any = None) -> Stream:
        """Return a stream."""
        return Stream()

    def create_event(self, options: Any = None) -> Event:
        """Return an event."""
        return Event()

    def allocate(self, size: int, *, stream: Any = None) -> Buffer:
        """Return memory of the device."""
        buffer: Buffer = self.memory_resource.allocate(size)
        return buffer


class Stream:
    """A stream, in which every call has ended."""

    handle = 0
    is_nonblocking = True
    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0

    def sync(self) -> None:
        """Do nothing: every call has ended."""

    def wait(self, event_or_stream: Any) -> None:
        """Do nothing: every call has ended."""

    def record(self, event: Event | None = None, options: Any = None) -> Event:
        """Return an event with the time of this call."""
        event = Event() if event is None else event
        event.seconds = time.perf_counter()
        return event

    def close(self) -> None:
        """Do nothing."""


class Event:
    """An event of a stream."""

    is_done = True

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = 0.0

    def __sub__(self, other: Event) -> float:
        return 1e3 * (self.seconds - other.seconds)

    def sync(self) -> None:
        """Do nothing: every call has ended."""

    def close(self) -> None:
        """Do nothing."""


class Buffer:
    """Memory of the emulated device, which the host can also read: ``numpy.from_dlpack(buffer)``."""

    is_device_accessible = is_host_accessible = True
    device_id = 0

    def __init__(self, address: int, size: int, resource: MemoryResource | None = None) -> None:
        self.handle, self.size, self.memory_resource = address, size, resource

    @classmethod
    def from_handle(cls, ptr: Any, size: int, mr: Any = None, owner: Any = None) -> Buffer:
        """Return a buffer for memory that another object owns."""
        return cls(int(ptr), size, mr)

    def __dlpack__(self, **options: Any) -> Any:
        options.pop("stream", None)
        return bytes_at(self.handle, self.size).view().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def copy_to(self, dst: Buffer | None = None, *, stream: Any = None) -> Buffer:
        """Copy to another buffer, or to a new one, and return it."""
        if dst is None:
            if self.memory_resource is None:
                raise ArgumentError("dst", None, "a Buffer", "this buffer has no memory resource for a new one")
            dst = self.memory_resource.allocate(self.size)
        dst.copy_from(self)
        return dst

    def copy_from(self, src: Buffer, *, stream: Any = None) -> None:
        """Copy from another buffer of the same size."""
        if src.size != self.size:
            raise ArgumentError("src", counted(src.size, "byte"), f"{self.size} bytes, the size of this buffer")
        bytes_at(self.handle, self.size)[:] = bytes_at(src.handle, src.size).copy()

    def fill(self, value: int | Any, *, stream: Any = None) -> None:
        """Fill with a byte, or with the bytes of a scalar or buffer."""
        pattern = np.frombuffer(bytes([value]) if isinstance(value, int) else bytes(value), np.uint8)
        bytes_at(self.handle, self.size).reshape(-1, pattern.size)[:] = pattern

    def close(self, stream: Any = None) -> None:
        """Free the memory."""
        if self.memory_resource is not None and self.size:
            self.memory_resource.state.memory.free(self.handle, "Buffer.close")
            self.size = 0


class MemoryResource:
    """Allocates host memory in the place of device, pinned or managed memory."""

    state: State
    is_device_accessible = is_host_accessible = True
    device_id = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def allocate(self, size: int, stream: Any = None, **_: Any) -> Buffer:
        """Return new memory."""
        return Buffer(self.state.memory.allocate(size), size, self)

    def deallocate(self, ptr: Any, size: int, stream: Any = None, **_: Any) -> None:
        """Free memory."""
        self.state.memory.free(int(ptr), "MemoryResource.deallocate")


class Program:
    """A program that compiles to PTX only."""

    state: State
    backend = "NVRTC"

    def __init__(self, code: Any, code_type: str, options: Any = None) -> None:
        if str(code_type).lower() not in ("c++", "ptx"):
            raise ArgumentError("code_type", code_type, "c++, ptx", "the emulator runs PTX")
        self._code, self._type, self._options = code, str(code_type).lower(), options
        self.is_closed = False

    def compile(self, target_type: str, name_expressions: Sequence[str] = (), logs: Any = None, **_: Any) -> ObjectCode:
        """Compile to PTX, whatever the requested type is: the emulator needs no other code."""
        if self._type == "ptx":
            return self._object(self._code, {})
        options = self._options
        flags = () if options is None else tuple(flag.decode() for flag in options.as_bytes("nvrtc"))
        name = getattr(options, "name", None) or "default_program"
        file_name = name if "." in name else f"{name}.cu"
        ptx, lowered = compile_to_ptx(self._code, self.state.log.target.name, flags, tuple(name_expressions), file_name)
        return self._object(ptx, lowered, ((file_name, self._code),))

    def _object(
        self, ptx: str, lowered: dict[str, str], sources: tuple[tuple[str, str], ...] | None = None
    ) -> ObjectCode:
        kind = type("ObjectCode", (ObjectCode,), {"state": self.state})
        code: ObjectCode = kind(ptx, lowered, sources)
        return code

    def close(self) -> None:
        """Mark the program as closed."""
        self.is_closed = True


class ObjectCode:
    """PTX and the names of its kernels."""

    state: State
    code_type = "ptx"

    def __init__(
        self, ptx: str, symbol_mapping: dict[str, str] | None = None, sources: tuple[tuple[str, str], ...] | None = None
    ) -> None:
        self._ptx, self.symbol_mapping, self._sources = ptx, symbol_mapping or {}, sources
        self.name = ""

    @property
    def code(self) -> bytes:
        """The PTX."""
        return self._ptx.encode()

    @classmethod
    def from_ptx(cls, module: Any, *, name: str = "", symbol_mapping: dict[str, str] | None = None) -> ObjectCode:
        """Return the code of PTX text, or of a PTX file."""
        is_path = isinstance(module, str | Path) and ".version" not in str(module)
        return cls(ptx_of(Path(module).read_bytes() if is_path else module), symbol_mapping)

    @classmethod
    def from_cubin(cls, module: Any, *, name: str = "", symbol_mapping: dict[str, str] | None = None) -> ObjectCode:
        """Raise ArgumentTypeError: the emulator runs PTX."""
        raise ArgumentTypeError("module", "a cubin", "PTX", "load it with ObjectCode.from_ptx: the emulator runs PTX")

    from_fatbin = from_ltoir = from_object = from_library = from_cubin

    def get_kernel(self, name: str | bytes) -> Kernel:
        """Return a kernel by its name in C++ or in the PTX."""
        text = name.decode() if isinstance(name, bytes) else name
        module = module_of(self._ptx, self._sources)
        return Kernel(self._ptx, entry_of(module.entries, text, self.symbol_mapping), self._sources)


class Kernel:
    """A kernel of an ObjectCode."""

    def __init__(self, ptx: str, entry: str, sources: tuple[tuple[str, str], ...] | None) -> None:
        self.ptx, self.entry, self.sources = ptx, entry, sources
        self.attributes = SimpleNamespace(max_threads_per_block=1024, max_dynamic_shared_size_bytes=0)

    @property
    def parameters(self) -> Sequence[Any]:
        """Parameters of the kernel."""
        return module_of(self.ptx, self.sources).image.entry(self.entry).function.params

    @property
    def num_arguments(self) -> int:
        """Number of parameters."""
        return len(self.parameters)


class LaunchConfig:
    """Shape of a launch. With a cluster, ``grid`` counts clusters."""

    def __init__(
        self,
        grid: Any = None,
        cluster: Any = None,
        block: Any = None,
        shmem_size: int | None = None,
        is_cooperative: bool = False,
        programmatic_stream_serialization: bool = False,
    ) -> None:
        self.grid, self.block = dim3(grid, "grid"), dim3(block, "block")
        self.cluster = None if cluster is None else dim3(cluster, "cluster")
        self.shmem_size = shmem_size or 0
        self.is_cooperative = is_cooperative
        self.programmatic_stream_serialization = programmatic_stream_serialization


def _launch(state: State, config: LaunchConfig, kernel: Any, args: Sequence[Any]) -> None:
    if not isinstance(kernel, Kernel):
        remedy = "compile and load it inside emulate_launches()"
        raise LaunchError(
            "kernel", f"a {type(kernel).__name__} that cuda.core loaded before", "a kernel of the emulator", remedy
        )
    parameters = kernel.parameters
    if len(args) != len(parameters):
        raise LaunchError("kernel_args", counted(len(args), "argument"), f"{len(parameters)} for {kernel.entry}")
    fields = [f"kernel_args[{index}] of {kernel.entry}" for index in range(len(args))]
    handles = [arg.handle if isinstance(arg, Buffer) else arg for arg in args]
    values = list(map(argument_of, handles, parameters, fields))
    addresses = [
        value.to_bytes(8, "little") for value in map(int, (v for v in values if isinstance(v, int))) if value > 0
    ]
    reached = state.memory.reached(words_of(addresses))
    blocks = state.memory.blocks
    labels = (f"Buffer of {counted(block.size, 'byte')}" for block in blocks)
    grid = tuple(g * c for g, c in zip(config.grid, config.cluster or (1, 1, 1), strict=True))
    state.log.run(
        ProgramLaunch(
            ptx=kernel.ptx,
            entry=kernel.entry,
            grid=dim3(grid, "grid"),
            block=config.block,
            cluster=config.cluster,
            shared_bytes=config.shmem_size,
            programmatic=config.programmatic_stream_serialization,
            args=tuple(values),
            arrays=(*blocks, *reached.values()),
            names=(*(f"args[{index}]" for index in range(len(values))), *labels, *reached),
            library="cuda.core",
            place=calling_place("cuda"),
            sources=kernel.sources,
        )
    )
