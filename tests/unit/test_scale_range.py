"""When scale and offset may be one multiply-add: the kernel's fp16 steps against subtracting 8 and multiplying."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cudatma.kernels.marlin.problem import ProblemStruct, Schedule, fill_problem
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.quantization import PackedWeight, pack, quantize
from cudatma.quantization.scale_range import FORMS, ScaleFit, fit_scales

NIBBLES = np.arange(16)
SPEC = WgmmaSpec("float16", 128, False, 64, 128, 2, 1, 4)
LIMIT = {form: 65504 / 2 ** (24 - lowest) for form, lowest in FORMS.items()}
NONE = ScaleFit()
#: Every finite fp16 value above 0.
HALVES = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16)


def factors(p: int) -> tuple[np.float16, float]:
    """What a launch hands to the kernel for 2^-p: fp16, and fp32."""
    problem = ProblemStruct()
    fill_problem(problem, SPEC, Schedule(1, 1, 1, 1, 0), 1, 1, 1, 1, scale_exponent=p)
    low, high = problem.scale_offset & 0xFFFF, problem.scale_offset >> 16
    assert low == high
    return np.uint16(low).view(np.float16), problem.scale_back


def fused(scales: Any, form: str, p: int) -> list[Any]:
    """(16, scales) as parts/marlin_wgmma_fused.cuh.j2 has them in channels g and g + 8, times 2^p, in float64.

    NumPy's fp16 products round once. A product of two halves is exact in float64, and so is the sum with a third here.
    """
    minus_eight, back = factors(p)
    found = []
    with np.errstate(all="ignore"):
        offsets = scales * minus_eight
        steps = offsets * np.float16(-(2.0**11))
        for lowest_bit in (FORMS[form], FORMS[form] + 4):
            factor = (steps * np.float16(2.0 ** (10 - lowest_bit))).astype(np.float64)
            nibble = (NIBBLES << lowest_bit).astype(np.uint16).view(np.float16).astype(np.float64)
            sums = nibble[:, None] * factor + offsets.astype(np.float64)
            found.append(sums.astype(np.float16).astype(np.float64) * back)
    return found


def separate(scales: Any) -> Any:
    """(16, scales): v - 8, exact, times the scale, rounded once to fp16; in float64."""
    with np.errstate(over="ignore"):
        return ((NIBBLES - 8).astype(np.float16)[:, None] * scales).astype(np.float64)


def same(scales: Any, form: str, p: int) -> bool:
    return all(bool((found == separate(scales)).all()) for found in fused(scales, form, p))


@st.composite
def lists(draw: st.DrawFn) -> Any:
    """fp16 scales of either sign: anything, or within some powers of two, where most of them are fit."""
    low = draw(st.integers(0, 0x7BFF))
    high = min(0x7BFF, low + draw(st.integers(0, 10 << 10)))
    one = st.one_of(st.just(0), st.integers(low, high), st.integers(low, high).map(lambda bits: bits | 0x8000))
    return np.array(draw(st.lists(one, min_size=1, max_size=12)), np.uint16).view(np.float16)


@given(lists())
@example(np.array([2.0**-24, LIMIT["as_stored"], -LIMIT["as_stored"], 0.0], np.float16))
@example(np.array([2.0**-24, LIMIT["shifted"], -LIMIT["shifted"], 0.0], np.float16))
@example(np.array([8188.0, 512.0, 0.0], np.float16))
@example(np.array([8188.0, 64.0, 0.0], np.float16))
@example(np.array([60000.0], np.float16))
def test_scales_that_are_fit_give_the_same_bits(scales: Any) -> None:
    fit = fit_scales(scales)
    if fit.form != "none":
        assert same(scales, fit.form, fit.exponent)


def test_every_scale_alone() -> None:
    """All of fp16: as stored, with the least p that keeps s 2^24 finite; but for those whose products overflow."""
    by_fit: dict[ScaleFit, list[Any]] = {}
    for scale in HALVES[::5]:
        by_fit.setdefault(fit_scales(np.array([scale])), []).append(scale)
    assert set(by_fit) == {NONE, *(ScaleFit("as_stored", p) for p in range(22))}
    assert min(by_fit.pop(NONE)) > 65504 / 8
    for fit, scales in by_fit.items():
        assert same(np.array(scales), "as_stored", fit.exponent)
        assert max(scales) * 2.0**-fit.exponent <= LIMIT["as_stored"]
        assert fit.exponent == 0 or max(scales) * 2.0 ** (1 - fit.exponent) > LIMIT["as_stored"]


@pytest.mark.parametrize(
    ("scales", "fit"),
    [
        ([LIMIT["as_stored"]], ScaleFit("as_stored", 0)),
        ([-LIMIT["as_stored"], 2.0**-24, 0.0], ScaleFit("as_stored", 0)),
        ([2.0**-8], ScaleFit("as_stored", 1)),
        ([0.0, 0.5, -0.016], ScaleFit("as_stored", 8)),
        ([2.0**-8, 2.0**-14], ScaleFit("shifted", 0)),
        ([-LIMIT["shifted"], 2.0**-24], ScaleFit("shifted", 0)),
        ([0.5, 0.015], ScaleFit("shifted", 6)),
        ([0.5, 0.0039], NONE),
        ([8188.0], ScaleFit("as_stored", 21)),
        ([8192.0], NONE),
        ([0.0, -0.0], NONE),
    ],
)
def test_which_form(scales: list[float], fit: ScaleFit) -> None:
    of = np.array([scales], np.float16)
    assert fit_scales(of) == fit
    assert fit == NONE or same(of[0], fit.form, fit.exponent)


@pytest.mark.parametrize("scales", [[0.5, 3.1e-3], [0.5, 2.0**-24], [60000.0], [8196.0, 8188.0]])
def test_what_is_refused_would_differ(scales: list[float]) -> None:
    of = np.array(scales, np.float16)
    assert fit_scales(of) == NONE
    assert not any(same(of, form, p) for form in FORMS for p in range(22))


def weight(scale: float, **options: Any) -> PackedWeight:
    dense = np.random.default_rng(3).uniform(-1, 1, (256, 72)).astype(np.float32) * scale * 7
    return quantize(dense, **({"group_size": 128, "dtype": "float16"} | options))


def test_a_weight_says_it() -> None:
    """Padded channels have scales of 0, which are fit with any others."""
    assert weight(2.0**-10).scale_fit == ScaleFit("as_stored", 0)
    large = weight(0.5)
    assert large.scale_fit.form == "as_stored"
    assert large.scale_fit.exponent > 0
    assert large._moved(lambda array: array.copy()).scale_fit == large.scale_fit
    assert large.__reduce__()[0](*large.__reduce__()[1]).scale_fit == large.scale_fit
    assert weight(0.5, dtype="bfloat16").scale_fit == NONE
    wide = pack(np.zeros((256, 64), np.uint8), np.repeat(np.float16([[1.0], [1e-3]]), 64, 1), group_size=128)
    assert wide.scale_fit == NONE
