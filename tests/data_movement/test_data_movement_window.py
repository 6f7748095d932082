"""Windows of strided arrays, pure: simplified, cropped and carried ones copy the same; boxes cover them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatma.kernels.data_movement.window import (
    Axis,
    Window,
    carried,
    choose_box,
    cropped,
    folded,
    simplify,
    tile_counts,
)

Array = np.ndarray[Any, Any]


@st.composite
def windows(draw: st.DrawFn, itemsize: int | None = None) -> Window:
    """Windows of up to four axes of arrays that are permuted, padded at the rows' ends, or neither."""
    rank = draw(st.integers(1, 4))
    item = itemsize or draw(st.sampled_from([1, 2, 4, 8]))
    sizes = [draw(st.integers(1, 5)) for _ in range(rank)]
    extents = [draw(st.integers(1, 6)) for _ in range(rank)]
    starts = [draw(st.integers(-3, 5)) for _ in range(rank)]
    inside = draw(st.booleans())
    if inside:
        starts = [draw(st.integers(0, size - 1)) for size in sizes]
        extents = [draw(st.integers(1, size - start)) for size, start in zip(sizes, starts, strict=True)]
    if draw(st.booleans()):  # whole arrays, so that axes merge
        starts, extents = [0] * rank, list(sizes)
    orders = [draw(st.permutations(range(rank))) if draw(st.booleans()) else list(range(rank)) for _ in range(2)]
    strides = []
    for order, shape in zip(orders, (sizes, extents), strict=True):
        step, found = item, [0] * rank
        for axis in reversed(order):
            found[axis] = step
            step *= shape[axis] + draw(st.integers(0, 1)) * draw(st.integers(0, 1))
        strides.append(found)
    axes = tuple(Axis(*axis) for axis in zip(starts, extents, sizes, *strides, strict=True))
    return Window(100_000, 0, item, axes)


def copies(window: Window) -> dict[int, int | None]:
    """Destination byte -> source byte, None for a fill."""
    found: dict[int, int | None] = {}
    for index in np.ndindex(*(axis.extent for axis in window.axes)):
        at = [axis.start + i for axis, i in zip(window.axes, index, strict=True)]
        inside = all(0 <= a < axis.size for a, axis in zip(at, window.axes, strict=True))
        source = window.source + sum(a * axis.source_stride for a, axis in zip(at, window.axes, strict=True))
        to = window.destination + sum(i * axis.destination_stride for i, axis in zip(index, window.axes, strict=True))
        for byte in range(window.itemsize):
            found[to + byte] = source + byte if inside else None
    return found


@given(windows())
def test_a_simplified_window_copies_the_same(window: Window) -> None:
    simple = simplify(window)
    assert copies(simple) == copies(window)
    assert 1 <= len(simple.axes) <= len(window.axes)
    assert simple.nbytes == window.nbytes
    assert simple.is_inside == window.is_inside
    if simple.is_one_run:
        assert list(copies(window).values()) == [simple.first_byte + to - simple.destination for to in copies(window)]


@given(windows())
def test_a_cropped_and_a_carried_window_copy_the_same(window: Window) -> None:
    simple = simplify(window)
    if not simple.has_body:
        assert set(copies(window).values()) == {None}
        return
    part = cropped(simple)
    assert copies(part) == copies(window)
    assert all(axis.start <= 0 for axis in part.axes)
    assert part.source == simple.first_byte
    if part.is_dense:
        wide = carried(part, 8)
        assert copies(wide) == copies(window)
        assert wide.itemsize >= part.itemsize


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([128, 132, 260, 300, 512]),
    st.integers(0, 1),
)
def test_a_folded_window_copies_the_same(lead: int, body: int, after: int, width: int, odd: int) -> None:
    """Rows in front of, in and behind a source, joined and taken apart again; a run, or a broken row, stays."""
    extent = (lead + body + after) * width + odd
    window = Window(1 << 20, 0, 4, (Axis(-lead * width, extent, body * width, 4, 4),))
    rows = folded(window)
    assert copies(rows) == copies(window)
    assert (len(rows.axes) == 2) == (not odd and lead + after > 0)


def test_axes_that_follow_each_other_merge() -> None:
    whole = Window(0, 0, 4, (Axis(0, 3, 3, 80, 80), Axis(0, 5, 5, 16, 16), Axis(0, 4, 4, 4, 4)))
    assert simplify(whole).axes == (Axis(0, 60, 60, 4, 4),)
    assert simplify(whole).is_one_run
    rows = Window(0, 0, 4, (Axis(-1, 3, 3, 80, 80), Axis(0, 5, 5, 16, 16), Axis(0, 4, 4, 4, 4)))
    assert simplify(rows).axes == (Axis(-20, 60, 60, 4, 4),)
    assert not simplify(rows).is_inside
    apart = Window(0, 0, 4, (Axis(0, 3, 3, 96, 80), Axis(0, 5, 5, 16, 16), Axis(0, 4, 4, 4, 4)))
    assert len(simplify(apart).axes) == 2


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([512, 4096, 16384]),
)
def test_a_box_is_one_that_tma_takes_and_covers_the_tensor(extents: list[int], itemsize: int, slot: int) -> None:
    box = choose_box(tuple(extents), itemsize, slot)
    assert all(1 <= size <= 256 for size in box)
    assert box[-1] * itemsize % 16 == 0
    assert prod(box) * itemsize <= slot
    for extent, size, count in zip(extents, box, tile_counts(tuple(extents), box), strict=True):
        assert (count - 1) * size < extent <= count * size


@pytest.mark.parametrize(
    ("extents", "itemsize", "box"),
    [((12000, 12000), 4, (16, 256)), ((300, 260), 4, (30, 132)), ((64, 64), 2, (64, 64)), ((5,), 4, (8,))],
)
def test_boxes_are_even(extents: tuple[int, ...], itemsize: int, box: tuple[int, ...]) -> None:
    assert choose_box(extents, itemsize, 16384) == box
