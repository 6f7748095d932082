"""Predict the time of a dense GEMM on a GPU, in order to rank the tiles of all versions.

Most constants were fitted on an H200 to ``benchmarks/results/gemm_tiles.json``. The constants for split rows and for
unused columns were fitted to ``gemm_middle.json``. _UNHIDDEN_PART and the constants for block scales were fitted on
H100s. tests/gemm/test_gemm.py bounds the slowdown of the chosen tile.

``m`` is an int or an int64 array, because a choice table evaluates each tile at all M at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cudatma.kernels.cost import Cost
from cudatma.kernels.gemm.problem import WGMMA_M, Problem
from cudatma.kernels.gpu import IN_L2_BYTES, Gpu, clusters_at_once
from cudatma.kernels.schedule import ceil_div
from cudatma.target import get_target

#: Microseconds per launch, keyed by the schedule, and additional microseconds for clusters. CTAs of a cluster that
#: share loads wait for each other (longer with block scales [H100]), and CTAs that split K synchronize. [H200]
_LAUNCH_US = {"one_tile": 0.3, "persistent": 0.5, "pingpong": 0.5}
_CLUSTER_LAUNCH_US, _CLUSTER_LAUNCH_OF_SCALES_US, _CLUSTER_K_LAUNCH_US, _MMA_SYNC_LAUNCH_US = 0.9, 2.2, 0.5, 0.9
#: Clock cycles between two stages in which a single warpgroup does not multiply, keyed by the loader, and the same
#: quantity for ping-pong warpgroups.
_STAGE_GAPS, _PINGPONG_GAP = {"cp_async": 400, "consumers": 250, "producer_warp": 0}, 40
#: Bytes of each operand that the tensor cores of an SM multiply per clock cycle. [H100 white paper]
_MAC_BYTES = 4096
#: Fraction of _MAC_BYTES that wgmmas reach, and number of columns that the model adds to each wgmma.
_RATE_PART = 0.92
_MORE_COLUMNS = 12
#: Bytes per clock cycle of shared memory, for reads by wgmmas and writes by TMA.
_SHARED_BYTES = 141
#: Bytes per clock cycle that an SM loads while it multiplies, and bytes per clock cycle for columns of a box of B that
#: are outside the tile.
_LOADED_BYTES = 330
_UNUSED_BYTES = 40
#: Clock cycles that TMA takes for 128 bytes of a row that splits L2 sectors, and for 128 bytes of any other row.
_SPLIT_ROW_CLOCKS, _ROW_CLOCKS = 4.3, 2.2
#: Bytes per clock cycle that L2 sends if neighboring CTAs read different data, such as CTAs that split K.
_L2_BYTES = 6600
#: Clock cycles until the first stage of a tile arrives, and from the request of a later stage to its arrival.
_FIRST_STAGE_CLOCKS = 2700
_LATENCY_CLOCKS = 2355
#: Clock cycles for a stage's block scales if threads load them or if TMA loads them, and clock cycles for storing a
#: thread's sum as 16 bits.
_SCALES_CLOCKS, _RING_SCALES_CLOCKS = 168, 110
_STORE_CLOCKS = 17.5
#: Clock cycles until the CTAs of a cluster have synchronized, and bytes of sums that they send per clock cycle.
_MEETING_CLOCKS = 380
_SUMS_BYTES = 9.6
#: A single wave on more than this fraction of the SMs leaves no SM for the next launch, at this cost in microseconds.
_FULL_PART = 0.97
_FULL_US = 1.0
#: Reading operands overlaps with multiplying them, but this fraction of the shorter time is not hidden.
#: [H100, gemm.json]
_UNHIDDEN_PART = 0.17
#: Tiles with this number of rows read the same columns one after another. If the operands do not fit in L2, the tiles
#: take longer by this fraction of the time to read the operands.
_DRIFT_PART = 0.23
_DRIFTING_M = 64
#: Clock cycles of the epilogue per sum of a thread.
_EPILOGUE_CLOCKS = {"none": 0, "linear": 10, "relu": 10, "gelu": 52, "gelu_tanh": 38, "silu": 36}


#: Floating-point operations per clock cycle and warp with mma.sync [H200: 559 TFLOP/s with four warps per SM], and the
#: estimated fraction of the tensor cores' rate that remains despite loads and waits.
_WARP_FLOPS, _BESIDE_LOADS = 535, 0.92
#: Fraction of the tensor cores' rate that two CTAs per SM reach, and clock cycles per stage without MMAs. [H200]
_TWO_CTAS, _STAGE_CLOCKS = 0.94, 60
#: Clock cycles until the first stage of a tile with mma.sync arrives.
_FIRST_MMA_SYNC_STAGE_CLOCKS = 1900
#: Bytes per clock cycle that an SM reads from shared memory, from L2, and from the L2 of a GeForce (estimate: 5 TB/s
#: for 170 SMs), and bytes per clock cycle that it stores.
_SMEM_BYTES, _SM_L2_BYTES, _GEFORCE_L2_BYTES, _STORED_BYTES = 128, 56, 12, 32


#: Function that predicts the time of a launch from M (an int or an int64 array) and a problem, whose own M is ignored.
CostModel = Callable[[Any, Problem], Cost]


def cost_model(config: Any, gpu: Gpu) -> CostModel:
    """Return a function that predicts the time of a launch with this GemmConfig from M and a problem."""
    return _wgmma_cost_model(config, gpu) if config.has_wgmma else _mma_sync_cost_model(config, gpu)


def _wgmma_cost_model(config: Any, gpu: Gpu) -> CostModel:
    """Return the cost model of a kernel with wgmma.

    Tiles run in waves. Each stage is bound by the tensor cores, the load latency or the L2 bandwidth. Terms that do not
    depend on sizes are computed only once, because tables call the model for every shape.
    """
    is_pingpong = config.preset.schedule == "pingpong"
    cluster_k = config.cluster_k
    cluster_tile_m, cluster_tile_n = config.cluster_tile_m, config.cluster_tile_n
    element_bytes, k_bytes = config.element_bytes, config.element_bytes * config.tile_k
    clusters = max(1, clusters_at_once(config.launch_cluster, gpu.sm_count))
    a_rows, b_rows = config.loaded_rows
    latency = _LATENCY_CLOCKS / max(1, config.useful_stages(get_target(gpu.target)))
    arrived_clocks = max(_multiplying_clocks(config), latency)
    unused_clocks = (config.slot_n - config.tile_n) * k_bytes / _UNUSED_BYTES
    max_rows, row_bytes, other_bytes = config.max_a_box_rows, 0, config.loaded_stage_bytes
    if config.cluster == 1:
        other_bytes = config.boxes_bytes(0)
        row_bytes = config.boxes_bytes(1) - other_bytes
    cluster_stage_k, tile = config.tile_k * cluster_k, config.tile_m * config.tile_n // cluster_k
    sums_of_thread = tile / (128 * config.warpgroups)
    stored = (_STORE_CLOCKS * config.out_bytes / 2 + _EPILOGUE_CLOCKS[config.epilogue]) * sums_of_thread
    meeting = _MEETING_CLOCKS + 4 * (cluster_k - 1) * tile / _SUMS_BYTES if cluster_k > 1 else 0.0
    launch_us, bytes_per_us = _launch_us(config), gpu.memory_bytes_per_us

    def cost(m: Any, problem: Problem) -> Cost:
        tiles_m, tiles_n = -(-m // cluster_tile_m), -(-problem.n // cluster_tile_n)
        tiles = problem.batch * tiles_m * tiles_n
        waves = -(-tiles // clusters)
        clocks: Any = arrived_clocks
        a_is_split, b_is_split = problem.split_rows
        if a_is_split or b_is_split:
            a_clocks, b_clocks = (_SPLIT_ROW_CLOCKS if split else _ROW_CLOCKS for split in (a_is_split, b_is_split))
            clocks = max(clocks, (a_rows * a_clocks + b_rows * b_clocks) * k_bytes / 128)
        if cluster_k > 1:  # L2 merges the loads of an operand if all tiles read the same rows.
            rows = config.tile_m * (tiles_m > 1) + config.tile_n * (tiles_n > 1)
            ctas = np.minimum(tiles * cluster_k, gpu.sm_count)
            clocks = np.maximum(clocks, ctas * rows * k_bytes / _L2_BYTES)
        loaded = np.minimum(max_rows, -(-m // 8) * 8) * row_bytes + other_bytes
        stage = clocks + loaded / _LOADED_BYTES + unused_clocks
        mainloop = waves * -(-problem.k // cluster_stage_k) * stage
        firsts = 1 if config.is_persistent else waves
        stores = waves * stored
        if is_pingpong:  # Clock cycles of the last tile, and clock cycles that the other warpgroup's MMAs do not hide.
            stores = stored + waves * np.maximum(0.0, stored - mainloop / waves) / 2
        around = stores + firsts * _FIRST_STAGE_CLOCKS
        mainloop_us = mainloop / gpu.sm_clock_mhz
        operands = float(problem.batch * element_bytes * problem.k) * (m + problem.n)
        read_us = operands / bytes_per_us
        memory_us = np.maximum(0.0, read_us - mainloop_us) + _UNHIDDEN_PART * np.minimum(read_us, mainloop_us)
        if config.tile_m == _DRIFTING_M:
            memory_us += _DRIFT_PART * read_us * ((operands > IN_L2_BYTES) & (tiles_m > 1))
        is_full = (waves == 1) & (tiles * cluster_k > _FULL_PART * gpu.sm_count)
        return Cost(
            launch_us=launch_us + _FULL_US * is_full + around / gpu.sm_clock_mhz,
            mainloop_us=mainloop_us,
            reduction_us=waves * (meeting / gpu.sm_clock_mhz),
            memory_us=memory_us,
            tensor_us=0.0,
        )

    return cost


def _launch_us(config: Any) -> float:
    if config.cluster > 1:
        return _CLUSTER_LAUNCH_OF_SCALES_US if config.block_scales else _CLUSTER_LAUNCH_US
    return _CLUSTER_K_LAUNCH_US if config.cluster_k > 1 else _LAUNCH_US[config.preset.schedule]


def _multiplying_clocks(config: Any) -> float:
    """Return the number of clock cycles per stage if the operands are already in shared memory.

    The tensor cores or the bandwidth of shared memory determine the number.
    """
    k_bytes, wgmmas = config.element_bytes * config.tile_k, config.tile_m // WGMMA_M
    products = config.tile_m * (config.tile_n + _MORE_COLUMNS) * k_bytes / (_MAC_BYTES * _RATE_PART)
    scales = _RING_SCALES_CLOCKS if config.ring_has_scales else _SCALES_CLOCKS
    # The other warpgroups multiply at the same time. Scaling replaces the gap between two stages.
    one_gap = _PINGPONG_GAP if config.preset.schedule == "pingpong" else _STAGE_GAPS[config.preset.loader]
    gap = scales if config.block_scales else one_gap / config.warpgroups**2
    through_smem = k_bytes * (wgmmas * (WGMMA_M + config.tile_n) + config.tile_m + config.slot_n)
    clocks: float = max(products + gap, through_smem / _SHARED_BYTES)
    return clocks


def _mma_sync_cost_model(config: Any, gpu: Gpu) -> CostModel:
    """Return the cost model of a kernel with mma.sync.

    Tiles run in waves. Each stage is bound by the tensor cores, reads of shared memory or loads from L2.
    """
    tile_m, tile_n, tile_k, element_bytes = config.tile_m, config.tile_n, config.tile_k, config.element_bytes
    consumer_warps, ctas_per_sm = config.consumer_warps, config.ctas_per_sm
    read = element_bytes * tile_k * consumer_warps * (config.warp_m + config.warp_n) / _SMEM_BYTES
    l2_bytes = _SM_L2_BYTES if get_target(gpu.target).has("cluster") else _GEFORCE_L2_BYTES
    waiting = max(read, config.loaded_stage_bytes / l2_bytes)
    stored = config.out_bytes * tile_m * tile_n / _STORED_BYTES

    def cost(m: Any, problem: Problem) -> Cost:
        tiles = problem.batch * ceil_div(m, tile_m) * ceil_div(problem.n, tile_n)
        sharing = np.minimum(ctas_per_sm, ceil_div(tiles, gpu.sm_count))
        waves = ceil_div(tiles, gpu.sm_count * sharing)
        flops = np.minimum(gpu.mma_sync_flops, _WARP_FLOPS * sharing * consumer_warps)
        rate = _BESIDE_LOADS * np.where(sharing > 1, _TWO_CTAS, 1.0) * flops / element_bytes
        stage = sharing * np.maximum(tile_m * tile_n * tile_k / rate, waiting) + _STAGE_CLOCKS
        mainloop_us = waves * ceil_div(problem.k, tile_k) * stage / gpu.sm_clock_mhz
        # If two CTAs share an SM, one multiplies while the other stores.
        around: Any = _FIRST_MMA_SYNC_STAGE_CLOCKS + np.where(sharing > 1, 1, waves) * stored
        operands = float(problem.batch * element_bytes * problem.k) * (m + problem.n)
        memory_us = np.maximum(0.0, operands / gpu.memory_bytes_per_us - mainloop_us)
        return Cost(_MMA_SYNC_LAUNCH_US + around / gpu.sm_clock_mhz, mainloop_us, 0.0, memory_us, 0.0)

    return cost
