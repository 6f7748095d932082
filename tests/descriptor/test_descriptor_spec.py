"""Each rule of a spec is broken separately, and the error names the field that breaks it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cudatma.descriptor import Im2colSpec, Im2colWideSpec, TensorMap, TiledSpec, check_target
from cudatma.dtypes import TMA_TYPES
from cudatma.errors import DescriptorError, TargetError
from cudatma.layout import Interleave, Swizzle
from cudatma.target import get_target

TILED: dict[str, Any] = {
    "dtype": "float16",
    "dims": (256, 64, 8),
    "strides_bytes": (512, 32768),
    "box": (64, 8, 2),
    "address": 4096,
}
IM2COL: dict[str, Any] = {
    "dtype": "float16",
    "dims": (64, 14, 9, 4),
    "strides_bytes": (128, 1792, 16128),
    "lower_corner": (-1, -1),
    "upper_corner": (-1, -1),
    "channels_per_pixel": 64,
    "pixels_per_column": 64,
}
WIDE: dict[str, Any] = {
    "dtype": "float16",
    "dims": (64, 14, 9, 4),
    "strides_bytes": (128, 1792, 16128),
    "lower_corner_w": -1,
    "upper_corner_w": -1,
    "channels_per_pixel": 64,
    "pixels_per_column": 64,
    "swizzle": "128B",
}
U4_8 = {"dtype": "16u4_align8b", "box": (32, 8, 2)}
U4_16 = {"dtype": "16u4_align16b", "box": (128, 8, 2)}
U6_16 = {"dtype": "16u6_align16b", "box": (128, 8, 2)}


TILED_RULES: list[tuple[dict[str, Any], str]] = [
    ({"dims": (), "strides_bytes": (), "box": ()}, "rank"),
    ({"dims": (8,) * 6, "strides_bytes": (16,) * 5, "box": (8,) * 6}, "rank"),
    ({"dims": (256, 64), "strides_bytes": (512,), "box": (64, 8), "interleave": "16B"}, "rank"),
    ({"strides_bytes": (512,)}, "strides_bytes"),
    ({"box": (64, 8)}, "box"),
    ({"element_strides": (1, 1)}, "element_strides"),
    ({"dims": (0, 64, 8)}, "dims[0]"),
    ({"dims": (256, 64, (1 << 32) + 1)}, "dims[2]"),
    ({"dims": (256, -1, 8)}, "dims[1]"),
    ({"dims": (256, 64.0, 8)}, "dims[1]"),
    ({"dims": (256, True, 8)}, "dims[1]"),
    ({"dims": "256"}, "dims"),
    ({"dims": 256}, "dims"),
    ({"strides_bytes": (520, 32768)}, "strides_bytes[0]"),
    ({"strides_bytes": (512, -32768)}, "strides_bytes[1]"),
    ({"strides_bytes": (512, 1 << 40)}, "strides_bytes[1]"),
    ({"strides_bytes": (528, 32768), "interleave": "32B", "swizzle": "32B"}, "strides_bytes[0]"),
    ({"address": 4104}, "address"),
    ({"address": -16}, "address"),
    ({"address": 1 << 64}, "address"),
    ({"address": 4112, "interleave": "32B", "swizzle": "32B"}, "address"),
    ({"box": (0, 8, 2)}, "box[0]"),
    ({"box": (64, 0, 2)}, "box[1]"),
    ({"box": (64, 8, 257)}, "box[2]"),
    ({"box": (264, 8, 2)}, "box[0]"),
    ({"box": (60, 8, 2)}, "box[0]"),
    ({"box": (72, 8, 2), "swizzle": "128B"}, "box[0]"),
    ({"box": (40, 8, 2), "swizzle": "64B"}, "box[0]"),
    ({"box": (24, 8, 2), "swizzle": "32B"}, "box[0]"),
    ({"element_strides": (1, 0, 1)}, "element_strides[1]"),
    ({"element_strides": (1, 1, 9)}, "element_strides[2]"),
    ({"interleave": "8B"}, "interleave"),
    ({"interleave": "16B", "box": (3, 8, 2)}, "box[0]"),
    ({"interleave": "32B", "swizzle": "32B", "box": (1, 8, 2)}, "box[0]"),
    ({"swizzle": "256B"}, "swizzle"),
    ({"l2_promotion": "512B"}, "l2_promotion"),
    ({"oob_fill": "ones"}, "oob_fill"),
    ({"dtype": "int32", "oob_fill": "nan"}, "oob_fill"),
    ({"dtype": "uint8", "oob_fill": "nan"}, "oob_fill"),
    ({"dtype": "complex128"}, "dtype"),
    (U4_8 | {"oob_fill": "nan"}, "oob_fill"),
    (U4_8 | {"dims": (255, 64, 8)}, "dims[0]"),
    (U4_8 | {"box": (16, 8, 2)}, "box[0]"),
    (U4_16 | {"dims": (192, 64, 8)}, "dims[0]"),
    (U4_16 | {"box": (64, 8, 2)}, "box[0]"),
    (U4_16 | {"address": 4112}, "address"),
    (U4_16 | {"strides_bytes": (528, 32768)}, "strides_bytes[0]"),
    (U4_16 | {"swizzle": "128B_ATOM_64B"}, "swizzle"),
    (U4_16 | {"swizzle": "128B_ATOM_32B_FLIP_8B"}, "swizzle"),
    (U6_16 | {"dims": (192, 64, 8)}, "dims[0]"),
    (U6_16 | {"swizzle": "64B"}, "swizzle"),
    (U6_16 | {"interleave": "16B"}, "interleave"),
]


@pytest.mark.parametrize(("change", "field"), TILED_RULES, ids=lambda value: str(value)[:60])
def test_a_broken_tiled_rule_names_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(DescriptorError) as caught:
        TiledSpec(**(TILED | change))
    assert caught.value.field == field
    assert caught.value.allowed
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dims": (64, 14), "strides_bytes": (128,), "lower_corner": (), "upper_corner": ()}, "rank"),
        ({"lower_corner": (-1,)}, "lower_corner"),
        ({"upper_corner": (-1, -1, -1)}, "upper_corner"),
        ({"lower_corner": (-129, -1)}, "lower_corner[0]"),
        ({"upper_corner": (-1, 128)}, "upper_corner[1]"),
        ({"lower_corner": (-1.5, 0)}, "lower_corner[0]"),
        # W runs from 2 to 13 - 12 = 1: empty. H runs from 0 to 8 - 9 = -1: empty.
        ({"lower_corner": (2, 0), "upper_corner": (-12, 0)}, "upper_corner[0]"),
        ({"lower_corner": (0, 0), "upper_corner": (0, -9)}, "upper_corner[1]"),
        ({"channels_per_pixel": 0}, "channels_per_pixel"),
        ({"channels_per_pixel": 264}, "channels_per_pixel"),
        ({"channels_per_pixel": 60}, "channels_per_pixel"),
        ({"channels_per_pixel": 128, "swizzle": "128B"}, "channels_per_pixel"),
        ({"pixels_per_column": 0}, "pixels_per_column"),
        ({"pixels_per_column": 1025}, "pixels_per_column"),
        ({"pixels_per_column": "64"}, "pixels_per_column"),
        ({"strides_bytes": (120, 1792, 16128)}, "strides_bytes[0]"),
    ],
)
def test_a_broken_im2col_rule_names_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(DescriptorError) as caught:
        Im2colSpec(**(IM2COL | change))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("rank", "corner"), [(3, -32768), (3, 32767), (4, -128), (4, 127), (5, -16), (5, 15)]
)  # fmt: skip
def test_corner_limits_by_rank(rank: int, corner: int) -> None:
    base = IM2COL | {"dims": (64, *(70000,) * (rank - 1)), "strides_bytes": (128,) * (rank - 1)}
    zeros = (0,) * (rank - 2)
    Im2colSpec(**(base | {"lower_corner": (*zeros[1:], corner), "upper_corner": zeros}))
    beyond = corner + (1 if corner > 0 else -1)
    with pytest.raises(DescriptorError) as caught:
        Im2colSpec(**(base | {"lower_corner": (*zeros[1:], beyond), "upper_corner": zeros}))
    assert caught.value.field == f"lower_corner[{rank - 3}]"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"swizzle": "none"}, "swizzle"),
        ({"swizzle": "32B"}, "swizzle"),
        ({"swizzle": "128B_ATOM_32B_FLIP_8B"}, "swizzle"),
        ({"swizzle": "128B", "interleave": "16B"}, "interleave"),
        ({"lower_corner_w": -32769}, "lower_corner_w"),
        ({"lower_corner_w": 14}, "upper_corner_w"),
        ({"mode": "W256"}, "mode"),
        ({"channels_per_pixel": 72}, "channels_per_pixel"),
        ({"pixels_per_column": 2000}, "pixels_per_column"),
    ],
)
def test_a_broken_wide_rule_names_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(DescriptorError) as caught:
        Im2colWideSpec(**(WIDE | change))
    assert caught.value.field == field


def test_sizes_of_boxes() -> None:
    narrow = TiledSpec(**(TILED | {"box": (16, 8, 2), "swizzle": "128B"}))
    assert (narrow.expected_bytes, narrow.footprint_bytes, narrow.smem_alignment_bytes) == (512, 2048, 1024)
    stepped = TiledSpec(**(TILED | {"element_strides": (8, 3, 2)}))
    assert stepped.expected_bytes == 64 * 3 * 1 * 2
    # Packed: 16 values take 8 bytes with ALIGN8B; 16 bytes, gaps included, with ALIGN16B.
    assert TiledSpec(**(TILED | U4_8)).expected_bytes == 16 * 16
    assert TiledSpec(**(TILED | U4_16)).expected_bytes == 128 * 16
    assert TiledSpec(**(TILED | U6_16)).expected_bytes == 128 * 16
    column = Im2colSpec(**(IM2COL | {"channels_per_pixel": 16, "swizzle": "64B", "element_strides": (1, 2, 2, 1)}))
    assert (column.expected_bytes, column.footprint_bytes) == (16 * 64 * 2, 64 * 64)
    assert Im2colWideSpec(**(WIDE | {"mode": "W128"})).expected_bytes == 64 * 128 * 2
    assert Im2colWideSpec(**WIDE).expected_bytes == 64 * 64 * 2


def test_accepted_although_unusual() -> None:
    TiledSpec(**(TILED | {"strides_bytes": (0, 16)}))  # a broadcast, and rows that overlap
    TiledSpec(**(TILED | {"dims": (1 << 32, 1 << 32, 1), "strides_bytes": ((1 << 40) - 16, 0)}))
    TiledSpec(**(TILED | {"box": (256, 256, 256), "element_strides": (8, 8, 8)}))
    TiledSpec(dtype=ml_dtypes.bfloat16, dims=[np.int64(64)], box=np.array([8]), oob_fill="nan")
    TiledSpec(**(TILED | {"box": (256, 8, 2), "interleave": "16B", "swizzle": "32B"}))  # no rule of the span


@pytest.mark.parametrize(
    ("spec", "refused", "accepted"),
    [
        (TiledSpec(**(TILED | U4_8)), "sm_90a", "sm_100a"),
        (TiledSpec(**(TILED | U4_16)), "sm_90", "sm_120a"),
        (TiledSpec(**(TILED | {"swizzle": "128B_ATOM_64B"})), "sm_90a", "sm_121a"),
        (Im2colWideSpec(**WIDE), "sm_90a", "sm_100f"),
    ],
)
def test_features_of_the_target(spec: Any, refused: str, accepted: str) -> None:
    check_target(spec, get_target(accepted))
    with pytest.raises(TargetError):
        check_target(spec, get_target(refused))


def test_a_box_must_fit_shared_memory() -> None:
    spec = TiledSpec(**(TILED | {"box": (64, 128, 8)}))  # 128 KiB
    check_target(spec, get_target("sm_90a"))
    with pytest.raises(DescriptorError, match="101376") as caught:
        check_target(spec, get_target("sm_120a"))
    assert caught.value.field == "box"
    column = Im2colSpec(**(IM2COL | {"pixels_per_column": 1024}))
    with pytest.raises(DescriptorError) as caught:
        check_target(column, get_target("sm_120a"))
    assert caught.value.field == "pixels_per_column"


def test_from_strided_reverses_c_order() -> None:
    spec = TiledSpec.from_strided(
        256, (8, 64, 256), strides_bytes=(32768, 512, 2), dtype="float16", box=(2, 8, 64), element_strides=(3, 2, 1)
    )
    assert spec == TiledSpec(**(TILED | {"address": 256, "element_strides": (1, 2, 3)}))


def test_from_strided_keeps_fortran_order() -> None:
    spec = TiledSpec.from_strided(256, (256, 64, 8), strides_bytes=(2, 512, 32768), dtype="float16", box=(64, 8, 2))
    assert spec == TiledSpec(**(TILED | {"address": 256}))


def test_from_strided_takes_named_axes() -> None:
    spec = TiledSpec.from_strided(
        256, (64, 8, 256), strides_bytes=(512, 32768, 2), dtype="float16", box=(8, 2, 64), axes=(2, 0, 1)
    )
    assert spec == TiledSpec(**(TILED | {"address": 256}))


def test_from_strided_gives_single_rows_a_legal_pitch() -> None:
    # NumPy's stride of an axis of size 1 means nothing and is no multiple of 16 here.
    spec = TiledSpec.from_strided(0, (4, 1, 100), strides_bytes=(208, 7, 2), dtype="float16", box=(1, 1, 8))
    assert spec.strides_bytes == (224, 208)
    assert (
        TiledSpec.from_strided(
            0, (1, 1, 1 << 32), strides_bytes=(6, 4, 8), dtype="uint64", box=(1, 1, 2)
        ).strides_bytes[0]
        % 32
        == 0
    )


@pytest.mark.parametrize(
    ("shape", "strides", "box", "kwargs", "field"),
    [
        ((8, 64), (256, 4), (8, 8), {}, "strides_bytes[1]"),
        ((8, 64), (2, 16), (8, 8), {"axes": (1, 0)}, "strides_bytes[1]"),
        ((8, 64), (128, 2), (8, 8), {"axes": (1, 1)}, "axes"),
        ((8, 64), (128, 2), (8, 8), {"axes": (2, 1)}, "axes"),
        ((8, 64), (128,), (8, 8), {}, "strides_bytes"),
        ((8, 64), (128, 2), (8,), {}, "box"),
        ((8, 64), (128, 2), (8, 8), {"element_strides": (1,)}, "element_strides"),
        ((8, 64), (-128, 2), (8, 8), {}, "strides_bytes[0]"),
        ((), (), (), {}, "rank"),
        ((0, 64), (128, 2), (8, 8), {}, "shape[0]"),
    ],
)
def test_from_strided_refuses(shape: Any, strides: Any, box: Any, kwargs: dict[str, Any], field: str) -> None:
    with pytest.raises(DescriptorError) as caught:
        TiledSpec.from_strided(0, shape, strides_bytes=strides, dtype="float16", box=box, **kwargs)
    assert caught.value.field == field


@pytest.mark.parametrize("name", TMA_TYPES)
def test_all_types_have_a_valid_spec(name: str) -> None:
    dtype = TMA_TYPES[name]
    inner = 128 if dtype.packed else 16
    spec = TiledSpec(dtype=name, dims=(256, 4), strides_bytes=(2048,), box=(inner, 2))
    assert spec.dtype is dtype
    assert spec.swizzle is Swizzle.NONE
    assert spec.interleave is Interleave.NONE


INTERLEAVED: dict[str, Any] = {
    "dtype": "float16",
    "dims": (256, 64, 8),
    "strides_bytes": (512, 32768),
    "box": (64, 8, 2),
}


# What an H200 counted, interleaved: one slice a pixel, whatever the type, and one slice of channels.
@pytest.mark.parametrize(
    ("dtype", "interleave", "swizzle", "box", "steps", "expected", "footprint"),
    [
        ("float16", "16B", "none", (8, 4, 2), (1, 1, 1), 256, 256),
        ("float16", "16B", "none", (8, 3, 5), (1, 1, 1), 640, 640),
        ("float16", "16B", "none", (8, 1, 5), (1, 1, 1), 640, 640),
        ("uint8", "16B", "none", (32, 3, 5), (1, 1, 1), 2560, 2560),
        ("float32", "16B", "none", (4, 3, 5), (1, 1, 1), 320, 320),
        ("float16", "16B", "128B", (64, 3, 5), (1, 1, 1), 5120, 5120),
        ("float16", "32B", "32B", (8, 3, 5), (1, 1, 1), 1280, 1280),
        ("uint8", "32B", "32B", (32, 3, 5), (1, 1, 1), 5120, 5120),
        ("float16", "16B", "none", (16, 3, 5), (2, 1, 1), 640, 640),
        ("float16", "16B", "none", (16, 3, 5), (1, 2, 1), 1280, 1280),
        ("float16", "32B", "32B", (32, 3, 5), (2, 1, 1), 2560, 2560),
        ("float16", "16B", "none", (8, 3, 2, 2), (1, 1, 1, 1), 768, 768),
        ("float16", "16B", "none", (8, 24), (1, 1, 1), 384, 384),
        ("float16", "16B", "none", (16, 24), (1, 1, 1), 384, 384),
        ("float16", "32B", "32B", (16, 24), (1, 1, 1), 768, 768),
        # Rows narrower than the span follow each other without gaps; the last span is given room.
        ("float32", "16B", "128B", (4, 3, 5), (1, 1, 1), 320, 384),
    ],
)
def test_sizes_of_interleaved_boxes(
    dtype: str,
    interleave: str,
    swizzle: str,
    box: tuple[int, ...],
    steps: tuple[int, ...],
    expected: int,
    footprint: int,
) -> None:
    rank = len(steps)
    common: dict[str, Any] = {
        "dtype": dtype,
        "dims": (64, 16, 16, 2)[:rank],
        "strides_bytes": (4096, 65536, 1 << 20)[: rank - 1],
        "element_strides": steps,
        "interleave": interleave,
        "swizzle": swizzle,
    }
    spec: TiledSpec | Im2colSpec
    if len(box) == rank:
        spec = TiledSpec(**common, box=box)
    else:
        spec = Im2colSpec(
            **common, lower_corner=(0,), upper_corner=(0,), channels_per_pixel=box[0], pixels_per_column=box[1]
        )
    assert (spec.expected_bytes, spec.footprint_bytes) == (expected, footprint)
    check_target(spec, get_target("sm_90a"))


def test_more_than_one_slice_of_channels_is_refused() -> None:
    fields = INTERLEAVED | {"interleave": "16B", "strides_bytes": (512, 32768)}
    for dtype, most in (("float16", 8), ("uint8", 16), ("float32", 4)):
        check_target(TiledSpec(**(fields | {"dtype": dtype, "box": (64, most, 2)})), get_target("sm_90a"))
        with pytest.raises(DescriptorError) as caught:
            check_target(TiledSpec(**(fields | {"dtype": dtype, "box": (64, most + 1, 2)})), get_target("sm_90a"))
        assert caught.value.field == "box[1]"


def test_the_drivers_own_limit_of_size() -> None:
    # 228 KiB, and one pixel more; with interleave only 16 of the 512 bytes of each pixel arrive.
    column = IM2COL | {"interleave": "16B", "dtype": "uint16", "channels_per_pixel": 256}
    check_target(Im2colSpec(**(column | {"pixels_per_column": 456})), get_target("sm_90a"))
    spec = Im2colSpec(**(column | {"pixels_per_column": 457}))
    assert spec.footprint_bytes == 457 * 16
    with pytest.raises(DescriptorError, match="233472") as caught:
        check_target(spec, get_target("sm_90a"))
    assert caught.value.field == "pixels_per_column"


def test_corners_belong_to_the_inner_dimensions_with_interleave() -> None:
    column = IM2COL | {"dims": (20, 30, 64, 4), "lower_corner": (0, 0), "interleave": "16B"}
    Im2colSpec(**(column | {"upper_corner": (-19, -29)}))
    for corner, index in (((-20, 0), 0), ((0, -30), 1)):
        with pytest.raises(DescriptorError) as caught:
            Im2colSpec(**(column | {"upper_corner": corner}))
        assert caught.value.field == f"upper_corner[{index}]"


def test_bounding_boxes_are_31_bits_wide() -> None:
    column = IM2COL | {"dims": (64, (1 << 31) - 1, 9, 4), "lower_corner": (0, 0)}
    Im2colSpec(**(column | {"upper_corner": (0, 0)}))
    with pytest.raises(DescriptorError, match=r"less than 2\*\*31") as caught:
        Im2colSpec(**(column | {"upper_corner": (1, 0)}))
    assert caught.value.field == "upper_corner[0]"
    # The driver computes in 32 bits, where 2**32 + 1 is 1.
    Im2colSpec(**(column | {"dims": (64, 1 << 32, 9, 4), "upper_corner": (1, 0)}))
    with pytest.raises(DescriptorError):
        Im2colSpec(**(column | {"dims": (64, 1 << 32, 9, 4), "upper_corner": (0, 0)}))


def test_the_repr_of_a_map_is_in_the_order_of_its_array() -> None:
    array = np.zeros((64, 32), np.float32)
    assert repr(TensorMap.from_array(array, (8, 32), swizzle="128B", encoder="codec")) == (
        "TensorMap(float32, shape=(64, 32), box=(8, 32), swizzle='128B')"
    )
    assert "shape=(32, 64), box=(32, 8)" in repr(TensorMap.from_array(array.T, (32, 8), encoder="codec"))
    assert "shape=(4, 9, 14, 64), swizzle" in repr(TensorMap.im2col(Im2colSpec(**IM2COL), encoder="codec"))
