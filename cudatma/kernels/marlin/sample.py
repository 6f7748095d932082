"""Random operands for a small Marlin GEMM on the emulator, and for the tuner."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cudatma.arrays import describe
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, LaunchError, counted
from cudatma.kernels.choice import Listed
from cudatma.kernels.cost import cheapest_first
from cudatma.kernels.engine import host_workspace, launch_of
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.marlin.arguments import gemm_arguments
from cudatma.kernels.marlin.candidates import MIN_WGMMA_M, SKINNY_SIZES, TIMES
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.gemm import MARLIN_GEMM, weight_of
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.sample import LIMITS, Launch, Sample, cold_copies, empty_rows, in_turn, random_rows, relative_error
from cudatma.kernels.schedule import schedule
from cudatma.kernels.tuning import pinned
from cudatma.quantization import PackedWeight, quantize
from cudatma.quantization.layout_v1 import BLOCK_BYTES, row_blocks
from cudatma.target import Target


def sample(
    version: str,
    target: Target,
    *,
    m: int = 16,
    n: int = 256,
    k: int = 512,
    dtype: str = "float16",
    group_size: int = 0,
    format: str = "int4",
    sm_count: int = 1,
    seed: int = 0,
) -> Sample:
    """Return a launch of a kernel that computes y = x W for x (m, k) and a quantized W (k, n).

    A group_size of 0 selects the default of the format. k must be a multiple of 8. The assumed GPU has ``sm_count``
    SMs. If there are few SMs, each SM computes many stages, so that the ring wraps around. Raises ArgumentError,
    ArgumentTypeError, QuantizationError, TargetError, CompileError, or DriverError if NVRTC is missing.
    """
    if version == "wgmma":
        target.require("wgmma", "marlin_wgmma")
    if k % 8:  # marlin_gemm copies misaligned rows before the GEMM.
        raise ArgumentError("k", k, "a multiple of 8 (TMA loads whole 16-byte chunks)", "round k up")
    for field, value in (("m", m), ("n", n), ("k", k), ("sm_count", sm_count)):
        if value < 1:
            raise ArgumentError(field, value, "at least 1")
    random = np.random.default_rng(seed)
    dense = random.standard_normal((k, n), np.float32) * 0.05
    weight = quantize(dense, group_size=group_size or None, dtype=dtype, format=format)
    x = random.standard_normal((m, k), np.float32).astype(activation_type(dtype).numpy)
    out = np.full((m, n), np.nan, x.dtype)
    problem = Problem.of(weight, m, has_aligned_out=n % 8 == 0)
    ranked = cheapest_first(TIMES[version], problem, imagined_gpu(target, sm_count))
    if not ranked:
        if version == "skinny" and m > SKINNY_SIZES[-1]:
            raise ArgumentError("m", m, f"at most {SKINNY_SIZES[-1]}", "choose another kernel")
        if version == "wgmma" and m < MIN_WGMMA_M:
            raise ArgumentError("m", m, f"at least {MIN_WGMMA_M}", "choose another kernel")
        allowed = f"a format that this kernel supports on {target.name}"
        raise ArgumentError("format", format, allowed, "choose another kernel")
    config = ranked[0][0].in_form(weight.scale_fit.form)
    work = schedule(config, m, n, k, sm_count)
    arguments = gemm_arguments(problem, config, work, target)
    arrays = {"x": describe(x), "out": describe(out), **weight_of(weight).arrays, **host_workspace(arguments.sizes)}
    reference = x.astype(np.float64) @ weight.dequantize(dtype=np.float64)

    error = partial(relative_error, out, reference)
    title = f"Marlin GEMM, M = {m}, N = {n}, K = {k}, {dtype}, {counted(work.ctas, 'CTA')} of {config.threads} threads"
    kernel = arguments.kernel(target)
    run = partial(arguments.emulate, target, arrays, kernel=kernel)
    return Sample(title, kernel, run, error, LIMITS[dtype])


mma_sync_sample, wgmma_sample, skinny_sample = sample, partial(sample, m=64), partial(sample, m=8, sm_count=2)


class MarlinTrial:
    """The ``Trial`` of marlin_gemm for the tuner. Raises DriverError if there is no CuPy or no GPU."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.out: Any = None
        self._layer: LinearShape | None = None
        self._weights: list[PackedWeight] = []
        self._x: Any = None

    @property
    def copies(self) -> int:
        return len(self._weights)

    def prepare(self, problem: Problem) -> None:
        """Create M rows of x, and create random weights unless they already exist."""
        import cupy

        layer, m = problem.layer, problem.m
        if layer != self._layer:
            self._layer, self._weights = None, []
            cupy.get_default_memory_pool().free_all_blocks()
            host = random_weight(layer)
            self._weights = [host.to_device(self.device) for _ in range(cold_copies(host.nbytes))]
            self._layer = layer
        self._x, self.out = random_rows(m, layer.k, layer.dtype, m), empty_rows(m, layer.n, layer.dtype)

    def launcher(self, candidate: Listed[MarlinConfig], copies: int, stream: int) -> Launch:
        """Load the candidate's kernel and return a function that enqueues it.

        launch(i) uses the i-th of ``copies`` copies of the weight. Raises LaunchError if the call would launch another
        kernel, and the errors of a launch.
        """
        x, out, weight = describe(self._x), describe(self.out), self._weights[0]
        problem = Problem.of(weight, x.shape[0], has_aligned_out=weight.shape[1] % 8 == 0)
        named = {"x": x, "out": out, **weight_of(weight).arrays}
        with pinned(candidate.config):
            launch = launch_of(MARLIN_GEMM, problem, self.device, stream, named, weight_of(weight))
        config = launch.replays[-1].config
        if config.in_form("none") != candidate.config:
            raise LaunchError("candidate", config.entry, f"the kernel of {candidate.label}")
        addresses = MARLIN_GEMM.addresses(named)
        return in_turn([partial(launch.run, addresses, stream, weight_of(w)) for w in self._weights[:copies]])


def random_weight(layer: LinearShape) -> PackedWeight:
    """Return a random weight in host memory that gives results near 1.

    The power of the tensor cores depends on the values.
    """
    rng = np.random.default_rng((layer.k, layer.n))
    n64 = -(-layer.n // 64)
    groups = 1 if layer.group_size == -1 else -(-layer.k // layer.group_size)
    kind = layer.weight
    codes = rng.integers(0, 256, (n64 * row_blocks(layer.k, kind.bits), BLOCK_BYTES), dtype=np.uint8)
    if layer.format == "fp8":
        codes[codes & 127 == 127] = kind.zero_code
    deviation = float(np.sqrt(np.nanmean(kind.values.astype(np.float64) ** 2)))
    scales = rng.uniform(0.5, 1.5, (groups, 64 * n64)) / (deviation * layer.k**0.5)
    zeros = rng.integers(0, 16, (groups, 64 * n64), dtype=np.uint8) if layer.has_zeros else None
    return PackedWeight(
        qweight=codes,
        scales=scales.astype(activation_type(layer.dtype).numpy),
        zeros=zeros,
        perm=None,
        shape=(layer.k, layer.n),
        group_size=layer.group_size,
        dtype=layer.dtype,
        format=layer.format,
    )
