"""Calls of the data movement operations, and the expected results from NumPy.

The same table runs on the reference, on the emulator (test_data_movement.py) and on a GPU (test_data_movement_gpu.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import cudatma as c

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
BF16 = np.dtype(ml_dtypes.bfloat16)
GUARD = 0xA5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call.

    shapes, dtype : the inputs, which hold small integers.
    call : gets the inputs and options. With ``writes_first`` it changes the first input, otherwise it takes ``out=``.
    expected : gets the inputs as NumPy arrays and returns the result.
    shift_bytes : distance of the result from an address that is a multiple of 16.
    needs : a feature that not every target has.
    large : rings wrap around many times; too slow for the emulator.
    """

    name: str
    shapes: tuple[Shape, ...]
    dtype: Any
    call: Callable[..., Any]
    expected: Callable[..., Array]
    writes_first: bool = False
    shift_bytes: int = 0
    needs: str = "tma"
    large: bool = False

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, shape)) for shape in self.shapes)
        return f"{self.name} {np.dtype(self.dtype).name} {shapes}"


def numbers(shape: Sequence[int], dtype: Any, seed: int = 0) -> Array:
    """Return small integers, which every type represents exactly."""
    return np.random.default_rng(seed).integers(1, 100, tuple(shape)).astype(dtype)


def on_host(array: Any) -> Array:
    return np.asarray(array.get() if hasattr(array, "get") else array)


def check(case: Case, library: Any, **options: Any) -> None:
    """Make the call twice with different values on NumPy or CuPy arrays, with guard bytes around the result."""
    for seed in (0, 10):
        inputs = [numbers(shape, case.dtype, seed + i) for i, shape in enumerate(case.shapes)]
        expected = case.expected(*inputs)
        arrays = [library.asarray(one) for one in inputs]
        whole = library.full(expected.nbytes + 512, GUARD, np.uint8)
        begin, end = 256 + case.shift_bytes, 256 + case.shift_bytes + expected.nbytes
        out = whole[begin:end].view(expected.dtype).reshape(expected.shape)
        if case.writes_first:
            out[...] = arrays[0]
            result = case.call(out, *arrays[1:], **options)
        else:
            result = case.call(*arrays, out=out, **options)
        assert result is out
        assert np.array_equal(on_host(out), expected, equal_nan=expected.dtype.kind in "fV")
        around = on_host(whole)
        assert (around[:begin] == GUARD).all()
        assert (around[end:] == GUARD).all()
        assert all((on_host(array) == one).all() for array, one in zip(arrays, inputs, strict=True))


def window(array: Array, offset: Sequence[int], shape: Sequence[int], fill: float = 0) -> Array:
    """Return a window of an array, with ``fill`` for elements outside the array."""
    before = [max(0, -start) for start in offset]
    after = [max(0, start + extent - size) for start, extent, size in zip(offset, shape, array.shape, strict=True)]
    padded = np.full([b + n + a for b, n, a in zip(before, array.shape, after, strict=True)], fill, array.dtype)
    padded[tuple(slice(b, b + n) for b, n in zip(before, array.shape, strict=True))] = array
    return padded[tuple(slice(o + b, o + b + n) for o, b, n in zip(offset, before, shape, strict=True))]


# ---- copy


def copy_case(shape: Shape, offset: Shape, extent: Shape, dtype: Any, *, fill: float = 0, **options: Any) -> Case:
    pad = "nan" if np.isnan(fill) else "zeros"
    more = {name: options.pop(name) for name in ("large",) if name in options}
    return Case(
        name=f"copy {offset} {extent} {pad} {options}",
        shapes=(shape,),
        dtype=dtype,
        call=partial(c.copy, offset=offset, shape=extent, pad=pad, **options),
        expected=partial(window, offset=offset, shape=extent, fill=fill),
        **more,
    )


#: (shape, offset, extent of the window).
WINDOWS: list[tuple[Shape, Shape, Shape]] = [
    ((1000,), (0,), (1000,)),
    ((65, 80), (0, 0), (65, 80)),
    ((65, 80), (3, 16), (40, 48)),
    ((65, 80), (-3, -16), (70, 112)),
    ((65, 80), (60, 64), (20, 48)),
    ((5, 9, 48), (1, -2, 16), (5, 6, 64)),
    ((3, 4, 5, 32), (-1, 1, 0, 0), (3, 2, 9, 32)),
    ((2, 3, 4, 3, 32), (1, 0, -1, 1, 16), (2, 4, 3, 2, 32)),
]
LARGE_WINDOWS: list[tuple[Shape, Shape, Shape]] = [
    ((5_000_016,), (0,), (5_000_016,)),
    ((1500, 2048), (7, 32), (1400, 1904)),
    ((1500, 2048), (-5, -32), (1600, 2144)),
    ((9, 130, 528), (1, -2, 16), (9, 131, 544)),
    ((5, 6, 70, 112), (-1, 1, 0, 16), (7, 4, 71, 96)),
    ((3, 4, 5, 30, 112), (1, 0, -1, 1, 16), (3, 4, 7, 29, 80)),
]
#: A type of each width, and those that need more than their width.
COPIED = (np.uint8, np.float16, BF16, np.float32, np.int64, np.complex128, np.bool_)
COPIES = [
    *(copy_case(*WINDOWS[3], dtype, via="tma") for dtype in COPIED),
    *(copy_case(*place, dtype, via="tma") for place in WINDOWS for dtype in (np.uint8, np.float32)),
    *(copy_case(*place, np.float32, via="plain") for place in WINDOWS[2:4]),
    *(
        copy_case((9, 32), (-2, -8), (12, 48), dtype, fill=np.nan, via=via)
        for dtype in (np.float16, BF16, np.float32, np.float64)
        for via in ("tma", "plain")
    ),
    *(copy_case((40, 64), (0, 0), (40, extent), np.float32, cache=f"evict_{kind}")
      for kind in ("first", "last", "normal") for extent in (48, 64)),
    *(copy_case(*place, dtype, via=via, large=True)
      for place in LARGE_WINDOWS for dtype in (np.uint8, BF16, np.complex128) for via in ("tma", "plain")),
]  # fmt: skip


def run_case(begin: int, end: int, shift_bytes: int, size: int) -> Case:
    """Return a copy of bytes from an odd address: head and tail have less than 16 bytes, or plain code copies all."""
    return Case(
        name=f"run {begin}:{end} to {shift_bytes}",
        shapes=((size,),),
        dtype=np.uint8,
        call=lambda x, **o: c.copy(x[begin:end], **o),
        expected=lambda x: x[begin:end],
        shift_bytes=shift_bytes,
        large=size > 100_000,
    )


RUNS = [
    run_case(begin, end, shift, size)
    for begin, end, shift in ((3, -20, 3), (3, -20, 19), (0, -1, 16), (1, 7, 1), (5, -5, 6))
    for size in (70_001, 1_000_003)
]

VIEWS: dict[str, Callable[[Any], Any]] = {
    "every other": lambda x: x[::2, ::3],
    "reversed": lambda x: x[::-1, 1:],
    "columns first": lambda x: x.T,
}


def view_case(name: str, view: Callable[[Any], Any]) -> Case:
    return Case(
        name=f"copy {name}",
        shapes=((50, 70),),
        dtype=np.float32,
        call=lambda x, **o: c.copy(view(x), **o),
        expected=lambda x: np.ascontiguousarray(view(x)),
    )


# ---- transpose


def turned(name: str, shape: Shape, dtype: Any, view: Callable[[Any], Any], **options: Any) -> Case:
    return Case(
        name=f"transpose {name} {options}",
        shapes=(shape,),
        dtype=dtype,
        call=lambda x, **o: c.transpose(view(x), **options, **o),
        expected=lambda x: np.ascontiguousarray(np.swapaxes(view(x), -1, -2)),
        large=int(np.prod(shape)) > 100_000,
    )


TRANSPOSED: list[tuple[Shape, Any]] = [
    ((128, 128), np.uint8),
    ((272, 144), np.int8),
    ((200, 88), np.float16),
    ((3, 136, 64), BF16),
    ((100, 140), np.float32),
    ((64, 64), np.int32),
    ((70, 34), np.float64),
    ((2, 2, 20, 36), np.complex64),
    ((2, 16, 16), np.uint8),
]
#: What TMA cannot read or write as tiles.
UNALIGNED: dict[str, tuple[Shape, Any, Callable[[Any], Any]]] = {
    "odd sizes": ((33, 35), np.float32, lambda x: x),
    "columns first": ((32, 36), np.float32, lambda x: x.T),
    "16-byte elements": ((16, 16), np.complex128, lambda x: x),
    "an odd address": ((64, 80), np.float32, lambda x: x[:, 1:65]),
    "matrices apart": ((4, 6, 16, 16), np.float32, lambda x: x[:, :5]),
    "reversed": ((16, 16), np.float32, lambda x: x[::-1]),
}
TRANSPOSES = [
    *(turned("", shape, dtype, lambda x: x, via="tma") for shape, dtype in TRANSPOSED),
    *(
        turned("", shape, dtype, lambda x: x, via="tma")
        for shape in ((1040, 784), (2048, 4096), (7, 336, 208))
        for dtype in (np.uint8, BF16, np.float32, np.float64)
    ),
    *(turned(name, *case, via=via) for name, case in UNALIGNED.items() for via in ("auto", "plain")),
]

# ---- reduce_into

SUMMED = (np.uint32, np.int32, np.uint64, np.int64, np.float16, BF16, np.float32, np.float64)
BITS = (np.uint8, np.int16, np.uint32, np.int64)
REDUCED: dict[str, tuple[Any, ...]] = {"add": SUMMED, "min": SUMMED[:6], "max": SUMMED[:6]}
REDUCED |= {"inc": (np.uint32,), "dec": (np.uint32,), "and": BITS, "or": BITS, "xor": BITS}
REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}
REDUCTIONS |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def reduced(old: Array, new: Array, op: str, offset: Shape) -> Array:
    """Return ``old`` after the operation with the overlapping elements of ``new``."""
    low = [max(0, o) for o in offset]
    high = [max(a, min(n, o + e)) for a, n, o, e in zip(low, old.shape, offset, new.shape, strict=True)]
    inside = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    a, b = old[inside], new[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
    result = old.copy()
    if op == "inc":
        result[inside] = np.where(a >= b, 0, a + 1)
    elif op == "dec":
        result[inside] = np.where((a == 0) | (a > b), b, a - 1)
    else:
        result[inside] = REDUCTIONS[op](a, b)
    return result


def reduce_case(op: str, dtype: Any, shape: Shape, offset: Shape, extent: Shape, *, large: bool = False) -> Case:
    return Case(
        name=f"reduce {op} {offset}",
        shapes=(shape, extent),
        dtype=dtype,
        call=lambda old, new, **o: c.reduce_into(old, new, op, offset=offset, **o),
        expected=lambda old, new: reduced(old, new, op, offset),
        writes_first=True,
        large=large,
    )


REDUCES = [
    *(reduce_case(op, dtype, (40, 64), (-3, 32), (20, 64)) for op, kinds in REDUCED.items() for dtype in kinds),
    reduce_case("add", np.float32, (1024,), (0,), (1024,)),
    reduce_case("max", np.float16, (40, 64), (3, 16), (20, 32)),
    reduce_case("xor", np.uint8, (5, 7, 48), (1, 2, 16), (3, 3, 16)),
    reduce_case("add", np.int32, (8, 16), (8, 0), (4, 16)),
    *(reduce_case(op, kinds[0], (900, 1040), (13, 16), (800, 992), large=True) for op, kinds in REDUCED.items()),
    *(reduce_case("add", dtype, (20, 30, 144), (-1, 2, 32), (20, 20, 160), large=True) for dtype in SUMMED),
    reduce_case("add", np.float32, (3_000_016,), (0,), (3_000_016,), large=True),
]

# ---- gather, halo_tiles, rows


def beside(x: Any, table: Array) -> Any:
    """Return a table as an array of x's library."""
    if isinstance(x, np.ndarray):
        return table
    import cupy

    return cupy.asarray(table)


#: How starts are given. The values of a table that lies next to the source are not checked.
TABLES: dict[str, Callable[[Any, Array], Any]] = {
    "list": lambda x, starts: starts.tolist(),
    "host": lambda x, starts: starts,
    "device": lambda x, starts: beside(x, starts.astype(np.int32)),
}


def gather_case(source: Shape, dtype: Any, starts: Array, box: Shape, form: str, *, fill: float = 0) -> Case:
    pad = "nan" if np.isnan(fill) else "zeros"
    return Case(
        name=f"gather {form} {pad}",
        shapes=(source,),
        dtype=dtype,
        call=lambda x, **o: c.gather(x, TABLES[form](x, starts), box, pad=pad, check=form != "device", **o),
        expected=lambda x: np.stack([window(x, at, box, fill) for at in starts]),
        large=int(np.prod(source)) > 100_000,
    )


def gathers(dtype: Any) -> list[Case]:
    unit, random = 16 // np.dtype(dtype).itemsize, np.random.default_rng(0)
    edges = np.array([(0, 0), (3, unit), (-2, -unit), (29, 64 - unit), (100, 0), (0, 640)])
    many = np.stack([random.integers(-20, 520, 3000), random.integers(-5, 500 // unit, 3000) * unit], 1)
    return [
        *(gather_case((30, 64), dtype, edges, (4, 2 * unit), form) for form in ("list", "host", "device")),
        *(gather_case((500, 480), dtype, many, (20, 4 * unit), form) for form in ("host", "device")),
    ]


def halo_case(shape: Shape, tile: Shape, halo: Shape, dtype: Any) -> Case:
    box = tuple(t + 2 * h for t, h in zip(tile, halo, strict=True))
    counts = tuple(-(-n // t) for n, t in zip(shape, tile, strict=True))

    def expected(x: Array) -> Array:
        result = np.empty((*counts, *box), dtype)
        for index in np.ndindex(*counts):
            result[index] = window(x, [i * t - h for i, t, h in zip(index, tile, halo, strict=True)], box)
        return result

    return Case(
        name=f"halo_tiles {tile} {halo}",
        shapes=(shape,),
        dtype=dtype,
        call=lambda x, **o: c.halo_tiles(x, tile, halo, **o),
        expected=expected,
        large=int(np.prod(shape)) > 100_000,
    )


def row_cases(shape: Shape, dtype: Any) -> list[Case]:
    """Return a gather and a scatter of rows, including row numbers outside the array."""
    rows = np.random.default_rng(0).integers(-3, shape[0] + 3, 37)
    targets = np.random.default_rng(1).permutation(shape[0] + 4)[: shape[0]] - 2

    def scattered(into: Array, source: Array) -> Array:
        result, inside = into.copy(), (targets >= 0) & (targets < shape[0])
        result[targets[inside]] = source[inside]
        return result

    return [
        Case(
            name="gather_rows",
            shapes=(shape,),
            dtype=dtype,
            call=lambda x, **o: c.gather_rows(x, rows, **o),
            expected=lambda x: np.concatenate([window(x, (row, 0), (1, shape[1])) for row in rows]),
            needs="gather4",
        ),
        Case(
            name="scatter_rows",
            shapes=(shape, shape),
            dtype=dtype,
            call=lambda into, x, **o: c.scatter_rows(into, [int(row) for row in targets], x, **o),
            expected=scattered,
            writes_first=True,
            needs="scatter4",
        ),
    ]


GATHERS = [
    *(case for dtype in (np.uint8, np.float16, np.float32, np.float64) for case in gathers(dtype)),
    gather_case((30, 64), np.float32, np.array([(-1, 0)]), (2, 8), "list", fill=np.nan),
    halo_case((96,), (32,), (16,), np.uint8),
    halo_case((40, 64), (16, 16), (1, 4), np.float32),
    halo_case((20, 33, 32), (8, 16, 8), (1, 0, 8), np.float16),
    halo_case((3, 4, 3, 16), (2, 2, 2, 8), (1, 1, 1, 4), np.int32),
    halo_case((300, 528), (32, 64), (2, 4), np.float32),
    *(case for shape, dtype in (((50, 48), np.float32), ((20, 528), np.float16), ((19, 16), np.uint8))
      for case in row_cases(shape, dtype)),
]  # fmt: skip

# ---- im2col, broadcast, tile_copy


def im2col_case(shape: Shape, taps: Shape, stride: Shape, padding: Shape, dilation: Shape, dtype: Any) -> Case:
    def expected(x: Array) -> Array:
        padded = np.pad(x, [(0, 0), *((p, p) for p in padding), (0, 0)])
        spatial = [
            (n - d * (t - 1) - 1) // s + 1
            for n, t, s, d in zip(padded.shape[1:-1], taps, stride, dilation, strict=True)
        ]
        result = np.empty((shape[0], *spatial, *taps, shape[-1]), dtype)
        for tap in np.ndindex(*taps):
            seen = (
                slice(t * d, t * d + (n - 1) * s + 1, s)
                for t, d, s, n in zip(tap, dilation, stride, spatial, strict=True)
            )
            window = (slice(None), *seen)
            result[(slice(None),) * (1 + len(taps)) + tap] = padded[window]
        return result

    return Case(
        name=f"im2col {taps} {stride} {padding} {dilation}",
        shapes=(shape,),
        dtype=dtype,
        call=partial(c.im2col, kernel=taps, stride=stride, padding=padding, dilation=dilation),
        expected=expected,
        large=int(np.prod(shape)) > 100_000,
    )


def broadcast_case(copies: int, shape: Shape, dtype: Any) -> Case:
    return Case(
        name=f"broadcast {copies}",
        shapes=(shape,),
        dtype=dtype,
        call=lambda x, **o: c.broadcast(x, copies, **o),
        expected=lambda x: np.stack([x] * copies),
        needs="multicast",
        large=int(np.prod(shape)) > 100_000,
    )


OTHERS = [
    im2col_case((3, 19, 8), (3,), (2,), (1,), (1,), np.float32),
    im2col_case((2, 7, 6, 16), (3, 2), (1, 2), (1, 1), (2, 1), np.float32),
    im2col_case((1, 4, 5, 4, 8), (2, 3, 1), (1, 1, 2), (1, 0, 0), (1, 1, 1), np.float32),
    im2col_case((2, 5, 5, 520), (1, 1), (1, 1), (0, 0), (1, 1), np.float32),
    im2col_case((4, 1001, 32), (5,), (2,), (2,), (1,), np.float16),
    im2col_case((3, 56, 57, 64), (3, 3), (1, 1), (1, 1), (1, 1), np.float16),
    im2col_case((2, 31, 30, 264), (3, 2), (2, 3), (1, 0), (2, 1), np.float32),
    im2col_case((2, 9, 10, 110, 16), (3, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 1), np.float16),
    *(broadcast_case(copies, (12, 1000), np.int16) for copies in (1, 2, 3, 8, 9)),
    *(broadcast_case(copies, (size,), np.uint8) for copies in (3, 11) for size in (16, 3_000_016)),
    Case(
        name="tile_copy",
        shapes=((64, 80), (64, 80)),
        dtype=np.float32,
        call=lambda into, x, **o: c.tile_copy(x, into, **o),
        expected=lambda into, x: x,
        writes_first=True,
    ),
]
CASES = COPIES + RUNS + [view_case(*view) for view in VIEWS.items()] + TRANSPOSES + REDUCES + GATHERS + OTHERS

# ---- ragged_copy


def ragged_arrays(
    library: Any, dtype: Any, *, count: int, max_rows: int, max_chunks: int, seed: int
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return sources of random shapes, destinations with gaps between rows, and the buffers of the destinations."""
    random, unit = np.random.default_rng(seed), 16 // np.dtype(dtype).itemsize
    sources, destinations, buffers = [], [], []
    for _ in range(count):
        rows, columns = int(random.integers(0, max_rows)), unit * int(random.integers(1, max_chunks))
        gap = unit * int(random.integers(0, 3))
        sources.append(library.asarray(random.integers(0, 100, (rows, columns)).astype(dtype)))
        buffers.append(library.full((rows, columns + gap), 77, dtype))
        destinations.append(buffers[-1][:, :columns])
    return sources, destinations, buffers


def check_ragged(sources: list[Any], destinations: list[Any], buffers: list[Any]) -> None:
    for source, destination, buffer in zip(sources, destinations, buffers, strict=True):
        assert bool((destination == source).all())
        assert bool((buffer[:, source.shape[1] :] == 77).all())
