"""The wgmma Marlin kernel with scale and offset in one multiply-add: the bits of the one without, free of hazards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from marlin_runner import TOLERANCE, operands, relative_error, run_marlin
from test_marlin_wgmma import spec

from cudatma import marlin_gemm
from cudatma.errors import ArgumentError
from cudatma.kernels.marlin import emulated
from cudatma.kernels.marlin.config import Feeds, Layer, choose_untuned
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.quantization import PackedWeight
from cudatma.quantization.scale_range import ScaleFit
from cudatma.target import get_target

SCHEDULES = 4
#: What the largest scale becomes, and the fit then; the others are a half of it and more.
SMALL, LARGE = (2.0**-9, ScaleFit("as_stored", 0)), (1.7, ScaleFit("as_stored", 9))
#: Some scales are then 2^-10 of the largest, or 2^-7.
WIDE, WIDE_LARGE = (2.0**-7, ScaleFit("shifted", 0)), (1.7, ScaleFit("shifted", 7))
#: M, K, N, blocks, spec, scales.
CASES = {
    "stream_k": (13, 384, 136, 3, spec(), SMALL),
    "stream_k_large": (13, 384, 136, 3, spec(), LARGE),
    "whole_tiles_wide": (13, 384, 72, 1, spec(), WIDE),
    "stack_wide_large": (20, 200, 136, 1, spec(block_m=24, block_k=128, stack=2, stages=3), WIDE_LARGE),
    "group_32_large": (9, 232, 72, 2, spec(group_size=32, steps=4, in_flight=0), LARGE),
    "multicast_setmaxnreg": (
        13,
        256,
        300,
        4,
        spec(cluster=2, steps=1, in_flight=3, block_k=128, consumer_registers=232, group_size=64),
        SMALL,
    ),
    "depth_divided_large": (13, 640, 200, 3, spec(warpgroups_k=2, block_k=128, steps=1, in_flight=3), LARGE),
    "store_stream_k_large": (40, 256, 72, 3, spec(block_m=32, store_tokens=16), LARGE),
    "store_32_depth_divided": (
        100,
        256,
        72,
        1,
        spec(block_m=64, warpgroups_k=2, block_k=128, group_size=64, steps=1, store_tokens=32),
        WIDE,
    ),
}


def scaled(w: PackedWeight, largest: float, fit: ScaleFit) -> PackedWeight:
    """The weight with scales of either sign, of at most ``largest``; some far below that where the fit is shifted."""
    rng = np.random.default_rng(9)
    sizes = rng.uniform(0.5, 0.99, w.scales.shape)
    if fit.form == "shifted":
        sizes[rng.uniform(size=sizes.shape) < 0.2] /= 64 if fit.exponent else 512
    sizes.flat[0] = 0.99
    scales = (sizes * largest * rng.choice([-1, 1], w.scales.shape)).astype(np.float16)
    scales[w.scales == 0] = 0
    made = replace(w, scales=scales)
    assert made.scale_fit == fit
    return made


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_other_way(name: str) -> None:
    m, k, n, processors, of, (largest, fit) = CASES[name]
    x, w, bias = operands(m, k, n, of)
    w = scaled(w, largest, fit)
    one_step, report = run_marlin(
        x, w, spec=of.in_form(fit.form), processors=processors, bias=bias, schedules=SCHEDULES
    )
    assert report.is_clean
    plain, _ = run_marlin(x, w, spec=of, processors=processors, bias=bias, schedules=1)
    assert one_step.tobytes() == plain.tobytes()
    assert np.isfinite(plain).all()
    assert relative_error(plain, x, w, bias) < TOLERANCE["float16"]


def test_infinite_activations_and_overflow_stay_what_they_are() -> None:
    of = spec()
    x, w, bias = operands(13, 256, 72, of)
    w = scaled(w, 600.0, ScaleFit("as_stored", 18))
    x[0, 0], x[1, 7], x[2] = np.inf, np.nan, 6e4
    one_step, plain = (
        run_marlin(x, w, spec=one, processors=2, bias=bias, schedules=1)[0] for one in (of.in_form("as_stored"), of)
    )
    assert np.isnan(one_step[1]).all()
    assert np.isinf(one_step[2]).any()
    np.testing.assert_array_equal(one_step, plain)


def test_a_weight_in_another_form_is_refused() -> None:
    x, w, _ = operands(8, 128, 64, spec())
    w = scaled(w, *WIDE)
    with pytest.raises(ArgumentError, match="'shifted' or 'none' for this weight"):
        run_marlin(x, w, spec=spec(fused="as_stored"), processors=1, schedules=1)


def served(monkeypatch: pytest.MonkeyPatch, w: PackedWeight, m: int = 33, **options: Any) -> Any:
    """The spec that marlin_gemm on the emulator runs."""
    seen = []
    prepare = emulated.prepare

    def spy(*args: Any, **more: Any) -> Any:
        seen.append(args[4])
        return prepare(*args, **more)

    monkeypatch.setattr(emulated, "prepare", spy)
    x = np.random.default_rng(2).normal(size=(m, w.shape[0])).astype(w.scales.dtype)
    out = marlin_gemm(x, w, backend="emulator", **options)
    assert relative_error(out, x, w) < TOLERANCE[w.dtype]
    return seen[0]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_call_takes_it_where_it_can(monkeypatch: pytest.MonkeyPatch, batch_invariant: bool) -> None:
    _, w, _ = operands(1, 128, 64, spec())
    assert w.scale_fit.form == "as_stored"
    chosen = served(monkeypatch, w, batch_invariant=batch_invariant)
    assert isinstance(chosen, WgmmaSpec)
    assert chosen.fused == "as_stored"
    assert served(monkeypatch, scaled(w, *WIDE_LARGE)).fused == "shifted"
    if not batch_invariant:
        rule = choose_untuned(Layer.of(w), 33, get_target("sm_90a"), 132, Feeds()).spec
        assert chosen.in_form("none") == rule


@pytest.mark.parametrize("fields", [{"has_zeros": True}, {"dtype": "bfloat16"}, {"group_size": -1}, {}])
def test_others_run_as_they_did(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    _, w, _ = operands(1, 128, 64, spec(**fields))
    if not fields:
        scales = w.scales.copy()
        scales[0, 0] = 2.0**-14
        scales[0, 1] = 1.0
        w = replace(w, scales=scales)
    assert served(monkeypatch, w).fused == "none"
