"""marlin_gemm(backend="emulator"): the generated kernel on NumPy arrays, against float64 and against its own feeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudatma import ArgumentError, marlin_gemm, quantize
from cudatma.dtypes import ACTIVATION_TYPES

RNG = np.random.default_rng(8)
TOLERANCE = {"float16": 1e-3, "bfloat16": 6e-3}


def operands(m: int, k: int, n: int, dtype: str = "float16", **options: Any) -> tuple[Any, Any, Any]:
    kind = ACTIVATION_TYPES[dtype].numpy
    weight = quantize(RNG.standard_normal((k, n), dtype=np.float32), dtype=dtype, **options)
    return (
        RNG.standard_normal((m, k), dtype=np.float32).astype(kind),
        weight,
        RNG.standard_normal(n, dtype=np.float32).astype(kind),
    )


def error(y: Any, x: Any, weight: Any, bias: Any) -> float:
    wanted = x.astype(np.float64) @ weight.dequantize() + bias.astype(np.float64)
    return float(np.linalg.norm(y.astype(np.float64) - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("target", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize(
    ("m", "k", "n", "options"),
    [
        (1, 256, 192, {}),
        (16, 512, 256, {"dtype": "bfloat16"}),
        (5, 333, 77, {"group_size": 32, "symmetric": False}),  # pitches off 16 bytes: plain loads and stores
        (40, 128, 64, {"group_size": -1}),
    ],
)
def test_against_float64(
    target: str, m: int, k: int, n: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDATMA_TARGET", target)
    x, weight, bias = operands(m, k, n, **options)
    y = marlin_gemm(x, weight, bias=bias, backend="emulator")
    assert y.shape == (m, n)
    assert error(y, x, weight, bias) < TOLERANCE[weight.dtype]
    by_threads = marlin_gemm(x, weight, bias=bias, backend="emulator", feed="cp_async")
    assert error(by_threads, x, weight, bias) < TOLERANCE[weight.dtype]
    if m <= 32:  # the same kernel, whatever the feed; more tokens by TMA are wgmma's where there is one
        assert np.array_equal(by_threads, y)


def test_a_given_out_is_filled_and_nothing_beside_it() -> None:
    x, weight, bias = operands(3, 128, 64)
    wide = np.full((3, 128), np.nan, np.float16)
    out = wide[:, :64]
    assert marlin_gemm(x, weight, out, bias, backend="emulator") is out
    assert error(out, x, weight, bias) < TOLERANCE["float16"]
    assert np.isnan(wide[:, 64:]).all()


def test_no_tokens() -> None:
    x, weight, _ = operands(0, 128, 64)
    assert marlin_gemm(x, weight, backend="emulator").shape == (0, 64)


def test_the_environment_can_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "emulator")
    x, weight, bias = operands(2, 128, 64)
    with pytest.warns(RuntimeWarning, match="emulator"):
        y = marlin_gemm(x, weight, bias=bias)
    assert error(y, x, weight, bias) < TOLERANCE["float16"]


def test_wrong_operands_are_refused_as_everywhere() -> None:
    x, weight, _ = operands(2, 128, 64)
    with pytest.raises(ArgumentError, match="shape"):
        marlin_gemm(x[:, :100], weight, backend="emulator")
