"""MarlinLinear on the CPU: what it keeps, what it computes, what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudatma import ArgumentError, ArgumentTypeError, MarlinLinear, quantize_linear
from cudatma.dtypes import activation_type


def dense(n: int = 40, k: int = 96, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(0, 0.05, (n, k)).astype(np.float32)


def values(shape: tuple[int, ...], dtype: str = "float16", seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(activation_type(dtype).numpy)


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


def test_a_layer_is_near_the_dense_one() -> None:
    layer = MarlinLinear.from_dense(dense(), np.ones(40), group_size=32)
    x = values((50, 96))
    wanted = x.astype(np.float64) @ dense().T.astype(np.float64) + 1
    assert np.corrcoef(layer(x, backend="reference").ravel(), wanted.ravel())[0, 1] > 0.98


def test_from_dense_is_quantize_linear() -> None:
    layer = MarlinLinear.from_dense(dense(), group_size=64, symmetric=False, clip_search=True)
    packed = quantize_linear(dense(), group_size=64, symmetric=False, clip_search=True)
    for name in ("qweight", "scales", "zeros"):
        np.testing.assert_array_equal(getattr(layer.weight, name), getattr(packed, name))


def test_out_is_returned() -> None:
    layer = MarlinLinear.from_dense(dense(), group_size=32, dtype="float16")
    out = np.empty((5, 40), np.float16)
    assert layer(values((5, 96)), out, backend="reference") is out
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
