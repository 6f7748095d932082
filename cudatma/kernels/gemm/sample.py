"""A small dense GEMM for the emulator: random operands, and its error against float64."""

from __future__ import annotations

from functools import partial

import numpy as np

from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, counted
from cudatma.kernels.gemm.plan import plan_gemm
from cudatma.kernels.gemm.problem import Problem
from cudatma.kernels.gemm.request import check_call_into
from cudatma.kernels.gemm.versions import VERSIONS
from cudatma.kernels.sample import LIMITS, Sample, relative_error
from cudatma.target import Target


def sample(
    version: int | str,
    target: Target,
    *,
    m: int = 72,
    n: int = 136,
    k: int = 320,
    dtype: str = "float16",
    layout: str = "RC",
    block_m: int = 64,
    block_n: int = 128,
    stages: int = 3,
    sm_count: int = 2,
) -> Sample:
    """y = a b; m, n, k: multiples of 8. sm_count: of the GPU, whose CTAs take several tiles each. Raises ArgumentError,
    ArgumentTypeError, TargetError, CompileError, DriverError (no NVRTC)."""
    Problem(m, n, k, dtype, layout)
    for name, size in (("m", m), ("n", n), ("k", k)):
        if size % 8:
            raise ArgumentError(name, size, "a multiple of 8")
    if dtype not in LIMITS:
        raise ArgumentError("dtype", dtype, ", ".join(LIMITS))
    random, kind = np.random.default_rng(0), activation_type(dtype).numpy
    a, b = (
        random.standard_normal(shape if letter == "R" else shape[::-1], np.float32).astype(kind)
        for shape, letter in zip(((m, k), (k, n)), layout, strict=True)
    )
    a, b = (array if letter == "R" else array.T for array, letter in zip((a, b), layout, strict=True))
    out = np.full((m, n), np.nan, a.dtype)
    spec = VERSIONS[version](dtype, layout, block_m, block_n, 64, stages, block_m // 64)
    request, result = check_call_into(a, b, out)
    launch = plan_gemm(request, result, spec, target, sm_count)
    reference = a.astype(np.float64) @ b.astype(np.float64)

    ctas = counted(int(np.prod(launch.grid)), "CTA")
    title = f"GEMM, M = {m}, N = {n}, K = {k}, {dtype}, {layout}, {ctas} of {spec.threads} threads"
    error = partial(relative_error, out, reference)
    return Sample(title, launch.kernel(target), partial(launch.emulate, target), error, LIMITS[dtype])


v1_sample, v2_sample, v3_sample, v4_sample, v5_sample, v6_sample, v7_sample, p1_sample = (
    partial(sample, version) for version in VERSIONS
)
