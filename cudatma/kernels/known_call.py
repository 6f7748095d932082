"""Calls like an earlier one, of any family: their keys, and what they read of their arrays.

The few attributes of CuPy arrays and torch tensors that a launch depends on, and nothing else: full checks cost more
than the launch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from cudatma.kernels.tensor_library import library_of_tensor
from cudatma.library_streams import working_on

_PLAIN = (int, float, bool, str, type(None))


def call_key(arrays: Sequence[Any], options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The library, and what else a launch depends on; None where the arrays are not all of CuPy or torch, or an option
    is no plain value."""
    kind = type(arrays[0])
    library = library_of_tensor(arrays[0])
    if not library or not all(type(option) in _PLAIN for option in options):
        return None
    facts: list[Any] = [library]
    for array in arrays:
        if array is None:
            facts.append(None)
        elif type(array) is not kind:
            return None
        elif library == "cupy":
            facts.append((array.shape, array.strides, array.dtype, array.data.device_id))
        elif array.requires_grad:
            return None
        else:
            try:
                facts.append((array.shape, array.stride(), array.dtype, array.device))
            except RuntimeError:  # a nested tensor has none of them
                return None
    return (*facts, options, tuple([type(option) for option in options]))


def address_of(library: str, array: Any) -> int:
    return int(array.data.ptr if library == "cupy" else array.data_ptr())


def new_result(library: str, like: Any, shape: tuple[int, ...], dtype: Any, stream: int) -> Any:
    """An uninitialized result on an array's device, allocated on the stream of the launch."""
    if library == "torch":
        with working_on(library, like.device.index, stream):
            return like.new_empty(shape, dtype=dtype)
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(like.data.device_id), working_on(library, like.data.device_id, stream):
        return cupy.empty(shape, dtype)
