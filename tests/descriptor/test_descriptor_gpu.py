"""Tensor maps on a GPU: the driver against the codec, and boxes that TMA moves against the computed layout.

The probe (descriptor_probe.py) dumps all of shared memory, so data, swizzle, padding and the bytes after the footprint
are compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from capture_descriptors import capture
from descriptor_interleave import HEADING, measure_all
from descriptor_probe import POISON, run
from descriptor_report import report

from cudatma.descriptor import Im2colSpec, TensorMap, TiledSpec, check_load, check_store, codec
from cudatma.descriptor import driver as map_driver
from cudatma.errors import DescriptorError
from cudatma.layout import swizzle, traversed

if not map_driver.has_driver():
    pytest.skip("no CUDA driver or no device on this machine", allow_module_level=True)
cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu


def reference(spec: TiledSpec, memory: np.ndarray[Any, Any], coords: Sequence[int], base: int, total: int) -> Any:
    """Return shared memory after the load, byte by byte, from strides, fill values, pitch and swizzle."""
    size = spec.dtype.element_bytes
    image = np.full(total, POISON, np.uint8)
    counts = traversed(spec.box, spec.element_strides, spec.interleave)
    steps = (1, *spec.element_strides[1:])
    strides = (size, *spec.strides_bytes)
    pitch = max(counts[0] * size, spec.swizzle.span_bytes)
    for row, outer in enumerate(product(*(range(count) for count in reversed(counts[1:])))):
        for inner in range(counts[0]):
            index = (inner, *reversed(outer))
            place = [c + i * s for c, i, s in zip(coords, index, steps, strict=True)]
            inside = all(0 <= p < dim for p, dim in zip(place, spec.dims, strict=True))
            offset = sum(p * stride for p, stride in zip(place, strides, strict=True))
            for byte in range(size):
                at = swizzle(base + row * pitch + inner * size + byte, spec.swizzle) - base
                image[at] = memory[offset + byte] if inside else 0
    return image


BOXES: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"dtype": "uint8", "dims": (1000,), "box": (256,)}, (800,)),
    ({"dtype": "float32", "dims": (100,), "box": (64,)}, (-8,)),
    ({"dtype": "float16", "dims": (96, 40), "strides_bytes": (208,), "box": (64, 16), "swizzle": "128B"}, (64, 30)),
    ({"dtype": "float16", "dims": (96, 40), "strides_bytes": (208,), "box": (16, 16), "swizzle": "128B"}, (8, -3)),
    ({"dtype": "bfloat16", "dims": (96, 40), "strides_bytes": (192,), "box": (8, 16), "swizzle": "64B"}, (88, 0)),
    ({"dtype": "uint64", "dims": (20, 40), "strides_bytes": (160,), "box": (2, 9), "swizzle": "32B"}, (18, 33)),
    ({"dtype": "int32", "dims": (20, 9, 7), "strides_bytes": (80, 720), "box": (8, 3, 5), "swizzle": "32B"}, (4, 7, 3)),
    (
        {
            "dtype": "uint16",
            "dims": (40, 9, 7),
            "strides_bytes": (80, 720),
            "box": (16, 8, 6),
            "element_strides": (4, 3, 2),
            "swizzle": "64B",
        },
        (24, 1, 2),
    ),
    ({"dtype": "float64", "dims": (6, 5, 4, 3), "strides_bytes": (48, 240, 960), "box": (4, 3, 2, 3)}, (2, 3, -1, 0)),
    (
        {
            "dtype": "uint8",
            "dims": (64, 3, 4, 3, 2),
            "strides_bytes": (64, 192, 768, 2304),
            "box": (32, 2, 3, 2, 2),
            "swizzle": "128B",
        },
        (16, 2, 2, 1, 1),
    ),
    ({"dtype": "uint8", "dims": (64, 8), "strides_bytes": (0,), "box": (64, 8)}, (0, 0)),
]


@pytest.mark.parametrize(("fields", "coords"), BOXES, ids=lambda value: str(value)[:70])
def test_a_box_arrives_as_computed(fields: dict[str, Any], coords: tuple[int, ...]) -> None:
    memory = np.random.default_rng(1).integers(0, 255, 1 << 16, np.uint8)
    source = cp.asarray(memory)
    spec = TiledSpec(**fields, address=int(source.data.ptr))
    check_load(spec, coords)
    made = TensorMap.tiled(spec, owner=source)
    total = spec.footprint_bytes + 2048
    seen = run(made, coords, made.expected_bytes, total)
    assert seen.done, "the barrier must complete with exactly expected_bytes"
    assert seen.base % 1024 == 0
    expected = reference(spec, memory, coords, seen.base, total)
    # Padding of narrow rows may be written with anything; what lies after the footprint may not.
    pitch, row = spec.box_layout.pitch_bytes, spec.box_layout.row_bytes
    compared = np.ones(total, bool)
    if pitch > row:
        for start in range(0, spec.footprint_bytes, pitch):
            for byte in range(row, pitch):
                compared[swizzle(seen.base + start + byte, spec.swizzle) - seen.base] = False
    np.testing.assert_array_equal(seen.image[compared], expected[compared])
    assert not run(made, coords, made.expected_bytes + 16, total).done, "not a byte more may be delivered"


def test_interleaved_boxes_count_and_take_what_is_computed() -> None:
    """The test compares the driver's verdict, the counted bytes and the shared memory of every box in the table."""
    measured = measure_all()
    table = "\n".join([HEADING, *(row.text for row in measured)])
    print(table)
    wrong = [row.text for row in measured if not row.as_computed]
    assert not wrong, f"{len(wrong)} of {len(measured)} rows (marked !) are not as computed\n{table}"


@pytest.mark.parametrize("mode", ["none", "64B", "128B"])
@pytest.mark.parametrize("steps", [(1, 1, 1, 1), (1, 2, 2, 1)])
def test_im2col_counts_channels_times_pixels(mode: str, steps: tuple[int, ...]) -> None:
    source = cp.full(1 << 20, 7, cp.uint8)
    spec = Im2colSpec(
        dtype="float16",
        dims=(64, 14, 9, 4),
        strides_bytes=(128, 1792, 16128),
        element_strides=steps,
        lower_corner=(-1, -1),
        upper_corner=(-1, -1),
        channels_per_pixel=16,
        pixels_per_column=24,
        swizzle=mode,
        address=int(source.data.ptr),
    )
    made = TensorMap.im2col(spec, owner=source)
    total = made.footprint_bytes + 2048
    seen = run(made, (0, -1, -1, 0), made.expected_bytes, total)
    assert seen.done
    assert (seen.image[made.footprint_bytes :] == POISON).all()
    assert not run(made, (0, -1, -1, 0), made.expected_bytes + 16, total).done


def test_stores_clip_at_16_bytes() -> None:
    target = cp.zeros((4, 128), cp.float16)
    spec = TiledSpec(
        dtype="float16", dims=(100, 4), strides_bytes=(256,), box=(64, 4), address=int(target.data.ptr)
    )  # fmt: skip
    with pytest.raises(DescriptorError) as caught:
        check_store(spec, (64, 0))
    assert caught.value.field == "dims[0]"
    ones = np.ones((4, 64), np.float16)
    run(TensorMap.tiled(spec, owner=target), (64, 0), 0, 512, ones.view(np.uint8).reshape(-1))
    written = target.get() != 0
    assert written[:, 64:100].all()
    assert written[:, 100:104].all(), "the chunk that holds the last element is written whole"
    assert not written[:, 104:].any()


def test_replace_address() -> None:
    first, second = cp.full((64, 64), 1, cp.uint8), cp.full((64, 64), 2, cp.uint8)
    made = TensorMap.from_array(first, (16, 64))
    assert made.encoder == "driver"
    assert (made.device, made.owner) == (first.device.id, first)
    before = bytes(made)
    made.replace_address(second)
    assert (made.address, made.owner) == (int(second.data.ptr), second)
    assert bytes(made)[8:] == before[8:]
    assert bytes(made)[:8] == int(second.data.ptr).to_bytes(8, "little")
    assert (run(made, (0, 0), made.expected_bytes, 1024).image == 2).all()
    made.replace_address(int(first.data.ptr))
    assert bytes(made) == before


def test_the_codec_makes_maps_that_work() -> None:
    """The codec's bytes equal the driver's. A map without the derived fields, as tensormap.replace creates it, also
    works."""
    source = cp.arange(64 * 64, dtype=cp.uint16).reshape(64, 64)
    driver, ours, bare = (
        TensorMap.from_array(source, (16, 32), swizzle="64B", encoder=backend)
        for backend in ("driver", "codec", "codec")
    )
    assert bytes(driver) == bytes(ours)
    bare.data[64:74] = [0] * 10
    fields = codec.read_fields(bytes(bare))[1]
    assert not any(fields[name] for name in codec.DERIVED)
    images = [run(made, (32, 16), made.expected_bytes, 2048) for made in (driver, ours, bare)]
    assert all(seen.done for seen in images)
    for seen in images[1:]:
        np.testing.assert_array_equal(images[0].image, seen.image)


def test_random_specs_against_the_driver() -> None:
    """The test compares all 128 bytes in both directions, and every verdict."""
    answers = capture(count=20000, invalid=0.25, seed=11)
    assert len(answers) == 20000
    assert sum(answer.is_compared for answer in answers) > 10000
    assert all(answer.agrees for answer in answers), report(answers)


def test_a_misaligned_inner_coordinate_traps() -> None:
    """The test runs in its own process, because the trap destroys the context."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, __file__, "trap"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert "ILLEGAL_INSTRUCTION" in result.stderr, result.stderr
    with pytest.raises(DescriptorError):
        check_load(TiledSpec(dtype="float16", dims=(64, 64), strides_bytes=(128,), box=(16, 16)), (4, 0))


def trap() -> None:
    made = TensorMap.from_array(cp.zeros((64, 64), cp.float16), (16, 16))
    run(made, (4, 0), made.expected_bytes, 1024)


if __name__ == "__main__" and sys.argv[1:] == ["trap"]:
    trap()
