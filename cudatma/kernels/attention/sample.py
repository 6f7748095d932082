"""Random operands for small launches of attention and attention_decode on the emulator, and for the tuner."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from cudatma.arrays import ArrayInfo, dense_strides, describe
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, alternatives, counted
from cudatma.kernels.arguments import FLAGS
from cudatma.kernels.attention.attention import ATTENTION_CALL
from cudatma.kernels.attention.check import check_attention, check_decode
from cudatma.kernels.attention.choose import decode_config
from cudatma.kernels.attention.config import PRESETS, AttentionConfig
from cudatma.kernels.attention.decode import DECODE_CALL
from cudatma.kernels.attention.problem import OPERAND_TYPES, OPTIONS, PROBLEM_FIELDS, Layout, Layouts, Mask, Problem
from cudatma.kernels.choice import Listed
from cudatma.kernels.engine import host_workspace, launch_of
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.host import host_array, host_bytes
from cudatma.kernels.operation import Checked
from cudatma.kernels.sample import LIMITS, Launch, Sample, cold_copies, empty_rows, in_turn, random_rows, relative_error
from cudatma.kernels.tuning import pinned
from cudatma.target import Target

#: A small tile for each version.
SMALL: dict[str, dict[str, Any]] = {
    "scalar": {"tile_m": 32, "tile_n": 32},
    "a1": {"tile_m": 64, "tile_n": 64},
    "a2": {"tile_m": 128, "tile_n": 64},
    "a3": {"tile_m": 128, "tile_n": 64},
    "a4": {"tile_m": 128, "tile_n": 64},
    "mma_sync": {"tile_m": 64, "tile_n": 64},
    "decode": {"tile_m": 64, "tile_n": 64, "box_rows": 64},
    "decode_mma_sync": {"tile_m": 64, "tile_n": 64, "box_rows": 64},
    "decode_fp8": {"tile_m": 16, "tile_n": 128, "box_rows": 128},
}


def small_config(version: str, problem: Problem | None = None, **fields: Any) -> AttentionConfig:
    """Return a configuration of a version with its small tile and shortest ring.

    dtype, head dims and options come from ``problem``. By default, they are fp16, 64 and no options. ``fields``
    replaces other fields.
    """
    given: dict[str, Any] = {"dtype": "float16", "head_dim": 64, "v_head_dim": 64}
    if problem is not None:
        given = {name: getattr(problem, name) for name in PROBLEM_FIELDS}
    return AttentionConfig(
        version=version, **given | {"stages": PRESETS[version].allowed["stages"][0]} | SMALL[version] | fields
    )


#: Softcap and window for problems in which only the flags are set.
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
    """Return a launch of softmax(q k^T / sqrt(head_dim)) v on a GPU with ``sm_count`` SMs.

    Each CTA computes several tiles. Raises ArgumentError, ArgumentTypeError, TargetError, CompileError, or DriverError
    if NVRTC is missing.
    """
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_length": q_length, "k_length": k_length}
    Problem.of(**sizes, head_dim=head_dim, dtype=dtype)  # Raises an error for impossible sizes.
    random, kind = np.random.default_rng(0), activation_type(dtype).numpy
    shapes = ((batch, q_length, heads, head_dim), *[(batch, k_length, kv_heads, head_dim)] * 2)
    q, k, v = (random.standard_normal(shape, np.float32).astype(kind) for shape in shapes)
    checked = check_attention(q, k, v, out=np.full(q.shape, np.nan, kind), causal=causal)
    fields = (
        SMALL["a3"] if version == "a1" else {}
    )  # Several warpgroups that drift apart test more of the synchronization.
    config = small_config(version, checked.problem, **fields)
    return _sample(f"attention, {checked.problem.description}", ATTENTION_CALL, checked, config, target, sm_count)


def _sample(
    title: str, operation: Any, checked: Checked[Any], config: AttentionConfig, target: Target, sm_count: int
) -> Sample:
    """Return the launch of a call on host arrays."""
    (arguments,) = operation.arguments(checked.problem, config, imagined_gpu(target, sm_count), ())
    arrays, space = operation.named(checked), host_workspace(arguments.sizes)
    out = host_array(arrays["out"])
    exact = np.empty_like(out)
    operation.reference(checked.problem, arrays | {"out": describe(exact)})
    expected = exact.astype(np.float64)

    def error() -> float:
        if FLAGS in space and host_bytes(space[FLAGS]).any():  # The next launch would begin with wrong counters.
            return math.inf
        return relative_error(out, expected)

    kernel = arguments.kernel(target)
    run = partial(arguments.emulate, target, arrays | space, kernel=kernel)
    ctas = counted(int(np.prod(arguments.sizes.grid)), "CTA")
    return Sample(f"{title}, {ctas} of {config.threads} threads", kernel, run, error, LIMITS[checked.problem.dtype])


def decode_sample(
    version: str,
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
    """Return a launch with q_length new queries and up to k_length keys per sequence.

    The cache has pages of ``page_size`` keys, or no pages if ``page_size`` is 0.

    Raises ArgumentError, ArgumentTypeError, TargetError, CompileError, or DriverError if NVRTC is missing.
    """
    if dtype not in OPERAND_TYPES:
        raise ArgumentError("dtype", dtype, alternatives(OPERAND_TYPES))
    random, kind = np.random.default_rng(0), activation_type(dtype).numpy
    lengths = np.array([max(1, k_length - 37 * index) for index in range(batch)], np.int32)
    table, cache = None, (batch, k_length, kv_heads, head_dim)
    if page_size:
        pages = -(-k_length // page_size)
        table = random.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
        cache = batch * pages, page_size, kv_heads, head_dim
    q_shape = batch, q_length, heads, head_dim
    is_fp8 = PRESETS[version].kv_bytes == 1
    cache_type = ml_dtypes.float8_e4m3fn if is_fp8 else kind
    shapes = ((q_shape, kind), (cache, cache_type), (cache, cache_type))
    q, k, v = (random.standard_normal(shape, np.float32).astype(dtype) for shape, dtype in shapes)
    checked = check_decode(q, k, v, lengths, table, out=np.full(q.shape, np.nan, kind))
    title = f"attention_decode, {batch} x {k_length} keys, {heads}/{kv_heads} heads of {head_dim}, {dtype}"
    title += ", e4m3 cache" if is_fp8 else ""
    return _sample(title, DECODE_CALL, checked, decode_config(checked.problem, target, version), target, sm_count)


class AttentionTrial:
    """The ``Trial`` of attention for the tuner. Raises DriverError if there is no CuPy or no GPU."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.out: Any = None
        self._problem: Any = None
        self._arrays: list[dict[str, ArrayInfo]] = []

    @property
    def copies(self) -> int:
        return len(self._arrays)

    def prepare(self, problem: Problem) -> None:
        """Create random q, k and v."""
        import cupy

        self._arrays, self.out = [], None
        cupy.get_default_memory_pool().free_all_blocks()
        batch, dtype = problem.batch, problem.dtype
        q = batch, problem.q_length, problem.heads, problem.head_dim
        k = batch, problem.k_length, problem.kv_heads, problem.head_dim
        v, out = (*k[:3], problem.v_head_dim), (*q[:3], problem.v_head_dim)
        self.out = empty_rows(math.prod(out[:3]), out[3], dtype)
        steady = {"q": _operand(q, dtype, 0), "out": _shaped(self.out, out)}
        for option in OPTIONS:
            if getattr(problem, option.field):
                steady |= {name: describe(cupy.zeros(problem.heads, "float32")) for name in option.parameters}
        for copy in range(cold_copies(2 * batch * k[1] * k[2] * (k[3] + v[3]))):
            cold = {"k": _operand(k, dtype, 2 * copy + 1), "v": _operand(v, dtype, 2 * copy + 2)}
            self._arrays.append(steady | cold)
        element = steady["q"].dtype
        self._problem = replace(
            problem,
            has_lse=False,
            version="",
            scale=q[3] ** -0.5,
            softcap=_SOFTCAP if problem.has_softcap else 0.0,
            limits=Mask(_WINDOW if problem.has_window else None, 0 if problem.is_causal else None),
            layouts=Layouts(*[Layout(shape, dense_strides(shape, element)) for shape in (q, k, v, out)]),
        )

    def launcher(self, candidate: Listed[AttentionConfig], copies: int, stream: int) -> Launch:
        """Load the candidate's kernel, and return a function launch(i) that enqueues it on the i-th copy of k and v."""
        arrays = self._arrays[:copies]
        with pinned(candidate.config):
            launch = launch_of(ATTENTION_CALL, self._problem, self.device, stream, arrays[0])
        return in_turn([partial(launch.run, ATTENTION_CALL.addresses(operands), stream, None) for operands in arrays])


def _operand(shape: tuple[int, ...], dtype: str, seed: int) -> ArrayInfo:
    """Return an array of normally distributed numbers."""
    return _shaped(random_rows(math.prod(shape[:3]), shape[3], dtype, seed), shape)


def _shaped(rows: Any, shape: tuple[int, ...]) -> ArrayInfo:
    """Return contiguous rows in the shape (batch, length, heads, dim)."""
    info = describe(rows)
    return replace(info, shape=shape, strides_bytes=dense_strides(shape, info.dtype))
