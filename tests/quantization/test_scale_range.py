"""When scale and offset may be one multiply-add: the kernel's steps against (v - 8) s, rounded once by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from marlin_builders import wgmma

from cudatma.dtypes import activation_type
from cudatma.kernels.marlin.problem import weight_values
from cudatma.quantization import PackedWeight, pack, quantize
from cudatma.quantization.scale_range import FORMS, ScaleFit, fit_scales

NIBBLES = np.arange(16)
CONFIG = wgmma(tile_m=64, tile_n=128, tile_k=128, warpgroups=2, stages=4)
HALF, BRAIN = (activation_type(name).numpy for name in ("float16", "bfloat16"))
#: Significant bits; the smallest and the largest number; u, so that a subnormal v is v 2^-u.
PRECISION, UNIT = {HALF: 11, BRAIN: 8}, {HALF: 24, BRAIN: 133}
LARGEST = {HALF: 65504.0, BRAIN: (2 - 2.0**-7) * 2.0**127}
#: -2^POWER and 2^(POWER - b), which make s 2^(u - b) of -8 s.
POWER = {HALF: (11, 10), BRAIN: (65, 65)}
LIMIT = {(dtype, form): LARGEST[dtype] / 2.0 ** (UNIT[dtype] - b) for dtype in UNIT for form, b in FORMS.items()}
NONE = ScaleFit()
#: Every finite value above 0.
POSITIVE = {
    HALF: np.arange(1, 0x7C00, dtype=np.uint16).view(HALF),
    BRAIN: np.arange(1, 0x7F80, dtype=np.uint16).view(BRAIN),
}


def rounded(values: Any, dtype: Any) -> Any:
    """float64 to the nearest of the type's numbers, ties to even, and still in float64; by hand."""
    _, exponents = np.frexp(values)
    unit = 2.0 ** np.maximum(exponents - PRECISION[dtype], -UNIT[dtype]).astype(np.float64)
    nearest = np.rint(values / unit) * unit
    return np.where(np.abs(nearest) > LARGEST[dtype], np.copysign(np.inf, nearest), nearest)


def factors(dtype: Any, p: int) -> tuple[Any, float]:
    """What a launch hands to the kernel for 2^-p: in the weight's type, and fp32."""
    of = replace(CONFIG, dtype=dtype.name)
    values = weight_values(of, 1, 1, 1, scale_exponent=p)
    low, high = values["scale_offset"] & 0xFFFF, values["scale_offset"] >> 16
    assert low == high
    return np.array(low, np.uint16).view(dtype), values["scale_back"]


def fused(scales: Any, form: str, p: int) -> list[Any]:
    """(16, scales) as parts/marlin_fused_scale.cuh.j2 has them in channels g and g + 8, times 2^p, in float64.

    A product of two halves is exact in float64, and so is the sum with a third here.
    """
    dtype = scales.dtype
    minus_eight, back = factors(dtype, p)
    power, rest = POWER[dtype]
    found = []
    with np.errstate(all="ignore"):
        offsets = rounded(scales.astype(np.float64) * float(minus_eight), dtype)
        steps = rounded(offsets * -(2.0**power), dtype)
        for lowest_bit in (FORMS[form], FORMS[form] + 4):
            factor = rounded(steps * 2.0 ** (rest - lowest_bit), dtype)
            nibble = (NIBBLES << lowest_bit).astype(np.uint16).view(dtype).astype(np.float64)
            found.append(rounded(nibble[:, None] * factor + offsets, dtype) * back)
    return found


def separate(scales: Any) -> Any:
    """(16, scales): v - 8 times the scale, exact in float64, rounded once to the scales' type."""
    return rounded((NIBBLES - 8)[:, None] * scales.astype(np.float64), scales.dtype)


def same(scales: Any, form: str, p: int) -> bool:
    return all(bool((found == separate(scales)).all()) for found in fused(scales, form, p))


@st.composite
def lists(draw: st.DrawFn) -> Any:
    """Scales of either type and sign: anything, or within some powers of two, where most of them are fit."""
    dtype = draw(st.sampled_from((HALF, BRAIN)))
    largest = len(POSITIVE[dtype])
    low = draw(st.integers(0, largest))
    high = min(largest, low + draw(st.integers(0, 10 << (PRECISION[dtype] - 1))))
    one = st.one_of(st.just(0), st.integers(low, high), st.integers(low, high).map(lambda bits: bits | 0x8000))
    return np.array(draw(st.lists(one, min_size=1, max_size=12)), np.uint16).view(dtype)


@given(lists())
@example(np.array([2.0**-24, LIMIT[HALF, "as_stored"], -LIMIT[HALF, "as_stored"], 0.0], HALF))
@example(np.array([2.0**-24, LIMIT[HALF, "shifted"], -LIMIT[HALF, "shifted"], 0.0], HALF))
@example(np.array([8188.0, 512.0, 0.0], HALF))
@example(np.array([8188.0, 64.0, 0.0], HALF))
@example(np.array([60000.0], HALF))
@example(np.array([2.0**-133, LIMIT[BRAIN, "as_stored"], -LIMIT[BRAIN, "as_stored"], 0.0], BRAIN))
def test_scales_that_are_fit_give_the_same_bits(scales: Any) -> None:
    fit = fit_scales(scales)
    if fit.form != "none":
        assert same(scales, fit.form, fit.exponent)


#: All that is too large: fp16's products with -8 overflow; of bf16, 2^p would leave the range of fp32.
@pytest.mark.parametrize(("dtype", "exponents", "most"), [(HALF, 22, 65504 / 8), (BRAIN, 127, 2.0**121)])
def test_every_scale_alone(dtype: Any, exponents: int, most: float) -> None:
    """All of a type: as stored, with the least p that keeps s 2^u finite; but for those that are too large."""
    by_fit: dict[ScaleFit, list[Any]] = {}
    for scale in POSITIVE[dtype][::5]:
        by_fit.setdefault(fit_scales(np.array([scale])), []).append(scale)
    assert set(by_fit) == {NONE, *(ScaleFit("as_stored", p) for p in range(exponents))}
    assert min(by_fit.pop(NONE)) >= most
    limit = LIMIT[dtype, "as_stored"]
    for fit, scales in by_fit.items():
        assert same(np.array(scales), "as_stored", fit.exponent)
        assert float(max(scales)) * 2.0**-fit.exponent <= limit
        assert fit.exponent == 0 or float(max(scales)) * 2.0 ** (1 - fit.exponent) > limit


@pytest.mark.parametrize(
    ("scales", "fit"),
    [
        ([LIMIT[HALF, "as_stored"]], ScaleFit("as_stored", 0)),
        ([-LIMIT[HALF, "as_stored"], 2.0**-24, 0.0], ScaleFit("as_stored", 0)),
        ([2.0**-8], ScaleFit("as_stored", 1)),
        ([0.0, 0.5, -0.016], ScaleFit("as_stored", 8)),
        ([2.0**-8, 2.0**-14], ScaleFit("shifted", 0)),
        ([-LIMIT[HALF, "shifted"], 2.0**-24], ScaleFit("shifted", 0)),
        ([0.5, 0.015], ScaleFit("shifted", 6)),
        ([0.5, 0.0039], NONE),
        ([8188.0], ScaleFit("as_stored", 21)),
        ([8192.0], NONE),
        ([0.0, -0.0], NONE),
    ],
)
def test_which_form(scales: list[float], fit: ScaleFit) -> None:
    of = np.array([scales], HALF)
    assert fit_scales(of) == fit
    assert fit == NONE or same(of[0], fit.form, fit.exponent)


@pytest.mark.parametrize(
    ("scales", "fit"),
    [
        ([LIMIT[BRAIN, "as_stored"], -(2.0**-133)], ScaleFit("as_stored", 0)),
        ([-(2.0**-5)], ScaleFit("as_stored", 1)),
        ([1.0, 2.0**-13, 0.0], ScaleFit("as_stored", 6)),
        ([2.0**120], ScaleFit("as_stored", 126)),
        ([2.0**121], NONE),
        # Times 2^-6 and an activation of 2^-64, 2^-56 is just normal in an fp32 sum.
        ([1.0, 2.0**-56], ScaleFit("as_stored", 6)),
        ([1.0, 2.0**-57], NONE),
        ([0.0, -0.0], NONE),
    ],
)
def test_bf16_has_one_form(scales: list[float], fit: ScaleFit) -> None:
    of = np.array([scales], BRAIN)
    assert fit_scales(of) == fit
    assert fit == NONE or same(of[0], fit.form, fit.exponent)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_other_types_have_none(dtype: Any) -> None:
    assert fit_scales(np.array([2.0**-10], dtype)) == NONE


@pytest.mark.parametrize(
    ("scales", "dtype", "exponents"),
    [
        ([0.5, 3.1e-3], HALF, 22),
        ([0.5, 2.0**-24], HALF, 22),
        ([60000.0], HALF, 22),
        ([8196.0, 8188.0], HALF, 22),
        ([1.0, (2 - 2.0**-7) * 2.0**-121], BRAIN, 127),
    ],
)
def test_what_is_refused_would_differ(scales: list[float], dtype: Any, exponents: int) -> None:
    of = np.array(scales, dtype)
    assert fit_scales(of) == NONE
    assert not any(same(of, form, p) for form in FORMS for p in range(exponents))


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
    assert weight(0.5, dtype="bfloat16").scale_fit == ScaleFit("as_stored", 4)
    wide = pack(np.zeros((256, 64), np.uint8), np.repeat(np.float16([[1.0], [1e-3]]), 64, 1), group_size=128)
    assert wide.scale_fit == NONE
