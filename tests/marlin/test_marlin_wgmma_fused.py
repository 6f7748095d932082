"""The wgmma Marlin kernel with scale and offset in one multiply-add: the bits of the one without, free of hazards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from marlin_runner import TOLERANCE, operands, relative_error, run_marlin
from test_marlin_wgmma import config

from cudatma import marlin_gemm
from cudatma.errors import ArgumentError
from cudatma.kernels.gpu import H200
from cudatma.kernels.marlin import gemm as marlin
from cudatma.kernels.marlin.choose import choose_by_cost
from cudatma.kernels.marlin.problem import Problem
from cudatma.kernels.schedule import schedule
from cudatma.quantization import PackedWeight
from cudatma.quantization.scale_range import ScaleFit

SCHEDULES = 2
#: What the largest scale becomes, and the fit then; all other scales are half of it and more.
SMALL, LARGE = (2.0**-9, ScaleFit("as_stored", 0)), (1.7, ScaleFit("as_stored", 9))
BF16_SMALL, BF16_LARGE = (2.0**-6, ScaleFit("as_stored", 0)), (1.7, ScaleFit("as_stored", 6))
#: Some scales are then 2^-10 of the largest, or 2^-7.
WIDE, WIDE_LARGE = (2.0**-7, ScaleFit("shifted", 0)), (1.7, ScaleFit("shifted", 7))
#: M, K, N, CTAs, config, scales.
CASES = {
    "stream_k": (13, 384, 136, 2, config(), SMALL),
    "stream_k_large": (13, 384, 136, 2, config(), LARGE),
    "whole_tiles_wide": (13, 384, 72, 1, config(), WIDE),
    "stack_wide_large": (20, 200, 136, 1, config(tile_m=24, tile_k=128, tile_n=128, stages=3), WIDE_LARGE),
    "group_32_large": (9, 232, 72, 2, config(group_size=32, mmas_per_commit=4, tile_k=128), LARGE),
    "multicast_setmaxnreg": (
        13,
        256,
        300,
        4,
        config(cluster_n=2, mmas_per_commit=1, commits_in_flight=3, tile_k=128, consumer_registers=232, group_size=64),
        SMALL,
    ),
    "depth_divided_large": (
        13,
        640,
        200,
        3,
        config(slice_k=2, tile_k=128, mmas_per_commit=1, commits_in_flight=3),
        LARGE,
    ),
    "32_tokens_stream_k_large": (40, 256, 72, 3, config(tile_m=32), LARGE),
    "store_32_depth_divided": (
        100,
        256,
        72,
        1,
        config(tile_m=64, slice_k=2, tile_k=128, group_size=64, mmas_per_commit=1),
        WIDE,
    ),
    "bf16_stream_k": (13, 384, 136, 2, config(dtype="bfloat16"), BF16_SMALL),
    "bf16_stack_large": (20, 200, 136, 1, config(dtype="bfloat16", tile_m=24, tile_k=128, tile_n=128), BF16_LARGE),
    "bf16_group_32": (
        9,
        232,
        72,
        2,
        config(dtype="bfloat16", group_size=32, mmas_per_commit=4, tile_k=128),
        BF16_SMALL,
    ),
    "bf16_multicast_depth_divided_large": (
        13,
        640,
        300,
        4,
        config(
            dtype="bfloat16",
            group_size=64,
            cluster_n=2,
            slice_k=2,
            tile_k=128,
            mmas_per_commit=1,
            commits_in_flight=3,
        ),
        BF16_LARGE,
    ),
    "bf16_32_tokens_large": (40, 256, 72, 3, config(dtype="bfloat16", tile_m=32), BF16_LARGE),
}


def scaled(w: PackedWeight, largest: float, fit: ScaleFit) -> PackedWeight:
    """The weight with scales of either sign, of at most ``largest``; some far below that where the fit is shifted.

    bf16 has room for any: some are 2^-50 of the largest, and with p = 0 subnormal.
    """
    rng = np.random.default_rng(9)
    sizes = rng.uniform(0.5, 0.99, w.scales.shape)
    if fit.form == "shifted":
        sizes[rng.uniform(size=sizes.shape) < 0.2] /= 64 if fit.exponent else 512
    if w.dtype == "bfloat16":
        sizes[rng.uniform(size=sizes.shape) < 0.2] *= 2.0**-50 if fit.exponent else 2.0**-122
    sizes.flat[0] = 0.99
    scales = (sizes * largest * rng.choice([-1, 1], w.scales.shape)).astype(w.scales.dtype)
    scales[w.scales == 0] = 0
    made = replace(w, scales=scales)
    assert made.scale_fit == fit
    return made


@pytest.mark.parametrize("name", [name for name in CASES if "stream_k" in name])
def test_tiles_are_divided(name: str) -> None:
    m, k, n, processors, of, *_ = CASES[name]
    assert schedule(of, m, n, k, processors, eager=True).stream_tiles


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_other_way(name: str) -> None:
    m, k, n, processors, of, (largest, fit) = CASES[name]
    x, w, bias = operands(m, k, n, of)
    w = scaled(w, largest, fit)
    one_step, report = run_marlin(
        x, w, config=of.in_form(fit.form), processors=processors, bias=bias, schedules=SCHEDULES
    )
    assert report.is_clean
    plain, _ = run_marlin(x, w, config=of, processors=processors, bias=bias, schedules=1)
    assert one_step.tobytes() == plain.tobytes()
    assert np.isfinite(plain).all()
    assert relative_error(plain, x, w, bias) < TOLERANCE[of.dtype]


@pytest.mark.parametrize(
    ("dtype", "largest", "exponent", "huge"), [("float16", 600.0, 18, 6e4), ("bfloat16", 2.0**20, 25, 1e30)]
)
def test_infinite_activations_and_overflow_stay_what_they_are(
    dtype: str, largest: float, exponent: int, huge: float
) -> None:
    """Of fp16, whose results overflow where fp32 sums do not; sums that overflow themselves do so 2^p later."""
    of = config(dtype=dtype)
    x, w, bias = operands(13, 256, 72, of)
    w = scaled(w, largest, ScaleFit("as_stored", exponent))
    x[0, 0], x[1, 7], x[2] = np.inf, np.nan, huge
    one_step, plain = (
        run_marlin(x, w, config=one, processors=2, bias=bias, schedules=1)[0].astype(np.float32)
        for one in (of.in_form("as_stored"), of)
    )
    assert np.isnan(one_step[1]).all()
    assert np.isinf(one_step[0]).any()
    assert np.isinf(one_step[2]).any() == (dtype == "float16")
    np.testing.assert_array_equal(one_step, plain)


def test_a_weight_in_another_form_is_refused() -> None:
    x, w, _ = operands(8, 128, 64, config())
    w = scaled(w, *WIDE)
    with pytest.raises(ArgumentError, match="'shifted' or 'none' for this weight"):
        run_marlin(x, w, config=config(scale_form="as_stored"), processors=1, schedules=1)


def served(monkeypatch: pytest.MonkeyPatch, w: PackedWeight, m: int = 33, **options: Any) -> Any:
    """The config that marlin_gemm on the emulator runs."""
    seen: list[Any] = []
    arguments = marlin.gemm_arguments

    def spy(problem: Any, config: Any, *more: Any) -> Any:
        seen.append(config)
        return arguments(problem, config, *more)

    monkeypatch.setattr(marlin, "gemm_arguments", spy)
    x = np.random.default_rng(2).normal(size=(m, w.shape[0])).astype(w.scales.dtype)
    out = marlin_gemm(x, w, backend="emulator", **options)
    assert relative_error(out, x, w) < TOLERANCE[w.dtype]
    return seen[0]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_call_takes_it_where_it_can(monkeypatch: pytest.MonkeyPatch, batch_invariant: bool) -> None:
    _, w, _ = operands(1, 128, 64, config())
    assert w.scale_fit.form == "as_stored"
    chosen = served(monkeypatch, w, batch_invariant=batch_invariant)
    assert chosen.version == "wgmma"
    assert chosen.scale_form == "as_stored"
    assert served(monkeypatch, scaled(w, *WIDE_LARGE)).scale_form == "shifted"
    _, brain, _ = operands(1, 128, 64, config(dtype="bfloat16"))
    for largest, fit in (BF16_SMALL, BF16_LARGE):
        assert (
            served(monkeypatch, scaled(brain, largest, fit), batch_invariant=batch_invariant).scale_form == "as_stored"
        )
    if not batch_invariant:
        rule = choose_by_cost(Problem.of(w, 33), H200)
        assert chosen.in_form("none") == rule
