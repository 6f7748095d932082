"""Runs the Marlin kernel on the emulator as the GPU's plan runs it, on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from ptx_of import ptx_of_template

from cudatma.descriptor import create_activation_tma_desc, create_scale_tma_desc, create_weight_tma_desc
from cudatma.emulator import Report, load
from cudatma.kernels.marlin.config import Feeds, Layer, choose
from cudatma.kernels.marlin.problem import ProblemStruct, fill_problem, schedule
from cudatma.kernels.marlin.spec import MarlinSpec
from cudatma.quantization import PackedWeight
from cudatma.target import get_target

TEMPLATE = "kernels/marlin_portable.cu.j2"


def run_marlin(
    x: Any,
    w: PackedWeight,
    *,
    target: str = "sm_90a",
    processors: int = 132,
    feeds: Feeds | None = None,
    spec: MarlinSpec | None = None,
    bias: Any = None,
    **options: Any,
) -> tuple[Any, Report]:
    """x @ dequantised(w) as (rows, N), and the emulator's report. processors: of the imagined card."""
    chosen = get_target(target)
    k, n = w.shape
    m = x.shape[0]
    feeds = feeds or Feeds()
    spec = spec or choose(Layer(k, n, w.group_size, not w.symmetric, w.dtype), m, chosen, processors, feeds).spec
    plan = schedule(spec, m, n, k, processors)
    out = np.full((m, n), np.nan).astype(x.dtype)
    problem = ProblemStruct()
    fill_problem(problem, spec, plan, m, n, k, w.groups)
    problem.activation_pitch, problem.output_pitch = x.strides[0] // 2, n
    problem.output_vectors = int(n % 8 == 0)
    partials = np.full(max(1, plan.partial_blocks) * spec.partial_bytes + 16, 0x7F, np.uint8)
    flags = np.zeros(max(1, plan.partial_blocks) * spec.warps_m * spec.warps_n, np.uint32)
    maps: list[Any] = []
    if spec.feed_weight == "tma":
        maps.append(create_weight_tma_desc(w.qweight, spec.block_k // 64, backend="codec"))
    if spec.has_stage_scales and spec.feed_scale == "tma":
        for table in [w.scales, w.zeros] if spec.has_stage_zeros else [w.scales]:
            maps.append(
                create_scale_tma_desc(table, spec.block_n, spec.groups_per_stage, whole_column=False, backend="codec")
            )
    if spec.feed_activation == "tma":
        maps.append(create_activation_tma_desc(x, spec.block_m, backend="codec"))

    def pointer(array: Any) -> Any:
        return 0 if array is None else array.view(np.uint8) if array.dtype.itemsize == 1 else array

    args = [
        *maps,
        *(pointer(a) for a in (w.qweight, w.scales, w.zeros, x, w.perm, bias, out)),
        partials,
        flags,
        bytes(problem),
    ]
    module = load(ptx_of_template(TEMPLATE, spec, target))
    report = module.launch(spec.entry, plan.blocks, spec.threads, args, shared_bytes=spec.smem_bytes, **options)
    assert not flags.any()
    return out, report


def relative_error(out: Any, x: Any, w: PackedWeight, bias: Any = None) -> float:
    """||out - reference|| / ||reference|| against float64."""
    wanted = x.astype(np.float64) @ w.dequantize() + (0 if bias is None else bias.astype(np.float64))
    return float(np.linalg.norm(out.astype(np.float64) - wanted) / np.linalg.norm(wanted))
