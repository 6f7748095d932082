"""Run the Marlin kernel on the emulator with NumPy arrays, in the same way as on a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from ptx_of import ptx_of_template

from cudatma.arrays import describe
from cudatma.emulator import Report, load
from cudatma.kernels.arguments import FLAGS
from cudatma.kernels.engine import host_workspace
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.host import host_bytes
from cudatma.kernels.marlin.arguments import gemm_arguments
from cudatma.kernels.marlin.choose import choose_untuned
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.gemm import MARLIN_GEMM, MarlinOptions, weight_of
from cudatma.kernels.marlin.problem import Problem
from cudatma.kernels.schedule import Schedule, schedule
from cudatma.quantization import PackedWeight, quantize
from cudatma.target import get_target

#: Upper bound of the relative error in the 2-norm for fp32 accumulation and one rounding to the dtype.
TOLERANCE = {"float16": 1e-3, "bfloat16": 6e-3}


def operands(m: int, k: int, n: int, of: MarlinConfig) -> tuple[Any, PackedWeight, Any]:
    """Return random x (m, k), a weight (k, n) that matches the config, and a bias (n,)."""
    rng = np.random.default_rng(m + k + n)
    dense = rng.normal(size=(k, n)).astype(np.float32) * 0.05
    w = quantize(dense, dtype=of.dtype, group_size=of.group_size, symmetric=not of.has_zeros)
    dtype = np.dtype(w.scales.dtype)
    return rng.normal(size=(m, k)).astype(dtype), w, rng.normal(size=n).astype(dtype)


def launch_programmatically(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make run_marlin() use programmatic dependent launches."""
    monkeypatch.setattr(sys.modules[__name__], "problem_of", partial(problem_of, programmatic=True))


def problem_of(x: Any, w: PackedWeight, out: Any, **options: Any) -> Problem:
    """Return the problem of a call with these arrays."""
    checked = MARLIN_GEMM.check((x, None), out, MarlinOptions(False, False), w)
    return replace(checked.problem, **options)


def run_marlin(
    x: Any,
    w: PackedWeight,
    *,
    target: str = "sm_90a",
    processors: int = 132,
    config: MarlinConfig | None = None,
    bias: Any = None,
    divide: bool = True,
    work: Schedule | None = None,
    out: Any = None,
    **options: Any,
) -> tuple[Any, Report]:
    """Return x @ dequantized(w) as (rows, N), and the emulator's report.

    ``processors`` is the number of SMs of the imagined GPU. By default, tiles are split even if this is slower, because
    a GPU would not split the tiles of these small problems. ``work`` replaces this split.
    """
    chosen = get_target(target)
    k, n = w.shape
    out = np.full((x.shape[0], n), np.nan).astype(x.dtype) if out is None else out
    problem = problem_of(x, w, out)
    config = config or choose_untuned(problem, imagined_gpu(chosen, processors))
    work = work or schedule(config, problem.m, n, k, processors, divide=divide, eager=True)
    arguments = gemm_arguments(problem, config, work, chosen)
    arrays = {"x": describe(x), "out": describe(out), **weight_of(w).arrays}
    if bias is not None:
        arrays["bias"] = describe(bias)
    space = host_workspace(arguments.sizes)
    module = load(ptx_of_template(config.template, config, target))
    report: Report = module.launch(
        config.entry,
        arguments.sizes.grid,
        config.threads,
        arguments.filled(arrays | space),
        cluster=arguments.cluster if arguments.cluster > 1 else None,
        shared_bytes=config.smem_bytes,
        arrays=tuple(host_bytes(info) for info in (arrays | space).values()),
        **options,
    )
    assert FLAGS not in space or not host_bytes(space[FLAGS]).any()
    return out, report


def relative_error(out: Any, x: Any, w: PackedWeight, bias: Any = None) -> float:
    """Return ||out - reference|| / ||reference|| with a float64 reference."""
    wanted = x.astype(np.float64) @ w.dequantize() + (0 if bias is None else bias.astype(np.float64))
    return float(np.linalg.norm(out.astype(np.float64) - wanted) / np.linalg.norm(wanted))
