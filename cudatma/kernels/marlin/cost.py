"""Predict the time of a Marlin GEMM on a GPU, in order to rank every configuration of every kernel.

The predicted time is the sum of four terms: the launch, the clock cycles of the busiest SM, the memory traffic, and the
operations of all tensor cores. The work of the SMs hides a part of the memory time and of the tensor-core time. Only
the part that is not hidden is added. The constants were fitted on an H200 to the 8,800 readings in
``benchmarks/results/marlin_readings.json``. docs/lab/marlin.md compares them with the predictions, and
tests/marlin/test_marlin_cost.py bounds the loss of the choice. The model uses neither a device nor a file.

A choice table evaluates all configurations of a kernel at all M at once. ``m`` is therefore an int or an int64 array,
and ``config`` is a config or the result of ``columns_of()`` for several configs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.schedule import ceil_div

LAUNCH_US = 2.68
#: Minimum number of rows of x at which kernels run long enough for the power limit to lower the clock.
#: [docs/lab/method.md]
SUSTAINED_FROM = 256
#: Bytes per weight of one 16-bit scale per 128 weights.
_SCALE_BYTES = 0.016
#: Clock cycles that TMA takes to fill 64 elements of a row beyond M with zeros, for boxes of the skinny and the wgmma
#: kernel. For 14336 x 4096 at M = 2, boxes of 8 rows take 14% longer than boxes of 2 rows. [H200]
_SKINNY_FILL, _WGMMA_FILL = 8, 6


def columns_of(configs: Sequence[Any], names: Sequence[str]) -> SimpleNamespace:
    """Return these fields and properties of configs, each as an array of shape (configs, 1)."""
    return SimpleNamespace(**{name: np.array([getattr(config, name) for config in configs])[:, None] for name in names})


def rows_of(columns: SimpleNamespace, index: Any) -> SimpleNamespace:
    """Return the columns of the configs that ``index`` selects."""
    return SimpleNamespace(**{name: column[index] for name, column in vars(columns).items()})


def weight_us(bits: Any, k: int, n: int, gpu: Gpu) -> Any:
    """Return the time to read a weight with codes of ``bits`` bits once, in microseconds."""
    return (bits / 8 + _SCALE_BYTES) * k * n / gpu.memory_bytes_per_us


def _with_fill(us: Any, clocks: Any, gpu: Gpu) -> Any:
    """Return the time of a CTA's loop in microseconds if TMA spends ``clocks`` clock cycles on filling rows.

    The loop and the filling overlap imperfectly. A norm of order 4 models this overlap.
    """
    fill_us = clocks / gpu.sm_clock_mhz
    return np.sqrt(np.hypot(us * us, fill_us * fill_us))


# ---- Skinny GEMM: N tiles of warps, the whole of K in a CTA or a cluster ---------------------------------------------


#: Clock cycles per step along K: per 32 columns of N of a CTA with 4-bit weights, and per column of its MMAs.
_SKINNY_N32, _SKINNY_MMA = 0.316, 0.0223
#: Microseconds for the first activations and for the result, per column of the MMAs.
_SKINNY_COLUMN_US = 0.0106
#: Clock cycles of a cluster barrier, and clock cycles per 32 x 8 sums from each CTA that sends sums.
_SKINNY_CLUSTER_US, _SKINNY_SUMS = 0.027, 100
SKINNY_MEMORY = 0.475
_MMA_N = 8
#: Fields of a config that skinny_cost() reads.
SKINNY_TERMS = ("tile_m", "tile_n", "tile_k", "cluster_k", "weight_bits")


def skinny_step_clocks(config: Any, gpu: Gpu) -> Any:
    """Return the number of clock cycles that a CTA of the skinny GEMM spends per element of K."""
    # If mma.sync is slower than on the GPU of the fit, the rate of the instruction bounds the time.
    mma = max(_SKINNY_MMA, 2 * 32 / gpu.mma_sync_flops)
    columns = np.maximum(_MMA_N, config.tile_m)
    return config.tile_n // 32 * (_SKINNY_N32 * config.weight_bits / 4 + mma * columns)


def skinny_cost(config: Any, m: Any, n: int, k: int, gpu: Gpu) -> Cost:
    """Return the predicted time of one launch of the skinny GEMM."""
    n_tiles, columns, tiles_m = config.tile_n // 32, np.maximum(_MMA_N, config.tile_m), ceil_div(m, config.tile_m)
    clock = gpu.sm_clock_mhz
    ctas = ceil_div(n, 32 * n_tiles) * tiles_m * config.cluster_k
    steps = ceil_div(ctas, gpu.sm_count) * ceil_div(ceil_div(k, config.tile_k), config.cluster_k) * config.tile_k
    sums = (config.cluster_k - 1) * ceil_div(n_tiles, config.cluster_k) * columns / _MMA_N
    memory_us = SKINNY_MEMORY * weight_us(config.weight_bits, k, n, gpu)
    loop_us = steps * skinny_step_clocks(config, gpu) / clock + memory_us
    return Cost(
        launch_us=LAUNCH_US + _SKINNY_COLUMN_US * columns,
        sm_us=_with_fill(loop_us, _SKINNY_FILL * (tiles_m * config.tile_m - m) * steps / 64, gpu) - memory_us,
        reduction_us=_SKINNY_CLUSTER_US * (config.cluster_k > 1) + sums * _SKINNY_SUMS / clock,
        memory_us=memory_us,
        tensor_us=0.0,
    )


# ---- wgmma -----------------------------------------------------------------------------------------------------------


#: Multiply-adds per clock cycle and SM on tensor cores. [H100 white paper]
WGMMA_MACS = 2048
#: Clock cycles that one warpgroup takes to dequantize 64 x 64 weights. Fraction of these clock cycles that each
#: additional warpgroup adds, because all warpgroups share the schedulers. Order of the norm that combines MMAs and
#: dequantization, which overlap imperfectly.
_DEQUANTIZE, _FURTHER, _NORM = 142, 0.8, 2.6
#: Factor by which a weight of each format takes longer to dequantize. [H200, 4096 x 28672 and 14336 x 4096]
DEQUANTIZE_FACTORS = {"int4": 1.0, "mxfp4": 1.15, "nvfp4": 1.22, "fp8": 1.38, "int8": 1.29}
#: Additional clock cycles per stage: a constant; the wait of a warpgroup for its last MMAs, divided by the number of
#: warpgroups because they take turns; and clock cycles per byte.
_STAGE, _DRAIN, _BYTE = 30, 50, 0.0032
#: Factors by which a stage of a divided tile takes longer, with one row of tiles and with several rows. With several
#: rows, CTAs are at different positions in K and share less data in L2. The other constants were fitted to readings
#: that are older than the second factor, so divided tiles are ranked as if they formed one row.
_DIVIDED_STAGE, _DIVIDED_STAGE_OF_ROWS, _RANKED_ROWS = 1.06, 1.15, 1
#: Storing and loading partial sums: one-time clock cycles, and bytes per clock cycle for each CTA that shares a tile
#: with the CTA that stores it.
_DIVISION, _PARTIAL_BYTES = 4850, 50
#: Clock cycles for the result of a tile: a constant, and clock cycles per 128 x 128 elements.
TILE, RESULT = 700, 700
#: Ping-pong warpgroups: clock cycles that a stage takes in addition to its MMAs, and clock cycles of the first stage
#: and of the last result, which do not overlap with MMAs.
_PINGPONG_STAGE, _PINGPONG_ENDS = 170, 4000
#: Clock cycles for which the CTAs of a cluster with shared activations wait for each other before the first stage.
_MULTICAST = 2000
#: Exchange of sums among the CTAs of a cluster that split K: clock cycles per CTA, and bytes per clock cycle.
_MEETING, _SUMS_BYTES = 45, 12.7
#: Fraction of each time that counts towards the total: clock cycles of the busiest SM, memory, operations, and
#: operations at the power limit.
WGMMA_SM, WGMMA_MEMORY, WGMMA_TENSOR, WGMMA_POWER = 0.676, 0.168, 0.417, 0.319
#: Fraction of the memory time that counts for weights of 8 bits, which memory often bounds.
_WGMMA_MEMORY_8 = 0.288
#: Fields and properties of a config that wgmma_cost() reads.
WGMMA_TERMS = (
    "tile_m",
    "tile_n",
    "tile_k",
    "cluster_n",
    "cluster_k",
    "pingpong",
    "own_rows",
    "stage_clocks",
    "weight_bits",
    "dequantize_factor",
)


def wgmma_stage_clocks(config: Any) -> float:
    """Return the number of clock cycles per stage of a whole tile, assuming that the ring is full."""
    products: float = config.tile_m * config.tile_n * config.tile_k / WGMMA_MACS
    squares = config.tile_n / 64 * config.tile_k / 64  # Number of 64 x 64 blocks of weights per warpgroup.
    warpgroups = config.warpgroups * config.slice_k
    factor = config.dequantize_factor * (1 + _FURTHER * (warpgroups - 1))
    dequantize: float = squares / warpgroups * _DEQUANTIZE * factor
    if config.pingpong:  # One warpgroup at a time dequantizes while its wgmmas run.
        return max(products, dequantize) + _PINGPONG_STAGE
    loaded: float = config.tile_k * (2 * config.tile_m / config.cluster_n + config.tile_n * config.weight_bits / 8)
    together: float = (products**_NORM + dequantize**_NORM) ** (1 / _NORM)
    waits: float = _STAGE + _DRAIN / warpgroups
    return together + _BYTE * loaded + waits


def wgmma_division(config: Any, others: Any, tiles_m: int) -> tuple[Any, float]:
    """Return the result of ``MarlinConfig.division()``. ``others`` is an int or an array."""
    clocks = _DIVISION + others * (4 * config.tile_m * config.tile_n) / _PARTIAL_BYTES
    return clocks / config.stage_clocks, _DIVIDED_STAGE if tiles_m == 1 else _DIVIDED_STAGE_OF_ROWS


def wgmma_cost(config: Any, m: Any, n: int, k: int, gpu: Gpu) -> Cost:
    """Return the predicted time of one launch of the wgmma kernel.

    Tiles are whole or divided, depending on which is cheaper. With ``cluster_k`` above 1, a cluster computes each tile,
    and all clusters run at the same time.
    """
    tiles_m, k_iterations = ceil_div(m, config.tile_m), ceil_div(k, config.tile_k)
    tiles = tiles_m * ceil_div(n, config.tile_n * config.cluster_n)
    resident, is_cluster = np.maximum(1, gpu.sm_count // config.cluster_n), config.cluster_k > 1
    waves = tiles // resident
    rest, has_wave = tiles - waves * resident, waves > 0
    # Number of results that the longest work range stores, whether tiles are divided or not.
    results = np.where(is_cluster, 1, waves + (rest > 0))
    whole = results * ceil_div(k_iterations, config.cluster_k)
    # schedule() divides the last, partial wave together with a full wave or, if there are several rows of tiles, alone.
    rest_stages, sharing = ceil_div(rest * k_iterations, resident), ceil_div(resident, np.maximum(1, rest))
    whole_part, divided_part = (waves - has_wave) * k_iterations, rest_stages + has_wave * k_iterations
    once, each = wgmma_division(config, np.where(has_wave, 1, sharing), _RANKED_ROWS)
    once_alone, each_of_rows = wgmma_division(config, sharing, 2)
    divided = whole_part + divided_part * each
    together = whole_part + divided_part * each_of_rows + once
    alone = waves * k_iterations + rest_stages * each_of_rows + once_alone
    pays = (divided + once < whole) & ((tiles_m == 1) | (np.minimum(together, alone) < whole))
    is_divided = (rest > 0) & pays & np.logical_not(is_cluster)
    # Each CTA of a cluster adds up the sums of all CTAs for its own rows, and stores the results.
    elements = config.own_rows * config.tile_n
    exchanged = _MEETING * is_cluster * config.cluster_k + 4 * (config.cluster_k - 1) * elements / _SUMS_BYTES
    around = results * (TILE + RESULT * elements / (128 * 128)) + _MULTICAST * (config.cluster_n > 1)
    ends: Any = np.where(config.pingpong, _PINGPONG_ENDS, around)
    clock_us = WGMMA_SM / gpu.sm_clock_mhz
    tensor = WGMMA_TENSOR + WGMMA_POWER * (m >= SUSTAINED_FROM)
    tensor_us = tensor * m * n * k / (WGMMA_MACS * gpu.sm_count * gpu.sm_clock_mhz)
    stages = np.where(is_divided, divided, whole)
    memory_share = np.where(config.weight_bits == 4, WGMMA_MEMORY, _WGMMA_MEMORY_8)
    memory_us = memory_share * weight_us(config.weight_bits, k, n, gpu)
    # The tiles of the last row of tiles have empty rows. They are one in tiles_m of a CTA's tiles, and at least one of
    # the tiles of the busiest CTA.
    empty = np.minimum(tiles_m * config.tile_m - m, config.tile_m / config.cluster_n) / np.minimum(results, tiles_m)
    loop_us = stages * config.stage_clocks * clock_us + memory_us + tensor_us
    return Cost(
        launch_us=LAUNCH_US + ends * clock_us,
        sm_us=_with_fill(loop_us, _WGMMA_FILL * empty * stages * config.tile_k / 64, gpu) - memory_us - tensor_us,
        reduction_us=(exchanged + is_divided * once * config.stage_clocks) * clock_us,
        memory_us=memory_us,
        tensor_us=tensor_us,
    )


# ---- mma.sync --------------------------------------------------------------------------------------------------------


#: Instructions per weight; instructions per weight that is scaled; instructions for the fp32 sums of an MMA in a group
#: of 128 if the sums are scaled instead.
_WEIGHT_INSTRUCTIONS, _SCALED_WEIGHT_INSTRUCTIONS, _SCALED_SUMS = 9 / 8, 13 / 8, 1.5
_SCHEDULERS = 4
#: Clock cycles per stage: the fractions of the tensor-core clock cycles and of the issue clock cycles that count, clock
#: cycles per byte, and a constant.
_MMA_PRODUCTS, _MMA_ISSUE, _MMA_BYTE, _MMA_STAGE = 0.914, 0.445, 0.013, 114
#: Partial sums: one-time microseconds, and microseconds per byte of each CTA that shares a tile. Microseconds for the
#: result of a tile.
_MMA_DIVIDED_US, _MMA_PARTIAL_US, _MMA_TILE_US = 1.69, 7.75e-6, 0.34
_MMA_MEMORY, _MMA_POWER = 0.129, 0.139
#: Fields of a config that mma_sync_cost() reads.
MMA_SYNC_TERMS = ("tile_m", "tile_n", "tile_k", "warps_n", "scale_on", "weight_bits")


def mma_sync_cost(config: Any, m: Any, n: int, k: int, gpu: Gpu) -> Cost:
    """Return the predicted time of one launch of the mma.sync kernel, with one CTA per SM."""
    k_iterations = ceil_div(k, config.tile_k)
    tiles = ceil_div(m, config.tile_m) * ceil_div(n, config.tile_n)
    weights, scales_weight = config.tile_n * config.tile_k, config.scale_on == "weight"
    mmas, ldmatrix = weights * config.tile_m / (16 * 8 * 16), config.warps_n * config.tile_m / 8 * config.tile_k / 32
    issued = weights / 32 * np.where(scales_weight, _SCALED_WEIGHT_INSTRUCTIONS, _WEIGHT_INSTRUCTIONS)
    issued = issued + mmas * np.where(scales_weight, 1, _SCALED_SUMS) + ldmatrix
    loaded, partial_bytes = (
        weights * config.weight_bits // 8 + 2 * config.tile_m * config.tile_k,
        4 * config.tile_m * config.tile_n,
    )
    stage = _MMA_PRODUCTS * 2 * config.tile_m * weights / gpu.mma_sync_flops + _MMA_ISSUE * issued / _SCHEDULERS
    stage = (stage + _MMA_BYTE * loaded + _MMA_STAGE) / gpu.sm_clock_mhz
    # schedule() uses the same comparison to divide tiles (MarlinConfig.division()).
    waves = tiles // gpu.sm_count
    rest, has_wave = tiles - waves * gpu.sm_count, waves > 0
    results = waves + (rest > 0)
    divided_part = ceil_div(rest * k_iterations, gpu.sm_count) + has_wave * k_iterations
    divided, whole = (waves - has_wave) * k_iterations + divided_part, results * k_iterations
    is_divided = (rest > 0) & (divided + partial_bytes // loaded < whole)
    ctas_of_tile = np.maximum(2, ceil_div(k_iterations, np.maximum(1, divided_part)))
    flops = 2.0 * m * n * k / (gpu.mma_sync_flops * gpu.sm_count * gpu.sm_clock_mhz)
    return Cost(
        launch_us=LAUNCH_US + _MMA_TILE_US * results,
        sm_us=np.where(is_divided, divided, whole) * stage,
        reduction_us=is_divided * (_MMA_DIVIDED_US + _MMA_PARTIAL_US * ctas_of_tile * partial_bytes),
        memory_us=_MMA_MEMORY * weight_us(config.weight_bits, k, n, gpu),
        tensor_us=_MMA_POWER * flops * (m >= SUSTAINED_FROM),
    )


#: Maps each kernel to the function that predicts one launch from config, m, n, k and GPU.
COST_MODELS: Mapping[str, Callable[[Any, Any, int, int, Gpu], Cost]] = {
    "skinny": skinny_cost,
    "wgmma": wgmma_cost,
    "mma_sync": mma_sync_cost,
}
