"""The inspector on a GPU: maps in its memory, the driver's bytes against the codec's, and what it says of loads and
stores against what a GPU does (descriptor_probe.py copies shared memory out)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from descriptor_probe import run

import cudatma
from cudatma.descriptor import Im2colSpec, TensorMap, TiledSpec
from cudatma.descriptor import driver as map_driver

if not map_driver.has_driver():
    pytest.skip("no CUDA driver or no device on this machine", allow_module_level=True)
cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

#: Fields of TiledSpec without the address, coordinates of a load, and of a store.
BOXES: list[tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = [
    (
        {"dtype": "float16", "dims": (100, 40), "strides_bytes": (208,), "box": (64, 16), "swizzle": "128B"},
        (64, -3),
        (64, 30),
    ),
    (
        {"dtype": "float16", "dims": (100, 40), "strides_bytes": (208,), "box": (16, 16), "swizzle": "128B"},
        (88, 30),
        (88, 30),
    ),
    (
        {"dtype": "uint8", "dims": (41, 9, 7), "strides_bytes": (48, 432), "box": (32, 3, 5), "swizzle": "32B"},
        (16, 7, 3),
        (16, 7, 3),
    ),
    ({"dtype": "float32", "dims": (99,), "box": (64,)}, (-8,), (64,)),
]


def tiled(fields: dict[str, Any], memory: Any) -> TiledSpec:
    return TiledSpec(**fields, address=int(memory.data.ptr))


def test_the_drivers_bytes_are_the_codecs() -> None:
    memory = cp.zeros(1 << 20, cp.uint8)
    configs: list[Any] = [tiled(fields, memory) for fields, _, _ in BOXES]
    configs.append(
        Im2colSpec(
            dtype="float16",
            dims=(64, 14, 9, 4),
            strides_bytes=(128, 1792, 16128),
            lower_corner=(-1, -1),
            upper_corner=(-1, -1),
            channels_per_pixel=64,
            pixels_per_column=24,
            swizzle="128B",
            address=int(memory.data.ptr),
        )
    )
    for spec in configs:
        made = (TensorMap.im2col if isinstance(spec, Im2colSpec) else TensorMap.tiled)(spec, owner=memory)
        assert made.encoder == "driver"
        found = made.compare()
        if made.target is not None and made.target.tensormap_knows_allocation:
            print(f"{made.target.name}: {found}")  # what other GPUs set is worth reading
        else:
            assert found.equal, str(found)


def test_a_map_in_the_memory_of_a_gpu() -> None:
    memory = cp.zeros(1 << 16, cp.uint8)
    made = TensorMap.tiled(tiled(BOXES[0][0], memory), owner=memory)
    raw = np.frombuffer(bytes(made), np.uint8)
    for held in (cp.asarray(raw), cp.asarray(raw.view(np.uint64)), cp.asarray(raw.view(np.uint32)).reshape(4, 8)):
        assert cudatma.inspect(held).data == bytes(made)
        assert cudatma.inspect(int(held.data.ptr), device=held.device.id).data == bytes(made)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:  # written on a stream that nobody has waited for
        held = cp.zeros(128, cp.uint8)
        held += cp.asarray(raw)
        assert cudatma.inspect(held).data == bytes(made)
    assert cudatma.inspect(made).fields == cudatma.inspect(bytes(made)).fields


@pytest.mark.parametrize(("fields", "coords", "_"), BOXES, ids=lambda value: str(value)[:60])
def test_elements_land_where_the_inspector_says(fields: dict[str, Any], coords: tuple[int, ...], _: Any) -> None:
    values = np.random.default_rng(3).integers(0, 256, 1 << 16, np.uint8)
    memory = cp.asarray(values)
    spec = tiled(fields, memory)
    made = TensorMap.tiled(spec, owner=memory)
    report = cudatma.inspect(made).at(coords)
    assert report.load_refusal is None
    seen = run(made, coords, report.expected_bytes, spec.footprint_bytes + 1024)
    assert seen.done, "the barrier counts exactly what the report says"
    placed = cudatma.inspect(made).place(coords, base=seen.base)
    size = spec.dtype.element_bytes
    inside = 0
    for row in range(placed.rows):
        for index in range(placed.row_elems):
            element = placed.element(row, index)
            at = element.smem_address - seen.base
            wanted = values[element.gmem_offset :][:size] if element.is_inside else np.zeros(size, np.uint8)
            np.testing.assert_array_equal(seen.image[at : at + size], wanted, err_msg=str(element))
            inside += element.is_inside
    assert inside == report.inside


@pytest.mark.parametrize(("fields", "_", "coords"), BOXES, ids=lambda value: str(value)[:60])
def test_stores_overwrite_what_the_inspector_says(fields: dict[str, Any], _: Any, coords: tuple[int, ...]) -> None:
    before = np.full(1 << 16, 0x11, np.uint8)
    memory = cp.asarray(before)
    spec = tiled(fields, memory)
    made = TensorMap.tiled(spec, owner=memory)
    report = cudatma.inspect(made).at(coords)
    assert report.store_refusal is None
    stored = np.full(spec.footprint_bytes + 1024, 0x22, np.uint8)
    seen = run(made, coords, report.expected_bytes, stored.size, stored)
    assert seen.done
    placed = cudatma.inspect(made).place(coords)
    expected, size = before.copy(), spec.dtype.element_bytes
    for row in range(placed.rows):
        for index in range(placed.row_elems):
            element = placed.element(row, index)
            if element.is_inside:
                expected[element.gmem_offset : element.gmem_offset + size] = 0x22
    assert len(report.overwrites) == report.overwritten_rows, "few enough to be listed one by one"
    for part in report.overwrites:
        expected[part.first_offset : part.first_offset + part.size_bytes] = 0x22
    np.testing.assert_array_equal(memory.get(), expected)
    assert report.overwritten_bytes == sum(part.size_bytes for part in report.overwrites)
