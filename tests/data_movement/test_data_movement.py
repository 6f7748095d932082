"""The data movement operations on the CPU: results against NumPy, hazards, plans, windows and repeated calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import build_driver, wrong_cases
from hypothesis import given
from hypothesis import strategies as st
from movement_cases import CASES, Case, check, numbers, window

import cudatma as c
from cudatma.arrays import describe
from cudatma.kernels.data_movement import movement
from cudatma.kernels.data_movement.configs import PlainConfig, RunConfig, WindowConfig
from cudatma.kernels.data_movement.copy import plan_copy
from cudatma.kernels.data_movement.movement import LaunchLimits
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
from cudatma.kernels.registry import REGISTRY
from cudatma.target import get_target

Array = np.ndarray[Any, Any]
BACKENDS = ("emulator", "reference")


@pytest.mark.sweep(60)
@pytest.mark.parametrize("case", [case for case in CASES if not case.large], ids=str)
def test_a_call_gives_what_numpy_gives(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if not get_target("sm_90a").has(case.needs):
        monkeypatch.setenv("CUDATMA_TARGET", "sm_100a")
    for backend in BACKENDS:
        check(case, np, backend=backend)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "sm_90a") for name in ("window_copy", "run_copy", "gather_boxes", "im2col", "broadcast")),
        ("window_copy", "sm_120a"),
    ],
)
def test_no_hazard_in_many_schedules(name: str, target: str) -> None:
    make = REGISTRY[name].sample
    assert make is not None
    sample = make(get_target(target))
    assert sample.run(schedules=4, seed=7).is_clean
    assert sample.error() == 0


@given(st.data())
def test_any_window_of_any_strides_is_right(data: st.DataObject) -> None:
    """TMA or plain code copies windows with misaligned rows, steps, and reversed and transposed axes."""
    dtype = data.draw(st.sampled_from([np.uint8, np.float16, np.float32, np.float64]))
    shape = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    base = numbers([2 * n for n in shape], dtype)
    steps = [data.draw(st.sampled_from([1, 1, 1, 2, -1])) for _ in shape]
    source = base[tuple(slice(None, None, step) for step in steps)]
    if data.draw(st.booleans()):
        source = source.T
    offset = [data.draw(st.integers(-5, n)) for n in source.shape]
    extent = [data.draw(st.integers(0, 12)) for _ in source.shape]
    result = c.copy(source, offset=offset, shape=extent, pad="zeros", backend="emulator")
    assert np.array_equal(result, window(source, offset, extent))


class Producer:
    """Host memory that is accessible only through DLPack."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_arrays_of_other_libraries() -> None:
    source, into = numbers((20, 48), np.float32), np.zeros((48, 20), np.float32)
    for backend in BACKENDS:
        result = c.copy(Producer(source), offset=(1, 4), shape=(8, 40), backend=backend)
        assert (result == source[1:9, 4:44]).all()
        target = Producer(into)
        assert c.transpose(Producer(source), out=target, backend=backend) is target
        assert (into == source.T).all()
        starts = Producer(np.array([[2, 8]], np.int32))
        assert (c.gather(Producer(source), starts, (3, 8), backend=backend)[0] == source[2:5, 8:16]).all()
    source.setflags(write=False)
    assert (c.copy(source, backend="emulator") == source).all()


def test_nothing_to_copy() -> None:
    empty = np.zeros((0, 16), np.float32)
    assert c.copy(empty, backend="emulator").shape == (0, 16)
    assert c.copy(np.full((), 3.0), backend="emulator").item() == 3
    assert (c.copy(empty, shape=(2, 16), pad="zeros", backend="emulator") == 0).all()
    for start in (2**63 - 1, -(2**63)):
        far = c.copy(np.ones((2, 16), np.float32), offset=(start, 0), shape=(2, 16), pad="zeros", backend="emulator")
        assert (far == 0).all()
    assert c.transpose(np.zeros((5, 0), np.int8), backend="emulator").shape == (0, 5)
    assert c.gather(np.zeros((5, 16), np.int8), [], (2, 16), backend="emulator").shape == (0, 2, 16)


@pytest.mark.parametrize(
    ("make", "offset", "kind"),
    [
        (lambda: (numbers((64, 64), np.float32), np.zeros((64, 64), np.float32)), (0, 0), RunConfig),
        (lambda: (numbers((64, 80), np.float32)[:, :64], np.zeros((64, 64), np.float32)), (0, 0), WindowConfig),
        (lambda: (numbers((64, 81), np.float32)[:, :64], np.zeros((64, 64), np.float32)), (0, 0), PlainConfig),
        (lambda: (numbers((64, 80), np.float32), np.zeros((64, 63), np.float32)), (0, 0), PlainConfig),
        (lambda: (numbers((64, 80), np.float32), np.zeros((64, 64), np.float32)), (0, 1), PlainConfig),
        (lambda: (numbers((64, 64), np.float32).T, np.zeros((64, 64), np.float32)), (0, 0), PlainConfig),
        (lambda: (numbers((64, 64), np.float32).T, np.zeros((64, 64), np.float32).T), (0, 0), RunConfig),
        (lambda: (numbers((6, 64), np.float32)[:1], np.zeros((9, 64), np.float32)[:1]), (0, 0), RunConfig),
    ],
)
def test_what_carries_a_copy(make: Callable[[], tuple[Array, Array]], offset: Sequence[int], kind: type) -> None:
    source, result = make()
    planned = plan_copy(describe(source), describe(result), tuple(offset), LaunchLimits(get_target("sm_90a"), 4))
    assert isinstance(planned.config, kind)


def test_prefetch_takes_any_part() -> None:
    source = numbers((64, 80), np.float32)
    for backend in BACKENDS:
        c.prefetch(source, backend=backend)
        c.prefetch(source, offset=(3, 4), shape=(20, 40), backend=backend)
        c.prefetch(source[:0], backend=backend)
        c.prefetch(source.ravel()[1:3], backend=backend)  # less than a chunk


def test_targets_without_the_instruction_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    source = numbers((8, 16), np.float32)
    with pytest.raises(c.TargetError, match="gather4"):
        c.gather_rows(source, [1], backend="emulator")
    monkeypatch.setenv("CUDATMA_TARGET", "sm_120a")
    assert (c.gather_rows(source, [1], backend="emulator") == source[1:2]).all()
    with pytest.raises(c.TargetError, match="scatter4"):
        c.scatter_rows(source.copy(), [1], source[:1].copy(), backend="emulator")
    with pytest.raises(c.TargetError, match="choose another target for broadcast"):
        c.broadcast(source, 2, backend="emulator")


@st.composite
def windows(draw: st.DrawFn, itemsize: int | None = None) -> Window:
    """Generate windows of up to four axes of arrays, some of which are permuted or have padded rows."""
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
    """Return the source byte of each destination byte, or None for a filled byte."""
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


@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([128, 132, 260, 300]),
    st.integers(0, 1),
)
def test_a_folded_window_copies_the_same(lead: int, body: int, after: int, width: int, odd: int) -> None:
    """Rows before, in and after a source are merged and divided again. A run or an incomplete row stays as it is."""
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


EMULATED = {"backend": "emulator"}


def test_on_the_fake_driver(tmp_path: Path) -> None:
    build_driver(tmp_path)
    script = Path(__file__).with_name("movement_on_fake_driver.py")
    assert not (wrong := wrong_cases(script, tmp_path)), wrong


def seeded(seed: int, shape: tuple[int, ...] = (20, 48)) -> Array:
    return np.random.default_rng(seed).integers(1, 100, shape).astype(np.float32)


def test_addresses_are_still_looked_at() -> None:
    x, room = seeded(0), np.zeros(21 * 48, np.float32)
    out = room[: 20 * 48].reshape(20, 48)
    c.copy(x, out=out, via="tma", **EMULATED)
    off = room[1 : 1 + 20 * 48].reshape(20, 48)
    with pytest.raises(c.DescriptorError, match="16"):
        c.copy(x, out=off, via="tma", **EMULATED)
    assert (c.copy(x, out=off, **EMULATED) == x).all()
    with pytest.raises(c.ArgumentError, match="with its own memory"):
        c.copy(out, out=room[48:].reshape(20, 48), via="tma", **EMULATED)
    out.setflags(write=False)
    with pytest.raises(c.ArgumentError, match="writable"):
        c.copy(x, out=out, via="tma", **EMULATED)
    with pytest.raises(c.ArgumentError, match="CUDA device"):
        c.copy(x, out=np.zeros_like(x), via="tma", backend="cuda")
    sums = np.zeros((40, 48), np.float32)
    c.reduce_into(sums[:20], x, "add", **EMULATED)
    with pytest.raises(c.ArgumentError, match="overlaps"):
        c.reduce_into(sums[:20], sums[10:30], "add", **EMULATED)


def test_from_one_part_of_an_array_to_another() -> None:
    x = seeded(0)
    wanted = x[:8].copy()
    assert (c.copy(x, out=x[9:17], shape=(8, 48), **EMULATED) == wanted).all()
    with pytest.raises(c.ArgumentError, match="with its own memory"):
        c.copy(x, out=x[7:15], shape=(8, 48), **EMULATED)


def test_values_of_a_table_are_still_looked_at() -> None:
    x = seeded(0)
    c.gather(x, [(0, 4)], (4, 8), **EMULATED)
    with pytest.raises(c.ArgumentError, match="a multiple of 4"):
        c.gather(x, [(0, 5)], (4, 8), **EMULATED)


def test_plans_are_found_by_layouts_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    x, planned = seeded(0), movement._planned
    planned.cache_clear()
    others: list[Callable[[], object]] = [
        lambda: c.copy(x, **EMULATED),
        lambda: c.copy(x.view(np.int32), **EMULATED),
        lambda: c.copy(x.reshape(48, 20), **EMULATED),
        lambda: c.copy(x[:, :44], **EMULATED),
        lambda: c.copy(x, cache="evict_first", **EMULATED),
        lambda: c.copy(x, via="plain", **EMULATED),
        lambda: c.copy(x, out=np.zeros((20, 52), np.float32)[:, :48], **EMULATED),
        lambda: c.copy(x, offset=(1, 4), shape=(12, 12), **EMULATED),
        lambda: c.copy(x, offset=(1, 8), shape=(12, 12), **EMULATED),
        lambda: c.copy(x.reshape(-1)[1:921].reshape(20, 46), **EMULATED),
        lambda: c.prefetch(x, **EMULATED),
    ]
    for _ in range(2):
        for other in others:
            other()
        x = seeded(1)
    assert (planned.cache_info().misses, planned.cache_info().hits) == (len(others), len(others))
    monkeypatch.setenv("CUDATMA_TARGET", "sm_120a")
    assert (c.copy(x, **EMULATED) == x).all()
    assert planned.cache_info().misses == len(others) + 1


def test_options_that_only_look_alike() -> None:
    x = seeded(0)
    first = c.copy(x, offset=(1, 4), shape=(12, 12), **EMULATED)
    for alike in ([1, 4], (True, 4), np.array([1, 4]), (np.int8(1), 4)):
        assert (c.copy(x, offset=alike, shape=(12, 12), **EMULATED) == first).all()  # type: ignore[arg-type]
    with pytest.raises(c.ArgumentTypeError):
        c.copy(x, offset=(1.0, 4), shape=(12, 12), **EMULATED)  # type: ignore[arg-type]
    c.broadcast(x, 1, **EMULATED)
    for wrong in (True, 1.0):
        with pytest.raises(c.ArgumentError, match="copies"):
            c.broadcast(x, wrong, **EMULATED)  # type: ignore[arg-type]
    with pytest.raises(c.ArgumentError, match="via"):
        c.copy(x, via=["tma"], **EMULATED)  # type: ignore[arg-type]
