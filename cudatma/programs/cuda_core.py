"""Emulate or record programs that use cuda.core.

cuda.core calls libcuda from compiled code, so the emulator replaces the public classes of cuda.core with the classes in
this module. Device memory is host memory, and all calls are synchronous.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from cudatma.emulator import EmulatedModule, KernelParameter
from cudatma.emulator.api import natural
from cudatma.errors import ArgumentError, ArgumentTypeError, DriverError, LaunchError, counted, quoted
from cudatma.programs.arguments import argument_of, run_with_memory
from cudatma.programs.compiling import compile_to_ptx, entry_of
from cudatma.programs.device import device_attributes, device_name
from cudatma.programs.driver import ptx_of
from cudatma.programs.host_memory import HostMemory, bytes_at
from cudatma.programs.launch import ProgramLaunch, calling_place, load_module
from cudatma.programs.log import LaunchLog, naming
from cudatma.programs.patches import Patches
from cudatma.programs.recorder import Recorder
from cudatma.runtime.launch_config import dim3

_LIBRARY = "cuda.core"


class EmulatedDevice:
    """State that the objects of an emulated device share."""

    def __init__(self, log: LaunchLog) -> None:
        self.log, self.memory = log, HostMemory()
        #: Replacements for classes of cuda.core, by name. They refer to this device.
        self.classes: dict[str, Any] = {
            kind.__name__: type(kind.__name__, (kind,), {"emulated": self})
            for kind in (Device, Program, MemoryResource)
        }


def intercept(patches: Patches, log: LaunchLog) -> None:
    """Replace the public classes and the function ``launch`` of cuda.core, and send launches to the log."""
    import cuda.core as core

    emulated = EmulatedDevice(log)
    resource = emulated.classes["MemoryResource"]
    options = type("ProgramOptions", (core.ProgramOptions,), {"__post_init__": lambda self: None})
    names = [name for name in dir(core) if name.endswith("MemoryResource") and name != "MemoryResource"]
    patches.set_everywhere(
        core,
        {
            **emulated.classes,
            **{name: type(name, (resource,), {}) for name in names},
            "ProgramOptions": options,
            "LaunchConfig": LaunchConfig,
            "ObjectCode": ObjectCode,
            "Buffer": Buffer,
            "Stream": Stream,
            "Event": Event,
            "launch": lambda stream, config, kernel, *args: _launch(emulated, config, kernel, args),
        },
    )


class ComputeCapability(NamedTuple):
    """Compute capability of the emulated device."""

    major: int
    minor: int


class Device:
    """The emulated device."""

    emulated: EmulatedDevice

    def __init__(self, device_id: Any = None) -> None:
        if device_id not in (None, 0) and not isinstance(device_id, Device):
            raise ArgumentError("device_id", device_id, "0 (the emulator has one device)")
        self.device_id = 0
        self.default_stream = Stream()
        self.memory_resource = self.emulated.classes["MemoryResource"]()
        target = self.emulated.log.target
        self.name = device_name(target)
        self.compute_capability = ComputeCapability(*target.compute_capability)
        self.arch = "".join(map(str, target.compute_capability))
        attributes = device_attributes(target)
        self.properties = SimpleNamespace(**{name.lower(): value for name, value in attributes.items()})

    @classmethod
    def get_all_devices(cls) -> tuple[Device, ...]:
        """Return a tuple that contains the emulated device."""
        return (cls(),)

    def set_current(self, context: Any = None) -> None: ...

    def sync(self) -> None: ...

    def create_stream(self, obj: Any = None, options: Any = None) -> Stream:
        return Stream()

    def create_event(self, options: Any = None) -> Event:
        return Event()

    def allocate(self, size: int, *, stream: Any = None) -> Buffer:
        """Return a new buffer in device memory."""
        buffer: Buffer = self.memory_resource.allocate(size)
        return buffer


class Stream:
    """A stream that never contains unfinished work."""

    handle = 0
    is_nonblocking = True
    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0

    def sync(self) -> None: ...

    def wait(self, event_or_stream: Any) -> None: ...

    def record(self, event: Event | None = None, options: Any = None) -> Event:
        """Store the current time in an event, and return the event."""
        event = Event() if event is None else event
        event.seconds = time.perf_counter()
        return event

    def close(self) -> None: ...


class Event:
    """An event that records a time."""

    is_done = True

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = 0.0

    def __sub__(self, other: Event) -> float:
        return 1e3 * (self.seconds - other.seconds)

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Buffer:
    """Memory of the emulated device. The host can access the memory with ``numpy.from_dlpack(buffer)``."""

    is_device_accessible = is_host_accessible = True
    device_id = 0

    def __init__(self, address: int, size: int, resource: MemoryResource | None = None) -> None:
        self.handle, self.size, self.memory_resource = address, size, resource
        self._free: Any = None

    @classmethod
    def from_handle(cls, ptr: Any, size: int, mr: Any = None, owner: Any = None) -> Buffer:
        """Return a buffer for memory that another object owns."""
        return cls(int(ptr), size, mr)

    def __dlpack__(self, **options: Any) -> Any:
        options.pop("stream", None)
        memory: Any = (ctypes.c_uint8 * self.size).from_address(self.handle)
        memory.owner = self  # arrays that use this memory keep the buffer alive
        return np.frombuffer(memory, np.uint8).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def copy_to(self, dst: Buffer | None = None, *, stream: Any = None) -> Buffer:
        """Copy the memory to ``dst``, or to a new buffer, and return the destination."""
        if dst is None:
            if self.memory_resource is None:
                raise ArgumentError("dst", None, "a Buffer (this buffer cannot allocate one without a memory resource)")
            dst = self.memory_resource.allocate(self.size)
        dst.copy_from(self)
        return dst

    def copy_from(self, src: Buffer, *, stream: Any = None) -> None:
        """Copy another buffer of the same size to this buffer."""
        if src.size != self.size:
            raise ArgumentError(
                "src", counted(src.size, "byte"), f"a buffer of {counted(self.size, 'byte')}, the size of this buffer"
            )
        bytes_at(self.handle, self.size)[:] = bytes_at(src.handle, src.size).copy()

    def fill(self, value: int | Any, *, stream: Any = None) -> None:
        """Fill the memory with a byte value, or with the repeated bytes of a scalar or buffer."""
        if isinstance(value, int) and not 0 <= value < 256:
            raise ArgumentError("value", value, "0 to 255")
        pattern = np.frombuffer(bytes([value]) if isinstance(value, int) else bytes(value), np.uint8)
        if pattern.size not in (1, 2, 4) or self.size % pattern.size:
            allowed = f"1, 2 or 4 bytes long and divide the size of the buffer ({counted(self.size, 'byte')})"
            raise ArgumentError("value", counted(pattern.size, "byte"), allowed)
        bytes_at(self.handle, self.size).reshape(-1, pattern.size)[:] = pattern

    def close(self, stream: Any = None) -> None:
        """Free the memory."""
        if self._free is not None:
            self._free()
            self.size = 0


class MemoryResource:
    """Allocates host memory instead of device, pinned or managed memory."""

    emulated: EmulatedDevice
    is_device_accessible = is_host_accessible = True
    device_id = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self._buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()

    def allocate(self, size: int, stream: Any = None, **_: Any) -> Buffer:
        """Return a new buffer."""
        address = self.emulated.memory.allocate(size, "size")
        if address is None and size:
            raise DriverError("MemoryResource.allocate", None, "CUDA_ERROR_OUT_OF_MEMORY")
        buffer = Buffer(address or 0, size, self)
        buffer._free = weakref.finalize(buffer, self.emulated.memory.discard, buffer.handle)
        self._buffers[buffer.handle] = buffer
        return buffer

    def deallocate(self, ptr: Any, size: int, stream: Any = None, **_: Any) -> None:
        address = int(ptr)
        self.emulated.memory.free(address, "ptr")
        # A new buffer may have the same address, so the finalizer of the old buffer must not free the address.
        if (buffer := self._buffers.pop(address, None)) is not None and buffer._free is not None:
            buffer._free.detach()


class Program:
    """A program that compiles to PTX only."""

    emulated: EmulatedDevice
    backend = "NVRTC"

    def __init__(self, code: Any, code_type: str, options: Any = None) -> None:
        if str(code_type).lower() not in ("c++", "ptx"):
            raise ArgumentError(
                "code_type", code_type, quoted(("c++", "ptx")), "compile to PTX, because the emulator runs only PTX"
            )
        self._code, self._type, self._options = code, str(code_type).lower(), options
        self.is_closed = False

    def compile(self, target_type: str, name_expressions: Sequence[str] = (), logs: Any = None, **_: Any) -> ObjectCode:
        """Compile to PTX, regardless of ``target_type``."""
        if self._type == "ptx":
            return ObjectCode(ptx_of(self._code))
        options = self._options
        flags = () if options is None else tuple(flag.decode() for flag in options.as_bytes("nvrtc"))
        name = getattr(options, "name", None) or "default_program"
        file_name = name if "." in name else f"{name}.cu"
        ptx, lowered = compile_to_ptx(
            self._code, self.emulated.log.target.name, flags, tuple(name_expressions), file_name
        )
        return ObjectCode(ptx, lowered, ((file_name, self._code),))

    def close(self) -> None:
        """Mark the program as closed."""
        self.is_closed = True


class ObjectCode:
    """PTX and the names of its kernels."""

    code_type = "ptx"

    def __init__(
        self, ptx: str, symbol_mapping: dict[str, str] | None = None, sources: tuple[tuple[str, str], ...] | None = None
    ) -> None:
        self._ptx, self.symbol_mapping, self._sources = ptx, symbol_mapping or {}, sources
        self.name = ""

    @cached_property
    def _module(self) -> EmulatedModule:
        return load_module(self._ptx, self._sources)

    @property
    def code(self) -> bytes:
        """The PTX."""
        return self._ptx.encode()

    @classmethod
    def from_ptx(cls, module: Any, *, name: str = "", symbol_mapping: dict[str, str] | None = None) -> ObjectCode:
        """Return the object code from PTX text or a PTX file."""
        is_path = isinstance(module, str | Path) and ".version" not in str(module)
        return cls(ptx_of(Path(module).read_bytes() if is_path else module), symbol_mapping)

    @classmethod
    def from_cubin(cls, module: Any, *, name: str = "", symbol_mapping: dict[str, str] | None = None) -> ObjectCode:
        """Raise ArgumentTypeError, because the emulator runs only PTX."""
        raise ArgumentTypeError(
            "module", "a cubin", "PTX", "compile to PTX and use ObjectCode.from_ptx, because the emulator runs only PTX"
        )

    from_fatbin = from_ltoir = from_object = from_library = from_cubin

    def get_kernel(self, name: str | bytes) -> Kernel:
        """Return a kernel by its name in C++ or in the PTX."""
        text = name.decode() if isinstance(name, bytes) else name
        entry = entry_of(self._module.entries, text, self.symbol_mapping)
        return Kernel(self._ptx, entry, self._sources, self._module)


class Kernel:
    """A kernel of an ObjectCode."""

    def __init__(
        self, ptx: str, entry: str, sources: tuple[tuple[str, str], ...] | None, module: EmulatedModule
    ) -> None:
        self.ptx, self.entry, self.sources, self.module = ptx, entry, sources, module
        self.attributes = SimpleNamespace(max_threads_per_block=1024, max_dynamic_shared_size_bytes=0)

    @property
    def parameters(self) -> tuple[KernelParameter, ...]:
        """Parameters of the kernel."""
        return self.module.parameters(self.entry)

    @property
    def num_arguments(self) -> int:
        """Number of parameters."""
        return len(self.parameters)


class LaunchConfig:
    """Shape of a launch. ``grid`` counts clusters if ``cluster`` is given, and CTAs otherwise."""

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


def _launch(emulated: EmulatedDevice, config: Any, kernel: Any, args: Sequence[Any]) -> None:
    __tracebackhide__ = True
    if not isinstance(kernel, Kernel):
        remedy = "compile and load the kernel in the block"
        raise LaunchError(
            "kernel",
            f"{type(kernel).__name__} from outside the block",
            "from inside emulate_launches()",
            remedy,
        )
    parameters = kernel.parameters
    with naming(_LIBRARY, kernel.entry, calling_place()):
        if len(args) != len(parameters):
            raise LaunchError(
                "kernel_args", counted(len(args), "argument"), f"a sequence of {counted(len(parameters), 'argument')}"
            )
        if not isinstance(config, LaunchConfig):
            raise ArgumentTypeError(
                "config", type(config).__name__, "a LaunchConfig that was created inside emulate_launches()"
            )
        launch = describe_launch(kernel.ptx, kernel.entry, config, args, kernel.sources)
        fields = [f"kernel_args[{index}]" for index in range(len(args))]
        values = tuple(map(argument_of, launch.args, parameters, fields))
    run_with_memory(emulated.log, replace(launch, args=values, loaded=kernel.module), emulated.memory)


def describe_launch(
    ptx: str, entry: str, config: Any, args: Sequence[Any], sources: tuple[tuple[str, str], ...] | None = None
) -> ProgramLaunch:
    """Return a launch of a kernel. Replace each Buffer in the arguments with its address."""
    cluster = None if config.cluster is None else dim3(config.cluster, "cluster")
    grid = tuple(
        extent * factor for extent, factor in zip(dim3(config.grid, "grid"), cluster or (1, 1, 1), strict=True)
    )
    return ProgramLaunch(
        ptx=ptx,
        entry=entry,
        grid=dim3(grid, "grid"),
        block=dim3(config.block, "block"),
        cluster=cluster,
        shared_bytes=natural("shmem_size", config.shmem_size),
        programmatic=bool(getattr(config, "programmatic_stream_serialization", False)),
        args=tuple(int(arg.handle) if hasattr(arg, "memory_resource") else arg for arg in args),
        library=_LIBRARY,
        place=calling_place(),
        sources=sources,
    )


def record(patches: Patches, recorder: Recorder) -> None:
    """Record the launches of kernels that are compiled during the recording."""
    import cuda.core as core

    original_launch, original_program = core.launch, core.Program
    modules: list[tuple[Any, str]] = []

    class Program(original_program):  # type: ignore[misc, valid-type]
        def __init__(self, code: Any, code_type: Any, options: Any = None) -> None:
            super().__init__(code, code_type, options)
            self._recorded = code, code_type, options

        def compile(self, target_type: Any, *args: Any, **options: Any) -> Any:
            compiled = super().compile(target_type, *args, **options)
            is_ptx = str(target_type).lower() == "ptx"
            twin = compiled if is_ptx else original_program(*self._recorded).compile("ptx", *args, **options)
            modules.append((compiled, ptx_of(twin.code)))
            return compiled

    def launch(stream: Any, config: Any, kernel: Any, *args: Any) -> Any:
        def describe() -> ProgramLaunch:
            ptx, sources = _code_of(kernel, modules)
            if not ptx:
                allowed = "a kernel of a Program that was compiled during the recording"
                raise ArgumentError("kernel", "a kernel from a module without PTX", allowed)
            return describe_launch(ptx, _entry_of(kernel), config, args, sources)

        return recorder.around(
            describe,
            lambda: original_launch(stream, config, kernel, *args),
            entry=_entry_of(kernel),
            library=_LIBRARY,
            stream=int(getattr(stream, "handle", 0) or 0),
        )

    patches.set_everywhere(core, {"launch": launch, "Program": Program})


def _entry_of(kernel: Any) -> str:
    if isinstance(kernel, Kernel):
        return kernel.entry
    from cuda.bindings import driver

    return bytes(driver.cuKernelGetName(kernel.handle)[1]).decode()


def _code_of(kernel: Any, modules: list[tuple[Any, str]]) -> tuple[str, tuple[tuple[str, str], ...] | None]:
    """Return the PTX and the sources of a kernel. The PTX is empty if it is unknown."""
    if isinstance(kernel, Kernel):
        return kernel.ptx, kernel.sources
    from cuda.bindings import driver

    library = int(driver.cuKernelGetLibrary(kernel.handle)[1])
    return next((ptx for code, ptx in modules if int(code.handle) == library), ""), None
