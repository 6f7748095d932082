"""cuda-python's driver functions on the emulator: memory is host memory, and a launch runs before its call returns."""

# ruff: noqa: N802, N815  # the names are CUDA's

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cudatma.backend import selected_backend
from cudatma.descriptor import codec
from cudatma.descriptor.driver import has_driver
from cudatma.descriptor.rules import L2Promotion, OobFill
from cudatma.descriptor.spec import Im2colSpec, TiledSpec
from cudatma.dtypes import TMA_TYPES
from cudatma.emulator import EmulatedModule
from cudatma.emulator.ptx.types import Array
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, DriverError, counted
from cudatma.layout import Interleave, Swizzle
from cudatma.programs.host_memory import HostMemory, bytes_at, words_of
from cudatma.programs.launch import Dim, ProgramLaunch, calling_place, module_of
from cudatma.programs.log import SM_COUNT, LaunchLog
from cudatma.programs.patches import Patches

#: Functions that have nothing to do, because every call ends before it returns.
_NOTHING = frozenset(
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
        "cuEventDestroy",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuFuncSetAttribute",
        "cuFuncSetCacheConfig",
        "cuInit",
        "cuKernelSetAttribute",
        "cuMemPrefetchAsync",
        "cuModuleUnload",
        "cuLibraryUnload",
        "cuProfilerStart",
        "cuProfilerStop",
        "cuStreamDestroy",
        "cuStreamQuery",
        "cuStreamSynchronize",
        "cuStreamWaitEvent",
    )
)
_DRIVER_VERSION = 13000
_TOTAL_BYTES = 80 << 30


@dataclass(frozen=True, slots=True)
class _Entry:
    """A kernel of a loaded module."""

    module: int
    name: str
    ptx: str


class DriverInterceptor:
    """Replaces the functions of cuda.bindings.driver, and sends its launches to the log."""

    def install(self, log: LaunchLog) -> None:
        from cuda.bindings import driver

        # Both results are kept, so that cudatma's own functions do not take the emulated device for a GPU.
        selected_backend("auto")
        has_driver()
        emulated = EmulatedDriver(driver, log)
        names = [name for name in dir(driver) if name.startswith("cu") and callable(getattr(driver, name))]
        functions = [name for name in names if not isinstance(getattr(driver, name), type)]
        self._patches = Patches()
        self._patches.set_everywhere(driver, {name: emulated.function(name) for name in functions})

    def remove(self) -> None:
        self._patches.undo()


class EmulatedDriver:
    """The driver API of one emulated GPU. Methods return what the functions of cuda.bindings.driver return."""

    def __init__(self, driver: Any, log: LaunchLog) -> None:
        self._driver, self._log = driver, log
        self._handles = itertools.count(0x1000)
        self._modules: dict[int, str] = {}
        self._entries: dict[int, _Entry] = {}
        self._events: dict[int, float] = {}
        self._context = 0
        self.memory = HostMemory()
        self._ok = driver.CUresult.CUDA_SUCCESS

    def function(self, name: str) -> Callable[..., Any]:
        """Return the emulated function with this name, or one that raises DriverError."""
        if name in _NOTHING:
            return lambda *_: (self._ok,)
        plain = name.removesuffix("_v2").removesuffix("_v3").removesuffix("Async")
        emulated = getattr(self, plain, None)
        if emulated is not None:
            return emulated  # type: ignore[no-any-return]

        def missing(*_: object) -> Any:
            raise DriverError(name, None, "the emulator has no such function", "run this part of the program on a GPU")

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
        return self._ok, f"cudatma emulator ({self._log.target.name})".encode()[:length]

    def cuDeviceTotalMem(self, device: Any) -> tuple[Any, ...]:
        return self._ok, _TOTAL_BYTES

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> tuple[Any, ...]:
        name = attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        value = device_attributes(self._log.target).get(name)
        if value is None:
            raise DriverError("cuDeviceGetAttribute", None, f"the emulated device has no attribute {name}")
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
        return self.cuModuleLoadData(Path(name.decode() if isinstance(name, bytes) else name).read_bytes())

    def cuModuleLoadData(self, image: Any, *_: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUmodule(self._load(image))

    cuModuleLoadDataEx = cuModuleLoadData
    cuModuleLoadFatBinary = cuModuleLoadData

    def cuLibraryLoadData(self, image: Any, *_: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUlibrary(self._load(image))

    def cuLibraryLoadFromFile(self, name: bytes | str, *_: Any) -> tuple[Any, ...]:
        return self.cuLibraryLoadData(Path(name.decode() if isinstance(name, bytes) else name).read_bytes())

    def cuLibraryGetModule(self, library: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUmodule(int(library))

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[Any, ...]:
        return self._entry(int(module), name, self._driver.CUfunction)

    def cuLibraryGetKernel(self, library: Any, name: bytes) -> tuple[Any, ...]:
        return self._entry(int(library), name, self._driver.CUkernel)

    def cuKernelGetFunction(self, kernel: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUfunction(int(kernel))

    def cuKernelGetLibrary(self, kernel: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUlibrary(self._entries[int(kernel)].module)

    def cuFuncGetModule(self, function: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUmodule(self._entries[int(function)].module)

    def cuFuncGetName(self, function: Any) -> tuple[Any, ...]:
        return self._ok, self._entries[int(function)].name.encode()

    cuKernelGetName = cuFuncGetName

    def cuFuncGetParamInfo(self, function: Any, index: int) -> tuple[Any, ...]:
        entry = self._entries[int(function)]
        program = self._parsed(entry.module).image.entry(entry.name)
        if index >= len(program.function.params):
            return self._driver.CUresult.CUDA_ERROR_INVALID_VALUE, None, None
        parameter = program.function.params[index]
        return self._ok, program.param_offsets[parameter.name], parameter.size_bytes

    cuKernelGetParamInfo = cuFuncGetParamInfo

    def cuFuncGetAttribute(self, attribute: Any, function: Any, *_: Any) -> tuple[Any, ...]:
        name, entry = attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_"), self._entries[int(function)]
        image = self._parsed(entry.module).image
        values = {
            "MAX_THREADS_PER_BLOCK": 1024,
            "MAX_DYNAMIC_SHARED_SIZE_BYTES": self._log.target.smem_per_block_bytes,
            "SHARED_SIZE_BYTES": image.shared_layout(entry.name)[1],
            "LOCAL_SIZE_BYTES": image.entry(entry.name).local_bytes,
            "CONST_SIZE_BYTES": 0,
            "NUM_REGS": 0,  # unknown: only the cubin has it
        }
        if name not in values:
            raise DriverError("cuFuncGetAttribute", None, f"the emulator has no attribute {name}")
        return self._ok, values[name]

    cuKernelGetAttribute = cuFuncGetAttribute

    def cuModuleGetGlobal(self, module: Any, name: bytes) -> tuple[Any, ...]:
        variable = self._parsed(int(module)).globals[name.decode()]
        return self._ok, self._driver.CUdeviceptr(variable.ctypes.data), variable.nbytes

    cuLibraryGetGlobal = cuModuleGetGlobal

    def _load(self, image: Any) -> int:
        handle = next(self._handles)
        self._modules[handle] = ptx_of(image)
        return handle

    def _parsed(self, module: int) -> EmulatedModule:
        return module_of(self._modules[module], None)

    def _entry(self, module: int, name: bytes, handle_type: Any) -> tuple[Any, ...]:
        text = name.decode() if isinstance(name, bytes) else name
        if text not in self._parsed(module).entries:
            return self._driver.CUresult.CUDA_ERROR_NOT_FOUND, handle_type(0)
        handle = next(self._handles)
        self._entries[handle] = _Entry(module, text, self._modules[module])
        return self._ok, handle_type(handle)

    # Memory

    def cuMemAlloc(self, size: int, *_: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUdeviceptr(self.memory.allocate(size))

    cuMemAllocManaged = cuMemAlloc

    def cuMemAllocHost(self, size: int, *_: Any) -> tuple[Any, ...]:
        return self._ok, self.memory.allocate(size)

    cuMemHostAlloc = cuMemAllocHost

    def cuMemHostGetDevicePointer(self, pointer: Any, *_: Any) -> tuple[Any, ...]:
        return self._ok, self._driver.CUdeviceptr(int(pointer))

    def cuMemFree(self, pointer: Any, *_: Any) -> tuple[Any, ...]:
        self.memory.free(int(pointer), "cuMemFree")
        return (self._ok,)

    def cuMemFreeHost(self, pointer: Any) -> tuple[Any, ...]:
        self.memory.free(int(pointer), "cuMemFreeHost")
        return (self._ok,)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return self._ok, _TOTAL_BYTES, _TOTAL_BYTES

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
        return self._fill(target, np.uint8(value), count)

    def cuMemsetD16(self, target: Any, value: int, count: int, *_: Any) -> tuple[Any, ...]:
        return self._fill(target, np.uint16(value), count)

    def cuMemsetD32(self, target: Any, value: int, count: int, *_: Any) -> tuple[Any, ...]:
        return self._fill(target, np.uint32(value), count)

    def _fill(self, target: Any, value: Any, count: int) -> tuple[Any, ...]:
        self.memory.range(int(target), count * value.nbytes, "cuMemset: dstDevice").view(value.dtype)[:] = value
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
        return self._ok, self._driver.CUevent(handle)

    def cuEventRecord(self, event: Any, *_: Any) -> tuple[Any, ...]:
        self._events[int(event)] = time.perf_counter()
        return (self._ok,)

    def cuEventElapsedTime(self, start: Any, end: Any) -> tuple[Any, ...]:
        return self._ok, 1e3 * (self._events[int(end)] - self._events[int(start)])

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

    def cuLaunchKernel(
        self,
        function: Any,
        *shape_stream_arguments: Any,
    ) -> tuple[Any, ...]:
        shape, (shared_bytes, _, kernel_params, extra) = shape_stream_arguments[:6], shape_stream_arguments[6:]
        return self._launch("cuLaunchKernel", function, shape, int(shared_bytes), kernel_params, extra)

    def cuLaunchCooperativeKernel(self, function: Any, *shape_stream_params: Any) -> tuple[Any, ...]:
        shape, (shared_bytes, _, kernel_params) = shape_stream_params[:6], shape_stream_params[6:]
        return self._launch("cuLaunchCooperativeKernel", function, shape, int(shared_bytes), kernel_params, 0)

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
        if extra:
            raise DriverError(call, None, "the emulator does not read arguments from extra", "use kernelParams")
        entry = self._entries.get(int(function))
        if entry is None:
            return (self._driver.CUresult.CUDA_ERROR_INVALID_HANDLE,)
        program = self._parsed(entry.module).image.entry(entry.name)
        raw = parameter_bytes(kernel_params, [parameter.size_bytes for parameter in program.function.params])
        try:
            reached = self.memory.reached(words_of(raw))
        except ArgumentError as error:
            raise error.renamed({"args": f"{call} of {entry.name}: kernelParams"}) from None
        blocks = self.memory.blocks
        grid = (int(shape[0]), int(shape[1]), int(shape[2]))
        block = (int(shape[3]), int(shape[4]), int(shape[5]))
        labels = (f"cuMemAlloc of {counted(block.size, 'byte')}" for block in blocks)
        self._log.run(
            ProgramLaunch(
                ptx=entry.ptx,
                entry=entry.name,
                grid=grid,
                block=block,
                cluster=cluster,
                shared_bytes=shared_bytes,
                programmatic=programmatic,
                args=tuple(raw),
                arrays=(*blocks, *reached.values()),
                names=(*(f"args[{index}]" for index in range(len(raw))), *labels, *reached),
                library="cuda-python",
                place=calling_place("cuda"),
            )
        )
        return (self._ok,)

    # Errors

    def cuGetErrorName(self, error: Any) -> tuple[Any, ...]:
        return self._ok, error.name.encode()

    cuGetErrorString = cuGetErrorName


def config_shape(driver: Any, config: Any) -> tuple[tuple[int, ...], Dim | None, bool]:
    """Return grid and block, cluster, and whether the launch is programmatic, of a CUlaunchConfig."""
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


def device_attributes(target: Any) -> dict[str, int]:
    """Return attributes of the emulated device by the end of their names in CUdevice_attribute."""
    major, minor = target.compute_capability
    return {
        "COMPUTE_CAPABILITY_MAJOR": major,
        "COMPUTE_CAPABILITY_MINOR": minor,
        "MULTIPROCESSOR_COUNT": SM_COUNT,
        "WARP_SIZE": 32,
        "MAX_THREADS_PER_BLOCK": 1024,
        "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
        **dict(zip(("MAX_BLOCK_DIM_X", "MAX_BLOCK_DIM_Y", "MAX_BLOCK_DIM_Z"), (1024, 1024, 64), strict=True)),
        **dict(zip(("MAX_GRID_DIM_X", "MAX_GRID_DIM_Y", "MAX_GRID_DIM_Z"), (2**31 - 1, 65535, 65535), strict=True)),
        "MAX_REGISTERS_PER_BLOCK": 65536,
        "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
        "MAX_SHARED_MEMORY_PER_BLOCK": 48 << 10,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": target.smem_per_block_bytes,
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": target.smem_per_sm_bytes,
        "UNIFIED_ADDRESSING": 1,
        "MANAGED_MEMORY": 1,
        "CONCURRENT_MANAGED_ACCESS": 1,
        "MEMORY_POOLS_SUPPORTED": 1,
        "COOPERATIVE_LAUNCH": 1,
        "CLUSTER_LAUNCH": int(target.has("cluster")),
        "TENSOR_MAP_ACCESS_SUPPORTED": int(target.has("tma")),
        "INTEGRATED": 0,
    }


def ptx_of(image: Any) -> str:
    """Return the PTX of a module image: bytes, text, a buffer, or an address. Raise ArgumentTypeError for a cubin."""
    if isinstance(image, str):
        raw = image.encode()
    elif isinstance(image, int | np.integer):
        raw = ctypes.string_at(int(image))
    else:
        raw = bytes(memoryview(image))
    if raw[:4] == b"\x7fELF" or b".version" not in raw:
        kind = "a cubin" if raw[:4] == b"\x7fELF" else "an image without PTX text"
        raise ArgumentTypeError(
            "image", kind, "PTX", "compile to PTX (nvrtcGetPTX, nvcc -ptx): the emulator runs PTX only"
        )
    return raw.partition(b"\0")[0].decode("utf-8", "replace")


def parameter_bytes(kernel_params: Any, sizes: Sequence[int]) -> list[bytes]:
    """Return the bytes of each parameter from the kernelParams of cuda-python.

    They are a pair of values and ctypes types, the address of an array of pointers, or a buffer with these pointers.
    """
    if (
        isinstance(kernel_params, tuple | list)
        and len(kernel_params) == 2
        and isinstance(kernel_params[0], tuple | list)
    ):
        values, types = kernel_params
        if len(values) != len(sizes) or len(types) != len(sizes):
            raise ArgumentError("kernelParams", f"{len(values)} values and {len(types)} types", f"{len(sizes)} of each")
        pairs = zip(values, types, sizes, strict=True)
        return [_value_bytes(*pair, f"kernelParams[{index}]") for index, pair in enumerate(pairs)]
    if kernel_params is None or (isinstance(kernel_params, int | np.integer) and not kernel_params):
        pointers: list[int] = []
    elif isinstance(kernel_params, int | np.integer):
        pointers = [int(pointer) for pointer in bytes_at(int(kernel_params), 8 * len(sizes)).view(np.uint64)]
    else:
        pointers = [int(pointer) for pointer in np.frombuffer(memoryview(kernel_params), np.uint8).view(np.uint64)]
    if len(pointers) < len(sizes):
        raise ArgumentError("kernelParams", counted(len(pointers), "pointer"), f"{len(sizes)}, one for each parameter")
    return [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=False)]


def _value_bytes(value: Any, kind: Any, size: int, field: str) -> bytes:
    if kind is None:
        if hasattr(value, "getPtr"):
            return ctypes.string_at(int(value.getPtr()), size)
        raw = bytes(value)
    elif isinstance(value, kind):
        raw = bytes(value)
    else:
        raw = bytes(kind(float(value) if kind in (ctypes.c_float, ctypes.c_double) else int(value)))
    if len(raw) != size:
        raise ArgumentError(field, f"{len(raw)} bytes", f"{size} bytes, as the kernel declares")
    return raw


def _host_bytes(value: Any, size: int, field: str) -> Array:
    """Return the bytes of a host operand of a copy: an address or a buffer."""
    try:
        address = int(value)
    except (TypeError, ValueError):
        data = np.frombuffer(memoryview(value), np.uint8) if not isinstance(value, np.ndarray) else value
        if data.nbytes < size:
            raise ArgumentError(field, f"{data.nbytes} bytes", f"at least {size} bytes") from None
        address = data.ctypes.data
    return bytes_at(address, size)


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


__all__ = ["CudaTmaError", "DriverInterceptor", "EmulatedDriver"]
