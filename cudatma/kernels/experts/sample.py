"""Random operands for the kernels of marlin_moe on the emulator."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, LaunchError, counted
from cudatma.kernels.arguments import ROWS
from cudatma.kernels.choice import Listed
from cudatma.kernels.engine import host_workspace, launch_of
from cudatma.kernels.experts.choose import product_config, wgmma_config
from cudatma.kernels.experts.config import PRODUCTS
from cudatma.kernels.experts.layer import LayerConfig, MoeConfig, route_threads
from cudatma.kernels.experts.moe import MARLIN_MOE, MoeOptions, weight_of
from cudatma.kernels.experts.problem import MoeProblem
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.marlin.problem import LinearShape
from cudatma.kernels.marlin.sample import random_weight
from cudatma.kernels.sample import LIMITS, Launch, Sample, cold_copies, empty_rows, in_turn, random_rows, relative_error
from cudatma.kernels.tuning import pinned
from cudatma.quantization.experts import PackedExperts, quantize_experts
from cudatma.quantization.layout_v1 import BLOCK, blocks
from cudatma.target import Target, detect


def sample(
    kernel: str,
    target: Target,
    *,
    m: int = 8,
    experts: int = 2,
    top_k: int = 2,
    k: int = 256,
    intermediate: int = 64,
    dtype: str = "float16",
    group_size: int = 64,
    tile_m: int = 0,
    tile_n: int = 0,
    stages: int = 2,
    sm_count: int = 1,
    ctas: int = 1,
    direct: bool = False,
    seed: int = 0,
) -> Sample:
    """Return one launch of marlin_moe for m tokens, after all earlier launches of the call have run.

    ``kernel`` is "route", "sum", or a version of the grouped GEMM and a product, such as "skinny_up". ``ctas`` is the
    number of CTAs of the routing kernel. If ``tile_m`` or ``tile_n`` is 0, the version's default is used. ``direct`` is
    True if each pair is a block. The error is that of the whole call's result. The simulated GPU has ``sm_count`` SMs,
    so that each CTA computes several tiles. Raises ArgumentError, QuantizationError, TargetError, CompileError,
    HazardError, or DriverError if NVRTC is missing.
    """
    for field, value in (("m", m), ("experts", experts), ("k", k), ("sm_count", sm_count)):
        if value < 1:
            raise ArgumentError(field, value, "at least 1")
    if not 1 <= top_k <= experts:
        raise ArgumentError("top_k", top_k, f"1 to {experts} (the number of experts)")
    name = kernel.rpartition("_")[2]
    version = "wgmma" if kernel.startswith("wgmma") else "skinny"
    if version == "wgmma":
        target.require("wgmma", f"experts_{kernel}")
    tile_m = tile_m or (1 if direct else 32 if version == "wgmma" else 8)
    tile_n = tile_n or (128 if version == "wgmma" else 64)
    call = _Call(
        version,
        target,
        m,
        experts,
        top_k,
        k,
        intermediate,
        dtype,
        group_size,
        tile_m,
        tile_n,
        stages,
        sm_count,
        ctas,
        direct,
        seed,
    )
    index = call.names.index(name)
    call.emulate(call.launches[:index])
    arguments = call.launches[index]
    loaded = arguments.kernel(target)
    run = partial(arguments.emulate, target, call.arrays, kernel=loaded)

    def error() -> float:
        call.emulate(call.launches[index + 1 :])
        return relative_error(call.out, call.reference)

    shape = f"{m} tokens, {counted(experts, 'expert')} of {k} x {intermediate}, top {top_k}, {dtype}"
    title = f"marlin_moe, {kernel}, {shape}"
    return Sample(title, loaded, run, error, LIMITS[dtype])


class _Call:
    """A call with random operands in host memory.

    ``names`` and ``launches`` contain the launches and their names. ``arrays`` maps names to all arrays. ``out`` is the
    result, and ``reference`` is the reference in float64.
    """

    def __init__(
        self,
        version: str,
        target: Target,
        m: int,
        experts: int,
        top_k: int,
        k: int,
        intermediate: int,
        dtype: str,
        group_size: int,
        tile_m: int,
        tile_n: int,
        stages: int,
        sm_count: int,
        ctas: int,
        direct: bool,
        seed: int,
    ) -> None:
        random = np.random.default_rng(seed)

        def dense(*shape: int) -> Any:
            return random.standard_normal(shape, np.float32)

        w1 = quantize_experts(
            dense(experts, k, 2 * intermediate) * 0.05, group_size=group_size, dtype=dtype, gated=True
        )
        w2 = quantize_experts(dense(experts, intermediate, k) * 0.05, group_size=group_size, dtype=dtype)
        x = dense(m, k).astype(activation_type(dtype).numpy)
        self.out = np.full((m, k), np.nan, x.dtype)
        ids = np.argsort(random.random((m, experts)))[:, :top_k].astype(np.int32)
        factors = random.random((m, top_k), np.float32)
        bias1, bias2 = (dense(experts, columns).astype(x.dtype) for columns in (2 * intermediate, k))
        checked = MARLIN_MOE.check(
            (x, factors, ids, None, bias1, bias2), self.out, MoeOptions(programmatic=True), (w1, w2)
        )
        problem, self._target = checked.problem, target
        make = wgmma_config if version == "wgmma" else product_config
        longest = (make(name, problem.product(name), tile_m, target, tile_n) for name in PRODUCTS)
        up, down = (
            replace(config, stages=stages, direct=direct).in_form(form)
            for config, form in zip(longest, problem.scale_forms, strict=True)
        )
        config = MoeConfig.of(route_threads(experts, m * top_k), up, down, ctas)
        self.names = [name for name, _ in config.named_kernels]
        resident = tuple([sm_count * getattr(each, "ctas_per_sm", 1) for _, each in config.kernels])
        self.launches = MARLIN_MOE.arguments(problem, config, imagined_gpu(target, sm_count), resident)
        self.arrays: dict[str, ArrayInfo] = MARLIN_MOE.named(checked) | weight_of(w1, w2).arrays
        self._weights = w1, w2  # The launches read their arrays.
        self.arrays[ROWS] = host_workspace(self.launches[0].sizes)[ROWS]
        expected = np.zeros_like(self.out)
        MARLIN_MOE.reference(problem, self.arrays | {"out": describe(expected)})
        self.reference = expected.astype(np.float64)

    def emulate(self, launches: Any) -> None:
        """Run launches on the emulator under one schedule."""
        for launch in launches:
            launch.emulate(self._target, self.arrays, schedules=1)


sum_sample = partial(sample, "sum")
# If there are more experts than lanes in a warp, several warps count the pairs.
route_sample = partial(sample, "route", m=100, experts=40, k=64, intermediate=32, group_size=32)


class ExpertsTrial:
    """The ``Trial`` of marlin_moe for the tuner. Raises DriverError if there is no CuPy or no GPU."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.out: Any = None
        self._fixed: Any = None
        self._weights: list[tuple[PackedExperts, PackedExperts]] = []
        self._inputs: tuple[Any, ...] = ()

    @property
    def copies(self) -> int:
        return len(self._weights)

    def prepare(self, problem: MoeProblem) -> None:
        """Create rows of x that choose experts at random, and create random weights unless they already exist."""
        import cupy

        m, k, up = problem.m, problem.k, problem.up
        self._inputs, self.out = (), None
        if problem.fixed != self._fixed:
            self._fixed, self._weights = None, []
            cupy.get_default_memory_pool().free_all_blocks()
            host = _random_experts(up, problem.experts, True), _random_experts(problem.down, problem.experts, False)
            copies = cold_copies(sum(weight.nbytes for weight in host))
            on_device = [[weight.to_device(self.device) for weight in host] for _ in range(copies)]
            self._weights = [(first, second) for first, second in on_device]
            self._fixed = problem.fixed
        random = np.random.default_rng(m)
        ids = np.argsort(random.random((m, problem.experts), np.float32))[:, : problem.top_k].astype(np.int32)
        factors = random.random((m, problem.top_k), np.float32)
        self._inputs = random_rows(m, k, up.dtype, m), cupy.asarray(factors), cupy.asarray(ids), None, None, None
        self.out = empty_rows(m, k, up.dtype)

    def launcher(self, candidate: Listed[LayerConfig], copies: int, stream: int) -> Launch:
        """Load the candidate's kernels and return a function that enqueues them.

        launch(i) uses the i-th of ``copies`` copies of the weights. Raises LaunchError if the call would launch other
        kernels, and the errors of a launch.
        """
        checked = MARLIN_MOE.check(self._inputs, self.out, MoeOptions(), self._weights[0])
        weights = [weight_of(*pair) for pair in self._weights[:copies]]
        named = MARLIN_MOE.named(checked) | weights[0].arrays
        with pinned(candidate.config):
            launch = launch_of(MARLIN_MOE, checked.problem, self.device, stream, named, weights[0])
        launched = tuple([replay.config for replay in launch.replays])
        for config, expected in zip(
            launched, candidate.config.launches(checked.problem, detect(self.device)), strict=True
        ):
            if config != expected:
                raise LaunchError("candidate", config.entry, f"{expected.entry} (a kernel of {candidate.label})")
        addresses = MARLIN_MOE.addresses(named)
        return in_turn([partial(launch.run, addresses, stream, weight) for weight in weights])


def _random_experts(shape: LinearShape, experts: int, gated: bool) -> PackedExperts:
    """Return random weights in host memory."""
    columns = experts * blocks(shape.n) * BLOCK
    return PackedExperts(random_weight(replace(shape, n=columns)), experts, shape.n, gated)
