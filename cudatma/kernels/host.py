"""NumPy views of host arrays from any library."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo


def host_bytes(info: ArrayInfo) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return all bytes from the first to the last element of an array, including gaps between rows."""
    low, end = info.extent
    if low == end:
        return np.empty(0, np.uint8)
    return np.frombuffer(memoryview((ctypes.c_char * (end - low)).from_address(low)), np.uint8)


def host_array(info: ArrayInfo) -> np.ndarray[Any, Any]:
    """Return a NumPy view of an array in host memory."""
    if info.size_elems == 0:
        return np.empty(info.shape, info.dtype)
    offset = info.pointer - info.extent[0]
    view: np.ndarray[Any, Any] = np.ndarray(info.shape, info.dtype, host_bytes(info), offset, info.strides_bytes)
    return view
