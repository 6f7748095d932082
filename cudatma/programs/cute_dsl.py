"""Emulate the launches of the CuTe DSL.

The DSL compiles a host function together with its kernels. The host function encodes the tensor maps, and calls
``_cudaLaunchKernelEx`` in the DSL's runtime library. This module replaces the functions in this library with Python
functions. It supports version 4.8 of the DSL.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from cudatma.emulator import EmulatedModule
from cudatma.programs.device import SM_COUNT
from cudatma.programs.launch import ProgramLaunch, calling_place, load_module
from cudatma.programs.log import LaunchLog, naming
from cudatma.programs.patches import Patches

_LIBRARY = "cute"
#: Values of cudaLaunchAttributeID for the cluster size and for programmatic dependent launch.
_CLUSTER, _PROGRAMMATIC = 4, 6
#: Functions of the runtime library whose replacements only return success.
_IGNORED = (
    "_cudaGetDevice",
    "_cudaDeviceGetAttribute",
    "_cuKernelGetAttribute",
    "_cudaFuncSetAttribute",
    "_cudaKernelSetAttributeForDevice",
)


class _Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))

    @property
    def extents(self) -> tuple[int, int, int]:
        return self.x, self.y, self.z


class _Value(ctypes.Union):
    _fields_ = (("dim", _Dim3), ("flag", ctypes.c_int), ("pad", ctypes.c_char * 64))


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", _Value))


class _Config(ctypes.Structure):
    """The struct cudaLaunchConfig_t."""

    _fields_ = (
        ("grid", _Dim3),
        ("block", _Dim3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


_SUCCEED = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
_LOAD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
_GET_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_char_p)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))


def intercept(patches: Patches, log: LaunchLog) -> None:
    """Send the launches of the CuTe DSL's host functions to the log.

    Host functions that were compiled before this call still call CUDA.
    """
    _Interceptor().install(patches, log)


class _Interceptor:
    """Replacement for the runtime library of the DSL."""

    def __init__(self) -> None:
        #: Name and module of each kernel, by handle.
        self._kernels: dict[int, tuple[str, EmulatedModule]] = {}
        self._module: EmulatedModule | None = None
        #: Launches of the running host function, and the error if one of them failed.
        self._launches: list[ProgramLaunch] = []
        self._error: Exception | None = None
        #: Memory of the tensors that were passed to host functions, by address.
        self._memory: dict[int, np.ndarray[Any, Any]] = {}
        self._symbols: dict[str, Any] = dict.fromkeys(_IGNORED, _SUCCEED)
        self._symbols["_cudaLibraryLoadData"] = _LOAD(self._load)
        self._symbols["_cudaLibraryGetKernel"] = _GET_KERNEL(self._get_kernel)
        self._symbols["_cudaLaunchKernelEx"] = _LAUNCH(self._launch)

    def install(self, patches: Patches, log: LaunchLog) -> None:
        """Make the DSL keep its PTX, and replace the functions of its runtime library."""
        from cutlass._mlir.execution_engine import ExecutionEngine
        from cutlass.base_dsl.jit_executor import JitExecutor
        from cutlass.cute import runtime
        from cutlass.cutlass_dsl import CuTeDSL
        from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction as Compiled
        from cutlass.utils.hardware_info import HardwareInfo

        settings = {
            "keep_ptx": True,
            "no_cache": True,  # a cached function has no PTX
            "lineinfo": True,
            "dump_dir": patches.enter_context(tempfile.TemporaryDirectory()),
            "_arch": log.target.name,
        }
        for name, value in settings.items():
            patches.set(CuTeDSL._get_dsl().envar, name, value)

        def create(engine: Any, *args: Any, **options: Any) -> None:
            construct(engine, *args, **options)
            for name, function in self._symbols.items():
                engine.raw_register_runtime(name, ctypes.cast(function, ctypes.c_void_p))

        def load(compiled: Any) -> list[Any]:
            self._module = load_module(compiled.artifacts.PTX)
            load_library(compiled)
            return []  # the DSL would call the CUDA runtime to unload libraries in this list

        def run(executor: Any, arguments: list[Any]) -> Any:
            self._launches.clear()
            self._error = None
            try:
                result = run_host(executor, arguments)
                for launch in self._launches:
                    log.run(launch)
            except Exception:
                if self._error is None:
                    raise
                error, self._error = self._error, None
                raise error from None
            finally:
                self._memory.clear()  # later launches must not access the tensors of a failed launch
            return result

        def pointers(tensor: Any) -> Any:
            memory = _memory_of(tensor)
            if memory is not None:
                self._memory[tensor.data_ptr] = memory
            return c_pointers(tensor)

        construct: Callable[..., None] = patches.set(ExecutionEngine, "__init__", create)
        load_library = patches.set(Compiled, "_load_cuda_library", load)
        patches.set(Compiled, "num_devices", 1)
        patches.set(HardwareInfo, "__init__", lambda info, device_id=0: None)
        patches.set(HardwareInfo, "get_max_active_clusters", lambda info, size, stream=None: max(1, SM_COUNT // size))
        run_host = patches.set(JitExecutor, "run_compiled_program", run)
        c_pointers = patches.set(runtime._Tensor, "__c_pointers__", pointers)

    def _load(self, handle: Any) -> int:
        handle[0] = 1
        return 0

    def _get_kernel(self, handle: Any, library: int, name: bytes) -> int:
        if self._module is None:
            return 1
        handle[0] = len(self._kernels) + 1
        self._kernels[handle[0]] = name.decode(), self._module
        return 0

    def _launch(self, config: Any, kernel: int, args: Any) -> int:
        """Store a launch, which runs after the host function. Also store exceptions, which cannot pass through C."""
        __tracebackhide__ = True
        try:
            self._launches.append(self._recorded(config[0], *self._kernels[kernel], args))
        except Exception as error:
            self._error = error
            return 1
        return 0

    def _recorded(self, shape: Any, name: str, module: EmulatedModule, args: Any) -> ProgramLaunch:
        attributes = {shape.attributes[i].id: shape.attributes[i].value for i in range(shape.attribute_count)}
        launch = ProgramLaunch(
            ptx=module.sources.ptx,
            entry=name,
            grid=shape.grid.extents,
            block=shape.block.extents,
            library=_LIBRARY,
            cluster=attributes[_CLUSTER].dim.extents if _CLUSTER in attributes else None,
            shared_bytes=shape.shared_bytes,
            programmatic=_PROGRAMMATIC in attributes and bool(attributes[_PROGRAMMATIC].flag),
            arrays=tuple(self._memory.values()),
            place=calling_place(),
            loaded=module,
        )
        with naming(_LIBRARY, name, launch.place):
            parameters = module.parameters(name)
        values = [ctypes.string_at(args[i], parameter.size_bytes) for i, parameter in enumerate(parameters)]
        return replace(launch, args=tuple(values))


def _memory_of(tensor: Any) -> np.ndarray[Any, Any] | None:
    """Return the bytes of a DSL tensor in host memory, or None if the tensor has no elements."""
    extents, strides = np.ravel(tensor.shape), np.ravel(tensor.stride)
    if not extents.all():
        return None
    elements = int(np.dot(extents - 1, strides)) + 1
    size = (elements * tensor.element_type.width + 7) // 8
    return np.frombuffer((ctypes.c_uint8 * size).from_address(tensor.data_ptr), np.uint8)
