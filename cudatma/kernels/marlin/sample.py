"""A small Marlin GEMM for the emulator: random operands, and its error against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cudatma.build import load_kernel
from cudatma.dtypes import activation_type
from cudatma.emulator import Report
from cudatma.errors import ArgumentError, counted
from cudatma.kernels.marlin.config import Layer, choose_portable, parse_feeds
from cudatma.kernels.marlin.emulated import prepare
from cudatma.kernels.marlin.layer import AnyMarlinSpec, resolve_fused
from cudatma.kernels.marlin.operands import check_input, check_output
from cudatma.kernels.marlin.plan import resolve_store
from cudatma.kernels.marlin.problem import schedule
from cudatma.kernels.marlin.strip_config import choose_strip
from cudatma.kernels.marlin.wgmma_config import choose_wgmma
from cudatma.kernels.sample import Sample
from cudatma.quantization import quantize
from cudatma.target import Target

#: ||out - reference|| / ||reference|| that one rounding to the dtype, after fp32 accumulation, must keep.
_LIMITS = {"float16": 1e-3, "bfloat16": 6e-3}


def sample(
    target: Target,
    *,
    m: int = 16,
    n: int = 256,
    k: int = 512,
    dtype: str = "float16",
    group_size: int = 128,
    feed: str = "tma",
    processors: int = 1,
    seed: int = 0,
) -> Sample:
    """y = x W with x (m, k) and W (k, n) in int4, on the portable kernel.

    processors: multiprocessors of the card that is imagined; few of them get many stages each, so that the ring wraps.
    Raises ArgumentError, QuantizationError, TargetError, CompileError, DriverError (no NVRTC).
    """

    def choose(layer: Layer, pitch_bytes: int) -> AnyMarlinSpec:
        # Rows that TMA and cp.async cannot bring are loaded element by element here; marlin_gemm copies them first.
        feeds = parse_feeds(feed) if pitch_bytes % 16 == 0 else replace(parse_feeds(feed), activation="plain")
        return choose_portable(layer, m, target, processors, feeds).spec

    return _sample(target, choose, m, n, k, dtype, group_size, processors, seed)


def wgmma_sample(
    target: Target,
    *,
    m: int = 64,
    n: int = 256,
    k: int = 512,
    dtype: str = "float16",
    group_size: int = 128,
    processors: int = 1,
    seed: int = 0,
) -> Sample:
    """The same on the wgmma kernel, whatever its number of tokens; k: a multiple of 8."""
    if k % 8:
        raise ArgumentError("k", k, "a multiple of 8", "TMA brings rows of whole 16-byte pieces")

    def choose(layer: Layer, pitch_bytes: int) -> AnyMarlinSpec:
        return choose_wgmma(layer, m, target, processors).spec

    return _sample(target, choose, m, n, k, dtype, group_size, processors, seed)


def strip_sample(
    target: Target,
    *,
    m: int = 8,
    n: int = 256,
    k: int = 512,
    dtype: str = "float16",
    group_size: int = 128,
    processors: int = 2,
    seed: int = 0,
) -> Sample:
    """The same on the kernel for few tokens, whatever their number; k: a multiple of 8."""
    if k % 8:
        raise ArgumentError("k", k, "a multiple of 8", "TMA brings rows of whole 16-byte pieces")

    def choose(layer: Layer, pitch_bytes: int) -> AnyMarlinSpec:
        return choose_strip(layer, m, target, processors).spec

    return _sample(target, choose, m, n, k, dtype, group_size, processors, seed)


def _sample(
    target: Target,
    choose: Callable[[Layer, int], AnyMarlinSpec],
    m: int,
    n: int,
    k: int,
    dtype: str,
    group_size: int,
    processors: int,
    seed: int,
) -> Sample:
    """choose: the spec for a layer and the bytes from one row of activations to the next."""
    for field, value in (("m", m), ("n", n), ("k", k), ("processors", processors)):
        if value < 1:
            raise ArgumentError(field, value, "1 and more")
    random = np.random.default_rng(seed)
    weight = quantize(random.standard_normal((k, n), np.float32) * 0.05, group_size=group_size, dtype=dtype)
    x = random.standard_normal((m, k), np.float32).astype(activation_type(dtype).numpy)
    out = np.full((m, n), np.nan, x.dtype)
    rows = check_input(x, weight)
    spec = resolve_store(choose(Layer.of(weight), rows.pitch_bytes), n, n * 2)
    spec = resolve_fused(spec, weight.scale_fit.form)
    work = schedule(spec, m, n, k, processors)
    launch = prepare(rows, weight, check_output(out, rows, weight), None, spec, work, target)
    kernel = load_kernel(spec.template, spec, target)
    reference = x.astype(np.float64) @ weight.dequantize(np.float64)

    def run(**options: object) -> Report:
        return launch.run(kernel.emulated, **({"target": target} | options))

    def error() -> float:
        return float(np.linalg.norm(out.astype(np.float64) - reference) / np.linalg.norm(reference))

    title = (
        f"Marlin GEMM, M = {m}, N = {n}, K = {k}, {dtype}, {counted(work.blocks, 'block')} of {spec.threads} threads"
    )
    return Sample(title, kernel, run, error, _LIMITS[dtype])
