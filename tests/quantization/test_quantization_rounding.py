"""quantize(): the error it may make, the choices it must make, and what it refuses."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatma.errors import ArgumentTypeError, QuantizationError
from cudatma.quantization import GROUP_SIZES, PackedWeight, pack, quantize, quantize_linear, rounding, unpack

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


def test_ties_round_to_even() -> None:
    weight = np.array([[-8.0], [0.5], [1.5], [2.5], [-0.5], [-1.5], [-2.5]], np.float32)
    assert unpack(quantize(weight)).q[:, 0].tolist() == [0, 8, 10, 10, 8, 6, 6]


def test_levels_are_computed_with_the_rounded_scale() -> None:
    """1/3 is no bf16 value: with the exact scale 4.5 / (1/3) = 13.5 would round to 14, with bf16's 0.33398 to 13."""
    weight = np.array([[0.0], [5.0], [4.5]], np.float32)
    found = unpack(quantize(weight, symmetric=False, dtype="bfloat16"))
    assert float(found.scales[0, 0]) == 0.333984375
    assert found.q[:, 0].tolist() == [0, 15, 13]


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


def test_the_signed_scale_beats_the_common_ones() -> None:
    """The choice that docs/quantization.md justifies: less error than max|w| / 7 and max|w| / 8."""
    weight = dense(4096, 32)
    block = weight.reshape(32, 128, 32)
    largest = np.abs(block).max(axis=1, keepdims=True)
    chosen = ((quantize(weight).dequantize() - weight) ** 2).mean()
    for divisor, gain in ((7, 0.80), (8, 0.98)):
        scale = (largest / divisor).astype(np.float16).astype(np.float64)
        error = (np.clip(np.rint(block / scale), -8, 7) * scale - block) ** 2
        assert chosen < gain * error.mean()


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


def test_the_largest_fp16_value_can_be_quantized() -> None:
    weight = np.array([[65504.0], [-65504.0]], np.float32)
    with np.errstate(over="raise"):
        assert np.isfinite(quantize(weight).dequantize(dtype=np.float16)).all()


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


@pytest.mark.sweep(4)
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize("size", [32, -1])
@pytest.mark.parametrize("search", [False, True])
def test_quantizing_takes_at_most_twice_the_memory_of_the_weight(kind: Any, size: int, search: bool) -> None:
    weight = dense(1024, 768, dtype=kind)
    quantize(weight, group_size=size, clip_search=search)
    tracemalloc.start()
    try:
        quantize(weight, group_size=size, clip_search=search)
        assert tracemalloc.get_traced_memory()[1] <= 2 * weight.nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("path")
def test_what_is_wrong_is_found_in_every_tile() -> None:
    weight = dense(700, 900)
    weight[555, 650] = 1e6
    with pytest.raises(QuantizationError, match=r"group 4, column 650\]: got values from -0\.\d+ to 1e\+06"):
        quantize(weight)
    weight[666, 777] = np.nan
    with pytest.raises(QuantizationError, match=r"weight\[666, 777\]: got nan"):
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
    with pytest.raises(ArgumentTypeError):
        quantize(tensor.detach().to(torch.float8_e4m3fn))


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
    "one dimension": (np.ones(4, np.float32), {}, QuantizationError, "two dimensions"),
    "empty": (np.ones((4, 0), np.float32), {}, QuantizationError, "two dimensions"),
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
