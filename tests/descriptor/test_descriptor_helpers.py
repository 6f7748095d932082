"""Tensor maps of the GEMM's arrays, box coordinates, multicast masks, clusters, and alignment of accesses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.arrays import ArrayInfo
from cudatma.descriptor import (
    Im2colSpec,
    Im2colWideSpec,
    TiledSpec,
    box_coordinates,
    check_cluster,
    check_load,
    check_reduce,
    check_store,
    create_activation_tma_desc,
    create_scale_tma_desc,
    create_weight_tile_tma_desc,
    create_weight_tma_desc,
    multicast_mask,
    tile_counts,
)
from cudatma.dtypes import TMA_TYPES
from cudatma.errors import DescriptorError, LaunchError, TargetError
from cudatma.layout import Interleave, Swizzle


def device_array(shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None) -> ArrayInfo:
    """Return an array on device 0 that is never read."""
    dtype = np.dtype(dtype)
    if strides is None:
        strides = tuple(int(np.prod(shape[i + 1 :])) * dtype.itemsize for i in range(len(shape)))
    return ArrayInfo(1 << 34, shape, strides, dtype, 0, None, "cai")


def test_weights() -> None:
    made = create_weight_tma_desc(device_array((96, 2048), "uint8"), 4, encoder="codec", target="sm_90a")
    spec = made.spec
    assert isinstance(spec, TiledSpec)
    assert (spec.dtype.name, spec.dims, spec.strides_bytes, spec.box) == ("uint64", (256, 96), (2048,), (256, 4))
    assert made.expected_bytes == made.footprint_bytes == 4 * 2048
    assert (made.device, made.address) == (0, 1 << 34)


def test_whole_tiles_of_weights() -> None:
    """The weight has 6 rows of 16 blocks, and a load fetches 2 x 4 blocks."""
    made = create_weight_tile_tma_desc(device_array((96, 2048), "uint8"), 16, 4, 2, encoder="codec", target="sm_90a")
    spec = made.spec
    assert isinstance(spec, TiledSpec)
    assert (spec.dtype.name, spec.dims, spec.strides_bytes) == ("uint64", (256, 16, 6), (2048, 16 * 2048))
    assert spec.box == (256, 4, 2)
    assert made.expected_bytes == made.footprint_bytes == 8 * 2048


def test_scales_and_zero_points() -> None:
    for array in (device_array((4096,), "float16"), device_array((1, 4096), "float16")):
        spec = create_scale_tma_desc(array, 128, encoder="codec").spec
        assert (spec.dims, spec.strides_bytes, spec.box) == ((4096,), (), (128,))
    spec = create_scale_tma_desc(device_array((32, 4096), ml_dtypes.bfloat16), 64, 2, encoder="codec").spec
    assert (spec.dtype.name, spec.dims, spec.strides_bytes, spec.box) == ("bfloat16", (4096, 32), (8192,), (64, 2))
    spec = create_scale_tma_desc(device_array((32, 4096), "uint8"), 64, encoder="codec").spec
    assert (spec.dtype.name, spec.strides_bytes, spec.box) == ("uint8", (4096,), (64, 1))


def test_activations() -> None:
    made = create_activation_tma_desc(device_array((333, 4096), "float16"), 16, encoder="codec")
    spec = made.spec
    assert (spec.dims, spec.strides_bytes, spec.box, spec.swizzle) == ((4096, 333), (8192,), (64, 16), Swizzle.B128)
    one = create_activation_tma_desc(device_array((1, 4096), "float16", (3, 2)), 16, encoder="codec").spec
    assert one.strides_bytes == (8192,), "the pitch of a single row means nothing"
    plain = create_activation_tma_desc(device_array((8, 256), "float16"), 8, 128, swizzle="none", encoder="codec").spec
    assert (plain.box, plain.swizzle) == ((128, 8), Swizzle.NONE)


@pytest.mark.parametrize(("m", "strides"), [(333, (8192, 2)), (333, (8208, 2)), (1, (3, 2))])
def test_blocks_of_activations(m: int, strides: tuple[int, int]) -> None:
    """Element k of row r is at (k % 64, r, k // 64), and a load fetches 256 elements of K for 16 rows."""
    x = device_array((m, 4096), "float16", strides)
    made = create_activation_tma_desc(x, 16, blocks=4, encoder="codec", target="sm_90a")
    spec = made.spec
    assert isinstance(spec, TiledSpec)
    assert (spec.dims, spec.box, spec.swizzle) == ((64, m, 64), (64, 16, 4), Swizzle.B128)
    assert spec.strides_bytes[1] == 128
    assert m == 1 or spec.strides_bytes[0] == strides[0]
    assert (made.device, made.address) == (0, 1 << 34)
    one = create_activation_tma_desc(x, 16, encoder="codec")
    assert (made.expected_bytes, spec.l2_promotion) == (4 * one.expected_bytes, one.spec.l2_promotion)


def test_blocks_of_another_k() -> None:
    x = device_array((8, 96), ml_dtypes.bfloat16)
    spec = create_activation_tma_desc(x, 8, 32, blocks=3, swizzle="64B", encoder="codec").spec
    assert (spec.dims, spec.strides_bytes, spec.box) == ((32, 8, 3), (192, 64), (32, 8, 3))
    assert (spec.dtype.name, spec.swizzle) == ("bfloat16", Swizzle.B64)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: create_weight_tma_desc(device_array((4, 2048), "int8"), 1), "qweight.dtype"),
        (lambda: create_weight_tma_desc(device_array((4, 1024), "uint8"), 1), "qweight.shape"),
        (lambda: create_weight_tma_desc(device_array((2048,), "uint8"), 1), "qweight.shape"),
        (lambda: create_weight_tma_desc(device_array((4, 2048), "uint8", (4096, 2)), 1), "qweight.strides_bytes[1]"),
        (lambda: create_weight_tma_desc(device_array((4, 2048), "uint8", (2056, 1)), 1), "strides_bytes[0]"),
        (lambda: create_weight_tma_desc(device_array((4, 2048), "uint8"), 0), "block_k64"),
        (lambda: create_weight_tma_desc(device_array((4, 2048), "uint8"), 257), "block_k64"),
        (lambda: create_weight_tma_desc(device_array((4, 2048), "uint8"), 100, target="sm_120a"), "box"),
        (lambda: create_weight_tile_tma_desc(device_array((4, 2048), "uint8"), 3, 1, 1), "k64"),
        (lambda: create_weight_tile_tma_desc(device_array((4, 2048), "uint8"), 0, 1, 1), "k64"),
        (lambda: create_weight_tile_tma_desc(device_array((4, 1024), "uint8"), 2, 1, 1), "qweight.shape"),
        (lambda: create_scale_tma_desc(device_array((4, 64), "float32"), 64), "scales.dtype"),
        (lambda: create_scale_tma_desc(device_array((4, 4, 64), "float16"), 64), "scales.shape"),
        (lambda: create_scale_tma_desc(device_array((64,), "float16"), 64, 2), "block_groups"),
        (lambda: create_scale_tma_desc(device_array((4, 64), "float16"), 4), "tile_n"),
        (lambda: create_scale_tma_desc(device_array((4, 64), "uint8"), 8), "tile_n"),
        (lambda: create_scale_tma_desc(device_array((4, 60), "float16"), 8), "strides_bytes[0]"),
        (lambda: create_activation_tma_desc(device_array((4, 64), "float32"), 4), "x.dtype"),
        (lambda: create_activation_tma_desc(device_array((4, 4, 64), "float16"), 4), "x.shape"),
        (lambda: create_activation_tma_desc(device_array((4, 60), "float16"), 4), "strides_bytes[0]"),
        (lambda: create_activation_tma_desc(device_array((4, 64), "float16"), 4, 128), "tile_k"),
        (lambda: create_activation_tma_desc(device_array((64, 4), "float16", (2, 128)), 4), "strides_bytes[1]"),
        (lambda: create_activation_tma_desc(device_array((0, 64), "float16"), 4), "shape[0]"),
        (lambda: create_activation_tma_desc(device_array((4, 128), "float16"), 4, blocks=0), "blocks"),
        (lambda: create_activation_tma_desc(device_array((4, 128), "float16"), 4, blocks=-1), "blocks"),
        (lambda: create_activation_tma_desc(device_array((4, 128), "float16"), 4, blocks=1.0), "blocks"),
        (lambda: create_activation_tma_desc(device_array((4, 128), "float16"), 4, blocks=2.0), "blocks"),
        (lambda: create_activation_tma_desc(device_array((4, 128), "float16"), 4, blocks=True), "blocks"),
        (lambda: create_activation_tma_desc(device_array((4, 128), "float16"), 4, blocks=None), "blocks"),
        (lambda: create_activation_tma_desc(device_array((4, 128), "float16"), 4, blocks=257), "blocks"),
        (lambda: create_activation_tma_desc(device_array((4, 96), "float16"), 4, blocks=2), "tile_k"),
        (lambda: create_activation_tma_desc(device_array((4, 128), "float16"), 4, 0, blocks=2), "tile_k"),
        (lambda: create_activation_tma_desc(device_array((4, 128), "float16"), 4, 64.0, blocks=2), "tile_k"),
        (lambda: create_activation_tma_desc(device_array((4, 256), "float16"), 4, 128, blocks=2), "tile_k"),
        (lambda: create_activation_tma_desc(device_array((4, 0), "float16"), 4, blocks=2), "shape[1]"),
        (
            lambda: create_activation_tma_desc(device_array((4, 64), "float16", (130, 2)), 4, blocks=2),
            "strides_bytes[0]",
        ),
        (
            lambda: create_activation_tma_desc(device_array((8, 64), "float16", (2, 16)), 4, blocks=2),
            "strides_bytes[2]",
        ),
    ],
)
def test_helpers_refuse(call: Any, field: str) -> None:
    with pytest.raises(DescriptorError) as caught:
        call()
    assert caught.value.field == field


@given(dims=st.lists(st.integers(1, 5000), min_size=1, max_size=5), data=st.data())
def test_boxes_cover_the_tensor_once(dims: list[int], data: st.DataObject) -> None:
    sizes = [16 * data.draw(st.integers(1, 16)), *(data.draw(st.integers(1, 256)) for _ in dims[1:])]
    spec = TiledSpec(dtype="uint8", dims=dims, strides_bytes=(16,) * (len(dims) - 1), box=sizes)
    for axis, count in enumerate(tile_counts(spec)):
        starts = [box_coordinates(spec, [t if i == axis else 0 for i in range(len(dims))])[axis] for t in range(count)]
        assert starts == list(range(0, dims[axis], sizes[axis]))
        for outside in (-1, count):
            with pytest.raises(DescriptorError) as caught:
                box_coordinates(spec, [outside if i == axis else 0 for i in range(len(dims))])
            assert caught.value.field == f"tile[{axis}]"


def test_box_coordinates_refuse() -> None:
    spec = TiledSpec(dtype="uint8", dims=(64, 4), strides_bytes=(64,), box=(16, 4))
    with pytest.raises(DescriptorError) as caught:
        box_coordinates(spec, (0,))
    assert caught.value.field == "tile"
    column = Im2colSpec(
        dtype="uint8", dims=(64, 4, 4), strides_bytes=(64, 256), lower_corner=(0,), upper_corner=(0,),
        channels_per_pixel=64, pixels_per_column=4,
    )  # fmt: skip
    with pytest.raises(DescriptorError) as caught:
        tile_counts(column)
    assert caught.value.field == "spec"


def test_multicast_masks_by_hand() -> None:
    assert multicast_mask((2,)) == 0b11
    assert multicast_mask((2, 2), axis="x") == 0b0011
    assert multicast_mask((2, 2), axis="x", block=(0, 1)) == 0b1100
    assert multicast_mask((2, 2), axis="y", block=(1, 0)) == 0b1010
    assert multicast_mask((2, 2, 2), axis="z", block=(1, 1, 0)) == 0b1000_1000
    assert multicast_mask((4, 4), ranks=[0, 15]) == 0x8001
    assert multicast_mask((1,), axis="x") == 1


@given(shape=st.sampled_from([(1, 1, 1), (2, 1, 1), (4, 2, 1), (2, 2, 4), (1, 8, 2), (16, 1, 1)]), data=st.data())
def test_masks_of_parallel_lines_tile_the_cluster(shape: tuple[int, int, int], data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from("xyz"))
    number = "xyz".index(axis)
    seen = 0
    for x in range(shape[0]):
        for y in range(shape[1]):
            for z in range(shape[2]):
                mask = multicast_mask(shape, axis=axis, block=(x, y, z))
                assert mask >> (x + shape[0] * (y + shape[1] * z)) & 1, "a block receives its own multicast"
                assert mask.bit_count() == shape[number]
                if (x, y, z)[number] == 0:
                    assert not seen & mask
                    seen |= mask
    assert seen == multicast_mask(shape)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: multicast_mask((4, 5)), "cluster"),
        (lambda: multicast_mask(()), "cluster"),
        (lambda: multicast_mask((0, 1)), "cluster[0]"),
        (lambda: multicast_mask((2, True)), "cluster[1]"),
        (lambda: multicast_mask((2,), axis="w"), "axis"),
        (lambda: multicast_mask((2,), axis="x", block=(2,)), "block[0]"),
        (lambda: multicast_mask((2,), axis="x", block=(0, 0, 0, 0)), "block"),
        (lambda: multicast_mask((2,), ranks=[0, 2]), "ranks[1]"),
        (lambda: multicast_mask((2,), ranks=[]), "ranks"),
        (lambda: multicast_mask((2,), axis="x", ranks=[0]), "ranks"),
        (lambda: check_cluster((8, 9), (2, 2), target="sm_90a"), "grid[1]"),
        (lambda: check_cluster((32,), (16,), target="sm_90a"), "cluster"),
        (lambda: check_cluster((0,), (1,), target="sm_90a"), "grid[0]"),
    ],
)
def test_clusters_refuse(call: Any, field: str) -> None:
    with pytest.raises(LaunchError) as caught:
        call()
    assert caught.value.field == field


def test_clusters() -> None:
    assert check_cluster((8, 6, 3), (2, 3), target="sm_90a") == (2, 3, 1)
    assert check_cluster((7,), (1,), target="sm_120a") == (1, 1, 1)
    with pytest.raises(TargetError):
        check_cluster((8,), (2,), target="sm_120a")


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
