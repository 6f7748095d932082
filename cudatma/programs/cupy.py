"""Launches of CuPy's RawKernel and RawModule.

CuPy needs a device for its arrays, its streams and its own kernels, so a program passes NumPy arrays or torch CPU
tensors to ``kernel(grid, block, args)`` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cudatma.emulator import EmulatedModule
from cudatma.errors import LaunchError
from cudatma.programs.arguments import argument_of, run_with_memory
from cudatma.programs.compiling import compile_to_ptx, entry_of
from cudatma.programs.driver import ptx_of
from cudatma.programs.host_memory import HostMemory
from cudatma.programs.launch import ProgramLaunch, calling_place, load_module
from cudatma.programs.log import LaunchLog
from cudatma.programs.patches import Patches
from cudatma.programs.recorder import Recorder
from cudatma.runtime.launch_config import dim3

#: Names in the module ``cupy`` that create arrays, directly or for CuPy's other functions.
_CREATION = ("array", "asarray", "ascontiguousarray", "arange", "ndarray")
_NEEDS_DEVICE = (
    "Without a device, CuPy can only launch a RawKernel or RawModule that the program creates inside "
    "emulate_launches(), or that is a variable of a module, on NumPy arrays or torch CPU tensors"
)


@dataclass(frozen=True, slots=True)
class RawCode:
    """The code of a RawKernel or RawModule: CUDA C++, or a file with PTX."""

    code: str | None
    path: str | None
    options: tuple[str, ...]
    name_expressions: tuple[str, ...]

    @classmethod
    def of(cls, raw: Any) -> RawCode:
        """Return the code of CuPy's object."""
        names = getattr(raw, "name_expressions", None) or ()
        return cls(raw.code, raw.file_path, tuple(raw.options), tuple(names))

    def compile(self, target: str) -> tuple[str, dict[str, str], tuple[tuple[str, str], ...]]:
        """Return the PTX, the names in the PTX of the name expressions, and the sources for reports."""
        if self.code is None:
            return ptx_of(Path(str(self.path)).read_bytes()), {}, ()
        options = (*self.options, "--device-as-default-execution-space")
        name = "raw_kernel.cu"
        return *compile_to_ptx(self.code, target, options, self.name_expressions, name), ((name, self.code),)

    def describe(
        self, name: str, target: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_bytes: int
    ) -> ProgramLaunch:
        """Return a launch of one of the kernels."""
        ptx, lowered, sources = self.compile(target)
        module = load_module(ptx, sources)
        entry = entry_of(module.entries, name, lowered)
        parameters = module.image.entry(entry).function.params
        fields = (f"args[{index}] of {entry}" for index in range(len(args)))
        values = map(argument_of, args, parameters, fields) if len(args) == len(parameters) else args
        return ProgramLaunch(
            ptx=ptx,
            entry=entry,
            grid=dim3(tuple(grid), "grid"),
            block=dim3(tuple(block), "block"),
            args=tuple(values),
            shared_bytes=int(shared_bytes),
            library="cupy",
            place=calling_place(),
            sources=sources,
            loaded=module,
        )


def intercept(patches: Patches, log: LaunchLog) -> None:
    """Replace cupy.RawKernel and cupy.RawModule, and kernels in variables of modules. Send launches to the log."""
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

    def convert(value: Any) -> object | None:
        if isinstance(value, original_kernel):
            return EmulatedRawKernel(log, RawCode.of(value), value.name)
        return EmulatedRawModule(log, RawCode.of(value)) if isinstance(value, original_module) else None

    creation = {name: type(name, (_NoDeviceArray,), {}) for name in _CREATION}
    patches.set_everywhere(cupy, {"RawKernel": RawKernel, "RawModule": RawModule} | creation, convert)
    patches.push(_explain)


def _explain(kind: Any, error: Any, traceback: Any) -> None:
    """Complete an error that CuPy raises without a device."""
    if getattr(kind, "__name__", "") == "CUDARuntimeError" and _NEEDS_DEVICE not in str(error):
        error.args = (f"{error}. {_NEEDS_DEVICE}",)


class EmulatedRawModule:
    """CuPy's RawModule, which compiles to PTX only."""

    enable_cooperative_groups = False
    backend = "nvrtc"

    def __init__(self, log: LaunchLog, raw: RawCode) -> None:
        self._log, self._raw = log, raw
        self.code, self.file_path, self.options = raw.code, raw.path, raw.options
        self.name_expressions = raw.name_expressions
        #: The loaded module, which exists after the first launch.
        self._loaded: EmulatedModule | None = None

    def compile(self, log_stream: Any = None) -> None:
        """Compile the module."""
        self._raw.compile(self._log.target.name)

    def get_function(self, name: str) -> EmulatedRawKernel:
        """Return a kernel of the module."""
        return EmulatedRawKernel(self._log, self._raw, name, self)

    def get_global(self, name: str) -> Any:
        """Raise LaunchError: CuPy's memory pointers need a device."""
        raise LaunchError("RawModule.get_global", name, "kernels", "CuPy's memory pointers need a device")


class EmulatedRawKernel(EmulatedRawModule):
    """CuPy's RawKernel. A call runs the kernel on the emulator."""

    def __init__(self, log: LaunchLog, raw: RawCode, name: str, module: EmulatedRawModule | None = None) -> None:
        super().__init__(log, raw)
        self.name, self.kernel, self._module = name, self, module or self
        self.max_dynamic_shared_size_bytes = 0

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0, stream: Any = None
    ) -> None:
        __tracebackhide__ = True
        launch = self._raw.describe(self.name, self._log.target.name, grid, block, args, shared_mem)
        self._module._loaded = self._module._loaded or launch.loaded
        run_with_memory(self._log, replace(launch, loaded=self._module._loaded), HostMemory())


class _NoDeviceArray:
    """CuPy's array, which cannot exist without a device."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        raise LaunchError(
            "cupy",
            "a CuPy array",
            "RawKernel and RawModule with NumPy arrays or torch CPU tensors",
            "CuPy's arrays, streams and own kernels need a GPU",
        )


def record(patches: Patches, recorder: Recorder) -> None:
    """Record the launches of RawKernel and RawModule, whose sources are compiled to PTX again."""
    import cupy

    original_kernel, original_module = cupy.RawKernel, cupy.RawModule

    class RawKernel(_RecordedKernel):
        def __init__(self, *args: Any, **options: Any) -> None:
            kernel = original_kernel(*args, **options)
            super().__init__(recorder, kernel, RawCode.of(kernel))

    class RawModule(_RecordedModule):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(recorder, original_module(*args, **options))

    def convert(value: Any) -> object | None:
        if isinstance(value, original_kernel):
            return _RecordedKernel(recorder, value, RawCode.of(value))
        return _RecordedModule(recorder, value) if isinstance(value, original_module) else None

    patches.set_everywhere(cupy, {"RawKernel": RawKernel, "RawModule": RawModule}, convert)


class _RecordedKernel:
    """CuPy's kernel with recorded calls. All other attributes are the kernel's."""

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
            library="cupy",
            stream=_cupy_stream(options.get("stream")),
        )


class _RecordedModule:
    """CuPy's module, whose kernels are recorded."""

    def __init__(self, recorder: Recorder, module: Any) -> None:
        self._recorder, self._module = recorder, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get_function(self, name: str) -> _RecordedKernel:
        return _RecordedKernel(self._recorder, self._module.get_function(name), RawCode.of(self._module))


def _cupy_stream(stream: Any) -> int:
    """Return the handle of the stream of a launch."""
    import cupy

    if stream is None and cupy.cuda.is_available():
        stream = cupy.cuda.get_current_stream()
    return int(getattr(stream, "ptr", 0))
