"""Calls of the dense GEMM that every version supports, for the emulator and for a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
#: ||y - reference|| / ||reference|| that rounding sums in fp32 to the result's type keeps. Sums of fp8 products have
#: fewer bits than fp32.
LIMITS = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 2e-5}


@dataclass(frozen=True, kw_only=True)
class Call:
    """Operands (possibly in layouts that kernels cannot read), options, and the versions that the emulator runs."""

    a: Any
    b: Any
    options: dict[str, Any] = field(default_factory=dict)
    emulated: tuple[str, ...]


def numbers(*shape: int, dtype: Any = np.float16, seed: int | None = None) -> Any:
    values = np.random.default_rng(len(shape) if seed is None else seed).standard_normal(shape, np.float32)
    return values.astype(dtype)


def calls(scale: int = 1) -> dict[str, Call]:
    """Return the calls with sizes multiplied by an odd number, so that odd sizes stay odd and aligned sizes stay
    aligned."""
    m, n, k = 70 * scale, 72 * scale, 136 * scale
    odd_n, odd_k = 73 * scale, 131 * scale
    scales = abs(numbers(2 * m, dtype=F32))
    return {
        "bias_gelu": Call(
            a=numbers(m, k),
            b=numbers(k, n),
            options={"bias": numbers(n), "alpha": 0.5, "activation": "gelu"},
            emulated=("v4",),
        ),
        "beta_batch": Call(
            a=numbers(2, m, k),
            b=numbers(2, k, n),
            options={"beta": 2, "bias": numbers(n, dtype=F32), "out_dtype": "float32"},
            emulated=("v6",),
        ),
        "tanh_fp32": Call(
            a=numbers(n, m).T,
            b=numbers(n, 40),
            options={"activation": "gelu_tanh", "out_dtype": "float32"},
            emulated=("v5",),
        ),
        "silu_to_bf16": Call(
            a=numbers(m, k),
            b=numbers(k, n),
            options={"activation": "silu", "out_dtype": "bfloat16"},
            emulated=("v3",),
        ),
        "relu_odd": Call(
            a=numbers(m, odd_k), b=numbers(odd_k, odd_n), options={"activation": "relu"}, emulated=("v2", "v5")
        ),
        "beta_odd": Call(
            a=numbers(66 * scale, n), b=numbers(n, 67 * scale), options={"beta": 2}, emulated=("v3", "mma_sync")
        ),
        "batch": Call(a=numbers(3, m, n), b=numbers(3, n, k), emulated=("v4", "v5")),
        "batch_of_b": Call(
            a=numbers(m, n, dtype=BF16),
            b=numbers(3, k, n, dtype=BF16).swapaxes(1, 2),
            options={"alpha": -1},
            emulated=("v1",),
        ),
        "shared_b": Call(
            a=numbers(3, n, m).swapaxes(1, 2), b=numbers(n, k), options={"out_dtype": "float32"}, emulated=("v2",)
        ),
        "odd_batch_fp32": Call(
            a=numbers(2, m, odd_k),
            b=numbers(2, odd_k, odd_n),
            options={"out_dtype": "float32"},
            emulated=("v6",),
        ),
        "fp8_strided_scales": Call(
            a=numbers(m, 2 * k, dtype=E4M3),
            b=numbers(n, 2 * k, dtype=E4M3, seed=1).T,
            options={"a_scale": scales[::2], "b_scale": numbers(2, n, dtype=F32)[:1]},
            emulated=("v5",),
        ),
        "fp8_rr": Call(
            a=numbers(m, 250 * scale, dtype=E5M2),
            b=numbers(250 * scale, n, dtype=E5M2),
            options={"a_scale": 2.0, "out_dtype": "float16"},
            emulated=("v4",),
        ),
    }


def check(found: Any, expected: Any, limit: float | None = None) -> None:
    allowed = LIMITS[found.dtype.name] if limit is None else limit
    exact = expected.astype(np.float64)
    assert found.shape == exact.shape
    assert np.linalg.norm(found.astype(np.float64) - exact) <= allowed * np.linalg.norm(exact)
