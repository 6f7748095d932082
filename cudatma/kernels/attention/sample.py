"""A small attention for the emulator: random operands, and its error against float64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from cudatma.arrays import describe
from cudatma.dtypes import activation_type
from cudatma.errors import counted
from cudatma.kernels.attention.plan import HostCounter, plan_attention
from cudatma.kernels.attention.problem import Problem
from cudatma.kernels.attention.reference import reference
from cudatma.kernels.attention.request import check_call
from cudatma.kernels.attention.versions import VERSIONS
from cudatma.kernels.sample import LIMITS, Sample, relative_error
from cudatma.target import Target

#: Small tiles of each version.
SMALL: dict[str, dict[str, Any]] = {
    "phase1": {"block_m": 32, "block_n": 32, "stages": 1, "warpgroups": 1},
    "a1": {"block_m": 64, "block_n": 64, "warpgroups": 1},
    "a2": {"block_m": 128, "block_n": 64, "warpgroups": 2},
    "a3": {"block_m": 128, "block_n": 64, "warpgroups": 2},
    "a4": {"block_m": 128, "block_n": 64, "warpgroups": 2},
    "p1": {"block_m": 64, "block_n": 64, "warpgroups": 1},
}


def sample(
    version: str,
    target: Target,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    q_length: int = 136,
    k_length: int = 200,
    head_dim: int = 64,
    dtype: str = "float16",
    causal: bool = True,
    sm_count: int = 2,
) -> Sample:
    """softmax(q k^T / sqrt(head_dim)) v. sm_count: of the GPU, whose CTAs take several tiles each. Raises
    ArgumentError, ArgumentTypeError, TargetError, CompileError, DriverError (no NVRTC)."""
    Problem(batch, heads, kv_heads, q_length, k_length, head_dim, head_dim, dtype)
    random, kind = np.random.default_rng(0), activation_type(dtype).numpy
    shapes = ((batch, q_length, heads, head_dim), *[(batch, k_length, kv_heads, head_dim)] * 2)
    q, k, v = (random.standard_normal(shape, np.float32).astype(kind) for shape in shapes)
    out, exact = np.full(q.shape, np.nan, kind), np.empty(q.shape, kind)
    request, _, result = check_call(q, k, v, causal, out=out)
    if result is None:
        raise AssertionError("check_call() describes the out that it is given")
    tile = SMALL["a3" if version == "a1" else version]  # warpgroups that drift apart show more
    spec = VERSIONS[version](dtype, head_dim, head_dim, request.mask.is_causal, **tile)
    counter = HostCounter()
    launch = plan_attention(request, result, None, spec, target, sm_count, counter)
    reference(request, describe(exact), None)
    wanted = exact.astype(np.float64)

    def error() -> float:
        if counter.taken.any():  # the next launch would begin with a later tile
            return math.inf
        return relative_error(out, wanted)

    ctas = counted(int(np.prod(launch.grid)), "CTA")
    title = f"attention, {request.problem().description}, {ctas} of {spec.threads} threads"
    return Sample(title, launch.kernel(target), partial(launch.emulate, target), error, LIMITS[dtype])


_SAMPLES = {version: partial(sample, version) for version in VERSIONS}
phase1_sample, a1_sample, a2_sample, a3_sample, a4_sample, p1_sample = _SAMPLES.values()
