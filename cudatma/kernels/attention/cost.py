"""Predict the time of the attention kernels on a GPU, in order to rank every tile of every version.

``m`` is an int or an int64 array, because a choice table evaluates each tile at all M at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.kernels.attention.problem import Problem
from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.schedule import ceil_div
from cudatma.target import get_target

#: Number of multiplications per clock cycle on an SM's tensor cores. [H100 white paper]
_MACS = 2048
#: Number of CTAs for which an SM has enough registers, keyed by the number of warpgroups per CTA. [a1 and a2 with 96
#: registers per thread]
_MAX_CTAS: Mapping[int, int] = {1: 5, 2: 2}
#: Microseconds of a launch. [H100]
_LAUNCH_US = 1.0
#: Fraction of the maximum clock rate that long launches reach under the power limit. [H200]
_CLOCK = 0.886


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Clock cycles that an SM needs for a tile of ``tile_m`` queries with ``q_stages`` slots of queries.

    Attributes
    ----------
    around : float
        Cycles for the prologue and the epilogue.
    products : float
        Time of the MMAs as a multiple of the ideal tensor-core time.
    scores : float
        Cycles per 2^14 scores.
    block : float
        Cycles per block.
    start : float
        Cycles per launch.
    shared : float
        Exponent of the speedup if CTAs share an SM, or 0 for no speedup.
    """

    tile_m: int
    q_stages: int = 1
    around: float
    products: float
    scores: float = 0.0
    block: float = 0.0
    start: float = 0.0
    shared: float = 0.0


def cost_at(config: Any, m: Any, problem: Problem, gpu: Gpu) -> Cost:
    """Return the predicted time for ``m`` queries, an int or an int64 array. The problem's own M is ignored.

    The time is determined by the SM with the most work or by the longest tile.
    """
    tile_m, tile_n = config.tile_m, config.tile_n
    k_length = m if problem.keys == 0 else problem.k_length
    keys = 1.0 * ceil_div(k_length, tile_n) * tile_n
    if problem.is_causal:
        # A causal tile skips whole blocks of keys after its last query.
        beyond = tile_m + tile_n - math.gcd(tile_m, tile_n)
        keys = np.minimum(keys, keys - 0.5 * np.minimum(keys, m) + 0.5 * beyond)
    clocks = clocks_of(config)
    waves, at_least = _waves(config, clocks, problem.batch * problem.heads * ceil_div(m, tile_m), gpu)
    longest = at_least * _tile_clocks(config, clocks, k_length)
    cycles = clocks.start + np.maximum(waves * _tile_clocks(config, clocks, keys), longest)
    mainloop_us = cycles / (_CLOCK * gpu.sm_clock_mhz)
    rows = problem.batch * (m * problem.heads + k_length * problem.kv_heads)
    memory_us = 2.0 * rows * (config.head_dim + config.v_head_dim) / gpu.memory_bytes_per_us
    return Cost(_LAUNCH_US, mainloop_us, 0.0, np.maximum(0.0, memory_us - mainloop_us), 0.0)


def clocks_of(config: Any) -> Clocks:
    """Return the preset's Clocks for the tile."""
    preset_clocks: tuple[Clocks, ...] = config.preset.clocks
    tile = config.tile_m, config.q_stages
    return next(clocks for clocks in preset_clocks if (clocks.tile_m, clocks.q_stages) == tile)


def _tile_clocks(config: Any, clocks: Clocks, keys: Any) -> Any:
    """Return the number of cycles per SM for a tile that attends to ``keys`` keys, which is a number or an array."""
    scores = config.tile_m * keys
    products = scores * (config.head_dim + config.v_head_dim) / _MACS * clocks.products
    return clocks.around + products + scores / 2**14 * clocks.scores + keys / config.tile_n * clocks.block


def _waves(config: Any, clocks: Clocks, tiles: Any, gpu: Gpu) -> tuple[Any, Any]:
    """Return the number of waves with one tile per SM at a time, and the number of waves with several."""
    if config.reallocates_registers and not config.is_causal:
        # All tiles take the same time, so all SMs wait for the last wave.
        share = np.minimum(config.ctas_per_sm, ceil_div(tiles, gpu.sm_count))
        return 1.0 * ceil_div(tiles, gpu.sm_count * share) * share, 1.0
    # The number of waves may be fractional, because several CTAs share an SM.
    tiles_per_sm = np.maximum(1.0, tiles / gpu.sm_count)
    if not clocks.shared:
        return tiles_per_sm, 1.0
    target, smem_bytes = get_target(gpu.target), config.smem_bytes
    counts = range(1, _MAX_CTAS[config.warpgroups] + 1)
    at_a_time = np.minimum(tiles_per_sm, sum(smem_bytes <= target.smem_share_bytes(count) for count in counts))
    faster = at_a_time**clocks.shared
    return tiles_per_sm / faster, at_a_time / faster
