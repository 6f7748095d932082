"""attention_decode's kernel for dumps and compile checks, and with random operands for the emulator."""

from __future__ import annotations

import math
from functools import partial

import ml_dtypes
import numpy as np

from cudatma.arrays import describe
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, counted
from cudatma.kernels.attention.decode_plan import HostParts, divide, fitted_spec, plan_decode
from cudatma.kernels.attention.decode_reference import decode_reference
from cudatma.kernels.attention.decode_request import check_decode
from cudatma.kernels.attention.decode_spec import AttentionDecode
from cudatma.kernels.attention.problem import HEAD_DIMS, OPERAND_TYPES
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.sample import LIMITS, Sample, relative_error
from cudatma.target import Target


def dump_specs(target: Target, has_fp8_cache: bool = False) -> list[AttentionDecode]:
    """Each pair of head dims once; each kind of mask; each way to load."""
    yes, no = True, False
    masks = ((no, no, no, yes), (yes, no, no, no), (yes, yes, no, no), (no, yes, yes, yes))
    page_sizes = (0, 16, 64, 8 if has_fp8_cache else 5)
    found = []
    for index, dims in enumerate(HEAD_DIMS):
        dtype = tuple(OPERAND_TYPES)[index % 2]
        page_size = page_sizes[(index + index // 4) % 4]
        found.append(fitted_spec(dtype, dims, masks[index % 4], page_size, target, has_fp8_cache))
    return found


def _sample(
    has_fp8_cache: bool,
    target: Target,
    *,
    batch: int = 2,
    heads: int = 8,
    kv_heads: int = 1,
    q_length: int = 1,
    k_length: int = 200,
    head_dim: int = 64,
    page_size: int = 0,
    dtype: str = "float16",
    sm_count: int = 4,
) -> Sample:
    """Attention of q_length new queries to up to k_length keys, in pages unless page_size is 0. sm_count: of the GPU.
    Raises ArgumentError, ArgumentTypeError, TargetError, CompileError, DriverError (no NVRTC)."""
    if dtype not in OPERAND_TYPES:
        raise ArgumentError("dtype", dtype, ", ".join(OPERAND_TYPES))
    random, kind = np.random.default_rng(0), activation_type(dtype).numpy
    lengths = np.array([max(1, k_length - 37 * index) for index in range(batch)], np.int32)
    table, cache = None, (batch, k_length, kv_heads, head_dim)
    if page_size:
        pages = -(-k_length // page_size)
        table = random.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
        cache = batch * pages, page_size, kv_heads, head_dim
    of_q = batch, q_length, heads, head_dim
    of_cache = ml_dtypes.float8_e4m3fn if has_fp8_cache else kind
    shapes = ((of_q, kind), (cache, of_cache), (cache, of_cache))
    q, k, v = (random.standard_normal(shape, np.float32).astype(its) for shape, its in shapes)
    out, exact = np.full(q.shape, np.nan, kind), np.empty(q.shape, kind)
    request, _, result = check_decode(q, k, v, lengths, page_table=table, out=out)
    if result is None:
        raise AssertionError("check_decode() describes the out that it is given")
    work = divide(request, imagined_gpu(target, sm_count))
    workspace = HostParts.of(work)
    launch = plan_decode(request, result, None, work, target, workspace)
    decode_reference(request, describe(exact), None)
    wanted = exact.astype(np.float64)

    def error() -> float:
        if workspace.counters.any():  # the next launch would take another CTA for the last one
            return math.inf
        return relative_error(out, wanted)

    parts = f"{counted(work.tiles, 'tile')} in {counted(work.parts, 'part')}{' of e4m3' * has_fp8_cache}"
    title = f"attention_decode, {batch} x {k_length} keys, {heads}/{kv_heads} heads of {head_dim}, {dtype}, {parts}"
    return Sample(title, launch.kernel(target), partial(launch.emulate, target), error, LIMITS[dtype])


decode_sample, fp8_sample = partial(_sample, False), partial(_sample, True)
fp8_dump_specs = partial(dump_specs, has_fp8_cache=True)
