"""Predict what versions 1 to 7 of the dense GEMM take on a GPU. The prediction ranks every tile of every version.

Most factors were fitted on an H200 to ``benchmarks/results/gemm_tiles.json``. The factors of split rows and of unused
columns were fitted to ``gemm_middle.json``, and _UNHIDDEN_PART and the factors of block scales on H100s.
tests/unit/test_gemm_choice.py bounds what the choice loses. Pure.

``m`` is an int or an int64 array: a shape's choice table evaluates each tile at all M at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cudatma.kernels.cost import Cost
from cudatma.kernels.gemm.problem import WGMMA_M, Problem
from cudatma.kernels.gpu import IN_L2_BYTES, Gpu, clusters_at_once
from cudatma.target import get_target

#: Bytes of each operand that the tensor cores of an SM multiply in a clock. [H100 white paper]
_MAC_BYTES = 4096
#: wgmmas reach this part of _MAC_BYTES, if each is counted with this many additional columns.
_RATE_PART = 0.92
_MORE_COLUMNS = 12
#: Bytes a clock of shared memory, which wgmmas read and TMA writes.
_SHARED_BYTES = 141
#: Bytes a clock that an SM loads while it multiplies; of columns that are in a box of B and not in the tile.
_LOADED_BYTES = 330
_UNUSED_BYTES = 40
#: Clocks that TMA takes for 128 bytes of a row that splits sectors of L2, and for 128 bytes of any other row.
_SPLIT_ROW_CLOCKS, _ROW_CLOCKS = 4.3, 2.2
#: Bytes a clock that L2 sends where neighboring CTAs do not read the same, as those that divide K.
_L2_BYTES = 6600
#: Until the first stage of a tile is there; from the request of a later stage until it is there.
_FIRST_STAGE_CLOCKS = 2700
_LATENCY_CLOCKS = 2355
#: A stage's scales of blocks, loaded by threads or by TMA; storing a thread's sum as 16 bits.
_SCALES_CLOCKS, _RING_SCALES_CLOCKS = 168, 110
_STORE_CLOCKS = 17.5
#: Until CTAs of a cluster have met; bytes of sums a clock that they send.
_MEETING_CLOCKS = 380
_SUMS_BYTES = 9.6
#: A single wave on more than this part of all SMs leaves the next launch none to begin on, which costs microseconds.
_FULL_PART = 0.97
_FULL_US = 1.0
#: Reading operands and multiplying them overlap: the part of the shorter time that the longer one does not hide.
#: [H100, gemm.json]
_UNHIDDEN_PART = 0.17
#: Tiles of this many rows read the same columns one after the other. If L2 does not hold the operands, they take longer
#: by this part of the time of reading them.
_DRIFT_PART = 0.23
_DRIFTING_M = 64
#: Clocks that an epilogue takes for each sum of a thread.
_EPILOGUE_CLOCKS = {"none": 0, "linear": 10, "relu": 10, "gelu": 52, "gelu_tanh": 38, "silu": 36}


#: Predicts one launch of a problem at M, an int or an int64 array, instead of the problem's.
CostModel = Callable[[Any, Problem], Cost]


def wgmma_cost_model(spec: Any, gpu: Gpu) -> CostModel:
    """Return the cost model of an instance of versions 1 to 7.

    Tiles run in waves. The tensor cores, the latency of loads, or L2 bounds their stages. Terms without sizes are
    computed once: a table calls the model for every shape, of which there may be many.
    """
    cluster_m, cluster_n, cluster_k = spec.cluster_m, spec.cluster_n, spec.cluster_k
    element_bytes, k_bytes = spec.element_bytes, spec.element_bytes * spec.block_k
    clusters = max(1, clusters_at_once(spec.launch_cluster, gpu.sm_count))
    a_rows, b_rows = spec.loaded_rows
    latency = _LATENCY_CLOCKS / max(1, spec.most_stages(get_target(gpu.target)))
    arrived_clocks = max(_multiplying_clocks(spec), latency)
    unused_clocks = (spec.slot_n - spec.block_n) * k_bytes / _UNUSED_BYTES
    max_rows, row_bytes, other_bytes = spec.max_a_box_rows, 0, spec.loaded_stage_bytes
    if spec.cluster == 1:
        other_bytes = spec.boxes_bytes(0)
        row_bytes = spec.boxes_bytes(1) - other_bytes
    cluster_stage_k, tile = spec.block_k * cluster_k, spec.block_m * spec.block_n // cluster_k
    sums_of_thread = tile / (128 * spec.warpgroups)
    stored = (_STORE_CLOCKS * spec.out_bytes / 2 + _EPILOGUE_CLOCKS[spec.epilogue]) * sums_of_thread
    meeting = _MEETING_CLOCKS + 4 * (cluster_k - 1) * tile / _SUMS_BYTES if cluster_k > 1 else 0.0
    launch_us, bytes_per_us = spec.launch_us, gpu.memory_bytes_per_us

    def cost(m: Any, problem: Problem) -> Cost:
        tiles_m, tiles_n = -(-m // cluster_m), -(-problem.n // cluster_n)
        tiles = problem.batch * tiles_m * tiles_n
        waves = -(-tiles // clusters)
        clocks: Any = arrived_clocks
        a_is_split, b_is_split = problem.split_rows
        if a_is_split or b_is_split:
            a_clocks, b_clocks = (_SPLIT_ROW_CLOCKS if split else _ROW_CLOCKS for split in (a_is_split, b_is_split))
            clocks = max(clocks, (a_rows * a_clocks + b_rows * b_clocks) * k_bytes / 128)
        if cluster_k > 1:  # L2 merges the loads of an operand whose rows all tiles read.
            rows = spec.block_m * (tiles_m > 1) + spec.block_n * (tiles_n > 1)
            ctas = np.minimum(tiles * cluster_k, gpu.sm_count)
            clocks = np.maximum(clocks, ctas * rows * k_bytes / _L2_BYTES)
        loaded = np.minimum(max_rows, -(-m // 8) * 8) * row_bytes + other_bytes
        stage = clocks + loaded / _LOADED_BYTES + unused_clocks
        mainloop = waves * -(-problem.k // cluster_stage_k) * stage
        firsts = 1 if spec.is_persistent else waves
        around = spec.store_clocks(waves, stored, mainloop / waves) + firsts * _FIRST_STAGE_CLOCKS
        mainloop_us = mainloop / gpu.sm_clock_mhz
        operands = float(problem.batch * element_bytes * problem.k) * (m + problem.n)
        read_us = operands / bytes_per_us
        memory_us = np.maximum(0.0, read_us - mainloop_us) + _UNHIDDEN_PART * np.minimum(read_us, mainloop_us)
        if spec.block_m == _DRIFTING_M:
            memory_us += _DRIFT_PART * read_us * ((operands > IN_L2_BYTES) & (tiles_m > 1))
        is_full = (waves == 1) & (tiles * cluster_k > _FULL_PART * gpu.sm_count)
        return Cost(
            launch_us=launch_us + _FULL_US * is_full + around / gpu.sm_clock_mhz,
            sm_us=mainloop_us,
            reduction_us=waves * (meeting / gpu.sm_clock_mhz),
            memory_us=memory_us,
            tensor_us=0.0,
        )

    return cost


def _multiplying_clocks(spec: Any) -> float:
    """Return the clocks of a stage that has arrived: of the tensor cores, or of shared memory."""
    k_bytes, wgmmas = spec.element_bytes * spec.block_k, spec.block_m // WGMMA_M
    products = spec.block_m * (spec.block_n + _MORE_COLUMNS) * k_bytes / (_MAC_BYTES * _RATE_PART)
    scales = _RING_SCALES_CLOCKS if spec.ring_has_scales else _SCALES_CLOCKS
    # The other warpgroups multiply meanwhile; scaling takes the place of what else there is between two stages.
    gap = scales if spec.block_scales else spec.stage_gap / spec.warpgroups**2
    through_smem = k_bytes * (wgmmas * (WGMMA_M + spec.block_n) + spec.block_m + spec.slot_n)
    clocks: float = max(products + gap, through_smem / _SHARED_BYTES)
    return clocks
