"""A small Marlin GEMM for the emulator: random operands, and its error against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from cudatma.dtypes import activation_type
from cudatma.emulator import Report
from cudatma.errors import ArgumentError, counted
from cudatma.kernels.candidates import Candidate, cheapest
from cudatma.kernels.gpu import Gpu, imagined_gpu
from cudatma.kernels.launch import Launch
from cudatma.kernels.marlin.emulated import prepare
from cudatma.kernels.marlin.mma_sync_candidates import mma_sync_candidates
from cudatma.kernels.marlin.operands import check_input, check_output
from cudatma.kernels.marlin.problem import Problem
from cudatma.kernels.marlin.skinny_candidates import skinny_candidates
from cudatma.kernels.marlin.specs import AnyMarlinSpec, resolve_fused
from cudatma.kernels.marlin.wgmma_candidates import wgmma_candidates
from cudatma.kernels.sample import Sample
from cudatma.kernels.schedule import schedule
from cudatma.quantization import quantize
from cudatma.target import Target

#: ||out - reference|| / ||reference|| that one rounding to the dtype, after fp32 accumulation, must keep.
_LIMITS = {"float16": 1e-3, "bfloat16": 6e-3}


def mma_sync_sample(
    target: Target,
    *,
    m: int = 16,
    n: int = 256,
    k: int = 512,
    dtype: str = "float16",
    group_size: int = 128,
    sm_count: int = 1,
    seed: int = 0,
) -> Sample:
    """y = x W with x (m, k) and W (k, n) in int4, on the mma.sync kernel; k: a multiple of 8.

    sm_count: SMs of the imagined GPU. With few of them each gets many stages, and the ring wraps.
    Raises ArgumentError, QuantizationError, TargetError, CompileError, DriverError (no NVRTC).
    """
    return _sample(target, mma_sync_candidates, m, n, k, dtype, group_size, sm_count, seed)


def wgmma_sample(
    target: Target,
    *,
    m: int = 64,
    n: int = 256,
    k: int = 512,
    dtype: str = "float16",
    group_size: int = 128,
    sm_count: int = 1,
    seed: int = 0,
) -> Sample:
    """The same on the wgmma kernel, whatever M; k: a multiple of 8."""
    return _sample(target, wgmma_candidates, m, n, k, dtype, group_size, sm_count, seed)


def skinny_sample(
    target: Target,
    *,
    m: int = 8,
    n: int = 256,
    k: int = 512,
    dtype: str = "float16",
    group_size: int = 128,
    sm_count: int = 2,
    seed: int = 0,
) -> Sample:
    """The same on the skinny GEMM, whatever M; k: a multiple of 8."""
    return _sample(target, skinny_candidates, m, n, k, dtype, group_size, sm_count, seed)


def _sample(
    target: Target,
    candidates: Callable[[Problem, Gpu], Iterable[Candidate[AnyMarlinSpec]]],
    m: int,
    n: int,
    k: int,
    dtype: str,
    group_size: int,
    sm_count: int,
    seed: int,
) -> Sample:
    """candidates: the kernel's function."""
    if candidates is wgmma_candidates:
        target.require("wgmma", "marlin_wgmma")
    if k % 8:  # marlin_gemm copies other rows first
        raise ArgumentError("k", k, "a multiple of 8", "TMA loads rows of whole 16-byte chunks")
    for field, value in (("m", m), ("n", n), ("k", k), ("sm_count", sm_count)):
        if value < 1:
            raise ArgumentError(field, value, "1 and more")
    random = np.random.default_rng(seed)
    weight = quantize(random.standard_normal((k, n), np.float32) * 0.05, group_size=group_size, dtype=dtype)
    x = random.standard_normal((m, k), np.float32).astype(activation_type(dtype).numpy)
    out = np.full((m, n), np.nan, x.dtype)
    rows = check_input(x, weight)
    chosen = cheapest(candidates(Problem.of(weight, m), imagined_gpu(target, sm_count)))
    if chosen is None:
        raise ArgumentError("m", m, "a number of rows that this kernel takes", "the kernels divide them: see --help")
    spec = resolve_fused(chosen, weight.scale_fit.form)
    work = schedule(spec, m, n, k, sm_count)
    launch: Launch = prepare(rows, weight, check_output(out, rows, weight), None, spec, work, target)
    kernel = launch.kernel(target)
    reference = x.astype(np.float64) @ weight.dequantize(dtype=np.float64)

    def run(**options: Any) -> Report:
        return launch.emulate(target, **options)

    def error() -> float:
        return float(np.linalg.norm(out.astype(np.float64) - reference) / np.linalg.norm(reference))

    title = f"Marlin GEMM, M = {m}, N = {n}, K = {k}, {dtype}, {counted(work.ctas, 'CTA')} of {spec.threads} threads"
    return Sample(title, kernel, run, error, _LIMITS[dtype])
