"""The arrays that a call of attention writes, as it gives them back and as kernels see them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo, describe, empty_like_library, with_cupy
from cudatma.kernels.attention.tensors import addressable
from cudatma.kernels.host import host_array
from cudatma.library_streams import working_on


def make_result(
    out: Any, given: ArrayInfo | None, like: ArrayInfo, shape: tuple[int, ...], handle: int | None
) -> tuple[Any, ArrayInfo]:
    """(the array that the caller gets, the same as (batch, length, heads, dim)). given: ``out`` if there is one."""
    if given is not None:
        return out, given
    made = empty_like_library(like, shape, like.dtype, handle)
    return made, addressable(describe(made), "out")


def make_lse(
    is_wanted: bool, like: ArrayInfo, shape: tuple[int, ...], handle: int | None
) -> tuple[Any, ArrayInfo | None]:
    """(the array that the caller gets, the same as an ArrayInfo); nothing where it is not wanted."""
    made = empty_like_library(like, shape, np.float32, handle) if is_wanted else None
    return made, describe(made) if is_wanted else None


def fill_empty(result: ArrayInfo, lse: ArrayInfo | None, sink: ArrayInfo | None, stream: int | None) -> None:
    """Write the results of queries that see no key; on a device on a stream, by its handle."""
    _fill(result, 0.0, stream)
    if lse is not None:
        _fill(lse, -math.inf if sink is None else sink, stream)


def _fill(info: ArrayInfo, value: float | ArrayInfo, stream: int | None) -> None:
    """Write a number, or one for each head, the last dimension but one, to all elements of an array."""
    if info.device is None:
        host_array(info)[...] = host_array(value)[:, None] if isinstance(value, ArrayInfo) else value
        return

    def write(array: Any, of_heads: Any) -> None:
        array[...] = value if of_heads is None else of_heads[:, None]

    owner = value.owner if isinstance(value, ArrayInfo) else None
    if info.kind == "torch":
        with working_on("torch", info.device, stream):
            write(info.owner, owner)
        return

    def of_cupy(cupy: Any) -> None:
        with cupy.cuda.Device(info.device), working_on("cupy", info.device, stream):
            write(cupy.asarray(info.owner), None if owner is None else cupy.asarray(owner))

    with_cupy("cupy.ndarray.fill", of_cupy)
