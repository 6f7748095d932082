"""The wgmma GEMM on the emulator: right against float64 and free of hazards, for tails, short K and rings that wrap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudatma.arrays import describe
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.choosing import pinned
from cudatma.kernels.gemm.gemm import gemm, plan_gemm
from cudatma.kernels.gemm.sample import sample
from cudatma.kernels.gemm.wgmma import WgmmaSpec
from cudatma.target import get_target

SM90A = get_target("sm_90a")
#: ||y - reference|| / ||reference|| that one rounding after fp32 accumulation keeps.
LIMITS = {"float16": 1e-3, "bfloat16": 6e-3}
SMALL = WgmmaSpec("float16", 64, 1, 2)


def matrix(rows: int, columns: int, dtype: str, seed: int) -> Any:
    """Random rows whose pitch is a multiple of 16 bytes, between NaNs."""
    whole = np.full((rows, -(-columns // 8) * 8 + 8), np.nan, activation_type(dtype).numpy)
    whole[:, :columns] = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    return whole[:, :columns]


def check(spec: WgmmaSpec, m: int, n: int, k: int, out: Any = None, *, schedules: int = 3) -> None:
    a, b = matrix(m, k, spec.dtype, 0), matrix(n, k, spec.dtype, 1)
    y = np.full((m, n), np.nan, a.dtype) if out is None else out
    report = plan_gemm(describe(a), describe(b), describe(y), spec, SM90A).emulate(SM90A, schedules=schedules)
    assert report.is_clean
    wanted = a.astype(np.float64) @ b.astype(np.float64).T
    assert np.linalg.norm(y.astype(np.float64) - wanted) <= LIMITS[spec.dtype] * np.linalg.norm(wanted)


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("spec", "m", "n", "k"),
    [
        (SMALL, 1, 1, 1),
        (SMALL, 65, 67, 129),  # tails of one, one and three of each tile
        (SMALL, 3, 5, 321),  # six stages: the ring of two wraps twice
        (WgmmaSpec("float16", 64, 2, 8), 63, 127, 70),  # K of two stages, in a ring of eight
        (WgmmaSpec("bfloat16", 64, 2, 3), 77, 131, 203),
        (WgmmaSpec("float16", 128, 1, 3), 130, 61, 264),
        (WgmmaSpec("bfloat16", 128, 2, 2), 9, 200, 192),
        (WgmmaSpec("float16", 256, 2, 3), 259, 129, 72),
    ],
    ids=str,
)
def test_products_are_right_and_clean(spec: WgmmaSpec, m: int, n: int, k: int) -> None:
    check(spec, m, n, k)


@pytest.mark.parametrize(
    ("pitch", "offset"),
    [(72, 0), (72, 8), (72, 1), (73, 0), (67, 0)],
    ids=["pitched", "aligned_window", "unaligned_window", "odd_pitch", "dense_odd"],
)
def test_what_surrounds_the_result_is_left_alone(pitch: int, offset: int) -> None:
    """Rows that are aligned to 16 bytes leave by vectors, others by elements; the last columns are a part of one."""
    m, n = 66, 64 if offset else 67
    whole = np.full((m, pitch), 7, np.float16)
    check(SMALL, m, n, 72, whole[:, offset : offset + n])
    assert (np.delete(whole, np.s_[offset : offset + n], axis=1) == 7).all()


def test_one_row_off_16_bytes() -> None:
    whole = np.full(50, 7, np.float16)
    check(SMALL, 1, 40, 64, whole[1:41].reshape(1, 40))
    assert (whole[[0, *range(41, 50)]] == 7).all()


def test_the_public_function_runs_the_kernel() -> None:
    a, b = matrix(5, 72, "float16", 0), matrix(9, 72, "float16", 1)
    with pinned(SMALL):
        y = gemm(a, b, backend="emulator")
    np.testing.assert_array_equal(y, gemm(a, b, backend="reference"))


def test_the_sample() -> None:
    made = sample(SM90A, m=9, n=70, k=200, stages=2)
    assert made.run(schedules=2).is_clean
    assert made.error() <= made.limit
    with pytest.raises(ArgumentError, match=r"^k: got 4"):
        sample(SM90A, k=4)
