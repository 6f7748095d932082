"""Emulate or record the launches of CuPy's RawKernel and RawModule.

CuPy's arrays, streams and built-in kernels need a GPU, so programs on the emulator pass NumPy arrays or torch CPU
tensors to ``kernel(grid, block, args)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cudatma.emulator import EmulatedModule
from cudatma.emulator.api import natural
from cudatma.errors import ArgumentError, LaunchError, counted
from cudatma.programs.arguments import argument_of, require_opt_in, run_with_memory
from cudatma.programs.compiling import compile_to_ptx, entry_of
from cudatma.programs.device import SHARED_BYTES
from cudatma.programs.driver import image_file, ptx_of
from cudatma.programs.host_memory import HostMemory
from cudatma.programs.launch import ProgramLaunch, calling_place, load_module
from cudatma.programs.log import LaunchLog, naming
from cudatma.programs.patches import Patches
from cudatma.programs.recorder import Recorder
from cudatma.runtime.launch_config import dim3

_LIBRARY = "cupy"
#: Attributes of the module ``cupy`` that create arrays. Other CuPy functions use them.
_CREATION = ("array", "asarray", "ascontiguousarray", "arange", "ndarray")
_NEEDS_DEVICE = (
    "Without a GPU, CuPy can launch only the kernels of RawKernel and RawModule objects, with NumPy arrays or torch "
    "CPU tensors. Create these objects inside emulate_launches(), or do not store them in local variables or tuples"
)


@dataclass(frozen=True, slots=True)
class RawCode:
    """The CUDA C++ source or the PTX file of a RawKernel or RawModule."""

    code: str | None
    path: str | None
    options: tuple[str, ...]
    name_expressions: tuple[str, ...]

    @classmethod
    def of(cls, raw: Any) -> RawCode:
        """Return the code of a RawKernel or RawModule."""
        names = getattr(raw, "name_expressions", None) or ()
        return cls(raw.code, raw.file_path, tuple(raw.options), tuple(names))

    def compile(self, target: str) -> tuple[str, dict[str, str], tuple[tuple[str, str], ...]]:
        """Return the PTX, a dict that maps name expressions to PTX names, and the sources that reports quote."""
        if self.code is None:
            return ptx_of(image_file(str(self.path))), {}, ()
        options = (*self.options, "--device-as-default-execution-space")
        name = "raw_kernel.cu"
        return *compile_to_ptx(self.code, target, options, self.name_expressions, name), ((name, self.code),)

    def describe(
        self, name: str, target: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_bytes: int
    ) -> ProgramLaunch:
        """Return a launch of the kernel ``name``."""
        ptx, lowered, sources = self.compile(target)
        module = load_module(ptx, sources)
        entry = entry_of(module.entries, name, lowered)
        parameters = module.parameters(entry)
        if not isinstance(args, Sequence) or len(args) != len(parameters):
            got = counted(len(args), "value") if isinstance(args, Sequence) else type(args).__name__
            raise ArgumentError("args", got, f"a tuple of {counted(len(parameters), 'value')}")
        fields = (f"args[{index}]" for index in range(len(args)))
        return ProgramLaunch(
            ptx=ptx,
            entry=entry,
            grid=dim3(grid, "grid"),
            block=dim3(block, "block"),
            args=tuple(map(argument_of, args, parameters, fields)),
            shared_bytes=natural("shared_mem", shared_bytes),
            library=_LIBRARY,
            place=calling_place(),
            sources=sources,
            loaded=module,
        )


def intercept(patches: Patches, log: LaunchLog) -> None:
    """Replace cupy.RawKernel, cupy.RawModule and their instances, and send launches to the log."""
    import cupy

    original_kernel, original_module = cupy.RawKernel, cupy.RawModule

    class RawKernel(EmulatedRawKernel):
        def __init__(self, code: str, name: str, options: Sequence[str] = (), *_: Any, **__: Any) -> None:
            super().__init__(log, RawCode(code, None, tuple(options), ()), name)

    class RawModule(EmulatedRawModule):
        def __init__(
            self,
            *,
            code: str | None = None,
            path: str | None = None,
            options: Sequence[str] = (),
            name_expressions: Sequence[str] | None = None,
            **_: Any,
        ) -> None:
            super().__init__(log, RawCode(code, path, tuple(options), tuple(name_expressions or ())))

    creation = {name: type(name, (_NoDeviceArray,), {}) for name in _CREATION}
    patches.set_everywhere(cupy, {"RawKernel": RawKernel, "RawModule": RawModule} | creation)
    patches.set_objects(
        {
            original_kernel: lambda kernel: EmulatedRawKernel(log, RawCode.of(kernel), kernel.name),
            original_module: lambda module: EmulatedRawModule(log, RawCode.of(module)),
        }
    )
    patches.push(_explain)


def _explain(kind: Any, error: Any, traceback: Any) -> None:
    """Add the supported uses of CuPy to an error that CuPy raises because there is no GPU."""
    if getattr(kind, "__name__", "") == "CUDARuntimeError" and _NEEDS_DEVICE not in str(error):
        error.args = (f"{error}. {_NEEDS_DEVICE}",)


class EmulatedRawModule:
    """Replacement for CuPy's RawModule that compiles to PTX."""

    enable_cooperative_groups = False
    backend = "nvrtc"

    def __init__(self, log: LaunchLog, raw: RawCode) -> None:
        self._log, self._raw = log, raw
        self.code, self.file_path, self.options = raw.code, raw.path, raw.options
        self.name_expressions = raw.name_expressions
        #: The loaded module, or None before the first launch.
        self._loaded: EmulatedModule | None = None
        #: Maximum number of bytes of dynamic shared memory that the program has set for each kernel.
        self._opt_ins: dict[str, int] = {}

    def compile(self, log_stream: Any = None) -> None:
        self._raw.compile(self._log.target.name)

    def get_function(self, name: str) -> EmulatedRawKernel:
        """Return a kernel of the module."""
        return EmulatedRawKernel(self._log, self._raw, name, self)

    def get_global(self, name: str) -> Any:
        """Raise LaunchError, because CuPy's memory pointers need a GPU."""
        raise LaunchError(
            "RawModule.get_global",
            f"a call for {name} on the emulator",
            "called on a machine with a GPU",
        )


class EmulatedRawKernel(EmulatedRawModule):
    """Replacement for CuPy's RawKernel that runs the kernel on the emulator."""

    def __init__(self, log: LaunchLog, raw: RawCode, name: str, module: EmulatedRawModule | None = None) -> None:
        super().__init__(log, raw)
        self.name, self.kernel, self._module = name, self, module or self

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Maximum number of bytes of dynamic shared memory per CTA."""
        return self._module._opt_ins.get(self.name, SHARED_BYTES)

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, value: int) -> None:
        self._module._opt_ins[self.name] = natural("max_dynamic_shared_size_bytes", value)

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0, stream: Any = None
    ) -> None:
        __tracebackhide__ = True
        with naming(_LIBRARY, self.name, calling_place()):
            launch = self._raw.describe(self.name, self._log.target.name, grid, block, args, shared_mem)
            opt_in = self._module._opt_ins.get(self.name)
            require_opt_in(launch, opt_in, "set max_dynamic_shared_size_bytes of the kernel")
        self._module._loaded = self._module._loaded or launch.loaded
        run_with_memory(self._log, replace(launch, loaded=self._module._loaded), HostMemory())


class _NoDeviceArray:
    """Replacement for CuPy's array functions. Raises LaunchError, because CuPy's arrays need a GPU."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        raise LaunchError(
            "cupy",
            "a CuPy array",
            "used only for RawKernel and RawModule with NumPy arrays or torch CPU tensors",
            "pass NumPy arrays, because CuPy's arrays, streams and built-in kernels need a GPU",
        )


def record(patches: Patches, recorder: Recorder) -> None:
    """Record the launches of RawKernel and RawModule. Their sources are compiled to PTX for the recording."""
    import cupy

    original_kernel, original_module = cupy.RawKernel, cupy.RawModule

    class RawKernel(_RecordedKernel):
        def __init__(self, *args: Any, **options: Any) -> None:
            kernel = original_kernel(*args, **options)
            super().__init__(recorder, kernel, RawCode.of(kernel))

    class RawModule(_RecordedModule):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(recorder, original_module(*args, **options))

    patches.set_everywhere(cupy, {"RawKernel": RawKernel, "RawModule": RawModule})
    patches.set_objects(
        {
            original_kernel: lambda kernel: _RecordedKernel(recorder, kernel, RawCode.of(kernel)),
            original_module: lambda module: _RecordedModule(recorder, module),
        }
    )


class _RecordedKernel:
    """A RawKernel whose calls are recorded."""

    def __init__(self, recorder: Recorder, kernel: Any, raw: RawCode) -> None:
        self._recorder, self._kernel, self._raw = recorder, kernel, raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __call__(self, grid: Any, block: Any, args: Any, **options: Any) -> None:
        __tracebackhide__ = True
        name, target = self._kernel.name, self._recorder.target.name
        self._recorder.around(
            lambda: self._raw.describe(name, target, grid, block, args, options.get("shared_mem", 0)),
            lambda: self._kernel(grid, block, args, **options),
            entry=name,
            library=_LIBRARY,
            stream=_cupy_stream(options.get("stream")),
        )


class _RecordedModule:
    """A RawModule whose kernels are recorded."""

    def __init__(self, recorder: Recorder, module: Any) -> None:
        self._recorder, self._module = recorder, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get_function(self, name: str) -> _RecordedKernel:
        return _RecordedKernel(self._recorder, self._module.get_function(name), RawCode.of(self._module))


def _cupy_stream(stream: Any) -> int:
    """Return the handle of a launch's stream."""
    import cupy

    if stream is None and cupy.cuda.is_available():
        stream = cupy.cuda.get_current_stream()
    return int(getattr(stream, "ptr", 0))
