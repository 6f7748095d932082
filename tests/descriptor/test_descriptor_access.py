"""Rules of one access: coordinates, clipping of stores, reductions, directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.descriptor import Im2colSpec, Im2colWideSpec, TiledSpec, check_load, check_reduce, check_store
from cudatma.dtypes import TMA_TYPES
from cudatma.errors import DescriptorError
from cudatma.layout import Interleave


def tiled(**change: Any) -> TiledSpec:
    base: dict[str, Any] = {"dtype": "float16", "dims": (256, 64), "strides_bytes": (512,), "box": (64, 8)}
    return TiledSpec(**(base | change))


def im2col(rank: int = 4) -> Im2colSpec:
    return Im2colSpec(
        dtype="float16",
        dims=(64, 14, 9, 5, 4)[:rank],
        strides_bytes=(128, 1792, 16128, 80640)[: rank - 1],
        lower_corner=(0,) * (rank - 2),
        upper_corner=(0,) * (rank - 2),
        channels_per_pixel=64,
        pixels_per_column=64,
    )


def refuses(call: Any, field: str) -> None:
    with pytest.raises(DescriptorError) as caught:
        call()
    assert caught.value.field == field


@given(
    name=st.sampled_from([n for n, t in TMA_TYPES.items() if not t.packed]),
    inner=st.integers(-1000, 1000),
    outer=st.integers(-(1 << 31), (1 << 31) - 1),
)
def test_loads_start_on_a_chunk(name: str, inner: int, outer: int) -> None:
    spec = tiled(dtype=name, box=(16, 8))
    if inner * TMA_TYPES[name].element_bytes % 16 == 0:
        check_load(spec, (inner, outer))
    else:
        refuses(lambda: check_load(spec, (inner, outer)), "coords[0]")


def test_loads_refuse() -> None:
    refuses(lambda: check_load(tiled(), (0,)), "coords")
    refuses(lambda: check_load(tiled(), (0, 1 << 31)), "coords[1]")
    refuses(lambda: check_load(tiled(), (0, -(1 << 31) - 1)), "coords[1]")
    refuses(lambda: check_load(tiled(), (0, 1.0)), "coords[1]")
    refuses(lambda: check_load(tiled(), (0, 0), offsets=(0,)), "offsets")
    check_load(tiled(dims=(256, 64, 4), strides_bytes=(512, 32768), box=(8, 1, 1), interleave="16B"), (3, 0, 0))


@pytest.mark.parametrize(("rank", "most"), [(3, 65535), (4, 255), (5, 31)])
def test_im2col_offsets(rank: int, most: int) -> None:
    spec, coords = im2col(rank), (0,) * rank
    check_load(spec, coords, (most,) * (rank - 2))
    refuses(lambda: check_load(spec, (3, *coords[1:])), "coords[0]")  # an H200 traps, in im2col mode too
    for wrong in (-1, most + 1):
        refuses(lambda: check_load(spec, coords, (0,) * (rank - 3) + (wrong,)), f"offsets[{rank - 3}]")  # noqa: B023
    refuses(lambda: check_load(spec, coords, (0,) * (rank - 1)), "offsets")


def test_packed_coordinates() -> None:
    spec = tiled(dtype="16u4_align8b", box=(32, 8))
    check_load(spec, (32, 0))
    refuses(lambda: check_load(spec, (16, 0)), "coords[0]")
    padded = tiled(dtype="16u6_align16b", box=(128, 8))
    check_load(padded, (128, 0))
    refuses(lambda: check_load(padded, (64, 0)), "coords[0]")


def test_stores_refuse_negative_coordinates() -> None:
    check_store(tiled(), (0, 0))
    check_store(tiled(), (248, 1000))
    refuses(lambda: check_store(tiled(), (-8, 0)), "coords[0]")
    refuses(lambda: check_store(tiled(), (0, -1)), "coords[1]")
    refuses(lambda: check_reduce(tiled(), "add", (0, -1)), "coords[1]")
    refuses(lambda: check_store(tiled(), (4, 0)), "coords[0]")


def test_stores_that_end_inside_a_chunk() -> None:
    spec = tiled(dims=(100, 64))  # 200 bytes: the last chunk holds 8 of the row and 8 that are not
    refuses(lambda: check_store(spec), "dims[0]")
    refuses(lambda: check_store(spec, (64, 0)), "dims[0]")
    refuses(lambda: check_reduce(spec, "add", (40, 0)), "dims[0]")
    with pytest.raises(DescriptorError, match="overwrite 8 bytes"):
        check_store(spec, (64, 0))
    check_store(spec, (32, 0))  # ends at 96, before the last element
    check_store(spec, (104, 0))  # begins after it: nothing is written
    check_load(spec, (64, 0))
    check_store(tiled(dims=(104, 64)))
    column = replace(im2col(), dims=(60, 14, 9, 4), channels_per_pixel=56)
    check_store(column, (0, 0, 0, 0))
    refuses(lambda: check_store(column, (8, 0, 0, 0)), "dims[0]")


def test_im2col_begins_inside_of_the_bounding_box() -> None:
    spec = replace(im2col(), lower_corner=(-1, 0), upper_corner=(0, -2))  # w from -1 to 13, h from 0 to 6
    for w, h in ((-1, 0), (13, 6)):
        check_load(spec, (0, w, h, 9))
    for w, h, field in ((-2, 0, "coords[1]"), (14, 0, "coords[1]"), (0, -1, "coords[2]"), (0, 7, "coords[2]")):
        refuses(lambda: check_load(spec, (0, w, h, 0)), field)  # noqa: B023
    sliced = replace(spec, dims=(14, 9, 8, 4), channels_per_pixel=8, interleave=Interleave.B16)
    check_load(sliced, (13, 6, 99, 0))
    refuses(lambda: check_load(sliced, (14, 6, 0, 0)), "coords[0]")


def test_im2col_wide_begins_left_of_the_end_of_the_bounding_box() -> None:
    wide = Im2colWideSpec(
        dtype="bfloat16", dims=(64, 14, 4), strides_bytes=(128, 1792), swizzle="64B", lower_corner_w=-3,
        upper_corner_w=-2, channels_per_pixel=32, pixels_per_column=16,
    )  # fmt: skip
    for w in (-100, -3, 11):
        check_load(wide, (0, w, 0))
    refuses(lambda: check_load(wide, (0, 12, 0)), "coords[1]")
    refuses(lambda: check_load(wide, (0, 0, 0), (0,)), "offsets")


def test_im2col_stores_need_a_bounding_box_inside_of_the_tensor() -> None:
    inside = replace(im2col(), lower_corner=(1, 0), upper_corner=(0, -2))
    check_store(inside, (0, 1, 0, 0))
    refuses(lambda: check_store(replace(inside, lower_corner=(1, -1)), (0, 1, 0, 0)), "lower_corner[1]")
    refuses(lambda: check_reduce(replace(inside, upper_corner=(1, 0)), "add", (0, 1, 0, 0)), "upper_corner[0]")


def test_dimensions_that_no_access_reaches() -> None:
    check_load(tiled(dims=(256, 1 << 31)), (0, 0))
    refuses(lambda: check_load(tiled(dims=(256, (1 << 31) + 1)), (0, 0)), "dims[1]")
    refuses(lambda: check_store(tiled(dims=(256, 1 << 32)), (0, 0)), "dims[1]")


def test_directions() -> None:
    flip = tiled(swizzle="128B_ATOM_32B_FLIP_8B")
    check_load(flip, (0, 0))
    refuses(lambda: check_store(flip, (0, 0)), "swizzle")
    padded = tiled(dtype="16u4_align16b", box=(128, 8))
    check_load(padded, (0, 0))
    refuses(lambda: check_store(padded, (0, 0)), "dtype")
    six = tiled(dtype="16u6_align16b", box=(128, 8), swizzle="128B_ATOM_64B")
    refuses(lambda: check_load(six, (0, 0)), "swizzle")


# PTX ISA, cp.reduce.async.bulk.tensor, as letters in the order of TYPES: y is legal; add on float64 as measured.
TYPES = ["uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "bfloat16"]
LEGAL = {
    "add": "..yyy.yyyy",
    "min": "..yyyyy..y",
    "max": "..yyyyy..y",
    "inc": "..y.......",
    "dec": "..y.......",
    "and": "..yyy.....",
    "or": "..yyy.....",
    "xor": "..yyy.....",
}


@pytest.mark.parametrize("op", LEGAL)
def test_reduction_types(op: str) -> None:
    for name, mark in zip(TYPES, LEGAL[op], strict=True):
        spec = tiled(dtype=name, box=(16, 8))
        if mark == "y":
            check_reduce(spec, op)
        else:
            refuses(lambda: check_reduce(spec, op), "dtype")  # noqa: B023


def test_unknown_reduction() -> None:
    refuses(lambda: check_reduce(tiled(), "mul"), "op")
