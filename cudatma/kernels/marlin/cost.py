"""What a GEMM takes on a GPU, predicted: one formula for all kernels, which ranks every candidate of every kernel.

A time is a sum: the launch, the clocks of the busiest SM, the bytes of all memory, the operations of all tensor cores.
Memory and tensor cores work while the SMs do, which hides a part of their time; the rest adds to the sum. The
factors were fitted on an H200 to 8,800 readings, which ``benchmarks/results/marlin_readings.json`` holds;
docs/performance/model.md compares them with the predictions, and tests/unit/test_marlin_cost.py bounds what the choice
loses. Pure: no device, no file.

``m`` is an int or an int64 array: a shape's choice table evaluates each tile at all M at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.schedule import ceil_div

_LAUNCH_US = 2.68
#: From so many rows of x on, kernels run long enough for the power limit to lower the clock.
#: [docs/performance/method.md]
_SUSTAINED_FROM = 256
#: int4 weights and one 16-bit scale for 128 of them.
_WEIGHT_BYTES = 0.516


def _memory_us(k: int, n: int, gpu: Gpu) -> float:
    """Of reading the weight once."""
    return _WEIGHT_BYTES * k * n / gpu.memory_bytes_per_us


@dataclass(frozen=True, slots=True)
class _Longest:
    """The longest work range: stages in whole and in divided tiles. others: as in schedule.Assignment."""

    is_divided: Any
    whole_stages: Any
    divided_stages: Any
    others: Any


def _longest(tiles: Any, resident: int, k_iterations: int, division: Callable[[Any], tuple[Any, float]]) -> _Longest:
    """Return what schedule() assigns to the busiest CTA or cluster with one row of tiles.

    division: TiledSpec.division() of ``others``.
    """
    waves, rest = tiles // resident, tiles % resident
    has_wave = waves > 0
    others = np.where(has_wave, 1, ceil_div(resident, rest + (rest == 0)))
    divided = ceil_div((rest + resident * has_wave) * k_iterations, resident)
    whole = (waves - has_wave) * k_iterations
    together = (waves + (rest > 0)) * k_iterations
    once, each = division(others)
    is_divided = (rest > 0) & (whole + divided * each + once < together)
    return _Longest(is_divided, np.where(is_divided, whole, together), is_divided * divided, others)


# ---- Skinny GEMM: N tiles of warps, the whole of K in a CTA or a cluster ---------------------------------------------


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """Of SkinnySpec; fields as there."""

    block_m: int
    n_tiles: int
    block_k: int
    cluster_k: int = 1


#: Clocks of one step in K for each 32 columns of N that a CTA has, and for each column of its MMAs.
_SKINNY_N32, _SKINNY_MMA = 0.316, 0.0223
#: Microseconds of the first activations and of the result, for each column of the MMAs.
_SKINNY_COLUMN_US = 0.0106
#: A cluster's barrier, and clocks for 32 x 8 sums of each CTA that sends some.
_SKINNY_CLUSTER_US, _SKINNY_SUMS = 0.027, 100
_SKINNY_MEMORY = 0.475
_MMA_N = 8


def skinny_cost(tile: SkinnyTile, m: Any, n: int, k: int, gpu: Gpu) -> Cost:
    """One launch of the skinny GEMM."""
    columns, clock = max(_MMA_N, tile.block_m), gpu.sm_clock_mhz
    ctas = ceil_div(n, 32 * tile.n_tiles) * ceil_div(m, tile.block_m) * tile.cluster_k
    steps = ceil_div(ctas, gpu.sm_count) * ceil_div(ceil_div(k, tile.block_k), tile.cluster_k) * tile.block_k
    # Where mma.sync is slower than on the GPU of the fit, the instruction itself is the bound.
    mma = max(_SKINNY_MMA, 2 * 32 / gpu.mma_sync_flops)
    exchanged = 0.0
    if tile.cluster_k > 1:
        sums = (tile.cluster_k - 1) * ceil_div(tile.n_tiles, tile.cluster_k) * columns / _MMA_N
        exchanged = _SKINNY_CLUSTER_US + sums * _SKINNY_SUMS / clock
    return Cost(
        launch_us=_LAUNCH_US + _SKINNY_COLUMN_US * columns,
        sm_us=steps * tile.n_tiles * (_SKINNY_N32 + mma * columns) / clock,
        reduction_us=exchanged,
        memory_us=_SKINNY_MEMORY * _memory_us(k, n, gpu),
        tensor_us=0.0,
    )


# ---- wgmma -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WgmmaTile:
    """Of WgmmaSpec; fields as there. block_n: of one CTA."""

    block_m: int
    block_n: int
    block_k: int
    warpgroups: int
    warpgroups_k: int = 1
    cluster: int = 1
    cluster_k: int = 1
    pingpong: bool = False


#: Multiply-adds that the tensor cores of an SM do in a clock. [H100 white paper]
_WGMMA_MACS = 2048
#: Clocks in which a warpgroup alone dequantizes 64 x 64 weights; the part of them that each further warpgroup adds, for
#: all share the schedulers. MMAs and dequantization overlap, but not perfectly: the norm that adds them up.
_DEQUANTIZE, _FURTHER, _NORM = 142, 0.8, 2.6
#: Further clocks of a stage: in any case, and for each byte.
_STAGE, _BYTE = 57, 0.0032
#: Factor of a stage of a divided tile, with one row of tiles and with several: CTAs are at different places in K then,
#: and share less in L2. The readings that the other factors were fitted to are older than the second one: tiles are
#: ranked as if all had one row.
_DIVIDED_STAGE, _DIVIDED_STAGE_OF_ROWS, _RANKED_ROWS = 1.06, 1.15, 1
#: Partial sums are stored and loaded again: clocks once, and bytes a clock for each CTA that shares a tile with the one
#: that stores it.
_DIVISION, _PARTIAL_BYTES = 4850, 50
#: Clocks of each tile's result: in any case, and for 128 x 128 elements.
_TILE, _RESULT = 700, 700
#: Ping-pong warpgroups: clocks that a stage adds to its products; clocks of the first stage and of the last result, the
#: only ones that nothing hides.
_PINGPONG_STAGE, _PINGPONG_ENDS = 170, 4000
#: Clocks for which the CTAs of a cluster that share activations wait for each other before the first stage.
_MULTICAST = 2000
#: CTAs of a cluster that divide K exchange sums: clocks for each of them, and bytes a clock of what they send.
_MEETING, _SUMS_BYTES = 60, 18
#: Parts of each time that add to the whole: clocks of the busiest SM, memory, operations, and operations at the power
#: limit.
_WGMMA_SM, _WGMMA_MEMORY, _WGMMA_TENSOR, _WGMMA_POWER = 0.676, 0.168, 0.417, 0.319


@lru_cache(maxsize=1024)
def stage_clocks(tile: WgmmaTile) -> float:
    """Return the clocks of one stage of a whole tile, with the ring full."""
    products = tile.block_m * tile.block_n * tile.block_k / _WGMMA_MACS
    squares = tile.block_n / 64 * tile.block_k / 64  # 64 x 64 weights; all warpgroups have as many
    warpgroups = tile.warpgroups * tile.warpgroups_k
    dequantize = squares / warpgroups * _DEQUANTIZE * (1 + _FURTHER * (warpgroups - 1))
    if tile.pingpong:  # one warpgroup at a time, which dequantizes while its wgmmas run
        return max(products, dequantize) + _PINGPONG_STAGE
    loaded = tile.block_k * (2 * tile.block_m / tile.cluster + tile.block_n / 2)
    together: float = (products**_NORM + dequantize**_NORM) ** (1 / _NORM)
    return together + _BYTE * loaded + _STAGE


def division_stages(tile: WgmmaTile, others: Any, tiles_m: int) -> tuple[Any, float]:
    """Return ``TiledSpec.division()``; ``others`` is an int or an array."""
    clocks = _DIVISION + others * 4 * tile.block_m * tile.block_n / _PARTIAL_BYTES
    return clocks / stage_clocks(tile), _DIVIDED_STAGE if tiles_m == 1 else _DIVIDED_STAGE_OF_ROWS


def wgmma_cost(tile: WgmmaTile, m: Any, n: int, k: int, gpu: Gpu) -> Cost:
    """Predict one launch of the wgmma kernel.

    Tiles are whole or divided, as is cheaper, or a cluster of ``cluster_k`` CTAs computes each tile, all at once.
    """
    ends, loop, exchanged = _wgmma_clocks(tile, ceil_div(m, tile.block_m), n, k, gpu.sm_count)
    clock_us = _WGMMA_SM / gpu.sm_clock_mhz
    tensor = _WGMMA_TENSOR + _WGMMA_POWER * (m >= _SUSTAINED_FROM)
    return Cost(
        launch_us=_LAUNCH_US + ends * clock_us,
        sm_us=loop * clock_us,
        reduction_us=exchanged * clock_us,
        memory_us=_WGMMA_MEMORY * _memory_us(k, n, gpu),
        tensor_us=tensor * m * n * k / (_WGMMA_MACS * gpu.sm_count * gpu.sm_clock_mhz),
    )


def _wgmma_clocks(tile: WgmmaTile, tiles_m: Any, n: int, k: int, sm_count: int) -> tuple[Any, Any, Any]:
    """Return clocks of the busiest SM: around the main loop, in it, and exchanging sums."""
    k_iterations, stage = ceil_div(k, tile.block_k), stage_clocks(tile)
    if tile.cluster_k > 1:
        # Each CTA adds up the sums of all for a part of the rows, and stores it.
        own = 8 * ceil_div(tile.block_m, 8 * tile.cluster_k) * tile.block_n
        exchanged = _MEETING * tile.cluster_k + 4 * (tile.cluster_k - 1) * own / _SUMS_BYTES
        return _result_clocks(own), ceil_div(k_iterations, tile.cluster_k) * stage, exchanged
    resident = max(1, sm_count // tile.cluster)
    tiles = tiles_m * ceil_div(n, tile.block_n * tile.cluster)
    longest = _longest(tiles, resident, k_iterations, lambda others: division_stages(tile, others, _RANKED_ROWS))
    once, each = division_stages(tile, longest.others, _RANKED_ROWS)
    loop = (longest.whole_stages + longest.divided_stages * each) * stage
    # The longest work range stores the same number of results, divided or not.
    return _ends_clocks(tile, ceil_div(tiles, resident)), loop, longest.is_divided * once * stage


def _ends_clocks(tile: WgmmaTile, results: Any) -> Any:
    """Before the first stage of a CTA, and of its results."""
    if tile.pingpong:
        return _PINGPONG_ENDS
    return results * _result_clocks(tile.block_m * tile.block_n) + (_MULTICAST if tile.cluster > 1 else 0)


def _result_clocks(elements: int) -> float:
    return _TILE + _RESULT * elements / (128 * 128)


# ---- mma.sync --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MmaSyncTile:
    """Of MmaSyncSpec; fields as there. One CTA on an SM."""

    block_m: int
    block_n: int
    block_k: int
    warps_n: int
    slice_k: int
    scales_weight: bool = False


#: Instructions for one weight, and with its scale; fp32 sums that are scaled instead, for one MMA in a group of 128.
_WEIGHT_INSTRUCTIONS, _SCALED_WEIGHT_INSTRUCTIONS, _SCALED_SUMS = 9 / 8, 13 / 8, 1.5
_SCHEDULERS = 4
#: Of a stage: parts of the tensor cores' and of the issue slots' clocks that add up, clocks a byte, and clocks once.
_MMA_PRODUCTS, _MMA_ISSUE, _MMA_BYTE, _MMA_STAGE = 0.914, 0.445, 0.013, 114
#: Partial sums: microseconds once, and for each byte of each CTA that shares a tile. A tile's result.
_MMA_DIVIDED_US, _MMA_PARTIAL_US, _MMA_TILE_US = 1.69, 7.75e-6, 0.34
_MMA_MEMORY, _MMA_POWER = 0.129, 0.139


def mma_sync_cost(tile: MmaSyncTile, m: Any, n: int, k: int, gpu: Gpu) -> Cost:
    """One launch of the mma.sync kernel."""
    k_iterations = ceil_div(k, tile.block_k)
    tiles = ceil_div(m, tile.block_m) * ceil_div(n, tile.block_n)
    partial_bytes = 4 * tile.block_m * tile.block_n
    weights, mmas = tile.block_n * tile.block_k, tile.block_n * tile.block_m * tile.block_k / (16 * 8 * 16)
    ldmatrix = tile.warps_n * tile.block_m / 8 * tile.block_k / 32
    issued = weights / 32 * (_SCALED_WEIGHT_INSTRUCTIONS if tile.scales_weight else _WEIGHT_INSTRUCTIONS)
    issued += mmas * (1 if tile.scales_weight else _SCALED_SUMS) + ldmatrix
    loaded = weights / 2 + 2 * tile.block_m * tile.block_k
    stage = _MMA_PRODUCTS * 2 * tile.block_m * weights / gpu.mma_sync_flops + _MMA_ISSUE * issued / _SCHEDULERS
    stage = (stage + _MMA_BYTE * loaded + _MMA_STAGE) / gpu.sm_clock_mhz
    # schedule() divides tiles by the same comparison (StagedTile.division()).
    once = partial_bytes // int(loaded)
    longest = _longest(tiles, gpu.sm_count, k_iterations, lambda others: (once, 1.0))
    # CTAs that share a tile
    sharing = np.maximum(2, ceil_div(k_iterations, longest.divided_stages + (longest.divided_stages == 0)))
    flops = 2.0 * m * n * k / (gpu.mma_sync_flops * gpu.sm_count * gpu.sm_clock_mhz)
    return Cost(
        launch_us=_LAUNCH_US + _MMA_TILE_US * ceil_div(tiles, gpu.sm_count),
        sm_us=(longest.whole_stages + longest.divided_stages) * stage,
        reduction_us=longest.is_divided * (_MMA_DIVIDED_US + _MMA_PARTIAL_US * sharing * partial_bytes),
        memory_us=_MMA_MEMORY * _memory_us(k, n, gpu),
        tensor_us=_MMA_POWER * flops * (m >= _SUSTAINED_FROM),
    )
