"""Launches of CuPy's RawKernel and RawModule.

CuPy itself needs a device for its arrays, its streams and its own kernels, so a program passes NumPy arrays or torch
CPU tensors to ``kernel(grid, block, args)`` instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cudatma.errors import LaunchError
from cudatma.programs.arguments import argument_of
from cudatma.programs.compiling import compile_to_ptx, entry_of
from cudatma.programs.driver import ptx_of
from cudatma.programs.launch import Dim, ProgramLaunch, calling_place, module_of
from cudatma.programs.log import LaunchLog
from cudatma.programs.patches import Patches

#: Names in the module ``cupy`` that create arrays, directly or for CuPy's other functions.
_CREATION = ("array", "asarray", "ascontiguousarray", "arange", "ndarray")


class CupyInterceptor:
    """Replaces cupy.RawKernel and cupy.RawModule, and sends their launches to the log."""

    def install(self, log: LaunchLog) -> None:
        import cupy

        original_kernel, original_module = cupy.RawKernel, cupy.RawModule

        class RawKernel(EmulatedKernel):
            sink = log

        class RawModule(EmulatedModule):
            sink = log

        def convert(value: object) -> object | None:
            if isinstance(value, original_kernel):
                return RawKernel.of(value)
            if isinstance(value, original_module):
                return RawModule.of(value)
            return None

        self._patches = Patches()
        classes = {"RawKernel": RawKernel, "RawModule": RawModule} | dict.fromkeys(_CREATION, _NoDeviceArray)
        self._patches.set_everywhere(cupy, classes, convert)

    def remove(self) -> None:
        self._patches.undo()


class EmulatedModule:
    """CuPy's RawModule, which compiles to PTX only."""

    sink: LaunchLog

    def __init__(
        self,
        *,
        code: str | None = None,
        path: str | None = None,
        options: Sequence[str] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Sequence[str] | None = None,
        jitify: bool = False,
    ) -> None:
        if (code is None) == (path is None):
            raise TypeError("Exactly one of `code` and `path` keyword arguments must be given.")
        self.code, self.file_path, self.options, self.backend = code, path, tuple(options), backend
        self.enable_cooperative_groups = enable_cooperative_groups
        self.name_expressions = None if name_expressions is None else tuple(name_expressions)

    @classmethod
    def of(cls, module: Any) -> EmulatedModule:
        """Return the emulated form of a RawModule that the program created before."""
        return cls(
            code=module.code, path=module.file_path, options=module.options, name_expressions=module.name_expressions
        )

    @property
    def module(self) -> EmulatedModule:
        return self

    def compile(self, log_stream: Any = None) -> None:
        """Compile the module."""
        self.build()

    def get_function(self, name: str) -> EmulatedKernel:
        """Return a kernel of the module."""
        kernel = EmulatedKernel.__new__(type("RawKernel", (EmulatedKernel,), {"sink": self.sink}))
        kernel.source, kernel.name = self, name
        return kernel

    def get_global(self, name: str) -> Any:
        raise LaunchError("RawModule.get_global", name, "kernels", "CuPy's memory pointers need a device")

    def build(self) -> tuple[str, Mapping[str, str]]:
        """Return PTX and the names in the PTX of the name expressions."""
        if self.code is None:
            return ptx_of(Path(str(self.file_path)).read_bytes()), {}
        options = (*self.options, "--device-as-default-execution-space")
        return compile_to_ptx(self.code, self.sink.target.name, options, self.name_expressions or (), self.file_name)

    @property
    def file_name(self) -> str:
        return "raw_module.cu"


class EmulatedKernel:
    """CuPy's RawKernel. A call runs the kernel on the emulator."""

    sink: LaunchLog
    source: EmulatedModule

    def __init__(
        self,
        code: str,
        name: str,
        options: Sequence[str] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        *,
        enable_cooperative_groups: bool = False,
        jitify: bool = False,
    ) -> None:
        self.source, self.name = EmulatedModule(code=code, options=options, backend=backend), name
        self.source.sink = self.sink
        self.max_dynamic_shared_size_bytes = 0

    @classmethod
    def of(cls, kernel: Any) -> EmulatedKernel:
        """Return the emulated form of a RawKernel that the program created before."""
        if kernel.code is None:
            return type("RawModule", (EmulatedModule,), {"sink": cls.sink})(path=kernel.file_path).get_function(kernel.name)
        return cls(kernel.code, kernel.name, kernel.options)

    @property
    def code(self) -> str | None:
        return self.source.code

    @property
    def options(self) -> tuple[str, ...]:
        return self.source.options

    @property
    def kernel(self) -> EmulatedKernel:
        return self

    def compile(self, log_stream: Any = None) -> None:
        """Compile the kernel."""
        self.source.build()

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0, stream: Any = None) -> None:
        self.sink.run(self.describe(grid, block, args, shared_mem))

    def describe(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int) -> ProgramLaunch:
        ptx, lowered = self.source.build()
        sources = () if self.code is None else ((self.source.file_name, self.code),)
        module = module_of(ptx, sources)
        entry = entry_of(module.entries, self.name, dict(lowered))
        parameters = module.image.entry(entry).function.params
        fields = (f"args[{index}] of {entry}" for index in range(len(args)))
        values = map(argument_of, args, parameters, fields) if len(args) == len(parameters) else args
        return ProgramLaunch(
            ptx=ptx,
            entry=entry,
            grid=_dim(grid),
            block=_dim(block),
            args=tuple(values),
            shared_bytes=int(shared_mem),
            library="cupy",
            place=calling_place("cupy"),
            sources=sources,
        )


def _dim(values: Sequence[int]) -> Dim:
    x, y, z = (*(int(value) for value in values), 1, 1)[:3]
    return x, y, z


class _NoDeviceArray:
    """CuPy's array, which cannot exist without a device."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        raise LaunchError(
            "cupy",
            "a CuPy array",
            "RawKernel and RawModule with NumPy arrays or torch CPU tensors",
            "CuPy's arrays, streams and own kernels need a GPU",
        )
