"""marlin_gemm and MarlinLinear on the CPU: the reference backend against float64, and invalid calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatma import ArgumentError, ArgumentTypeError, MarlinLinear, PackedWeight, marlin_gemm, quantize_linear
from cudatma.dtypes import BFLOAT16, activation_type
from cudatma.kernels.marlin.gemm import MARLIN_GEMM, MarlinOptions
from cudatma.quantization import pack

#: ||out - reference|| / ||reference||: products are exact in fp32, and one rounding of the result remains.
TOLERANCE = {"float16": 5e-4, "bfloat16": 4e-3}


def make(
    k: int,
    n: int,
    *,
    dtype: str = "float16",
    group_size: int = 32,
    zeros: bool = False,
    act_order: bool = False,
    seed: int = 0,
) -> tuple[PackedWeight, Any]:
    """Return a weight, and its values as float64 (K, N), computed from the integers before packing."""
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 16, (k, n), dtype=np.uint8)
    size = k if group_size == -1 else group_size
    groups = np.arange(k) // size
    scales = rng.uniform(0.01, 0.03, (groups[-1] + 1, n)).astype(activation_type(dtype).numpy)
    offsets = rng.integers(0, 17, scales.shape) if zeros else None
    perm = rng.permutation(k) if act_order else None
    dense = (q - (8.0 if offsets is None else offsets[groups])) * scales.astype(np.float64)[groups]
    if perm is not None:
        dense = dense[np.argsort(perm)]
    return pack(q, scales, offsets, group_size=group_size, perm=perm), dense


def values(shape: tuple[int, ...], dtype: str = "float16", seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(activation_type(dtype).numpy)


def close(out: Any, reference: Any) -> bool:
    error = np.linalg.norm(out.astype(np.float64) - reference)
    return bool(error <= TOLERANCE[out.dtype.name] * np.linalg.norm(reference))


@pytest.mark.filterwarnings("error")
def test_infinities_and_overflows_are_results_without_a_warning() -> None:
    weight = pack(np.full((32, 8), 15, np.uint8), np.full((1, 8), 60000, np.float16), group_size=32)
    assert np.isinf(weight.dequantize(dtype=np.float16)).all()
    x = np.full((2, 32), np.inf, np.float16)
    x[0, 0] = -np.inf
    out = marlin_gemm(x, weight, bias=np.full(8, -np.inf, np.float16), backend="reference")
    assert np.isnan(out).all()
    assert np.isinf(marlin_gemm(np.ones_like(x), weight, backend="reference")).all()


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 20), st.integers(1, 200), st.integers(1, 150)),
    dtype=st.sampled_from(("float16", "bfloat16")),
    group_size=st.sampled_from((32, 64, 128, -1)),
    zeros=st.booleans(),
    act_order=st.booleans(),
    bias=st.booleans(),
)
def test_the_reference_against_float64(
    shape: tuple[int, int, int], dtype: str, group_size: int, zeros: bool, act_order: bool, bias: bool
) -> None:
    m, k, n = shape
    weight, dense = make(k, n, dtype=dtype, group_size=group_size, zeros=zeros, act_order=act_order, seed=m)
    x, b = values((m, k), dtype), values((n,), dtype, 2) if bias else None
    out = marlin_gemm(x, weight, bias=b, backend="reference")
    assert (out.shape, out.dtype) == ((m, n), x.dtype)
    assert close(out, x.astype(np.float64) @ dense + (0 if b is None else b.astype(np.float64)))


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 0, 3)], ids=str)
def test_leading_dimensions(lead: tuple[int, ...]) -> None:
    weight, dense = make(96, 40)
    x = values((*lead, 96))
    out = marlin_gemm(x, weight, backend="reference")
    assert out.shape == (*lead, 40)
    assert close(out, x.astype(np.float64) @ dense)


def test_windows_of_wider_buffers() -> None:
    weight, dense = make(96, 40)
    x_buffer, buffer = np.full((9, 101), np.nan, np.float16), np.full((8, 47), np.nan, np.float16)
    x_buffer[:6, :96] = values((6, 96))
    out = buffer[:6, :40]
    assert marlin_gemm(x_buffer[:6, :96], weight, out=out, backend="reference") is out
    assert close(out, x_buffer[:6, :96].astype(np.float64) @ dense)
    assert np.isnan(buffer[6:]).all()
    assert np.isnan(buffer[:, 40:]).all()


def test_a_row_read_many_times() -> None:
    weight, dense = make(96, 40)
    x = np.broadcast_to(values((96,)), (5, 96))
    assert close(marlin_gemm(x, weight, backend="reference"), x.astype(np.float64) @ dense)


def test_other_libraries_on_the_host() -> None:
    class OnlyDlpack:
        def __init__(self, array: Any) -> None:
            self._array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self._array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self._array.__dlpack_device__()

    weight, dense = make(96, 40)
    x, out = values((5, 96)), np.empty((5, 40), np.float16)
    wrapped = OnlyDlpack(out)
    assert marlin_gemm(OnlyDlpack(x), weight, out=wrapped, backend="reference") is wrapped
    assert close(out, x.astype(np.float64) @ dense)


WEIGHT, _ = make(96, 40)
X = values((5, 96))
SHARED = values((5 * 96 + 200,))
FROZEN = np.empty((5, 40), np.float16)
FROZEN.flags.writeable = False


@pytest.mark.parametrize(
    ("arguments", "options", "error", "field"),
    [
        ((X, "weight"), {}, ArgumentTypeError, "w"),
        ((X[:, :95], WEIGHT), {}, ArgumentError, "x.shape"),
        ((X[0, 0], WEIGHT), {}, (ArgumentError, ArgumentTypeError), ""),
        ((X.astype(np.float32), WEIGHT), {}, ArgumentTypeError, "x.dtype"),
        ((values((5, 96), "bfloat16"), WEIGHT), {}, ArgumentTypeError, "x.dtype"),
        (([[1.0] * 96], WEIGHT), {}, ArgumentTypeError, "x"),
        ((np.zeros(193, np.uint8)[1:].view(np.float16).reshape(1, 96), WEIGHT), {}, ArgumentError, "x.pointer"),
        ((values((96, 5)).T, WEIGHT), {}, ArgumentError, "x.strides"),
        ((X[::-1], WEIGHT), {}, ArgumentError, "x.strides"),
        ((values((2, 3, 5, 96))[:, :2], WEIGHT), {}, ArgumentError, "x.strides"),
        ((X, WEIGHT), {"out": np.empty((4, 40), np.float16)}, ArgumentError, "out.shape"),
        ((X, WEIGHT), {"out": np.empty((5, 41), np.float16)}, ArgumentError, "out.shape"),
        ((X, WEIGHT), {"out": np.empty((5, 40), np.float32)}, ArgumentTypeError, "out.dtype"),
        ((X, WEIGHT), {"out": FROZEN}, ArgumentError, "out"),
        ((X, WEIGHT), {"out": np.empty((40, 5), np.float16).T}, ArgumentError, "out.strides"),
        ((SHARED[: 5 * 96].reshape(5, 96), WEIGHT), {"out": SHARED[8:208].reshape(5, 40)}, ArgumentError, "out"),
        ((X, WEIGHT), {"bias": values((41,))}, ArgumentError, "bias.shape"),
        ((X, WEIGHT), {"bias": values((40,)).astype(np.float32)}, ArgumentTypeError, "bias.dtype"),
        ((X, WEIGHT), {"bias": values((80,))[::2]}, ArgumentError, "bias.strides"),
        ((X, WEIGHT), {"out": SHARED[:200].reshape(5, 40), "bias": SHARED[100:140]}, ArgumentError, "out"),
        ((X, WEIGHT), {"programmatic": 1}, ArgumentTypeError, "programmatic"),
        ((X, WEIGHT), {"backend": "cpu"}, ArgumentError, "backend"),
        ((X, WEIGHT), {"backend": "cuda"}, ArgumentError, "x.device"),
    ],
)
def test_what_is_refused(arguments: tuple[Any, ...], options: dict[str, Any], error: Any, field: str) -> None:
    arrays = [a for a in (*arguments, *options.values()) if isinstance(a, np.ndarray)]
    before = [a.tobytes() for a in arrays]
    with pytest.raises(error) as caught:
        marlin_gemm(*arguments, **{"backend": "reference", **options})
    assert not field or caught.value.field == field
    assert isinstance(caught.value, ValueError | TypeError)
    assert before == [a.tobytes() for a in arrays]


def test_values_beyond_fp32_have_finite_products() -> None:
    weight = pack(np.full((32, 8), 15, np.uint8), np.full((1, 8), 3e38, BFLOAT16), group_size=32)
    x = np.full((1, 32), 2.0**-60, BFLOAT16)
    assert close(marlin_gemm(x, weight, backend="reference"), x.astype(np.float64) @ weight.dequantize())


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize("part", ["qweight", "scales", "zeros", "perm"])
def test_an_output_in_the_memory_of_the_weight(part: str, backend: str) -> None:
    weight, dense = make(96, 40, zeros=True, act_order=True)
    out = getattr(weight, part).reshape(-1).view(np.float16)[:40].reshape(1, 40)
    with pytest.raises(ArgumentError, match=f"^out must be .* memory that overlaps {part} of the weight"):
        marlin_gemm(X[:1], weight, out=out, backend=backend)
    assert (weight.dequantize() == dense).all()


def test_rows_that_overlap_are_no_output() -> None:
    buffer = np.zeros(200, np.float16)
    out = np.lib.stride_tricks.as_strided(buffer, (5, 40), (40, 2))
    with pytest.raises(ArgumentError, match="free of overlaps between rows"):
        marlin_gemm(X, WEIGHT, out=out, backend="reference")


def test_rows_that_are_copied_first() -> None:
    permuted, _ = make(96, 40, act_order=True)
    odd, shifted = values((7, 97))[:, :96], values((7, 104))[:, 1:97]
    for x, weight, is_copied in ((X, WEIGHT, False), (X, permuted, True), (odd, WEIGHT, True), (shifted, WEIGHT, True)):
        assert MARLIN_GEMM.check((x, None), None, MarlinOptions(False, False), weight).problem.copies_x == is_copied


# ---- MarlinLinear


def dense(n: int = 40, k: int = 96, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(0, 0.05, (n, k)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_its_dequantised_weight(dtype: str, symmetric: bool, bias: bool) -> None:
    added = np.linspace(-1, 1, 40) if bias else None
    layer = MarlinLinear.from_dense(dense(), added, group_size=32, symmetric=symmetric, dtype=dtype)
    assert (layer.in_features, layer.out_features) == (96, 40)
    assert (layer.weight.dtype, layer.weight.group_size, layer.weight.symmetric) == (dtype, 32, symmetric)
    x = values((2, 3, 96), dtype)
    reference = x.astype(np.float64) @ layer.weight.dequantize()
    if bias:
        assert layer.bias.dtype == x.dtype
        reference += layer.bias.astype(np.float64)
    out = layer(x, backend="reference")
    assert (out.shape, out.dtype) == ((2, 3, 40), x.dtype)
    error = np.linalg.norm(out.astype(np.float64) - reference) / np.linalg.norm(reference)
    assert error < {"float16": 5e-4, "bfloat16": 4e-3}[dtype]


def test_out_is_returned() -> None:
    layer = MarlinLinear.from_dense(dense(), group_size=32, dtype="float16")
    out = np.empty((5, 40), np.float16)
    assert layer(values((5, 96)), out=out, backend="reference") is out
    np.testing.assert_array_equal(out, layer(values((5, 96)), backend="reference"))


@pytest.mark.parametrize(
    ("bias", "error", "field"),
    [
        (np.zeros(41, np.float16), ArgumentError, "bias"),
        (np.zeros((1, 40), np.float16), ArgumentError, "bias"),
        (np.zeros(40, np.float32), ArgumentTypeError, "bias.dtype"),
        ([0.0] * 40, ArgumentTypeError, "bias"),
    ],
)
def test_a_bias_is_checked_when_the_layer_is_made(bias: Any, error: type[Exception], field: str) -> None:
    with pytest.raises(error) as caught:
        MarlinLinear(quantize_linear(dense(), group_size=32), bias)
    assert caught.value.field == field  # type: ignore[attr-defined]


def test_what_else_is_checked_then() -> None:
    packed = quantize_linear(dense(), group_size=32)
    with pytest.raises(ArgumentTypeError, match="PackedWeight"):
        MarlinLinear(dense())
    with pytest.raises(ArgumentError, match=r"x\.shape"):
        MarlinLinear(packed)(values((5, 95)), backend="reference")


def test_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = MarlinLinear.from_dense(dense(), group_size=32)
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    layer.warm_up([1, 16])
    monkeypatch.setenv("CUDATMA_BACKEND", "cuda")
    with pytest.raises(ArgumentError, match=r"to_device\(\)"):
        layer.warm_up([1])
