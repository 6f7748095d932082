"""quantize(): its error, its choices, the range of its scales, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marlin_builders import wgmma

from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentTypeError, QuantizationError
from cudatma.kernels.marlin.problem import weight_values
from cudatma.quantization import GROUP_SIZES, PackedWeight, pack, quantize, quantize_linear, rounding, unpack
from cudatma.quantization.scale_range import FORMS, ScaleFit, fit_scales

BF16 = np.dtype(ml_dtypes.bfloat16)


def dense(depth: int, width: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).normal(0, 0.02, (depth, width)).astype(dtype)


def per_row(rows: Any, depth: int, size: int) -> Any:
    """(G, N) -> (K, N) in float64."""
    return rows.astype(np.float64)[np.arange(depth) // (depth if size == -1 else size)]


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 150),
    st.integers(1, 70),
    st.sampled_from(GROUP_SIZES),
    st.booleans(),
    st.sampled_from(["float16", "bfloat16"]),
    st.integers(0, 2**32 - 1),
)
def test_each_value_is_the_nearest_level(
    depth: int, width: int, size: int, symmetric: bool, dtype: str, seed: int
) -> None:
    weight = dense(depth, width, seed)
    packed = quantize(weight, group_size=size, symmetric=symmetric, dtype=dtype)
    assert (packed.shape, packed.group_size, packed.dtype, packed.symmetric) == ((depth, width), size, dtype, symmetric)
    found = unpack(packed)
    scale = per_row(found.scales, depth, size)
    zero = 8 if found.zeros is None else per_row(found.zeros, depth, size)
    every_level = (np.arange(16)[:, None, None] - zero) * scale
    nearest = np.abs(every_level - weight).min(axis=0)
    np.testing.assert_allclose(np.abs(packed.dequantize() - weight), nearest, rtol=0, atol=1e-6 * np.abs(scale).max())


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_magnitude_is_kept_and_sets_the_sign_of_the_scale(sign: int) -> None:
    weight = np.zeros((32, 1), np.float32)
    weight[3], weight[4] = sign * 8.0, -sign * 6.0
    packed = quantize(weight, group_size=32)
    assert unpack(packed).scales[0, 0] == -sign
    np.testing.assert_array_equal(packed.dequantize(), weight)


def test_equal_extremes_give_a_positive_scale() -> None:
    weight = np.array([[1.0], [-1.0]], np.float32)
    assert unpack(quantize(weight)).scales[0, 0] == 0.125


def test_asymmetric_uses_all_levels_of_a_shifted_range() -> None:
    weight = np.linspace(-1, 14, 64, dtype=np.float32).reshape(64, 1)
    found = unpack(quantize(weight, group_size=64, symmetric=False))
    assert found.zeros is not None
    assert (found.zeros[0, 0], found.scales[0, 0]) == (1, 1)
    assert (found.q.min(), found.q.max()) == (0, 15)


def test_asymmetric_range_includes_zero() -> None:
    found = unpack(quantize(np.full((32, 1), 3.0, np.float32), symmetric=False))
    assert found.zeros is not None
    assert found.zeros[0, 0] == 0
    assert float(found.scales[0, 0]) == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize("symmetric", [True, False])
def test_clip_search_never_makes_a_group_worse(symmetric: bool) -> None:
    weight = np.random.default_rng(3).standard_t(3, (200, 40)).astype(np.float32)
    errors = []
    for search in (False, True):
        packed = quantize(weight, group_size=64, symmetric=symmetric, clip_search=search)
        squares = (packed.dequantize() - weight) ** 2
        errors.append(np.stack([squares[k : k + 64].sum(axis=0) for k in range(0, 200, 64)]))
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all()
    assert errors[1].sum() < 0.95 * errors[0].sum()


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_groups_stay_zero(symmetric: bool) -> None:
    weight = dense(96, 8)
    weight[32:64] = 0
    packed = quantize(weight, group_size=32, symmetric=symmetric, clip_search=True)
    assert not packed.dequantize()[32:64].any()
    assert packed.dequantize()[:32].any()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [3e-7, 1e-7, 3e-8])
def test_values_below_the_scales_range_keep_the_smallest_step(size: float, symmetric: bool) -> None:
    """The scale would round to 0 in fp16 (smallest step 2^-24): values are then off by half that step at most."""
    weight = np.linspace(-size, size, 31, dtype=np.float32).reshape(31, 1)
    packed = quantize(weight, symmetric=symmetric)
    assert float(unpack(packed).scales[0, 0]) != 0
    assert np.abs(packed.dequantize() - weight).max() <= 2.0**-25


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64])
def test_float_types_of_the_weight(dtype: Any) -> None:
    weight = dense(64, 24, dtype=BF16)  # values that all four types hold
    np.testing.assert_array_equal(quantize(weight.astype(dtype)).qweight, quantize(weight).qweight)


def test_linear_weights_are_transposed() -> None:
    weight = dense(72, 40)
    packed = quantize_linear(np.ascontiguousarray(weight.T), group_size=32)
    assert packed.shape == (72, 40)
    np.testing.assert_array_equal(packed.dequantize(), quantize(weight, group_size=32).dequantize())


def plainly_packed(weight: Any, size: int, symmetric: bool, dtype: str, ratios: tuple[float, ...]) -> PackedWeight:
    """quantize() as a formula over the whole weight at once, and pack() of its integers."""
    depth, width = weight.shape
    rows = depth if size == -1 else size
    groups = -(-depth // rows)
    block = np.zeros((groups * rows, width), np.float32)
    block[:depth] = weight
    block = block.reshape(groups, rows, width)
    kind = BF16 if dtype == "bfloat16" else np.dtype(np.float16)
    best = np.full((groups, width), np.inf, np.float32)
    found = [np.zeros((groups, width), np.float32) for _ in range(2)]
    for ratio in ratios:
        low, high = (np.float32(ratio) * bound for bound in (block.min(1).clip(max=0), block.max(1).clip(min=0)))
        wanted = np.where(high > -low, high, low) / np.float32(-8) if symmetric else high / 15 - low / 15
        scale = wanted.astype(kind).astype(np.float32)
        smallest = np.copysign(np.float32(ml_dtypes.finfo(kind).smallest_subnormal), wanted)
        scale = np.where((scale == 0) & (wanted != 0), smallest, scale)
        step = np.where(scale == 0, np.float32(1), scale)
        zero = np.full_like(scale, 8) if symmetric else np.rint(-low / step).clip(0, 15)
        levels = np.rint(block / step[:, None]).clip(-zero[:, None], 15 - zero[:, None])
        error = ((levels * scale[:, None] - block) ** 2).sum(axis=1)
        found = [np.where(error < best, new, old) for new, old in zip((scale, zero), found, strict=True)]
        best = np.minimum(error, best)
    scale, zero = found
    steps = np.rint(block / np.where(scale == 0, np.float32(1), scale)[:, None])
    q = (steps.clip(-zero[:, None], 15 - zero[:, None]) + zero[:, None]).reshape(-1, width)[:depth]
    zeros = None if symmetric else zero.astype(np.uint8)
    return pack(q.astype(np.uint8), scale.astype(kind), zeros, group_size=size)


class _DeviceNumPy:
    """NumPy under another name, which takes the path of a GPU's arrays."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@pytest.fixture(params=["host", "device"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of host arrays, and the one of device arrays, on NumPy."""
    if request.param == "device":
        monkeypatch.setattr(rounding, "namespace_of", lambda array: _DeviceNumPy())


def assert_same_bytes(one: PackedWeight, other: PackedWeight) -> None:
    for name in ("qweight", "scales", "zeros"):
        found, wanted = getattr(one, name), getattr(other, name)
        assert (found is None) == (wanted is None)
        if found is not None:
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.sweep(48)
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("shape", [(1, 1), (33, 1), (65, 130), (130, 129), (288, 70), (257, 1025)])
@pytest.mark.parametrize("size", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tiles_have_the_bytes_of_the_plain_formula(
    shape: tuple[int, int], size: int, symmetric: bool, dtype: str
) -> None:
    weight = (np.random.default_rng(shape).standard_t(3, shape) * 0.02).astype(np.float32)
    weight[:, shape[1] // 2] = 0
    weight[: shape[0] // 3] *= np.float32(1e-6)
    options: dict[str, Any] = {"symmetric": symmetric, "dtype": dtype}
    for kind in (np.float32, np.float16, BF16, np.float64):
        one = weight.astype(kind)
        wanted = plainly_packed(one, size, symmetric, dtype, (1.0,))
        assert_same_bytes(quantize(one, group_size=size, **options), wanted)
        assert_same_bytes(quantize_linear(np.ascontiguousarray(one.T), group_size=size, **options), wanted)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("size", [32, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_tiles_of_a_clip_search_have_the_bytes_of_the_plain_formula(size: int, symmetric: bool) -> None:
    weight = np.random.default_rng(3).standard_t(3, (300, 70)).astype(np.float32)
    wanted = plainly_packed(weight, size, symmetric, "float16", rounding.CLIP_RATIOS)
    assert_same_bytes(quantize(weight, group_size=size, symmetric=symmetric, clip_search=True), wanted)


@pytest.mark.usefixtures("path")
def test_what_is_wrong_is_found_in_every_tile() -> None:
    weight = dense(700, 900)
    weight[555, 650] = 1e6
    with pytest.raises(QuantizationError, match=r"group 4, column 650\] must be .*got values from -0\.\d+ to 1e\+06"):
        quantize(weight)
    weight[666, 777] = np.nan
    with pytest.raises(QuantizationError, match=r"weight\[666, 777\] must be .*got nan"):
        quantize(weight)


class _Shared:
    """An array of some other library: DLPack and nothing else."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def test_arrays_of_other_libraries() -> None:
    weight = dense(64, 24)
    np.testing.assert_array_equal(quantize(_Shared(weight)).qweight, quantize(weight).qweight)
    with pytest.raises(ArgumentTypeError, match="DLPack device type 8"):
        quantize(_Shared(weight, (8, 0)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    weight = dense(64, 24, dtype=BF16).astype(np.float32)
    tensor = torch.nn.Parameter(torch.from_numpy(weight).to(getattr(torch, dtype)))
    np.testing.assert_array_equal(quantize(tensor).qweight, quantize(weight).qweight)
    np.testing.assert_array_equal(quantize_linear(tensor.T).qweight, quantize(weight).qweight)
    with pytest.raises(QuantizationError, match="dtype float8_e4m3fn"):
        quantize(tensor.detach().to(torch.float8_e4m3fn))
    with pytest.raises(ArgumentTypeError, match="float8_e5m2"):
        quantize(tensor.detach().to(torch.float8_e5m2))


def _with(value: float, dtype: Any = np.float32) -> Any:
    weight = np.ones((70, 50), dtype)
    weight[40, 7] = value
    return weight


REFUSALS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "NaN": (_with(np.nan), {}, QuantizationError, r"weight\[40, 7\]"),
    "infinite": (_with(-np.inf), {}, QuantizationError, r"weight\[40, 7\]"),
    "NaN in bf16": (_with(np.nan, BF16), {}, QuantizationError, r"weight\[40, 7\]"),
    "too large for fp16": (_with(7e4), {"group_size": 32}, QuantizationError, r"group 1, column 7"),
    "scale too large for fp16": (_with(1e6), {"group_size": 32}, QuantizationError, r"group 1, column 7"),
    "too large for float32": (_with(1e300, np.float64), {"dtype": "bfloat16"}, QuantizationError, "group 0, column 7"),
    "a range fp16 cannot hold": (
        np.array([[65504.0], [-65504.0]], np.float32),
        {"symmetric": False},
        QuantizationError,
        "group 0, column 0",
    ),
    "integers": (np.ones((4, 4), np.int32), {}, QuantizationError, "dtype int32"),
    "complex": (np.ones((4, 4), np.complex64), {}, QuantizationError, "dtype complex64"),
    "one dimension": (np.ones(4, np.float32), {}, QuantizationError, "two-dimensional"),
    "empty": (np.ones((4, 0), np.float32), {}, QuantizationError, "two-dimensional"),
    "a list": ([[1.0]], {}, ArgumentTypeError, "list"),
    "None": (None, {}, ArgumentTypeError, "NoneType"),
    "group size": (_with(1), {"group_size": 100}, QuantizationError, "group_size"),
    "scale type": (_with(1), {"dtype": "float32"}, ArgumentTypeError, "dtype"),
}


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.parametrize("search", [False, True])
def test_quantize_refuses(case: str, search: bool) -> None:
    weight, options, error, text = REFUSALS[case]
    with pytest.raises(error, match=text):
        quantize(weight, clip_search=search, **options)


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
