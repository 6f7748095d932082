"""Describe arrays from any library, and allocate results in the library of an input.

cudatma reads CuPy arrays and torch tensors through their attributes, and all other arrays through
``__cuda_array_interface__`` (versions 2 and 3) or DLPack. It copies no data and imports no library other than the one
that created the array.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from cudatma import context
from cudatma.dtypes import BFLOAT16
from cudatma.errors import INSTALL_CUDA, ArgumentError, ArgumentTypeError, DriverError, reason_of
from cudatma.library_streams import current_stream, working_on

_ACCEPTED = "a CuPy, torch or NumPy array, or an object with __cuda_array_interface__ or __dlpack__"

#: Maps torch's dtype names to NumPy dtypes. torch's quantized and sub-byte types have no NumPy equivalent.
_TORCH_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
} | {
    "bfloat16": BFLOAT16,
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
#: CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL in cuda.h.
_POINTER_DEVICE_ORDINAL = 9
#: Values of DLDeviceType in dlpack.h.
_DLPACK_HOST, _DLPACK_CUDA, _DLPACK_MANAGED = 1, 2, 13
_ADDRESSES = 1 << 64


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Address, layout, dtype and device of an array.

    Attributes
    ----------
    pointer : int
        Address of element [0, ..., 0]. It may be 0 if the array has no elements.
    shape : tuple of int
        Shape in NumPy order.
    strides_bytes : tuple of int
        Stride of each dimension in bytes. A stride may be 0 or negative.
    dtype : numpy.dtype
        NumPy dtype. The dtype of bf16 is ml_dtypes.bfloat16.
    device : int or None
        CUDA ordinal, or None for host memory.
    owner : object
        Object that keeps the memory alive.
    kind : str
        Library or protocol of the array: "cupy", "torch", "numpy", "cai" or "dlpack".
    readonly : bool, default: False
        Whether the producer forbids writes.
    producer : int or None, default: None
        Handle of the stream that a reader must wait for (streams.order_after_producers), or None if the array's
        library orders its own work or does not name a stream.
    """

    pointer: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int | None
    owner: object
    kind: str
    readonly: bool = False
    producer: int | None = None

    @property
    def size_elems(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    @property
    def extent(self) -> tuple[int, int]:
        """Address of the first byte and address after the last byte. The two are equal if there are no elements."""
        if self.size_elems == 0:
            return self.pointer, self.pointer
        spans = [(n - 1) * s for n, s in zip(self.shape, self.strides_bytes, strict=True)]
        low = self.pointer + sum(s for s in spans if s < 0)
        return low, self.pointer + sum(s for s in spans if s > 0) + self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are dense in C order. Dimensions of size 1 are ignored."""
        if self.size_elems == 0:
            return True
        return all(
            n == 1 or s == dense
            for n, s, dense in zip(self.shape, self.strides_bytes, dense_strides(self.shape, self.dtype), strict=True)
        )

    @property
    def is_disjoint(self) -> bool:
        """Whether no two elements share a byte.

        The test is conservative: an array with elements passes only if each axis steps over all axes with smaller
        strides.
        """
        end = self.dtype.itemsize
        for stride, extent in sorted((abs(s), n) for n, s in zip(self.shape, self.strides_bytes, strict=True)):
            if extent > 1:
                if stride < end:
                    return self.size_elems == 0
                end += (extent - 1) * stride
        return True


def place_name(device: int | None) -> str:
    """Return the location of an array for error messages, such as ``"the host"`` or ``"device 0"``."""
    return "the host" if device is None else f"device {device}"


def dense_strides(shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Return the byte strides of a dense array in C order."""
    strides: list[int] = []
    step = dtype.itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def describe(array: object, field: str = "array") -> ArrayInfo:
    """Return the ArrayInfo of an array from any library. An ArrayInfo is returned unchanged.

    ``field`` is the argument's name in error messages. This function does not wait for the producer of the array.
    Raises ArgumentTypeError if the object is not a dense array, and DriverError if the device of a
    ``__cuda_array_interface__`` pointer must be determined and there is no driver.
    """
    if isinstance(array, ArrayInfo):
        return array
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        data: Any = array
        return ArrayInfo(data.data.ptr, data.shape, data.strides, data.dtype, data.data.device_id, array, "cupy")
    if is_torch(array):
        return _from_torch(sys.modules["torch"], array, field)
    if isinstance(array, np.ndarray):
        if getattr(array, "mask", None) is not None:
            raise ArgumentTypeError(field, "a masked array", "an array without a mask")
        return _from_numpy(array, array, "numpy")
    interface = getattr(array, "__cuda_array_interface__", None)
    if isinstance(interface, Mapping):
        return _from_cuda_array_interface(array, interface, field)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _from_dlpack(array, field)
    raise ArgumentTypeError(field, type(array).__name__, _ACCEPTED)


def _from_numpy(array: np.ndarray[Any, np.dtype[Any]], owner: object, kind: str) -> ArrayInfo:
    pointer, readonly = array.__array_interface__["data"]
    return ArrayInfo(pointer, array.shape, array.strides, array.dtype, None, owner, kind, bool(readonly))


def _from_torch(torch: Any, tensor: Any, field: str) -> ArrayInfo:
    place = tensor.device.type
    is_nested = getattr(tensor, "is_nested", False)
    if tensor.layout is not torch.strided or is_nested or place not in ("cuda", "cpu"):
        kind = "nested" if is_nested else str(tensor.layout)
        raise ArgumentTypeError(field, f"a {kind} tensor on {place}", "a strided tensor on a CUDA device or the CPU")
    dtype = _TORCH_DTYPES.get(str(tensor.dtype)[len("torch.") :])
    if dtype is None:
        raise ArgumentTypeError(field, str(tensor.dtype), ", ".join(_TORCH_DTYPES), "view it as uint8")
    if tensor.is_neg() or (dtype.kind == "c" and tensor.is_conj()):
        # The memory does not contain the tensor's values until torch resolves the tensor.
        raise ArgumentTypeError(
            field,
            "a lazily negated or conjugated tensor",
            "a tensor whose memory contains its values",
            "pass tensor.clone()",
        )
    strides = tuple([s * dtype.itemsize for s in tensor.stride()])
    device = None if place == "cpu" else tensor.device.index
    try:
        pointer = tensor.data_ptr()
    except RuntimeError as error:  # the tensor is inside torch.vmap or torch.func
        got = f"a tensor without its own memory ({reason_of(error)})"
        raise ArgumentTypeError(field, got, "an ordinary tensor") from error
    if not pointer and tensor.numel():
        raise ArgumentError(
            f"{field}.pointer",
            "0x0",
            "the address of the tensor's memory",
            "check whether the storage of the tensor was freed",
        )
    return ArrayInfo(pointer, tuple(tensor.shape), strides, dtype, device, tensor, "torch")


def _from_cuda_array_interface(array: object, interface: Mapping[str, Any], field: str) -> ArrayInfo:
    """Return the ArrayInfo of an object with the CUDA Array Interface. [Numba documentation, Version 3]"""
    if interface.get("mask") is not None:
        raise ArgumentTypeError(field, "a masked array", "an array without a mask")
    try:
        dtype = np.dtype(interface["typestr"])
        shape = tuple(operator.index(n) for n in interface["shape"])
        pointer, readonly = operator.index(interface["data"][0]), bool(interface["data"][1])
        strides = interface.get("strides")
        strides = dense_strides(shape, dtype) if strides is None else tuple(operator.index(s) for s in strides)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ArgumentTypeError(
            field, f"an invalid interface ({error})", "an array with a __cuda_array_interface__ of version 3"
        ) from error
    if len(strides) != len(shape):
        raise ArgumentTypeError(
            field, f"{len(strides)} strides for {len(shape)} dimensions", "an array with one stride per dimension"
        )
    if any(n < 0 for n in shape):
        raise ArgumentError(f"{field}.shape", shape, "a tuple of nonnegative integers")
    # Arrays without elements have address 0 in this interface.
    if not 0 <= pointer < _ADDRESSES or (pointer == 0 and 0 not in shape):
        raise ArgumentError(f"{field}.pointer", hex(pointer), "the address of the array's memory on a device")
    producer = _named_stream(interface, field)
    device = pointer_device(pointer, field)
    return ArrayInfo(pointer, shape, strides, dtype, device, array, "cai", readonly, producer)


def _named_stream(interface: Mapping[str, Any], field: str) -> int | None:
    """Return the stream handle of a ``__cuda_array_interface__``.

    The interface forbids the handle 0, because it is ambiguous.
    """
    producer = interface.get("stream")
    if producer is not None and (type(producer) is not int or producer <= 0):
        raise ArgumentError(f"{field}.stream", repr(producer), "None or a positive handle")
    return producer


def producer_of(array: object) -> int | None:
    """Return the current ArrayInfo.producer of a tensor map's owner, or None if the owner is not an array."""
    cupy = sys.modules.get("cupy")
    if array is None or is_torch(array) or (cupy is not None and isinstance(array, cupy.ndarray)):
        return None
    interface = getattr(array, "__cuda_array_interface__", None)
    return _named_stream(interface, "array") if isinstance(interface, Mapping) else None


def pointer_device(pointer: int, field: str = "pointer") -> int:
    """Return the ordinal of the device that owns a pointer, or of the current device for a null pointer.

    Raises DriverError if there is no driver, and ArgumentError if CUDA neither allocated nor registered the address.
    [cuPointerGetAttribute]
    """
    if pointer == 0:
        return context.current_device()
    context.initialize()
    ordinal = ctypes.c_int(-1)
    code = _pointer_attribute()(ctypes.byref(ordinal), ctypes.c_int(_POINTER_DEVICE_ORDINAL), ctypes.c_uint64(pointer))
    if code != 0 or ordinal.value < 0:
        raise ArgumentError(field, hex(pointer), "a pointer to memory that was allocated by or registered with CUDA")
    return ordinal.value


@lru_cache(maxsize=1)
def _pointer_attribute() -> Any:
    """Return cuPointerGetAttribute from libcuda.

    The binding in cuda.bindings 13.3 returns device 0 (cuda-python issue 2928).
    """
    return ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute


def _from_dlpack(array: Any, field: str) -> ArrayInfo:
    """Return the ArrayInfo of a DLPack producer. [DLPack; Python array API standard, __dlpack_device__]"""
    try:
        place, _ = (int(part) for part in array.__dlpack_device__())
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            field,
            f"an invalid device ({error})",
            "an array whose __dlpack_device__() returns (device type, device number)",
        ) from error
    if place not in (_DLPACK_HOST, _DLPACK_CUDA, _DLPACK_MANAGED):
        raise ArgumentTypeError(
            field,
            f"DLPack device type {place}",
            "an array on DLPack device type 1 (CPU), 2 (CUDA) or 13 (CUDA managed memory)",
        )
    try:
        if place == _DLPACK_HOST:
            return _from_numpy(np.from_dlpack(array), array, "dlpack")
        import cupy

        # CuPy passes its current stream to the producer, and the producer orders its own work before that stream. A
        # reader on another stream must therefore wait for CuPy's stream.
        view = cupy.from_dlpack(array)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        got = f"an array whose export raises {error!r}"
        raise ArgumentTypeError(field, got, "an array that can be exported through DLPack") from error
    device = view.data.device_id
    producer = current_stream("cupy", device)
    return ArrayInfo(view.data.ptr, view.shape, view.strides, view.dtype, device, view, "dlpack", producer=producer)


def overlaps(a: ArrayInfo, b: ArrayInfo) -> bool:
    """Return whether two arrays may share a byte. False means that they certainly do not.

    Arrays are disjoint if their byte extents are. Windows of one buffer with the same row pitch are also disjoint if
    their columns are.
    """
    if a.device != b.device or a.size_elems == 0 or b.size_elems == 0:
        return False
    (a_low, a_end), (b_low, b_end) = a.extent, b.extent
    if a_end <= b_low or b_end <= a_low:
        return False
    a_pitch, a_width = _rows(a)
    b_pitch, b_width = _rows(b)
    if a_pitch == 0 or a_pitch != b_pitch or max(a_width, b_width) > a_pitch:
        return True
    # Modulo the pitch, every byte of `a` is in [a_low, a_low + a_width), and likewise for `b`.
    return (b_low - a_low) % a_pitch < a_width or (a_low - b_low) % a_pitch < b_width


def _rows(array: ArrayInfo) -> tuple[int, int]:
    """Return the largest stride (the pitch, or 0) and the number of bytes that one row spans."""
    spans = [(abs(s), n) for s, n in zip(array.strides_bytes, array.shape, strict=True) if n > 1 and s != 0]
    low, end = array.extent
    if not spans:
        return 0, end - low
    pitch = max(spans)[0]
    return pitch, end - low - sum((n - 1) * s for s, n in spans if s == pitch)


def empty_like_library(reference: object, shape: Sequence[int], dtype: object, stream: int | None = None) -> Any:
    """Return an uninitialized C-ordered array with the library and device of the reference.

    CuPy, torch and NumPy allocate their own arrays. For ``__cuda_array_interface__`` and DLPack producers, the result
    is a CuPy array on the device or a NumPy array on the host. ``stream`` is the handle of the first stream that writes
    to the array, by default the library's current stream. On any other stream, earlier work may still be using the
    memory. Raises ArgumentTypeError if torch has no corresponding dtype.
    """
    info, element = describe(reference, "reference"), np.dtype(dtype)  # type: ignore[call-overload]
    if info.kind == "torch":
        torch = sys.modules["torch"]
        name = element.name
        if name not in _TORCH_DTYPES or not hasattr(torch, name):
            raise ArgumentTypeError("dtype", name, ", ".join(_TORCH_DTYPES))
        place = "cpu" if info.device is None else f"cuda:{info.device}"
        with working_on("torch", info.device, stream):
            return torch.empty(tuple(shape), dtype=getattr(torch, name), device=place)
    if info.device is None:
        return np.empty(tuple(shape), element)
    return empty_in_cupy(tuple(shape), element, info.device, stream)


def empty_in_cupy(shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int | None) -> Any:
    """Return an uninitialized CuPy array, as empty_like_library() does. Raises DriverError if CuPy fails."""

    def make(cupy: Any) -> Any:
        with cupy.cuda.Device(device), working_on("cupy", device, stream):
            return cupy.empty(shape, dtype)

    return with_cupy("cupy.empty", make)


#: cudaErrorInsufficientDriver, which CUDA also returns if there is no driver, and cudaErrorNoDevice.
_NO_DRIVER, _NO_DEVICE = 35, 100


def with_cupy(call: str, function: Callable[[Any], Any]) -> Any:
    """Return ``function(cupy)``.

    Raises a DriverError with the name ``call`` if CuPy is not installed or finds no driver or GPU, or if the CUDA
    runtime fails.
    """
    try:
        import cupy
    except ImportError as error:
        raise DriverError(call, None, f"no CuPy ({error}). {INSTALL_CUDA}") from error
    try:
        return function(cupy)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        status = int(error.status)
        remedy = "run cudatma doctor to check the machine, or pass NumPy arrays and backend='emulator' to use the CPU"
        detail = (
            f"no NVIDIA driver, or a driver too old for this CuPy ({error})" if status == _NO_DRIVER else str(error)
        )
        raise DriverError(call, status, detail, remedy if status in (_NO_DRIVER, _NO_DEVICE) else "") from error


def is_torch(owner: object) -> bool:
    """Return whether an object is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(owner, torch.Tensor)
