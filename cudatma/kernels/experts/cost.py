"""Predict the run time of an MoE layer on a GPU to choose which candidates to measure.

The model assumes random routing. A grouped GEMM takes as long as the same version of the marlin_gemm kernel
(marlin/cost.py) takes for the expected number of blocks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cudatma.kernels.cost import Cost
from cudatma.kernels.experts.config import PRODUCTS, ExpertsConfig
from cudatma.kernels.experts.problem import ELEMENT_BYTES, MoeProblem
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.marlin.cost import (
    LAUNCH_US,
    RESULT,
    SKINNY_MEMORY,
    SUSTAINED_FROM,
    TILE,
    WGMMA_MACS,
    WGMMA_MEMORY,
    WGMMA_POWER,
    WGMMA_SM,
    WGMMA_TENSOR,
    skinny_step_clocks,
    weight_us,
    wgmma_stage_clocks,
)
from cudatma.kernels.marlin.problem import LinearShape
from cudatma.kernels.schedule import ceil_div
from cudatma.target import get_target

#: Numbers of standard deviations by which the numbers of rows of representative experts differ from the mean.
_DEVIATIONS = np.array([-1.53, -0.89, -0.49, -0.16, 0.16, 0.49, 0.89, 1.53])[:, None]
#: Factor by which the skinny kernel takes longer than marlin_gemm's, because it gathers rows and changes tiles. [H200]
_SKINNY = 1.2
#: Microseconds of the routing: a constant, and per pair. Bytes per microsecond of the sum. [H200]
_ROUTE_US, _PAIR_US, _SUM_BYTES = 1.5, 3.2e-4, 3.6e6


def layer_cost(config: Any, m: Any, problem: MoeProblem, gpu: Gpu) -> Cost:
    """Return the predicted time of a layer's launches with a LayerConfig for M = ``m``, an int or an array."""
    tokens = np.atleast_1d(np.asarray(m, np.float64))
    pairs = tokens * problem.top_k
    share = problem.experts / problem.global_experts
    mean = pairs / problem.global_experts
    used = -np.expm1(-mean)
    # Numbers of rows of representative experts among those that have rows, and the expected number of these experts.
    rows = np.maximum(1, np.rint(mean / used + np.sqrt(mean / used) * _DEVIATIONS))
    experts, target = problem.experts * used, get_target(gpu.target)
    products = []
    for name in PRODUCTS:
        grouped = config.grouped(name, problem, target)
        blocks = share * pairs if config.direct else experts * np.ceil(rows / grouped.tile_m).mean(axis=0)
        if grouped.is_skinny:
            products.append(_skinny(grouped, problem.product(name), experts, blocks, gpu))
        else:
            at_power_limit = tokens >= SUSTAINED_FROM
            products.append(_wgmma(grouped, problem.product(name), experts, blocks, rows, at_power_limit, gpu))
    ends_us, loop_us, memory_us, tensor_us = (first + second for first, second in zip(*products, strict=True))
    launch_us = ends_us + LAUNCH_US * (3 if config.direct else 4)
    if not config.direct:
        launch_us = launch_us + _ROUTE_US + _PAIR_US * pairs
    sum_us = (share * pairs + tokens) * problem.k * ELEMENT_BYTES / _SUM_BYTES
    terms = [launch_us, loop_us, sum_us, memory_us, tensor_us]
    return Cost(*(terms if np.ndim(m) else [float(term[0]) for term in terms]))


def _skinny(config: ExpertsConfig, shape: LinearShape, experts: Any, blocks: Any, gpu: Gpu) -> tuple[Any, ...]:
    """Return the microseconds of a product: the ends of tiles, the main loops, memory, and tensor cores."""
    waves = np.ceil(np.maximum(1, blocks) * ceil_div(shape.n, config.tile_n) / gpu.sm_count)
    clocks = waves * ceil_div(shape.k, config.tile_k) * config.tile_k * skinny_step_clocks(config, gpu)
    memory_us = SKINNY_MEMORY * experts * weight_us(config.weight_bits, shape.k, shape.n, gpu)
    none = np.zeros_like(blocks)
    return none, _SKINNY * clocks / gpu.sm_clock_mhz, _SKINNY * memory_us, none


def _wgmma(
    config: ExpertsConfig, shape: LinearShape, experts: Any, blocks: Any, rows: Any, at_power_limit: Any, gpu: Gpu
) -> tuple[Any, ...]:
    """Return the microseconds of a product in the order of _skinny()."""
    tiles_n, stages = ceil_div(shape.n, config.tile_n), ceil_div(shape.k, config.tile_k)
    stage_clocks, computed = _wgmma_work(config, rows)
    tile_clocks, tiles = stages * _stage_clocks(config, config.tile_m), blocks * tiles_n
    # CTAs take tiles in turn, so the last one ends about half a tile after the average.
    after = np.where(tiles > gpu.sm_count, tile_clocks / 2, 0)
    clocks = np.maximum(tile_clocks, experts * stage_clocks * stages * tiles_n / gpu.sm_count + after)
    ends = np.maximum(1, tiles / gpu.sm_count) * (TILE + RESULT * config.tile_m * config.tile_n / (128 * 128))
    clock_us = WGMMA_SM / gpu.sm_clock_mhz
    memory_us = WGMMA_MEMORY * experts * weight_us(config.weight_bits, shape.k, shape.n, gpu)
    macs = (WGMMA_TENSOR + WGMMA_POWER * at_power_limit) * experts * computed * shape.n * shape.k
    tensor_us = macs / (WGMMA_MACS * gpu.sm_count * gpu.sm_clock_mhz)
    return ends * clock_us, clocks * clock_us, memory_us, tensor_us


def _wgmma_work(config: ExpertsConfig, rows: Any) -> tuple[Any, Any]:
    """Return the expected clocks per stage of an expert's blocks, and the number of rows that they compute."""
    whole = np.ceil(rows / config.tile_m) - 1
    rest = rows - whole * config.tile_m
    counts = np.array(config.row_counts)
    clocks = np.array([_stage_clocks(config, count) for count in config.row_counts])
    index = np.searchsorted(counts, rest)
    work = whole * clocks[-1] + clocks[index]
    return work.mean(axis=0), (whole * config.tile_m + counts[index]).mean(axis=0)


def _stage_clocks(config: ExpertsConfig, rows: int) -> float:
    """Return the clock cycles per stage for a block with this number of rows."""
    names = ("tile_n", "tile_k", "cluster_n", "warpgroups", "slice_k", "pingpong", "weight_bits", "dequantize_factor")
    return wgmma_stage_clocks(SimpleNamespace(tile_m=rows, **{name: getattr(config, name) for name in names}))
