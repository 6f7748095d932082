"""Copies, reductions, gathers, im2col and broadcasts over host arrays: what their kernels give on the emulator against
NumPy, and no hazard under 20 schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cudatma as c
from cudatma.arrays import describe
from cudatma.kernels.data_movement.copy import plan_copy
from cudatma.kernels.data_movement.movement import Place
from cudatma.kernels.data_movement.specs import PlainSpec, RunSpec, WindowSpec
from cudatma.kernels.registry import REGISTRY
from cudatma.kernels.sample import Sample
from cudatma.target import get_target

Array = np.ndarray[Any, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
BACKENDS = ("emulator", "reference")
#: Operations that `cudatma emulate` knows, and a target.
SAMPLES = [(name, "sm_90a") for name in ("window_copy", "run_copy", "gather_boxes", "im2col", "broadcast")]


def numbers(shape: Sequence[int], dtype: Any, seed: int = 0) -> Array:
    """Small integers, exact in every type."""
    return np.random.default_rng(seed).integers(1, 100, tuple(shape)).astype(dtype)


def window(array: Array, offset: Sequence[int], shape: Sequence[int], fill: float = 0) -> Array:
    """What a copy with padding gives, by a padded array and plain slices."""
    before = [max(0, -start) for start in offset]
    after = [max(0, start + extent - size) for start, extent, size in zip(offset, shape, array.shape, strict=True)]
    padded = np.full([b + n + a for b, n, a in zip(before, array.shape, after, strict=True)], fill, array.dtype)
    padded[tuple(slice(b, b + n) for b, n in zip(before, array.shape, strict=True))] = array
    return padded[tuple(slice(o + b, o + b + n) for o, b, n in zip(offset, before, shape, strict=True))]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("name", "target"), [*SAMPLES, ("window_copy", "sm_120a")])
def test_no_hazard_in_many_schedules(name: str, target: str) -> None:
    make = REGISTRY[name].sample
    assert make is not None
    sample: Sample = make(get_target(target))
    report = sample.run(schedules=8, seed=7)
    assert report.is_clean
    assert sample.error() == 0


# ---- copy

WINDOWS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
    ((1000,), (0,), (1000,)),
    ((65, 80), (0, 0), (65, 80)),
    ((65, 80), (3, 16), (40, 48)),
    ((65, 80), (-3, -16), (70, 112)),
    ((65, 80), (60, 64), (20, 48)),
    ((5, 9, 48), (1, -2, 16), (5, 6, 64)),
    ((3, 4, 5, 32), (-1, 1, 0, 0), (3, 2, 9, 32)),
    ((2, 3, 4, 3, 32), (1, 0, -1, 1, 16), (2, 4, 3, 2, 32)),
]


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, BF16, np.float32, np.int64, np.complex128, np.bool_], ids=str)
@pytest.mark.parametrize(("shape", "offset", "extent"), WINDOWS)
def test_copy(shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...], dtype: Any) -> None:
    source = numbers(shape, dtype)
    kept = source.copy()
    for backend in BACKENDS:
        wide = np.full((extent[0] + 1, *extent[1:]), 7, dtype)
        result = c.copy(source, out=wide[:-1], offset=offset, shape=extent, pad="zeros", backend=backend, via="tma")
        assert result.base is wide
        assert (result == window(source, offset, extent)).all()
        assert (wide[-1] == np.array(7, dtype)).all()
    assert (source == kept).all()


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("via", ["tma", "plain"])
def test_copy_fills_with_nan(dtype: Any, via: str) -> None:
    source = numbers((9, 32), dtype)
    for backend in BACKENDS:
        result = c.copy(source, offset=(-2, -8), shape=(12, 48), pad="nan", backend=backend, via=via)
        assert np.array_equal(result, window(source, (-2, -8), (12, 48), np.nan), equal_nan=True)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_window_of_any_strides_is_right(data: st.DataObject) -> None:
    """TMA where it can, plain code where it cannot: rows off 16 bytes, steps, reversed and transposed arrays."""
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


def test_copy_of_runs_at_odd_addresses() -> None:
    """Head and tail of less than 16 bytes; another place in the chunk is copied by plain code."""
    source, result = numbers((70_001,), np.uint8), np.zeros(70_001, np.uint8)
    for begin, to in ((3, 3), (3, 19), (5, 6)):
        result[:] = 0
        c.copy(source[begin:-20], out=result[to : to + 70_001 - 20 - begin], backend="emulator")
        assert (result[to : to + 70_001 - 20 - begin] == source[begin:-20]).all()
        assert (result[:to] == 0).all()
        assert (result[to + 70_001 - 20 - begin :] == 0).all()


@pytest.mark.parametrize("cache", ["evict_first", "evict_last", "evict_normal"])
def test_copy_with_an_l2_policy(cache: str) -> None:
    for source in (numbers((40, 64), np.float32), numbers((80, 128), np.float32)[:40, :64]):
        assert (c.copy(source, cache=cache, backend="emulator") == source).all()


class Producer:
    """Host memory that only DLPack shows."""

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


def place(target: str = "sm_90a") -> Place:
    return Place(get_target(target), 4)


@pytest.mark.parametrize(
    ("make", "offset", "kind"),
    [
        (lambda: (numbers((64, 64), np.float32), np.zeros((64, 64), np.float32)), (0, 0), RunSpec),
        (lambda: (numbers((64, 80), np.float32)[:, :64], np.zeros((64, 64), np.float32)), (0, 0), WindowSpec),
        (lambda: (numbers((64, 81), np.float32)[:, :64], np.zeros((64, 64), np.float32)), (0, 0), PlainSpec),
        (lambda: (numbers((64, 80), np.float32), np.zeros((64, 63), np.float32)), (0, 0), PlainSpec),
        (lambda: (numbers((64, 80), np.float32), np.zeros((64, 64), np.float32)), (0, 1), PlainSpec),
        (lambda: (numbers((64, 64), np.float32).T, np.zeros((64, 64), np.float32)), (0, 0), PlainSpec),
        (lambda: (numbers((64, 64), np.float32).T, np.zeros((64, 64), np.float32).T), (0, 0), RunSpec),
        (lambda: (numbers((6, 64), np.float32)[:1], np.zeros((9, 64), np.float32)[:1]), (0, 0), RunSpec),
    ],
)
def test_what_carries_a_copy(make: Callable[[], tuple[Array, Array]], offset: tuple[int, int], kind: type) -> None:
    source, result = make()
    assert isinstance(plan_copy(describe(source), describe(result), offset, place()).config, kind)


# ---- reduce_into

REDUCED: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
    ((1024,), (0,), (1024,)),
    ((40, 64), (3, 16), (20, 32)),
    ((40, 64), (-3, 32), (20, 64)),
    ((5, 7, 48), (1, 2, 16), (3, 3, 16)),
]
SUMMED = (np.uint32, np.int32, np.uint64, np.int64, np.float16, BF16, np.float32, np.float64)
ORDERED = (np.uint32, np.int32, np.uint64, np.int64, np.float16, BF16)
BITS = (np.uint8, np.int16, np.uint32, np.int64)
TYPES = {"add": SUMMED, "min": ORDERED, "max": ORDERED, "inc": (np.uint32,), "dec": (np.uint32,)}
TYPES |= {"and": BITS, "or": BITS, "xor": BITS}


def reduced(old: Array, new: Array, op: str) -> Array:
    """One operation on each pair, with Python's numbers."""
    functions: dict[str, Callable[[Any, Any], Any]] = {
        "add": lambda a, b: a + b,
        "min": min,
        "max": max,
        "inc": lambda a, b: 0 if a >= b else a + 1,
        "dec": lambda a, b: b if a == 0 or a > b else a - 1,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }
    whole = [functions[op](int(a), int(b)) for a, b in zip(old.ravel(), new.ravel(), strict=True)]
    return np.array(whole, np.float64 if old.dtype.kind in "fV" else object).astype(old.dtype).reshape(old.shape)


@pytest.mark.sweep(10)
@pytest.mark.parametrize(("op", "dtype"), [(op, dtype) for op, kinds in TYPES.items() for dtype in kinds], ids=str)
def test_reduce_into(op: str, dtype: Any) -> None:
    for shape, offset, extent in REDUCED:
        old, new = numbers(shape, dtype, 1), numbers(extent, dtype, 2)
        low = [max(0, o) for o in offset]
        high = [max(o, min(n, o + e)) for n, o, e in zip(shape, offset, extent, strict=True)]
        inside = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
        part = new[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
        wanted = old.copy()
        wanted[inside] = reduced(old[inside], part, op)
        for backend in BACKENDS:
            result = old.copy()
            assert c.reduce_into(result, new, op, offset=offset, backend=backend) is result
            assert (result == wanted).all()


def test_reduction_of_what_lies_outside_does_nothing() -> None:
    old = numbers((8, 16), np.int32)
    kept = old.copy()
    c.reduce_into(old, numbers((4, 16), np.int32), "add", offset=(8, 0), backend="emulator")
    assert (old == kept).all()


# ---- gather, halo_tiles, prefetch


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64], ids=str)
def test_gather(dtype: Any) -> None:
    source, unit = numbers((30, 64), dtype), 16 // np.dtype(dtype).itemsize
    starts = [(0, 0), (3, unit), (-2, -unit), (29, 64 - unit), (100, 0), (0, 640)]
    box = (4, 2 * unit)
    for backend in BACKENDS:
        for given_as in (starts, np.array(starts, np.int32), np.array(starts)):
            result = c.gather(source, given_as, box, backend=backend)
            assert all((part == window(source, at, box)).all() for part, at in zip(result, starts, strict=True))
    assert c.gather(source, [], box, backend="emulator").shape == (0, *box)


def test_gather_fills_with_nan() -> None:
    source = numbers((30, 64), np.float32)
    for backend in BACKENDS:
        result = c.gather(source, [(-1, 0)], (2, 8), pad="nan", backend=backend)
        assert np.isnan(result[0, 0]).all()
        assert (result[0, 1] == source[0, :8]).all()


@pytest.mark.parametrize(
    ("shape", "tile", "halo", "dtype"),
    [
        ((100,), (32,), (16,), np.uint8),
        ((40, 64), (16, 16), (1, 4), np.float32),
        ((20, 33, 32), (8, 16, 8), (1, 0, 8), np.float16),
        ((3, 4, 3, 16), (2, 2, 2, 8), (1, 1, 1, 4), np.int32),
    ],
)
def test_halo_tiles(shape: tuple[int, ...], tile: tuple[int, ...], halo: tuple[int, ...], dtype: Any) -> None:
    source = numbers([n // 16 * 16 if i == len(shape) - 1 and n > 16 else n for i, n in enumerate(shape)], dtype)
    box = tuple(t + 2 * h for t, h in zip(tile, halo, strict=True))
    for backend in BACKENDS:
        result = c.halo_tiles(source, tile, halo, backend=backend)
        assert result.shape == (*(-(-n // t) for n, t in zip(source.shape, tile, strict=True)), *box)
        for index in np.ndindex(*result.shape[: source.ndim]):
            at = [i * t - h for i, t, h in zip(index, tile, halo, strict=True)]
            assert (result[index] == window(source, at, box)).all()


def test_prefetch_asks_for_what_is_there() -> None:
    source = numbers((64, 80), np.float32)
    for backend in BACKENDS:
        c.prefetch(source, backend=backend)
        c.prefetch(source, offset=(3, 4), shape=(20, 40), backend=backend)
        c.prefetch(source[:0], backend=backend)
        c.prefetch(source.ravel()[1:3], backend=backend)  # less than a chunk


# ---- im2col, broadcast


def convolved(
    images: Array, weight: Array, stride: Sequence[int], padding: Sequence[int], step: Sequence[int]
) -> Array:
    """A convolution, channels last, by its definition."""
    spatial = images.ndim - 2
    padded = np.pad(images, [(0, 0), *((p, p) for p in padding), (0, 0)])
    taps = weight.shape[:spatial]
    out = [(padded.shape[1 + i] - step[i] * (taps[i] - 1) - 1) // stride[i] + 1 for i in range(spatial)]
    result = np.zeros((len(images), *out, weight.shape[-1]))
    for n, *at in np.ndindex(*result.shape[:-1]):
        for tap in np.ndindex(*taps):
            place = tuple(a * s + t * d for a, s, t, d in zip(at, stride, tap, step, strict=True))
            result[n][tuple(at)] += padded[n][place] @ weight[tap]
    return result


@pytest.mark.parametrize(
    ("shape", "taps", "stride", "padding", "dilation"),
    [
        ((3, 19, 8), (3,), (2,), (1,), (1,)),
        ((2, 7, 6, 16), (3, 2), (1, 2), (1, 1), (2, 1)),
        ((1, 4, 5, 4, 8), (2, 3, 1), (1, 1, 2), (1, 0, 0), (1, 1, 1)),
        ((2, 5, 5, 520), (1, 1), (1, 1), (0, 0), (1, 1)),
    ],
)
def test_im2col_makes_a_convolution_a_product(
    shape: tuple[int, ...], taps: Any, stride: Any, padding: Any, dilation: Any
) -> None:
    images, weight = numbers(shape, np.float32), numbers((*taps, shape[-1], 3), np.float64)
    for backend in BACKENDS:
        columns = c.im2col(images, taps, stride=stride, padding=padding, dilation=dilation, backend=backend)
        spatial = len(taps)
        pixels = int(np.prod(columns.shape[: 1 + spatial]))
        product = columns.reshape(pixels, -1).astype(np.float64) @ weight.reshape(-1, 3)
        wanted = convolved(images, weight, stride, padding, dilation)
        assert (product.reshape(wanted.shape) == wanted).all()
    whole = c.im2col(images, 1, backend="emulator")
    assert (whole.reshape(images.shape) == images).all()


@pytest.mark.parametrize("copies", [1, 2, 3, 8, 9])
def test_broadcast(copies: int) -> None:
    source = numbers((12, 1000), np.int16)
    for backend in BACKENDS:
        result = c.broadcast(source, copies, backend=backend)
        assert result.shape == (copies, 12, 1000)
        assert (result == source).all()


# ---- gather4 and scatter4, on the emulator alone


@pytest.mark.parametrize(("shape", "dtype"), [((50, 48), np.float32), ((20, 528), np.float16), ((19, 16), np.uint8)])
def test_rows_by_number(shape: tuple[int, int], dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_TARGET", "sm_100a")
    source = numbers(shape, dtype)
    rows = np.random.default_rng(0).integers(-3, shape[0] + 3, 37)
    target_rows = np.random.default_rng(1).permutation(shape[0] + 4)[: shape[0]] - 2
    for backend in BACKENDS:
        result = c.gather_rows(source, rows, backend=backend)
        for got, row in zip(result, rows, strict=True):
            assert (got == (source[row] if 0 <= row < shape[0] else 0)).all()
        into = np.full(shape, 9, dtype)
        wanted = into.copy()
        for i, row in enumerate(target_rows):
            if 0 <= row < shape[0]:
                wanted[row] = source[i]
        assert c.scatter_rows(into, [int(row) for row in target_rows], source, backend=backend) is into
        assert (into == wanted).all()


def test_targets_without_the_instruction_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    source = numbers((8, 16), np.float32)
    with pytest.raises(c.TargetError, match="gather4"):
        c.gather_rows(source, [1], backend="emulator")
    monkeypatch.setenv("CUDATMA_TARGET", "sm_120a")
    assert (c.gather_rows(source, [1], backend="emulator") == source[1:2]).all()
    with pytest.raises(c.TargetError, match="scatter4"):
        c.scatter_rows(source.copy(), [1], source[:1].copy(), backend="emulator")
    with pytest.raises(c.TargetError, match="broadcast needs it"):
        c.broadcast(source, 2, backend="emulator")
