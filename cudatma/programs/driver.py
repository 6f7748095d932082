"""Emulate the functions of cuda.bindings.driver. Device memory is host memory, and all calls are synchronous."""

# ruff: noqa: N802, N815  # the names are CUDA's

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cudatma.backend import selected_backend
from cudatma.context import using_other_devices
from cudatma.descriptor import codec
from cudatma.descriptor.driver import has_driver
from cudatma.descriptor.rules import L2Promotion, OobFill
from cudatma.descriptor.spec import Im2colSpec, TiledSpec
from cudatma.dtypes import TMA_TYPES
from cudatma.emulator import EmulatedModule
from cudatma.emulator.api import natural
from cudatma.emulator.machine.memory import address_of
from cudatma.emulator.ptx.types import Array
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, DriverError, counted, reason_of
from cudatma.layout import Interleave, Swizzle
from cudatma.programs.arguments import require_opt_in, run_with_memory
from cudatma.programs.device import MAX_THREADS, SHARED_BYTES, TOTAL_BYTES, device_attributes, device_name
from cudatma.programs.host_memory import LOWEST_ADDRESS, HostMemory, bytes_at
from cudatma.programs.launch import Dim, ProgramLaunch, calling_place, load_module
from cudatma.programs.log import LaunchLog, naming
from cudatma.programs.patches import Patches
from cudatma.programs.recorder import Recorder
from cudatma.runtime.launch_config import dim3
from cudatma.target import forget_detected

#: Functions that only return success.
_NO_OPS = frozenset(
    (
        "cuCtxDestroy",
        "cuCtxPushCurrent",
        "cuCtxSetCacheConfig",
        "cuCtxSetCurrent",
        "cuCtxSetFlags",
        "cuCtxSetLimit",
        "cuCtxSynchronize",
        "cuDevicePrimaryCtxRelease",
        "cuDevicePrimaryCtxSetFlags",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuFuncSetCacheConfig",
        "cuInit",
        "cuMemPrefetchAsync",
        "cuProfilerStart",
        "cuProfilerStop",
        "cuStreamDestroy",
        "cuStreamQuery",
        "cuStreamSynchronize",
        "cuStreamWaitEvent",
    )
)
_DRIVER_VERSION = 13000


@dataclass(frozen=True, slots=True)
class _Entry:
    """A kernel in the module with the handle ``module``."""

    module: int
    name: str


def intercept(patches: Patches, log: LaunchLog) -> None:
    """Replace the functions of cuda.bindings.driver, and send launches to the log."""
    from cuda.bindings import driver

    # Cache these results before the driver is replaced, so that cudatma's own functions do not use the emulated device.
    selected_backend("auto")
    has_driver()
    patches.enter_context(using_other_devices())
    patches.callback(forget_detected)
    forget_detected()
    emulated = EmulatedDriver(driver, log)
    names = [name for name in dir(driver) if name.startswith("cu") and callable(getattr(driver, name))]
    functions = [name for name in names if not isinstance(getattr(driver, name), type)]
    patches.set_everywhere(driver, {name: emulated.function(name) for name in functions})


class _UnknownHandleError(Exception):
    """A handle does not belong to the emulated device."""


class EmulatedDriver:
    """The driver API of one emulated GPU. Methods return the same tuples as the functions of cuda.bindings.driver."""

    def __init__(self, driver: Any, log: LaunchLog) -> None:
        self._driver, self._log = driver, log
        self._handles = itertools.count(0x1000)
        self._modules: dict[int, EmulatedModule] = {}
        self._entries: dict[int, _Entry] = {}
        #: Maximum number of bytes of dynamic shared memory that the program has set for each kernel.
        self._opt_ins: dict[_Entry, int] = {}
        #: Time at which each event was last recorded, by handle. None if the event has not been recorded.
        self._events: dict[int, float | None] = {}
        self._context = 0
        self.memory = HostMemory()
        self._ok = driver.CUresult.CUDA_SUCCESS

    def function(self, name: str) -> Callable[..., Any]:
        """Return the emulated function with this name, or a function that raises DriverError."""
        if name in _NO_OPS:
            return lambda *_: (self._ok,)
        plain = name.removesuffix("_v2").removesuffix("_v3").removesuffix("Async")
        emulated = getattr(self, plain, None)
        if emulated is not None:

            def call(*args: Any) -> tuple[Any, ...]:
                try:
                    return emulated(*args)  # type: ignore[no-any-return]
                except _UnknownHandleError:
                    return self._driver.CUresult.CUDA_ERROR_INVALID_HANDLE, *[None] * _results(plain)

            return call

        def missing(*_: object) -> Any:
            raise DriverError(
                name, None, "the emulator does not support this function", "run this part of the program on a GPU"
            )

        return missing

    # Devices and contexts

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return self._ok, _DRIVER_VERSION

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return self._ok, 1

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        if ordinal != 0:
            return self._driver.CUresult.CUDA_ERROR_INVALID_DEVICE, None
        return self._ok, self._driver.CUdevice(0)

    def cuDeviceGetName(self, length: int, device: Any) -> tuple[Any, ...]:
        return self._ok, device_name(self._log.target).encode()[:length]

    def cuDeviceTotalMem(self, device: Any) -> tuple[Any, ...]:
        return self._ok, TOTAL_BYTES

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> tuple[Any, ...]:
        name = attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        value = device_attributes(self._log.target).get(name)
        if value is None:
            raise DriverError(
                "cuDeviceGetAttribute", None, f"the emulated device does not support the attribute {name}"
            )
        return self._ok, value

    def cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, ...]:
        return self._new_context()

    def cuDevicePrimaryCtxGetState(self, device: Any) -> tuple[Any, ...]:
        return self._ok, 0, int(self._context != 0)

    def cuCtxCreate(self, *_: Any) -> tuple[Any, ...]:
        return self._new_context()

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return self._ok, self._driver.CUcontext(self._context)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return self.cuCtxGetCurrent()

    def cuCtxGetDevice(self, *_: Any) -> tuple[Any, ...]:
        return self.cuDeviceGet(0)

    def _new_context(self) -> tuple[Any, ...]:
        self._context = self._context or next(self._handles)
        return self.cuCtxGetCurrent()

    # Modules

    def cuModuleLoad(self, name: bytes | str) -> tuple[Any, ...]:
        return self.cuModuleLoadData(image_file(name))

    def cuModuleLoadData(self, image: Any, *_: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUmodule(self._load(image))

    cuModuleLoadDataEx = cuModuleLoadData
    cuModuleLoadFatBinary = cuModuleLoadData

    def cuLibraryLoadData(self, image: Any, *_: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUlibrary(self._load(image))

    def cuLibraryLoadFromFile(self, name: bytes | str, *_: Any) -> tuple[Any, ...]:
        return self.cuLibraryLoadData(image_file(name))

    def cuLibraryGetModule(self, library: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUmodule(int(library))

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[Any, ...]:
        return self._new_entry(module, name, self._driver.CUfunction)

    def cuLibraryGetKernel(self, library: Any, name: bytes) -> tuple[Any, ...]:
        return self._new_entry(library, name, self._driver.CUkernel)

    def cuKernelGetFunction(self, kernel: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUfunction(int(kernel))

    def cuModuleUnload(self, module: Any) -> tuple[Any, ...]:
        for variable in self._module(module).globals.values():
            self.memory.remove(variable)
        del self._modules[int(module)]
        return (self._ok,)

    cuLibraryUnload = cuModuleUnload

    def cuKernelGetLibrary(self, kernel: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUlibrary(self._entry(kernel).module)

    def cuFuncGetModule(self, function: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUmodule(self._entry(function).module)

    def cuFuncGetName(self, function: Any) -> tuple[Any, ...]:
        return self._ok, self._entry(function).name.encode()

    cuKernelGetName = cuFuncGetName

    def cuFuncGetParamInfo(self, function: Any, index: int) -> tuple[Any, ...]:
        entry = self._entry(function)
        parameters = self._module(entry.module).parameters(entry.name)
        if index >= len(parameters):
            return self._driver.CUresult.CUDA_ERROR_INVALID_VALUE, None, None
        return self._ok, parameters[index].offset_bytes, parameters[index].size_bytes

    cuKernelGetParamInfo = cuFuncGetParamInfo

    def cuFuncGetAttribute(self, attribute: Any, function: Any, *_: Any) -> tuple[Any, ...]:
        name, entry = attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_"), self._entry(function)
        resources = self._module(entry.module).resources(entry.name)
        values = {
            "MAX_THREADS_PER_BLOCK": MAX_THREADS,
            "MAX_DYNAMIC_SHARED_SIZE_BYTES": self._opt_ins.get(entry, SHARED_BYTES - resources.static_shared_bytes),
            "SHARED_SIZE_BYTES": resources.static_shared_bytes,
            "LOCAL_SIZE_BYTES": resources.local_bytes,
            "CONST_SIZE_BYTES": 0,
            "NUM_REGS": 0,  # unknown, because PTX does not contain this number
        }
        if name not in values:
            raise DriverError("cuFuncGetAttribute", None, f"the emulator does not support the attribute {name}")
        return self._ok, values[name]

    cuKernelGetAttribute = cuFuncGetAttribute

    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: int) -> tuple[Any, ...]:
        if attribute.name.endswith("MAX_DYNAMIC_SHARED_SIZE_BYTES"):
            self._opt_ins[self._entry(function)] = value
        return (self._ok,)

    def cuKernelSetAttribute(self, attribute: Any, value: int, kernel: Any, device: Any) -> tuple[Any, ...]:
        return self.cuFuncSetAttribute(kernel, attribute, value)

    def cuModuleGetGlobal(self, module: Any, name: bytes) -> tuple[Any, ...]:
        variables = self._module(module).globals
        if name.decode() not in list(variables):  # `in variables` also matches parts of names
            return self._driver.CUresult.CUDA_ERROR_NOT_FOUND, None, None
        variable = variables[name.decode()]
        self.memory.add(variable)
        return self._ok, self._driver.CUdeviceptr(variable.ctypes.data), variable.nbytes

    cuLibraryGetGlobal = cuModuleGetGlobal

    def _load(self, image: Any) -> int:
        handle = next(self._handles)
        self._modules[handle] = load_module(ptx_of(image))
        return handle

    def _module(self, handle: Any) -> EmulatedModule:
        module = self._modules.get(int(handle))
        if module is None:
            raise _UnknownHandleError
        return module

    def _entry(self, handle: Any) -> _Entry:
        entry = self._entries.get(int(handle))
        if entry is None:
            raise _UnknownHandleError
        return entry

    def _new_entry(self, module: Any, name: bytes, handle_type: Any) -> tuple[Any, ...]:
        text = name.decode() if isinstance(name, bytes) else name
        if text not in self._module(module).entries:
            return self._driver.CUresult.CUDA_ERROR_NOT_FOUND, handle_type(0)
        handle = next(self._handles)
        self._entries[handle] = _Entry(int(module), text)
        return self._ok, handle_type(handle)

    # Memory

    def cuMemAlloc(self, size: int, *_: Any) -> tuple[Any, ...]:
        address, codes = self.memory.allocate(size, "cuMemAlloc: bytesize"), self._driver.CUresult
        if address is None:
            return codes.CUDA_ERROR_OUT_OF_MEMORY if size else codes.CUDA_ERROR_INVALID_VALUE, None
        return self._ok, self._driver.CUdeviceptr(address)

    cuMemAllocManaged = cuMemAlloc

    def cuMemAllocHost(self, size: int, *_: Any) -> tuple[Any, ...]:
        code, address = self.cuMemAlloc(size)
        return code, None if address is None else int(address)

    cuMemHostAlloc = cuMemAllocHost

    def cuMemHostGetDevicePointer(self, pointer: Any, *_: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUdeviceptr(int(pointer))

    def cuMemFree(self, pointer: Any, *_: Any) -> tuple[Any, ...]:
        self.memory.free(int(pointer), "cuMemFree: dptr")
        return (self._ok,)

    def cuMemFreeHost(self, pointer: Any) -> tuple[Any, ...]:
        self.memory.free(int(pointer), "cuMemFreeHost: p")
        return (self._ok,)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return self._ok, TOTAL_BYTES, TOTAL_BYTES

    def cuMemGetAddressRange(self, pointer: Any) -> tuple[Any, ...]:
        known = self.memory.find(int(pointer))
        if known is None:
            return self._driver.CUresult.CUDA_ERROR_INVALID_VALUE, None, None
        return self._ok, self._driver.CUdeviceptr(known[0]), known[1]

    def cuMemcpyHtoD(self, target: Any, source: Any, size: int, *_: Any) -> tuple[Any, ...]:
        self.memory.range(int(target), size, "cuMemcpyHtoD: dstDevice")[:] = _host_bytes(source, size, "srcHost")
        return (self._ok,)

    def cuMemcpyDtoH(self, target: Any, source: Any, size: int, *_: Any) -> tuple[Any, ...]:
        _host_bytes(target, size, "dstHost")[:] = self.memory.range(int(source), size, "cuMemcpyDtoH: srcDevice")
        return (self._ok,)

    def cuMemcpyDtoD(self, target: Any, source: Any, size: int, *_: Any) -> tuple[Any, ...]:
        copied = self.memory.range(int(source), size, "cuMemcpyDtoD: srcDevice").copy()
        self.memory.range(int(target), size, "cuMemcpyDtoD: dstDevice")[:] = copied
        return (self._ok,)

    def cuMemcpy(self, target: Any, source: Any, size: int, *_: Any) -> tuple[Any, ...]:
        _host_bytes(target, size, "dst")[:] = _host_bytes(source, size, "src").copy()
        return (self._ok,)

    def cuMemsetD8(self, target: Any, value: int, count: int, *_: Any) -> tuple[Any, ...]:
        return self._fill(target, value, count, 1)

    def cuMemsetD16(self, target: Any, value: int, count: int, *_: Any) -> tuple[Any, ...]:
        return self._fill(target, value, count, 2)

    def cuMemsetD32(self, target: Any, value: int, count: int, *_: Any) -> tuple[Any, ...]:
        return self._fill(target, value, count, 4)

    def _fill(self, target: Any, value: int, count: int, size: int) -> tuple[Any, ...]:
        pattern = (int(value) % (1 << 8 * size)).to_bytes(size, "little")
        destination = self.memory.range(int(target), count * size, "cuMemset: dstDevice").reshape(-1, size)
        destination[:] = np.frombuffer(pattern, np.uint8)
        return (self._ok,)

    # Streams and events

    def cuStreamCreate(self, *_: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUstream(next(self._handles))

    cuStreamCreateWithPriority = cuStreamCreate

    def cuStreamIsCapturing(self, stream: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        return self._ok, mode

    def cuEventCreate(self, *_: Any) -> tuple[Any, ...]:
        handle = next(self._handles)
        self._events[handle] = None
        return self._ok, self._driver.CUevent(handle)

    def cuEventDestroy(self, event: Any) -> tuple[Any, ...]:
        self._seconds(event)
        del self._events[int(event)]
        return (self._ok,)

    def cuEventRecord(self, event: Any, *_: Any) -> tuple[Any, ...]:
        self._seconds(event)
        self._events[int(event)] = time.perf_counter()
        return (self._ok,)

    def cuEventElapsedTime(self, start: Any, end: Any) -> tuple[Any, ...]:
        first, last = self._seconds(start), self._seconds(end)
        if first is None or last is None:
            raise _UnknownHandleError  # the driver also returns this error for an event that was not recorded
        return self._ok, 1e3 * (last - first)

    def _seconds(self, event: Any) -> float | None:
        if int(event) not in self._events:
            raise _UnknownHandleError
        return self._events[int(event)]

    # Tensor maps

    def cuTensorMapEncodeTiled(
        self,
        dtype: Any,
        rank: int,
        address: Any,
        dims: Sequence[Any],
        strides: Sequence[Any],
        box: Sequence[Any],
        element_strides: Sequence[Any],
        *modes: Any,
    ) -> tuple[Any, ...]:
        fields = _map_fields(dtype, rank, address, dims, strides, element_strides, modes)
        return self._encode(TiledSpec(box=_ints(box, rank), **fields))

    def cuTensorMapEncodeIm2col(
        self,
        dtype: Any,
        rank: int,
        address: Any,
        dims: Sequence[Any],
        strides: Sequence[Any],
        lower: Sequence[int],
        upper: Sequence[int],
        channels: int,
        pixels: int,
        element_strides: Sequence[Any],
        *modes: Any,
    ) -> tuple[Any, ...]:
        fields = _map_fields(dtype, rank, address, dims, strides, element_strides, modes)
        return self._encode(
            Im2colSpec(
                lower_corner=tuple(lower),
                upper_corner=tuple(upper),
                channels_per_pixel=channels,
                pixels_per_column=pixels,
                **fields,
            )
        )

    def cuTensorMapReplaceAddress(self, tensor_map: Any, address: Any) -> tuple[Any, ...]:
        bytes_at(int(tensor_map.getPtr()), 8).view(np.uint64)[0] = int(address)
        return (self._ok,)

    def _encode(self, spec: TiledSpec | Im2colSpec) -> tuple[Any, ...]:
        result = self._driver.CUtensorMap()
        words = np.frombuffer(codec.encode(spec), np.uint64)
        result.opaque = [self._driver.cuuint64_t(int(word)) for word in words]
        return self._ok, result

    # Launches

    def cuLaunchKernel(self, function: Any, *rest: Any) -> tuple[Any, ...]:
        _require_arguments("cuLaunchKernel", rest, 10)
        return self._launch("cuLaunchKernel", function, rest[:6], rest[6], rest[8], rest[9])

    def cuLaunchCooperativeKernel(self, function: Any, *rest: Any) -> tuple[Any, ...]:
        _require_arguments("cuLaunchCooperativeKernel", rest, 9)
        return self._launch("cuLaunchCooperativeKernel", function, rest[:6], rest[6], rest[8], 0)

    def cuLaunchKernelEx(self, config: Any, function: Any, kernel_params: Any, extra: Any) -> tuple[Any, ...]:
        shape, cluster, programmatic = config_shape(self._driver, config)
        return self._launch(
            "cuLaunchKernelEx", function, shape, config.sharedMemBytes, kernel_params, extra, cluster, programmatic
        )

    def _launch(
        self,
        call: str,
        function: Any,
        shape: Sequence[int],
        shared_bytes: int,
        kernel_params: Any,
        extra: Any,
        cluster: Dim | None = None,
        programmatic: bool = False,
    ) -> tuple[Any, ...]:
        __tracebackhide__ = True
        if extra:
            raise DriverError(
                call, None, "the emulator does not support the argument `extra`", "pass the arguments in kernelParams"
            )
        entry = self._entry(function)
        module = self._module(entry.module)
        with naming("cuda-python", entry.name, calling_place()):
            launch = describe_launch(module, entry.name, shape, shared_bytes, kernel_params, cluster, programmatic)
            require_opt_in(launch, self._opt_ins.get(entry), "set CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES")
        run_with_memory(self._log, launch, self.memory)
        return (self._ok,)

    # Errors

    def cuGetErrorName(self, error: Any) -> tuple[Any, ...]:
        return self._ok, error.name.encode()

    cuGetErrorString = cuGetErrorName


def describe_launch(
    module: EmulatedModule,
    entry: str,
    shape: Sequence[int],
    shared_bytes: int,
    kernel_params: Any,
    cluster: Dim | None,
    programmatic: bool,
) -> ProgramLaunch:
    """Return a launch of a kernel. ``shape`` contains the three extents of the grid, followed by those of the block."""
    sizes = [parameter.size_bytes for parameter in module.parameters(entry)]
    return ProgramLaunch(
        ptx=module.sources.ptx,
        entry=entry,
        grid=dim3(tuple(shape[:3]), "grid"),
        block=dim3(tuple(shape[3:]), "block"),
        cluster=cluster,
        shared_bytes=natural("sharedMemBytes", shared_bytes),
        programmatic=programmatic,
        args=tuple(parameter_bytes(kernel_params, sizes)),
        library="cuda-python",
        place=calling_place(),
        loaded=module,
    )


def _require_arguments(call: str, rest: Sequence[Any], count: int) -> None:
    if len(rest) != count:
        raise ArgumentTypeError(
            call, counted(1 + len(rest), "argument"), f"called with {counted(1 + count, 'argument')}"
        )


def _results(name: str) -> int:
    """Return the number of values that follow the error code in the result of a function that takes a handle."""
    if name.endswith(("GetGlobal", "GetParamInfo")):
        return 2
    return int("Get" in name or name == "cuEventElapsedTime")


def config_shape(driver: Any, config: Any) -> tuple[tuple[int, ...], Dim | None, bool]:
    """Return the extents of grid and block, the cluster size, and the programmatic flag from a CUlaunchConfig."""
    names, cluster, programmatic = driver.CUlaunchAttributeID, None, False
    for attribute in config.attrs[: config.numAttrs]:
        if attribute.id == names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            extents = attribute.value.clusterDim
            cluster = (extents.x, extents.y, extents.z)
        elif attribute.id == names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
            programmatic = bool(attribute.value.programmaticStreamSerializationAllowed)
    shape = (
        *(config.gridDimX, config.gridDimY, config.gridDimZ),
        *(config.blockDimX, config.blockDimY, config.blockDimZ),
    )
    return shape, cluster, programmatic


def image_file(path: bytes | str | Path) -> bytes:
    """Return the contents of a module file."""
    try:
        return Path(os.fsdecode(path)).read_bytes()
    except OSError as error:
        raise ArgumentError("path", f"{os.fsdecode(path)} ({reason_of(error)})", "a readable PTX file") from None


def _buffer(value: Any, field: str) -> Array:
    """Return the bytes of an object that supports the buffer protocol."""
    try:
        return np.frombuffer(memoryview(value), np.uint8)
    except (TypeError, ValueError):
        raise ArgumentTypeError(field, type(value).__name__, "an address or a contiguous buffer") from None


def ptx_of(image: Any) -> str:
    """Return the PTX in a module image (bytes, str, buffer or address). Raise ArgumentTypeError if it is not PTX."""
    if isinstance(image, str):
        raw = image.encode()
    elif isinstance(image, int | np.integer) and image:
        raw = ctypes.string_at(int(image))
    else:
        raw = _buffer(image, "image").tobytes()
    if raw[:4] == b"\x7fELF" or b".version" not in raw:
        kind = "a cubin" if raw[:4] == b"\x7fELF" else "an image without PTX text"
        raise ArgumentTypeError(
            "image", kind, "PTX", "pass PTX from nvrtcGetPTX or nvcc -ptx, because the emulator runs only PTX"
        )
    return raw.partition(b"\0")[0].decode("utf-8", "replace")


def parameter_bytes(kernel_params: Any, sizes: Sequence[int]) -> list[bytes]:
    """Return the bytes of each parameter in kernelParams.

    ``kernel_params`` is a pair of sequences (values and their ctypes types), the address of an array of pointers, or a
    buffer that contains the pointers.
    """
    if (
        isinstance(kernel_params, tuple | list)
        and len(kernel_params) == 2
        and isinstance(kernel_params[0], tuple | list)
    ):
        values, types = kernel_params
        if len(values) != len(sizes) or len(types) != len(sizes):
            raise ArgumentError(
                "kernelParams",
                f"{counted(len(values), 'value')} and {counted(len(types), 'type')}",
                f"a pair of sequences with {counted(len(sizes), 'value')} and {counted(len(sizes), 'type')}",
            )
        pairs = zip(values, types, sizes, strict=True)
        return [_value_bytes(*pair, f"kernelParams[{index}]") for index, pair in enumerate(pairs)]
    if kernel_params is None or (isinstance(kernel_params, int | np.integer) and not kernel_params):
        pointers: list[int] = []
    elif isinstance(kernel_params, int | np.integer):
        pointers = [int(pointer) for pointer in bytes_at(int(kernel_params), 8 * len(sizes)).view(np.uint64)]
    else:
        pointers = [int(pointer) for pointer in _buffer(kernel_params, "kernelParams").view(np.uint64)]
    if len(pointers) < len(sizes):
        raise ArgumentError(
            "kernelParams",
            counted(len(pointers), "pointer"),
            f"an array of {counted(len(sizes), 'pointer')}, one per parameter",
        )
    return [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=False)]


def _value_bytes(value: Any, kind: Any, size: int, field: str) -> bytes:
    try:
        if kind is None:
            if hasattr(value, "getPtr"):
                return ctypes.string_at(int(value.getPtr()), size)
            raw = bytes(value)
        elif isinstance(value, kind):
            raw = bytes(value)
        else:
            raw = bytes(kind(float(value) if kind in (ctypes.c_float, ctypes.c_double) else int(value)))
    except (TypeError, ValueError) as error:
        got = f"{type(value).__name__} with the ctypes type {getattr(kind, '__name__', kind)} ({reason_of(error)})"
        raise ArgumentTypeError(field, got, "convertible to its ctypes type") from None
    if len(raw) != size:
        raise ArgumentError(
            field, counted(len(raw), "byte"), f"a value of {counted(size, 'byte')}, the size of the parameter"
        )
    return raw


def _host_bytes(value: Any, size: int, field: str) -> Array:
    """Return the bytes of a copy's host operand, which is an address or a buffer."""
    natural("ByteCount", size)
    if not hasattr(value, "__int__") or isinstance(value, np.ndarray):
        data = value if isinstance(value, np.ndarray) else _buffer(value, field)
        if data.nbytes < size:
            raise ArgumentError(field, counted(data.nbytes, "byte"), f"a buffer of at least {counted(size, 'byte')}")
        return bytes_at(address_of(data), size)
    if size and int(value) < LOWEST_ADDRESS:
        raise ArgumentError(field, hex(int(value)), "a buffer or an address in host memory")
    return bytes_at(int(value), size)


def _ints(values: Sequence[Any], count: int) -> tuple[int, ...]:
    return tuple(int(value) for value in values[:count])


def _map_fields(
    dtype: Any, rank: int, address: Any, dims: Any, strides: Any, element_strides: Any, modes: Sequence[Any]
) -> dict[str, Any]:
    interleave, swizzle, promotion, fill = (int(mode) for mode in modes)
    types = {kind.driver_value: kind for kind in TMA_TYPES.values()}
    return {
        "dtype": types[int(dtype)],
        "address": int(address),
        "dims": _ints(dims, rank),
        "strides_bytes": _ints(strides, rank - 1),
        "element_strides": _ints(element_strides, rank),
        "interleave": Interleave(interleave),
        "swizzle": Swizzle(swizzle),
        "l2_promotion": L2Promotion(promotion),
        "oob_fill": OobFill(fill),
    }


def record(patches: Patches, recorder: Recorder) -> None:
    """Record launches of kernels from modules that the program loads from PTX during the recording."""
    from cuda.bindings import driver

    # PTX of each module or library, by handle.
    modules: dict[int, str] = {}
    # PTX and name of each function or kernel, by handle.
    entries: dict[int, tuple[str, str]] = {}

    def remember(call: Callable[..., Any], note: Callable[[int, tuple[Any, ...]], None]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            result = call(*args)
            if int(result[0]) == 0:
                note(int(result[1]), args)
            return result

        return wrapped

    def note_module(handle: int, args: tuple[Any, ...]) -> None:
        try:
            modules[handle] = ptx_of(args[0])
        except CudaTmaError:
            modules.pop(handle, None)

    def note_entry(handle: int, args: tuple[Any, ...]) -> None:
        entries[handle] = modules.get(int(args[0]), ""), bytes(args[1]).decode()

    def note_function(handle: int, args: tuple[Any, ...]) -> None:
        entries[handle] = entries.get(int(args[0]), ("", ""))

    def around(call: str, function: Any, stream: Any, describe: Any, execute: Callable[[], Any]) -> Any:
        ptx, entry = entries.get(int(function), ("", f"unknown kernel of {call}"))

        def launch() -> ProgramLaunch:
            if not ptx:
                raise ArgumentError("module", "a module without PTX", "loaded from PTX during the recording")
            return describe(ptx, entry)  # type: ignore[no-any-return]

        return recorder.around(launch, execute, entry=entry, library="cuda-python", stream=int(stream))

    def launch_kernel(function: Any, *rest: Any) -> Any:
        def describe(ptx: str, entry: str) -> ProgramLaunch:
            return describe_launch(load_module(ptx), entry, rest[:6], int(rest[6]), rest[8], None, False)

        return around(
            "cuLaunchKernel", function, rest[7], describe, lambda: original["cuLaunchKernel"](function, *rest)
        )

    def launch_kernel_ex(config: Any, function: Any, params: Any, extra: Any) -> Any:
        def describe(ptx: str, entry: str) -> ProgramLaunch:
            shape, cluster, programmatic = config_shape(driver, config)
            return describe_launch(load_module(ptx), entry, shape, config.sharedMemBytes, params, cluster, programmatic)

        return around(
            "cuLaunchKernelEx",
            function,
            config.hStream,
            describe,
            lambda: original["cuLaunchKernelEx"](config, function, params, extra),
        )

    notes = {
        **dict.fromkeys(("cuModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData"), note_module),
        **dict.fromkeys(("cuModuleGetFunction", "cuLibraryGetKernel"), note_entry),
        "cuKernelGetFunction": note_function,
    }
    launches = {"cuLaunchKernel": launch_kernel, "cuLaunchKernelEx": launch_kernel_ex}
    original = {name: getattr(driver, name) for name in (*notes, *launches)}
    wrapped = {name: remember(original[name], note) for name, note in notes.items()}
    patches.set_everywhere(driver, wrapped | launches)
