"""Random tensor maps whose boxes fit into a small global buffer and a block's shared memory."""

from __future__ import annotations

import random
from typing import Any

from cudatma.dtypes import TMA_TYPES
from cudatma.layout import Swizzle

Fields = dict[str, Any]
PLAIN = [name for name, dtype in TMA_TYPES.items() if not dtype.packed]


def slice_bytes(fields: Fields) -> int:
    return 16 * int(fields["interleave"])


def _box(rng: random.Random, rank: int, most: int) -> list[int]:
    """Extents of the outer dimensions whose product is at most ``most``."""
    extents = []
    for _ in range(rank):
        extent = rng.randint(1, max(1, min(256, rng.choice((2, 4, 16, 256)), most)))
        extents.append(extent)
        most //= extent
    rng.shuffle(extents)
    return extents


def _steps(rng: random.Random, rank: int) -> list[int]:
    if rng.random() < 0.65:
        return [1] * rank
    return [rng.choice((1, 1, 2, 3, 4, 5, 7, 8)) for _ in range(rank)]


def _strides(rng: random.Random, dims: list[int], inner_bytes: int, unit: int, writes: bool) -> list[int]:
    """Return pitches without overlap (rows rounded up to 16-byte chunks), or sometimes any pitches for loads."""
    strides = [0] * (len(dims) - 1)
    order = list(range(1, len(dims)))
    if rng.random() < 0.3:
        rng.shuffle(order)
    extent = -(-inner_bytes // unit) * unit
    for axis in order:
        strides[axis - 1] = extent + unit * rng.choice((0, 0, 0, 1, 2, 5))
        extent = strides[axis - 1] * dims[axis]
    if not writes and strides and rng.random() < 0.12:
        strides[rng.randrange(len(strides))] = unit * rng.choice((0, 0, 1, 2, 3))
    return strides


def _common(rng: random.Random, kind: str, rank: int, dtype: str, interleave: int, swizzle: int) -> Fields:
    return {
        "kind": kind,
        "dtype": dtype,
        "element_strides": _steps(rng, rank),
        "interleave": interleave,
        "swizzle": swizzle,
        "l2_promotion": rng.randint(0, 3),
        "oob_fill": rng.randint(0, 1) if TMA_TYPES[dtype].is_float else 0,
    }


def _inner(rng: random.Random, size: int, swizzle: int, interleave: int) -> int:
    """Elements of the innermost extent: whole 16-byte chunks."""
    span = Swizzle(swizzle).span_bytes if swizzle and not interleave else 2048
    most = min(256 * size, span) // 16
    chunks = rng.randint(1, max(1, min(most, rng.choice((1, 2, 4, 8, 64)))))
    return 16 * chunks // size


def tiled(rng: random.Random, rank: int, dtype: str, writes: bool) -> Fields:
    """A tiled map without interleave."""
    size = TMA_TYPES[dtype].element_bytes
    fields = _common(rng, "tiled", rank, dtype, 0, rng.choice((0, 0, 1, 2, 3, 3)))
    inner = _inner(rng, size, fields["swizzle"], 0)
    row = max(inner * size, Swizzle(fields["swizzle"]).span_bytes)
    budget = rng.choice((1 << 10, 1 << 11, 1 << 12, 1 << 12, 1 << 13, 1 << 15)) if rng.random() < 0.98 else 150 << 10
    fields["box"] = [inner, *_box(rng, rank - 1, max(1, budget // row))]
    dims = [max(1, int(extent * rng.uniform(0.2, 2.5)) + rng.randint(-1, 3)) for extent in fields["box"]]
    if rng.random() < 0.5:
        dims[0] = max(16 // size, dims[0] * size // 16 * 16 // size)
    if rng.random() < 0.1 and rank > 1:
        dims[rng.randrange(1, rank)] = 1
    fields["dims"] = dims
    fields["strides_bytes"] = _strides(rng, dims, dims[0] * size, 16, writes)
    if not writes and rank > 1 and rng.random() < 0.06:
        axis = rng.randrange(1, rank)
        dims[axis] = rng.choice(((1 << 31) - 1, 1 << 31))
        fields["strides_bytes"][axis - 1] = 0
    return fields


def interleaved(rng: random.Random, rank: int, dtype: str, writes: bool) -> Fields:
    """A tiled map of channel slices: dims W, (H, (D,)) C, N."""
    size, interleave = TMA_TYPES[dtype].element_bytes, rng.randint(1, 2)
    swizzle = 1 if interleave == 2 else rng.choice((0, 0, 1, 2, 3))
    fields = _common(rng, "tiled", rank, dtype, interleave, swizzle)
    unit = 16 * interleave
    inner = _inner(rng, size, 0, interleave)
    rows = _box(rng, rank - 2, max(1, 4096 // (inner * unit)))
    per_slice = unit // size
    channels = rng.randint(1, per_slice) if rng.random() < 0.8 else rng.randint(1, min(256, 4 * per_slice))
    fields["box"] = [inner, *rows[:-1], channels, rows[-1]]
    dims = [max(1, int(extent * rng.uniform(0.4, 2.0)) + rng.randint(-1, 3)) for extent in fields["box"]]
    dims[-2] = rng.randint(1, 5)
    fields["dims"] = dims
    fields["strides_bytes"] = _strides(rng, dims, dims[0] * unit, unit, writes)
    return fields


def im2col(rng: random.Random, rank: int, dtype: str, writes: bool) -> Fields:
    """An im2col map: dims C, W, (H, (D,)) N; with interleave W, (H, (D,)) C, N."""
    size = TMA_TYPES[dtype].element_bytes
    interleave = rng.choice((0, 0, 0, 0, 0, 0, 0, 1, 2))
    swizzle = 1 if interleave == 2 else rng.choice((0, 0, 1, 2, 3))
    fields = _common(rng, "im2col", rank, dtype, interleave, swizzle)
    unit = 16 * max(1, interleave)
    channels = _inner(rng, size, swizzle, interleave)
    if interleave:
        channels = min(channels, unit // size * rng.choice((1, 1, 1, 2)))
    row = max(channels * size, Swizzle(swizzle).span_bytes, unit if interleave else 16)
    pixels = rng.randint(1, max(1, min(1024, rng.choice((4, 16, 64, 128)), 8192 // row)))
    spatial = [rng.randint(1, rng.choice((3, 6, 12))) for _ in range(rank - 2)]
    images = rng.randint(1, 4)
    lower = [rng.choice((0, 0, -1, -1, -2, -3, 1, 2)) for _ in spatial]
    upper = [rng.choice((0, 0, -1, -1, -2, 1, 2)) for _ in spatial]
    if writes:  # A bounding box that reaches out of the tensor traps.
        lower, upper = ([max(0, c) for c in lower], [min(0, c) for c in upper])
    for i, extent in enumerate(spatial):
        if extent + upper[i] - lower[i] < 1:
            lower[i] = upper[i] = 0 if writes else rng.choice((0, -1))
    if interleave:
        dims = [*spatial, rng.randint(1, 4), images]
        inner_bytes = dims[0] * unit
    else:
        dims = [max(1, int(channels * rng.uniform(0.3, 3)) + rng.randint(-1, 2)), *spatial, images]
        inner_bytes = dims[0] * size
    fields |= {
        "dims": dims,
        "strides_bytes": _strides(rng, dims, inner_bytes, unit, writes),
        "lower_corner": lower,
        "upper_corner": upper,
        "channels_per_pixel": channels,
        "pixels_per_column": pixels,
    }
    return fields


def extent_bytes(fields: Fields) -> int:
    """Return the bytes from the tensor's base to the end of its accesses, ignoring steps of 0."""
    inner = slice_bytes(fields) or TMA_TYPES[fields["dtype"]].element_bytes
    reach = sum((dim - 1) * stride for dim, stride in zip(fields["dims"][1:], fields["strides_bytes"], strict=True))
    return int(fields["dims"][0] * inner + reach)
