"""Data movement operations on random arrays, for `cudatma emulate NAME`.

The values are small integers, so that results are exact.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cudatma.arrays import describe
from cudatma.errors import ArgumentError, counted
from cudatma.kernels.arguments import Arguments
from cudatma.kernels.data_movement.broadcast import plan_broadcast
from cudatma.kernels.data_movement.copy import check_window, plan_copy
from cudatma.kernels.data_movement.gather import plan_boxes
from cudatma.kernels.data_movement.im2col import columns_on_host, convolution, plan_im2col
from cudatma.kernels.data_movement.movement import LaunchLimits
from cudatma.kernels.data_movement.ring import BOXES, CTAS_PER_SM
from cudatma.kernels.data_movement.transpose import plan_transpose
from cudatma.kernels.sample import Sample, sample_dtype
from cudatma.target import Target

Array = np.ndarray[Any, Any]


def window_sample(
    target: Target, *, rows: int = 300, columns: int = 208, pad: int = 8, dtype: str = "float32", blocks: int = 2
) -> Sample:
    """Return a copy of an array with a border of ``pad`` zeros."""
    source = _numbers((rows, columns), dtype)
    shape = (rows + 2 * pad, columns + 2 * pad)
    result, starts = np.ones(shape, source.dtype), (-pad, -pad)
    check_window(describe(source), starts, shape, "zeros")
    # `ctas` assumes CTAS_PER_SM CTAs per SM.
    limits = _limits(target, blocks * CTAS_PER_SM // BOXES.ctas_per_sm)
    planned = plan_copy(describe(source), describe(result), starts, limits, via="tma")
    title = f"window copy, {rows} x {columns} {dtype}, {pad} around"
    return _sample(title, target, planned, source, result, np.pad(source, pad))


def run_sample(target: Target, *, elements: int = 100_000, dtype: str = "float32", blocks: int = 2) -> Sample:
    """Return a copy of a run of bytes."""
    source = _numbers((elements,), dtype)
    result = np.ones_like(source)
    planned = plan_copy(describe(source), describe(result), (0,), _limits(target, blocks), via="tma")
    return _sample(f"run copy, {elements} {dtype}", target, planned, source, result, source)


def transpose_sample(
    target: Target, *, rows: int = 304, columns: int = 208, dtype: str = "float32", blocks: int = 2
) -> Sample:
    """Return a transpose of a matrix."""
    source = _numbers((rows, columns), dtype)
    result = np.ones((columns, rows), source.dtype)
    planned = plan_transpose(describe(source), describe(result), _limits(target, blocks), via="tma")
    return _sample(f"transpose, {rows} x {columns} {dtype}", target, planned, source, result, source.T)


def gather_sample(target: Target, *, tile: int = 16, halo: int = 4, dtype: str = "float32", blocks: int = 2) -> Sample:
    """Return a call to halo_tiles() for a matrix."""
    source = _numbers((64, 64), dtype)
    side, counts = tile + 2 * halo, (-(-64 // tile),) * 2
    result = np.ones((*counts, side, side), source.dtype)
    axes = [(-halo, tile, count) for count in counts]
    planned = plan_boxes(describe(source), describe(result), (side, side), None, axes, _limits(target, blocks))
    wide = np.pad(source, [(halo, halo + tile)] * 2)
    expected = np.lib.stride_tricks.sliding_window_view(wide, (side, side))[::tile, ::tile][: counts[0], : counts[1]]
    title = f"halo tiles, 64 x 64 {dtype}, tiles of {tile} with {halo}"
    return _sample(title, target, planned, source, result, expected)


def im2col_sample(
    target: Target, *, size: int = 12, channels: int = 16, taps: int = 3, stride: int = 1, blocks: int = 2
) -> Sample:
    """Return a call to im2col() for two images."""
    source = _numbers((2, size, size, channels), "float32")
    conv = convolution((size, size), taps, stride, taps // 2, 1)
    shape = (2, *conv.out, *conv.taps, channels)
    result, expected = np.ones(shape, source.dtype), np.empty(shape, source.dtype)
    columns_on_host(describe(source), describe(expected), conv)
    planned = plan_im2col(describe(source), describe(result), conv, _limits(target, blocks))
    title = f"im2col, 2 x {size} x {size} x {channels}, {taps} x {taps} taps"
    return _sample(title, target, planned, source, result, expected)


def broadcast_sample(target: Target, *, elements: int = 40_000, copies: int = 2, clusters: int = 2) -> Sample:
    """Return a broadcast of one array to 2, 4 or 8 copies."""
    source = _numbers((elements,), "float32")
    result = np.ones((copies, elements), source.dtype)
    plans = plan_broadcast(describe(source), describe(result), _limits(target, clusters * copies))
    if len(plans) != 1:
        raise ArgumentError("copies", copies, "1, 2, 4 or 8")
    return _sample(f"broadcast, {copies} x {elements} float32", target, plans[0], source, result, source)


def _numbers(shape: tuple[int, ...], dtype: str) -> Array:
    """Return small integers. Raises ArgumentError for an unknown dtype, or for an extent that is less than 1."""
    kind = sample_dtype(dtype)
    if min(shape) < 1:
        raise ArgumentError("shape", shape, "a tuple of positive ints")
    return np.random.default_rng(0).integers(0, 100, shape).astype(kind)


def _limits(target: Target, blocks: int) -> LaunchLimits:
    if blocks < 1:
        raise ArgumentError("blocks", blocks, "at least 1")
    return LaunchLimits(target, blocks)


def _sample(title: str, target: Target, planned: Arguments, source: Array, result: Array, expected: Array) -> Sample:
    planned.config.check_target(target)
    run = partial(planned.emulate, target, {"src": describe(source), "out": describe(result)})
    description = f"{title}, {counted(int(np.prod(planned.sizes.grid)), 'block')} of {planned.config.threads} threads"
    return Sample(description, planned.kernel(target), run, lambda: float((result != expected).mean()), 0.0)
