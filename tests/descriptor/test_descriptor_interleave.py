"""Interleaved boxes, bounding boxes and sizes as an H200 and its driver (580.159) have them."""

from __future__ import annotations

from typing import Any

import pytest

from cudatma.descriptor import Im2colSpec, TiledSpec, check_target
from cudatma.errors import DescriptorError
from cudatma.target import get_target

TILED: dict[str, Any] = {
    "dtype": "float16",
    "dims": (256, 64, 8),
    "strides_bytes": (512, 32768),
    "box": (64, 8, 2),
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
    fields = TILED | {"interleave": "16B", "strides_bytes": (512, 32768)}
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
    with pytest.raises(DescriptorError, match=r"below 2\*\*31") as caught:
        Im2colSpec(**(column | {"upper_corner": (1, 0)}))
    assert caught.value.field == "upper_corner[0]"
    # The driver computes in 32 bits, where 2**32 + 1 is 1.
    Im2colSpec(**(column | {"dims": (64, 1 << 32, 9, 4), "upper_corner": (1, 0)}))
    with pytest.raises(DescriptorError):
        Im2colSpec(**(column | {"dims": (64, 1 << 32, 9, 4), "upper_corner": (0, 0)}))
