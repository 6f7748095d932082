"""Made-up operands: small launches of attention and attention_decode for the emulator, and what the tuner launches."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from cudatma.arrays import ArrayInfo, dense_strides, describe
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, counted
from cudatma.kernels.arguments import FLAGS
from cudatma.kernels.attention.arguments import attention_arguments
from cudatma.kernels.attention.attention import ATTENTION_CALL
from cudatma.kernels.attention.decode_plan import decode_arguments, divide, fitted_spec
from cudatma.kernels.attention.decode_request import check_decode
from cudatma.kernels.attention.decode_spec import AttentionDecode
from cudatma.kernels.attention.problem import HEAD_DIMS, OPERAND_TYPES, Problem
from cudatma.kernels.attention.reference import decode_reference, reference
from cudatma.kernels.attention.request import Mask, Request, check_call
from cudatma.kernels.attention.spec import AttentionSpec
from cudatma.kernels.attention.versions import VERSIONS
from cudatma.kernels.choosing import Listed, pinned
from cudatma.kernels.engine import host_workspace, launch_of
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.host import host_bytes
from cudatma.kernels.sample import LIMITS, Launch, Sample, cold_copies, empty_rows, in_turn, random_rows, relative_error
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
#: Of a cap, and of a window, that a problem has without saying how large.
_SOFTCAP, _WINDOW = 30.0, 256


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
    request, _, _ = check_call(q, k, v, causal, out=out)
    tile = SMALL["a3" if version == "a1" else version]  # warpgroups that drift apart show more
    spec = VERSIONS[version](dtype, head_dim, head_dim, request.mask.is_causal, **tile)
    arguments = attention_arguments(request, spec, target, sm_count)
    arrays = {"q": describe(q), "k": describe(k), "v": describe(v), "out": describe(out)}
    space = host_workspace(arguments.sizes)
    reference(request, arrays | {"out": describe(exact)})
    wanted = exact.astype(np.float64)

    def error() -> float:
        if FLAGS in space and host_bytes(space[FLAGS]).any():  # the next launch would begin with a later tile
            return math.inf
        return relative_error(out, wanted)

    kernel = arguments.kernel(target)
    ctas = counted(int(np.prod(arguments.sizes.grid)), "CTA")
    title = f"attention, {request.problem().description}, {ctas} of {spec.threads} threads"
    run = partial(arguments.emulate, target, arrays | space, kernel=kernel)
    return Sample(title, kernel, run, error, LIMITS[dtype])


_SAMPLES = {version: partial(sample, version) for version in VERSIONS}
phase1_sample, a1_sample, a2_sample, a3_sample, a4_sample, p1_sample = _SAMPLES.values()


def decode_specs(target: Target, has_fp8_cache: bool = False) -> list[AttentionDecode]:
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


def _decode_sample(
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
    request, _, _ = check_decode(q, k, v, lengths, page_table=table, out=out)
    work = divide(request, imagined_gpu(target, sm_count))
    arguments = decode_arguments(request, work, target)
    arrays = {"q": describe(q), "k": describe(k), "v": describe(v), "seqlens": describe(lengths), "out": describe(out)}
    arrays |= {} if table is None else {"page_table": describe(table)}
    space = host_workspace(arguments.sizes)
    decode_reference(request, arrays | {"out": describe(exact)})
    wanted = exact.astype(np.float64)

    def error() -> float:
        if FLAGS in space and host_bytes(space[FLAGS]).any():  # the next launch would take another CTA for the last
            return math.inf
        return relative_error(out, wanted)

    parts = f"{counted(work.tiles, 'tile')} in {counted(work.parts, 'part')}{' of e4m3' * has_fp8_cache}"
    title = f"attention_decode, {batch} x {k_length} keys, {heads}/{kv_heads} heads of {head_dim}, {dtype}, {parts}"
    kernel = arguments.kernel(target)
    run = partial(arguments.emulate, target, arrays | space, kernel=kernel)
    return Sample(title, kernel, run, error, LIMITS[dtype])


decode_sample, fp8_sample = partial(_decode_sample, False), partial(_decode_sample, True)
fp8_specs = partial(decode_specs, has_fp8_cache=True)


class AttentionTrial:
    """A Trial (kernels/sample.py). Raises DriverError without CuPy or a GPU."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.out: Any = None
        self._result: Any = None
        self._requests: list[Request] = []

    @property
    def copies(self) -> int:
        return len(self._requests)

    def prepare(self, problem: Problem) -> None:
        """Random q, k and v."""
        import cupy

        self._requests, self.out, self._result = [], None, None
        cupy.get_default_memory_pool().free_all_blocks()
        of_k = problem.batch, problem.k_length, problem.kv_heads, problem.head_dim
        of_v = *of_k[:3], problem.v_head_dim
        of_q = problem.batch, problem.q_length, problem.heads, problem.head_dim
        q, of_out = _operand(of_q, problem.dtype, 0), (*of_q[:3], problem.v_head_dim)
        right = 0 if problem.is_causal else None
        mask = Mask(_WINDOW if problem.has_window else None, right)
        cap = _SOFTCAP if problem.has_softcap else 0.0
        sink = describe(cupy.zeros(problem.heads, "float32")) if problem.has_sink else None
        size_bytes = 2 * problem.batch * problem.k_length * problem.kv_heads * (problem.head_dim + problem.v_head_dim)
        for copy in range(cold_copies(size_bytes)):
            k, v = _operand(of_k, problem.dtype, 2 * copy + 1), _operand(of_v, problem.dtype, 2 * copy + 2)
            self._requests.append(Request(q, k, v, problem.head_dim**-0.5, mask, cap, sink=sink))
        self.out = empty_rows(of_out[0] * of_out[1] * of_out[2], of_out[3], problem.dtype)
        self._result = _shaped(self.out, of_out)

    def launcher(self, candidate: Listed[AttentionSpec], copies: int, stream: int) -> Launch:
        """launch(i) enqueues the candidate on the i-th of so many copies of k and v; its kernel is loaded now."""
        named = [
            {name: info for name, info in request.read.items() if info is not None} | {"out": self._result}
            for request in self._requests[:copies]
        ]
        with pinned(candidate.spec):
            problem = self._requests[0].without_memory
            launch = launch_of(ATTENTION_CALL, problem, self.device, stream, named[0])
        return in_turn([partial(launch.run, ATTENTION_CALL.addresses(arrays), stream, None) for arrays in named])


def _operand(shape: tuple[int, int, int, int], dtype: str, seed: int) -> ArrayInfo:
    """Normally distributed."""
    return _shaped(random_rows(shape[0] * shape[1] * shape[2], shape[3], dtype, seed), shape)


def _shaped(rows: Any, shape: tuple[int, int, int, int]) -> ArrayInfo:
    """Rows without gaps as (batch, length, heads, dim)."""
    info = describe(rows)
    return replace(info, shape=shape, strides_bytes=dense_strides(shape, info.dtype))
