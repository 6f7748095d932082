"""Convert arrays from NumPy, CuPy, torch or any DLPack library to NumPy or CuPy without changing their values."""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cudatma.dtypes import BFLOAT16
from cudatma.errors import ArgumentTypeError

#: DLPack device types (DLDeviceType in dlpack.h) for memory that the host can read, and for CUDA memory.
_DLPACK_HOST, _DLPACK_CUDA = (1, 3), (2, 13)


def library_of(array: object) -> str:
    """Return the top-level package of an array's type, such as ``"numpy"``, ``"cupy"`` or ``"torch"``."""
    return type(array).__module__.partition(".")[0]


def namespace_of(array: object) -> Any:
    """Return the module (NumPy or CuPy) whose functions work on this array."""
    if library_of(array) == "cupy":
        import cupy

        return cupy
    return np


def on_device_of(array: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context that creates CuPy arrays on the device of ``array``, and does nothing for a NumPy array."""
    if library_of(array) == "cupy":
        device: contextlib.AbstractContextManager[Any] = array.device
        return device
    return contextlib.nullcontext()


def is_float(dtype: Any) -> bool:
    """Return whether a NumPy or CuPy dtype is fp16, fp32, fp64 or bf16."""
    return dtype == BFLOAT16 or np.dtype(dtype) in (np.float16, np.float32, np.float64)


def native_array(value: Any, field: str) -> Any:
    """Return ``value`` as a NumPy array (host memory) or a CuPy array (device memory), without a copy if possible.

    torch tensors are detached. Raises ArgumentTypeError if ``value`` is not an array, or if it is a bf16 array on a
    device and the installed CuPy does not support bf16.
    """
    library = library_of(value)
    if isinstance(value, np.ndarray):
        if getattr(value, "mask", None) is not None:
            raise ArgumentTypeError(
                field, "a masked array", "an array without a mask", "fill the masked elements with value.filled(0)"
            )
        return np.asarray(value)  # Subclasses may index differently.
    if library == "cupy" and hasattr(value, "flags"):
        return value
    if library == "torch" and hasattr(value, "detach"):
        return _from_torch(value.detach(), field)
    if not hasattr(value, "__dlpack__"):
        remedy = "pass a NumPy or CuPy array, a torch tensor, or an object that supports DLPack"
        raise ArgumentTypeError(field, type(value).__name__, "an array", remedy)
    return _from_dlpack(value, field)


def host_array(value: Any, field: str) -> NDArray[Any]:
    """Return ``value`` as a NumPy array, copied from its device if necessary, or raise ArgumentTypeError."""
    if library_of(value) == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu()
    native = native_array(value, field)
    host: NDArray[Any] = native if isinstance(native, np.ndarray) else native.get()
    return host


def upload(array: NDArray[Any]) -> Any:
    """Copy a NumPy array to the current device. Raises ArgumentTypeError if this CuPy does not support bf16."""
    import cupy

    if array.dtype != BFLOAT16:
        return cupy.asarray(array)
    return bfloat16_view(cupy.asarray(array.view(np.uint16)))


def bfloat16_view(bits: Any) -> Any:
    """View a CuPy array of 16-bit integers as bf16. Raises ArgumentTypeError if this CuPy does not support bf16."""
    try:
        return bits.view(BFLOAT16)
    except (TypeError, ValueError) as error:
        import cupy

        remedy = "install CuPy 14 or newer, or pass float16"
        raise ArgumentTypeError("dtype", f"bfloat16 with CuPy {cupy.__version__}", "float16", remedy) from error


def _from_torch(tensor: Any, field: str) -> Any:
    import torch

    on_host = tensor.device.type == "cpu"
    if tensor.dtype is torch.bfloat16:  # NumPy's DLPack does not support bf16, so pass the bits.
        bits = tensor.view(torch.int16)
        return bits.numpy().view(BFLOAT16) if on_host else bfloat16_view(_from_dlpack(bits, field))
    if not on_host:
        return _from_dlpack(tensor, field)
    if tensor.dtype is torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError) as error:
        raise ArgumentTypeError(
            field, str(tensor.dtype), "a type that NumPy supports", "convert the tensor to float32"
        ) from error


def _from_dlpack(value: Any, field: str) -> Any:
    try:
        kind = int(value.__dlpack_device__()[0])
        if kind in _DLPACK_HOST:
            return np.from_dlpack(value)
        if kind in _DLPACK_CUDA:
            import cupy

            return cupy.from_dlpack(value)
    except (AttributeError, BufferError, LookupError, RuntimeError, TypeError, ValueError) as error:
        shown = f"{type(value).__name__} ({error})"
        raise ArgumentTypeError(
            field, shown, "an array that DLPack can share", "convert the array to float32"
        ) from error
    raise ArgumentTypeError(
        field, f"DLPack device type {kind}", "an array in host or CUDA memory", "copy the array to the host"
    )
