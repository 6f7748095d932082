"""Predict the time of a layer of experts on a GPU, in order to select candidates for measurements.

The time of a grouped GEMM is that of marlin_gemm's kernel of the same version (marlin/cost.py) for the expected number
of blocks, if pairs choose experts at random. docs/lab/marlin.md compares the predictions with measurements.
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
from cudatma.kernels.schedule import ceil_div
from cudatma.target import get_target

#: Numbers of standard deviations by which the numbers of rows of representative experts differ from the mean.
_DEVIATIONS = np.array([-1.53, -0.89, -0.49, -0.16, 0.16, 0.49, 0.89, 1.53])[:, None]
#: Factor by which the skinny kernel takes longer than marlin_gemm's, because it gathers rows and changes tiles. [H200]
_SKINNY = 1.2
#: Microseconds of the routing: a constant, and per pair. Bytes per microsecond of the sum. [H200]
_ROUTE_US, _PAIR_US, _SUM_BYTES = 1.5, 3.2e-4, 3.6e6


def layer_cost(config: Any, m: Any, problem: MoeProblem, gpu: Gpu) -> Cost:
    """Return the predicted time of all launches of a layer with a LayerConfig for M = ``m``, an int or an array."""
    tokens = np.atleast_1d(np.asarray(m, np.float64))
    pairs = tokens * problem.top_k
    share = problem.experts / problem.global_experts
    mean = pairs / problem.global_experts
    used = -np.expm1(-mean)
    # Numbers of rows of representative experts among those that have rows, and the expected number of these experts.
    rows = np.maximum(1, np.rint(mean / used + np.sqrt(mean / used) * _DEVIATIONS))
    experts = problem.experts * used
    target = get_target(gpu.target)
    loop_us = ends_us = memory_us = tensor_us = np.zeros_like(tokens)
    for product in PRODUCTS:
        grouped, shape = config.grouped(product, problem, target), problem.product(product)
        tiles_n, stages = ceil_div(shape.n, grouped.tile_n), ceil_div(shape.k, grouped.tile_k)
        read_us = experts * weight_us(grouped.weight_bits, shape.k, shape.n, gpu)
        if grouped.is_skinny:
            blocks = share * pairs if config.direct else experts * np.ceil(rows / grouped.tile_m).mean(axis=0)
            waves = np.ceil(np.maximum(1, blocks) * tiles_n / gpu.sm_count)
            clocks = waves * stages * grouped.tile_k * skinny_step_clocks(grouped, gpu)
            loop_us = loop_us + _SKINNY * clocks / gpu.sm_clock_mhz
            memory_us = memory_us + _SKINNY * SKINNY_MEMORY * read_us
            continue
        work, computed = _wgmma_work(grouped, rows)
        tile_clocks = stages * _stage_clocks(grouped, grouped.tile_m)
        total = experts * work * stages * tiles_n
        blocks = experts * np.ceil(rows / grouped.tile_m).mean(axis=0)
        # CTAs take tiles in turn, so the last one ends about half a tile after the average.
        clocks = np.maximum(
            tile_clocks, total / gpu.sm_count + np.where(blocks * tiles_n > gpu.sm_count, 0.5, 0) * tile_clocks
        )
        results = np.maximum(1, blocks * tiles_n / gpu.sm_count)
        clock_us = WGMMA_SM / gpu.sm_clock_mhz
        loop_us = loop_us + clocks * clock_us
        ends_us = ends_us + results * (TILE + RESULT * grouped.tile_m * grouped.tile_n / (128 * 128)) * clock_us
        memory_us = memory_us + WGMMA_MEMORY * read_us
        rate = WGMMA_TENSOR + WGMMA_POWER * (tokens >= SUSTAINED_FROM)
        operations = experts * computed * shape.n * shape.k
        tensor_us = tensor_us + rate * operations / (WGMMA_MACS * gpu.sm_count * gpu.sm_clock_mhz)
    launch_us = LAUNCH_US * (3 if config.direct else 4) + ends_us
    if not config.direct:
        launch_us = launch_us + _ROUTE_US + _PAIR_US * pairs
    sum_us = (share * pairs + tokens) * problem.k * ELEMENT_BYTES / _SUM_BYTES
    terms = [launch_us, loop_us, sum_us, memory_us, tensor_us]
    return Cost(*(terms if np.ndim(m) else [float(term[0]) for term in terms]))


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
    """Return the clocks of a stage of a block with this number of rows."""
    names = ("tile_n", "tile_k", "cluster_n", "warpgroups", "slice_k", "pingpong", "weight_bits")
    return wgmma_stage_clocks(SimpleNamespace(tile_m=rows, **{name: getattr(config, name) for name in names}))
