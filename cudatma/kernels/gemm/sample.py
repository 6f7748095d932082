"""A small dense GEMM for the emulator: random operands, and its error against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudatma.arrays import describe
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, counted
from cudatma.kernels.gemm.gemm import plan_gemm
from cudatma.kernels.gemm.problem import Problem
from cudatma.kernels.gemm.wgmma import WgmmaSpec
from cudatma.kernels.sample import Sample
from cudatma.target import Target

if TYPE_CHECKING:
    from cudatma.emulator import Report

_LIMITS = {"float16": 1e-3, "bfloat16": 6e-3}


def sample(
    target: Target,
    *,
    m: int = 72,
    n: int = 136,
    k: int = 320,
    dtype: str = "float16",
    block_m: int = 64,
    stages: int = 3,
) -> Sample:
    """y = a b^T; k: a multiple of 8. Raises ArgumentError, ArgumentTypeError, TargetError, CompileError,
    DriverError (no NVRTC)."""
    Problem(m, n, k, dtype)
    if k % 8:
        raise ArgumentError("k", k, "a multiple of 8")
    random, kind = np.random.default_rng(0), activation_type(dtype).numpy
    a, b = (random.standard_normal(shape, np.float32).astype(kind) for shape in ((m, k), (n, k)))
    out = np.full((m, n), np.nan, a.dtype)
    spec = WgmmaSpec(dtype, block_m, 2, stages)
    launch = plan_gemm(describe(a), describe(b), describe(out), spec, target)
    reference = a.astype(np.float64) @ b.astype(np.float64).T

    def run(**options: Any) -> Report:
        return launch.emulate(target, **options)

    def error() -> float:
        return float(np.linalg.norm(out.astype(np.float64) - reference) / np.linalg.norm(reference))

    ctas = counted(int(np.prod(launch.grid)), "CTA")
    title = f"GEMM, M = {m}, N = {n}, K = {k}, {dtype}, {ctas} of {spec.threads} threads"
    return Sample(title, launch.kernel(target), run, error, _LIMITS[dtype])
