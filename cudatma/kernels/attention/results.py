"""The arrays that a call of attention writes, as it gives them back and as kernels see them."""

from __future__ import annotations

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


def fill(info: ArrayInfo, value: float, stream: int | None) -> None:
    """Fill an array; one on a device on a stream, by its handle."""
    if info.device is None:
        host_array(info)[...] = value
        return
    if info.kind == "torch":
        with working_on("torch", info.device, stream):
            info.owner.fill_(value)  # type: ignore[attr-defined]
        return

    def of_cupy(cupy: Any) -> None:
        with cupy.cuda.Device(info.device), working_on("cupy", info.device, stream):
            cupy.asarray(info.owner).fill(value)

    with_cupy("cupy.ndarray.fill", of_cupy)
