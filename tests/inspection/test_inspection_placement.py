"""Where elements land, what accesses do and what reads cost, against plain loops over elements and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.descriptor import Im2colSpec, TiledSpec
from cudatma.descriptor.access import check_load, check_store
from cudatma.dtypes import TMA_TYPES
from cudatma.errors import ArgumentError, DescriptorError
from cudatma.inspection.access import access_at
from cudatma.inspection.banks import read_costs
from cudatma.inspection.placement import MAX_SMEM_BYTES, Placement, origin

SPANS = {"none": 0, "32B": 32, "64B": 64, "128B": 128}


def tiled(**change: Any) -> TiledSpec:
    base: dict[str, Any] = {"dtype": "float16", "dims": (100, 64), "strides_bytes": (208,), "box": (64, 8)}
    return TiledSpec(**(base | {"swizzle": "128B", "address": 4096} | change))


COLUMN = Im2colSpec(
    dtype="float16",
    dims=(60, 14, 9, 4),
    strides_bytes=(128, 1792, 16128),
    lower_corner=(-1, 0),
    upper_corner=(0, -2),
    channels_per_pixel=64,
    pixels_per_column=40,
    swizzle="128B",
)


def swizzled(address: int, span: int) -> int:
    """The XOR as the field notes of an H200 have it: 16-byte chunks by the bits of the 128-byte line above them."""
    mask = {0: 0, 32: 0b001, 64: 0b011, 128: 0b111}[span]
    return address ^ ((address >> 7 & mask) << 4)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[TiledSpec, tuple[int, ...]]:
    """Small tiled maps of every rank, type and swizzle, and coordinates in and around the tensor."""
    rank = draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([t for t in TMA_TYPES.values() if not t.packed]))
    swizzle = draw(st.sampled_from(list(SPANS)))
    chunk = 16 // dtype.element_bytes
    chunks = draw(st.integers(1, SPANS[swizzle] // 16 or 9))
    dims = (draw(st.integers(1, 90)), *(draw(st.integers(1, 6)) for _ in range(rank - 1)))
    strides: list[int] = []
    pitch = dims[0] * dtype.element_bytes
    for dim in dims[1:]:
        pitch = -(-pitch // 16) * 16 + 16 * draw(st.integers(0, 2))
        strides.append(pitch)
        pitch *= dim
    spec = TiledSpec(
        dtype=dtype,
        dims=dims,
        strides_bytes=tuple(strides),
        box=(chunk * chunks, *(draw(st.integers(1, 5)) for _ in range(rank - 1))),
        element_strides=tuple(draw(st.integers(1, 3)) for _ in range(rank)),
        swizzle=swizzle,
        address=1 << 20,
    )
    coords = (chunk * draw(st.integers(-3, 9)), *(draw(st.integers(-3, 7)) for _ in range(rank - 1)))
    return spec, coords


def elements_of(spec: TiledSpec, coords: Sequence[int]) -> Iterator[tuple[int, int, list[int], bool, int]]:
    """Row, index, coordinates, whether inside, and byte offset of every element that arrives, one by one."""
    counts = [-(-size // step) for size, step in zip(spec.box, spec.element_strides, strict=True)]
    strides = (spec.dtype.element_bytes, *spec.strides_bytes)
    for row, outer in enumerate(product(*(range(count) for count in reversed(counts[1:])))):
        for index in range(spec.box[0]):
            place = [coords[0] + index]
            steps = zip(coords[1:], spec.element_strides[1:], reversed(outer), strict=True)
            place += [first + step * at for first, step, at in steps]
            inside = all(0 <= p < dim for p, dim in zip(place, spec.dims, strict=True))
            yield row, index, place, inside, sum(p * s for p, s in zip(place, strides, strict=True))


@given(case=boxes(), line=st.integers(0, 20))
def test_every_element_lands_where_a_plain_loop_says(case: tuple[TiledSpec, tuple[int, ...]], line: int) -> None:
    spec, coords = case
    base, size = 128 * line, spec.dtype.element_bytes
    placed = Placement(spec, coords, base=base)
    pitch = max(spec.box[0] * size, spec.swizzle.span_bytes)
    count = 0
    for row, index, place, inside, offset in elements_of(spec, coords):
        found = placed.element(row, index)
        assert found.smem_address == swizzled(base + row * pitch + index * size, spec.swizzle.span_bytes)
        assert found.bank == found.smem_address // 4 % 32
        assert (list(found.coords), found.is_inside, found.gmem_offset) == (place, inside, offset)
        count += 1
    assert count == placed.rows * placed.row_elems == spec.expected_bytes // size


@given(case=boxes())
def test_a_report_counts_what_a_plain_loop_counts(case: tuple[TiledSpec, tuple[int, ...]]) -> None:
    spec, coords = case
    size = spec.dtype.element_bytes
    report = access_at(spec, coords)
    inside = [offset for _, _, _, is_inside, offset in elements_of(spec, coords) if is_inside]
    assert (report.elements, report.inside) == (spec.expected_bytes // size, len(inside))
    assert report.outside == report.elements - len(inside)
    assert report.gmem_range == ((min(inside), max(inside) + size) if inside else None)
    assert (report.fill is None) == (report.outside == 0)
    if min(coords) < 0:
        assert report.store_refusal is not None
        assert "in a store" in report.store_refusal.rule
        assert "destroys the context" in report.store_refusal.effect
        return
    # A store writes every 16-byte chunk that begins inside of the tensor, all of it.
    past: Counter[int] = Counter()
    for row, index, place, is_inside, offset in elements_of(spec, coords):
        in_chunk = (offset - (place[0] - index) * size) % 16 == 0 and index * size % 16 == 0
        if in_chunk and is_inside:
            beyond = (place[0] * size + 16) - spec.dims[0] * size
            past[row] += max(0, beyond)
    past = +past
    assert (report.overwritten_rows, report.overwritten_bytes) == (len(past), past.total())
    assert {part.row: part.size_bytes for part in report.overwrites} == dict(list(past.items())[:16])
    assert report.stored == len(inside)
    clean = True
    try:
        check_store(spec, coords)
    except DescriptorError:
        clean = False
    assert report.is_clean or not clean, "the rules know at least what the report knows"


@pytest.mark.parametrize(
    ("spec", "coords", "field", "effect"),
    [
        (tiled(), (4, 0), "coords[0]", "destroys the context"),
        (tiled(dims=(100, (1 << 31) + 1)), (0, 0), "dims[1]", "destroys the context"),
        (COLUMN, (0, 14, 0, 0), "coords[1]", "destroys the context"),
        (tiled(dtype="16u6_align16b", dims=(128, 8), strides_bytes=(96,), box=(128, 8), swizzle="128B_ATOM_64B"),
         (0, 0), "swizzle", "documentation"),
    ],
)  # fmt: skip
def test_loads_that_do_not_work(spec: Any, coords: tuple[int, ...], field: str, effect: str) -> None:
    report = access_at(spec, coords)
    assert report.load_refusal is not None
    assert (report.load_refusal.field, report.elements) == (field, None)
    assert effect in report.load_refusal.effect
    assert not report.is_clean
    with pytest.raises(DescriptorError) as caught:
        check_load(spec, coords)
    assert caught.value.field == field


def test_stores_that_do_not_work_and_reductions_that_do() -> None:
    padded = access_at(COLUMN, (0, 0, 0, 0))
    assert padded.load_refusal is None
    assert padded.store_refusal is not None
    assert padded.store_refusal.field == "lower_corner[0]"
    one_way = access_at(tiled(swizzle="128B_ATOM_32B_FLIP_8B"), (0, 0)).store_refusal
    assert one_way is not None
    assert "documentation" in one_way.effect
    assert access_at(tiled(), (0, 0)).reductions == ("add", "min", "max")
    assert access_at(tiled(), (64, 0)).reductions == ("add", "min", "max"), "they clip as stores do"
    assert access_at(tiled(dtype="uint8", box=(64, 8)), (0, 0)).reductions == ()
    assert access_at(tiled(oob_fill="nan"), (64, 0)).fill == "NaN, 0x7FF7 in every 16 bits"


@pytest.mark.parametrize("coords", [(0,), (0, 0, 0), (0.5, 0), ("a", 0), (0, 1 << 31), ()])
def test_coordinates_that_are_none(coords: Any) -> None:
    with pytest.raises(DescriptorError):
        access_at(tiled(), coords)


def test_im2col_rows_are_pixels_with_the_filters_offset() -> None:
    placed = Placement(COLUMN, (0, 12, 5, 1), (1, 2))
    # The box runs from -1 to 13 along W and from 0 to 6 along H; at its end the next image follows.
    walk = [(w, h, n) for n in (1, 2) for h in range(7) for w in range(-1, 14)]
    begin = walk.index((12, 5, 1))
    for row in range(COLUMN.pixels_per_column):
        w, h, n = walk[begin + row]
        assert placed.row_coords(row) == (0, w + 1, h + 2, n)
        found = placed.element(row, 9)
        assert found.coords == (9, w + 1, h + 2, n)
        assert found.is_inside == (0 <= w + 1 < 14 and 0 <= h + 2 < 9)
        if found.is_inside:
            assert found.gmem_offset == 9 * 2 + (w + 1) * 128 + (h + 2) * 1792 + n * 16128
        assert found.smem_address == swizzled(row * 128 + 18, 128)
    assert origin(COLUMN) == (0, -1, 0, 0)


def test_interleaved_slices_follow_each_other() -> None:
    spec = TiledSpec(
        dtype="float16", dims=(64, 16, 16), strides_bytes=(4096, 65536), box=(16, 3, 5), element_strides=(2, 1, 1),
        interleave="16B",
    )  # fmt: skip
    placed = Placement(spec, (3, 2, 1))
    assert (placed.rows, placed.chunks, placed.chunk_elems) == (5, 8, 8)
    for row, pixel in product(range(5), range(8)):
        found = placed.element(row, 8 * pixel + 5)
        assert found.coords == (3 + 2 * pixel, 2, 1 + row)
        assert found.gmem_offset == (3 + 2 * pixel) * 16 + 10 + 2 * 4096 + (1 + row) * 65536
        assert found.smem_address == 128 * row + 16 * pixel + 10


@pytest.mark.parametrize(
    ("call", "error", "field"),
    [
        (lambda: Placement(tiled(), base=64), ArgumentError, "base"),
        (lambda: Placement(tiled(), base=-128), ArgumentError, "base"),
        (lambda: Placement(tiled(), base=MAX_SMEM_BYTES // 128 * 128 + 128), ArgumentError, "base"),
        (lambda: Placement(tiled(box=(64, 256, 256), dims=(64, 256, 256), strides_bytes=(128, 32768))), DescriptorError,
         "box"),
        (lambda: Placement(tiled(), (4, 0)), DescriptorError, "coords[0]"),
        (lambda: Placement(tiled()).element(8, 0), ArgumentError, "element"),
        (lambda: Placement(tiled()).element(0, 64), ArgumentError, "element"),
        (lambda: Placement(tiled()).element(-1, 0), ArgumentError, "element"),
    ],
)  # fmt: skip
def test_placements_that_are_none(call: Any, error: type[Exception], field: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert caught.value.field == field  # type: ignore[attr-defined]


# Banks


def wavefronts_of(spec: TiledSpec, accesses: list[tuple[int, int]], size: int) -> int:
    """Most different words in one bank, over groups of lanes that move 128 bytes together."""
    lanes = 128 // max(4, size)
    total = 0
    for start in range(0, len(accesses), lanes):
        banks: dict[int, set[int]] = {}
        for row, byte in accesses[start : start + lanes]:
            pitch = max(spec.box[0] * spec.dtype.element_bytes, spec.swizzle.span_bytes)
            at = swizzled(row * pitch + byte, spec.swizzle.span_bytes)
            for word in range(at // 4, (at + size - 1) // 4 + 1):
                banks.setdefault(word % 32, set()).add(word)
        total += max(len(words) for words in banks.values())
    return total


@pytest.mark.parametrize("swizzle", list(SPANS))
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
def test_what_reads_cost(swizzle: str, dtype: str) -> None:
    size = TMA_TYPES[dtype].element_bytes
    for width in {16, SPANS[swizzle] or 256}:
        spec = tiled(dtype=dtype, dims=(1024, 64), strides_bytes=(8192,), box=(width // size, 64), swizzle=swizzle)
        costs = {cost.pattern: cost for cost in read_costs(spec)}
        columns = range(0, width, 16)
        down = max(wavefronts_of(spec, [(row, c) for row in range(32)], size) for c in columns)
        matrix = max(wavefronts_of(spec, [(row, c) for row in range(8)], 16) for c in columns)
        assert (costs["column"].wavefronts, costs["ldmatrix"].wavefronts) == (down, matrix)
        if width // size > 1:
            lanes = min(32, width // size)
            along = max(wavefronts_of(spec, [(r, lane * size) for lane in range(lanes)], size) for r in range(8))
            assert costs["row"].wavefronts == along
