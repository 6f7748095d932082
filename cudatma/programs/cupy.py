"""Launches of CuPy's RawKernel and RawModule.

CuPy needs a device for its arrays, its streams and its own kernels, so a program passes NumPy arrays or torch CPU
tensors to ``kernel(grid, block, args)`` instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudatma.errors import LaunchError
from cudatma.programs.arguments import argument_of
from cudatma.programs.compiling import compile_to_ptx, entry_of
from cudatma.programs.driver import ptx_of
from cudatma.programs.launch import ProgramLaunch, calling_place, module_of
from cudatma.programs.log import LaunchLog
from cudatma.programs.patches import Patches
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
        module = module_of(ptx, sources)
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
            place=calling_place("cupy"),
            sources=sources,
        )


class CupyInterceptor:
    """Replaces cupy.RawKernel and cupy.RawModule, and sends their launches to the log."""

    def __init__(self) -> None:
        self._patches = Patches()

    def install(self, log: LaunchLog) -> None:
        """Replace the classes, and the kernels in variables of the program's modules."""
        import cupy

        original_kernel, original_module = cupy.RawKernel, cupy.RawModule

        class RawKernel(EmulatedKernel):
            def __init__(self, code: str, name: str, options: Sequence[str] = (), *_: Any, **__: Any) -> None:
                super().__init__(log, RawCode(code, None, tuple(options), ()), name)

        class RawModule(EmulatedModule):
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
                return EmulatedKernel(log, RawCode.of(value), value.name)
            return EmulatedModule(log, RawCode.of(value)) if isinstance(value, original_module) else None

        classes = {"RawKernel": RawKernel, "RawModule": RawModule} | dict.fromkeys(_CREATION, _NoDeviceArray)
        self._patches.set_everywhere(cupy, classes, convert)

    def remove(self) -> None:
        """Put CuPy's classes and the program's kernels back. Complete an error that CuPy raises without a device."""
        self._patches.undo()
        error = sys.exc_info()[1]
        if type(error).__name__ == "CUDARuntimeError" and error is not None:
            error.args = (f"{error}. {_NEEDS_DEVICE}",)


class EmulatedModule:
    """CuPy's RawModule, which compiles to PTX only."""

    enable_cooperative_groups = False
    backend = "nvrtc"

    def __init__(self, log: LaunchLog, raw: RawCode) -> None:
        self._log, self._raw = log, raw
        self.code, self.file_path, self.options = raw.code, raw.path, raw.options
        self.name_expressions = raw.name_expressions

    def compile(self, log_stream: Any = None) -> None:
        """Compile the module."""
        self._raw.compile(self._log.target.name)

    def get_function(self, name: str) -> EmulatedKernel:
        """Return a kernel of the module."""
        return EmulatedKernel(self._log, self._raw, name)

    def get_global(self, name: str) -> Any:
        """Raise LaunchError: CuPy's memory pointers need a device."""
        raise LaunchError("RawModule.get_global", name, "kernels", "CuPy's memory pointers need a device")


class EmulatedKernel(EmulatedModule):
    """CuPy's RawKernel. A call runs the kernel on the emulator."""

    def __init__(self, log: LaunchLog, raw: RawCode, name: str) -> None:
        super().__init__(log, raw)
        self.name, self.kernel = name, self
        self.max_dynamic_shared_size_bytes = 0

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0, stream: Any = None
    ) -> None:
        self._log.run(self._raw.describe(self.name, self._log.target.name, grid, block, args, shared_mem))


class _NoDeviceArray:
    """CuPy's array, which cannot exist without a device."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        raise LaunchError(
            "cupy",
            "a CuPy array",
            "RawKernel and RawModule with NumPy arrays or torch CPU tensors",
            "CuPy's arrays, streams and own kernels need a GPU",
        )
