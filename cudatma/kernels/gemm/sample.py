"""Random operands for a small dense GEMM on the emulator, and for the tuner."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, alternatives, counted
from cudatma.kernels.arguments import Arguments
from cudatma.kernels.choice import Listed
from cudatma.kernels.engine import launch_of
from cudatma.kernels.gemm.arguments import gemm_arguments
from cudatma.kernels.gemm.config import GemmConfig
from cudatma.kernels.gemm.gemm import GEMM_CALL
from cudatma.kernels.gemm.problem import SCALE_BLOCK, Problem, call_of, check_call, element_bytes, is_fp8
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.operation import Checked
from cudatma.kernels.sample import LIMITS, Launch, Sample, cold_copies, empty_rows, in_turn, random_rows, relative_error
from cudatma.kernels.schedule import ceil_div
from cudatma.kernels.tuning import pinned
from cudatma.target import Target


def sample(
    version: str,
    target: Target,
    *,
    m: int = 72,
    n: int = 136,
    k: int = 320,
    dtype: str = "float16",
    layout: str = "RC",
    tile_m: int = 64,
    tile_n: int = 128,
    stages: int = 3,
    sm_count: int = 2,
) -> Sample:
    """Return a launch of y = a b on a GPU with ``sm_count`` SMs.

    m, n and k must be multiples of 8. Each CTA computes several tiles. Raises ArgumentError, ArgumentTypeError,
    TargetError, CompileError, or DriverError if NVRTC is missing.
    """
    if dtype not in LIMITS:
        raise ArgumentError("dtype", dtype, alternatives(LIMITS), 'call gemm(..., backend="emulator") for fp8')
    Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)
    for name, size in (("m", m), ("n", n), ("k", k)):
        if size % 8:
            raise ArgumentError(name, size, "a multiple of 8")
    if sm_count < 1:
        raise ArgumentError("sm_count", sm_count, "at least 1")
    random, kind = np.random.default_rng(0), activation_type(dtype).numpy
    a, b = (
        random.standard_normal(shape if letter == "R" else shape[::-1], np.float32).astype(kind)
        for shape, letter in zip(((m, k), (k, n)), layout, strict=True)
    )
    a, b = (array if letter == "R" else array.T for array, letter in zip((a, b), layout, strict=True))
    out = np.full((m, n), np.nan, a.dtype)
    tile = {"tile_m": tile_m, "tile_n": tile_n, "tile_k": 64, "stages": stages, "warpgroups": tile_m // 64}
    config = GemmConfig.of(version, dtype=dtype, layout=layout, **tile)
    arguments, arrays = gemm_call(config, target, sm_count, a, b, out)
    reference = a.astype(np.float64) @ b.astype(np.float64)

    ctas = counted(int(np.prod(arguments.sizes.grid)), "CTA")
    title = f"GEMM, M = {m}, N = {n}, K = {k}, {dtype}, {layout}, {ctas} of {config.threads} threads"
    error = partial(relative_error, out, reference)
    kernel = arguments.kernel(target)
    return Sample(title, kernel, partial(arguments.emulate, target, arrays, kernel=kernel), error, LIMITS[dtype])


def gemm_call(
    config: GemmConfig, target: Target, sm_count: int, a: Any, b: Any, out: Any, **options: Any
) -> tuple[Arguments, dict[str, ArrayInfo]]:
    """Return the launch of gemm() with these arguments and this configuration, and the arrays by name."""
    checked = checked_call(a, b, out, **options)
    return gemm_arguments(checked.problem, config, imagined_gpu(target, sm_count)), GEMM_CALL.named(checked)


def checked_call(a: Any, b: Any, out: Any = None, **options: Any) -> Checked[Problem]:
    """Return a checked call to gemm() with operands that the kernels can read."""
    inputs, others = call_of(a, b, **options)
    return GEMM_CALL.with_readable_inputs(check_call(inputs, out, others), "emulator", None)


class GemmTrial:
    """The ``Trial`` of gemm for the tuner. Raises DriverError if there is no CuPy or no GPU."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.out: Any = None
        self._a: Any = None
        self._b: list[Any] = []
        self._fixed: Any = None
        self._options: dict[str, Any] = {}

    @property
    def copies(self) -> int:
        return len(self._b)

    def prepare(self, problem: Problem) -> None:
        """Create a random a, and create a random b unless the previous problem's b can be reused."""
        import cupy

        m, n, k = problem.m, problem.n, problem.k
        self._a = self.out = None
        if problem.fixed != self._fixed:
            self._fixed, self._b = None, []
            cupy.get_default_memory_pool().free_all_blocks()
            copies = cold_copies(element_bytes(problem.dtype) * n * k)
            self._b = [_operand(k, n, problem.layout[1], problem, seed=1) for _ in range(copies)]
            self._fixed = problem.fixed
        self._a, self.out = _operand(m, k, problem.layout[0], problem, seed=0), _result(m, n, problem.result_dtype)
        self._options = _options(problem)

    def launcher(self, candidate: Listed[GemmConfig], copies: int, stream: int) -> Launch:
        """Load the candidate's kernel, and return a function launch(i) that enqueues it on the i-th copy of b."""
        named = [GEMM_CALL.named(checked_call(self._a, b, self.out, **self._options)) for b in self._b[:copies]]
        problem = checked_call(self._a, self._b[0], self.out, **self._options).problem
        with pinned(candidate.config):
            launch = launch_of(GEMM_CALL, problem, self.device, stream, named[0])
        return in_turn([partial(launch.run, GEMM_CALL.addresses(arrays), stream, None) for arrays in named])


def _operand(rows: int, columns: int, layout: str, problem: Problem, seed: int) -> ArrayInfo:
    """Return a row-major or column-major matrix of normally distributed values."""
    if layout == "C":
        turned = _operand(columns, rows, "R", problem, seed)
        return replace(turned, shape=turned.shape[::-1], strides_bytes=turned.strides_bytes[::-1])
    if not is_fp8(problem.dtype):
        return describe(random_rows(rows, columns, problem.dtype, seed))
    import cupy

    kind, pitch = np.dtype(getattr(ml_dtypes, problem.dtype)), -(-columns // 16) * 16
    values = cupy.random.RandomState(seed).standard_normal(1_048_573, dtype=np.float32)
    bits = cupy.asarray(cupy.asnumpy(values).astype(kind).view(np.uint8))
    return replace(describe(cupy.resize(bits, (rows, pitch))[:, :columns]), dtype=kind)


def _result(m: int, n: int, dtype: str) -> Any:
    import cupy

    return cupy.empty((m, n), np.float32) if dtype == "float32" else empty_rows(m, n, dtype)


def _options(problem: Problem) -> dict[str, Any]:
    """Return the arguments of gemm for the problem's epilogue and scales."""
    import cupy

    options: dict[str, Any] = {}
    if problem.epilogue != "none":
        bias = _result(1, problem.n, problem.result_dtype)[0]
        bias.view(np.uint8).fill(0)
        options = {"bias": bias, "alpha": 0.5}
    if problem.epilogue not in ("none", "linear"):
        options["activation"] = problem.epilogue
    if problem.block_scales:
        blocks = ceil_div(problem.k, SCALE_BLOCK)
        columns = cupy.ones((blocks, ceil_div(problem.m, 4) * 4), np.float32)[:, : problem.m].T
        options["a_scale"] = columns if problem.scales_by_tma else cupy.ones((problem.m, blocks), np.float32)
        options["b_scale"] = cupy.ones((blocks, ceil_div(problem.n, SCALE_BLOCK)), np.float32)
    return options
