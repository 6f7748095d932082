"""The dense GEMM's versions on the emulator: right against float64, free of hazards, for tails and rings that wrap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudatma.arrays import describe
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.choosing import pinned
from cudatma.kernels.gemm.gemm import gemm, plan_gemm
from cudatma.kernels.gemm.problem import LAYOUTS
from cudatma.kernels.gemm.sample import v3_sample
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.gemm.versions import VERSIONS, GemmV3, GemmV4
from cudatma.target import get_target

SM90A = get_target("sm_90a")
#: ||y - reference|| / ||reference|| that one rounding after fp32 accumulation keeps.
LIMITS = {"float16": 1e-3, "bfloat16": 6e-3}
SMALL = {"block_m": 64, "block_n": 64, "stages": 2, "warpgroups": 1}
#: An SM or two, so that persistent CTAs take several tiles.
SMS = 2


def matrix(rows: int, columns: int, letter: str, dtype: str, seed: int) -> Any:
    """Random rows, or columns, whose pitch is a multiple of 16 bytes, between NaNs."""
    if letter == "C":
        return matrix(columns, rows, "R", dtype, seed).T
    whole = np.full((rows, -(-columns // 8) * 8 + 8), np.nan, activation_type(dtype).numpy)
    whole[:, :columns] = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    return whole[:, :columns]


def check(spec: GemmSpec, m: int, n: int, k: int, out: Any = None, *, schedules: int = 3) -> None:
    a, b = matrix(m, k, spec.layout[0], spec.dtype, 0), matrix(k, n, spec.layout[1], spec.dtype, 1)
    y = np.full((m, n), np.nan, a.dtype) if out is None else out
    report = plan_gemm(describe(a), describe(b), describe(y), spec, SM90A, SMS).emulate(SM90A, schedules=schedules)
    assert report.is_clean, str(report)
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    assert np.linalg.norm(y.astype(np.float64) - wanted) <= LIMITS[spec.dtype] * np.linalg.norm(wanted)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("m", "n", "k", "fields"),
    [
        (65, 200, 129, {}),  # tails of each tile
        (3, 8, 321, {"stages": 3}),  # six stages: the ring of three wraps
        (63, 136, 70, {"block_n": 128, "stages": 8}),  # K of two stages, in a ring of eight
        (130, 261, 264, {"block_m": 128, "warpgroups": 2, "dtype": "bfloat16"}),
        (130, 64, 192, {"block_m": 128, "block_k": 128}),  # two wgmmas of 64 rows, two spans of K
        (257, 264, 72, {"block_m": 256, "block_n": 128, "warpgroups": 2}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("version", VERSIONS)
def test_products_are_right_and_clean(version: int, m: int, n: int, k: int, fields: dict[str, Any]) -> None:
    layout = LAYOUTS[(m + version) % 4]
    given = {"dtype": "float16", **SMALL, **fields}
    if version == 5 and layout[1] == "R":
        given["block_n"] = max(128, given["block_n"])
    check(VERSIONS[version](layout=layout, **given), m, n, k)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_layout(version: int, layout: str) -> None:
    check(VERSIONS[version]("float16", layout, 64, 128, stages=2, warpgroups=1), 130, 136, 72, schedules=2)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("version", VERSIONS)
def test_twenty_schedules_are_clean(version: int) -> None:
    check(VERSIONS[version]("float16", "CR", 64, 128, stages=2, warpgroups=1), 180, 264, 200, schedules=20)


@pytest.mark.parametrize(
    ("pitch", "offset"),
    [(72, 0), (72, 8), (72, 1), (73, 0), (67, 0)],
    ids=["pitched", "aligned_window", "unaligned_window", "odd_pitch", "dense_odd"],
)
@pytest.mark.parametrize("version", [3, 4])
def test_what_surrounds_the_result_is_left_alone(version: int, pitch: int, offset: int) -> None:
    """Whole rows leave by TMA or vectors, others by elements; the last columns are a part of a vector."""
    m, n = 66, 64 if offset else 67
    whole = np.full((m, pitch), 7, np.float16)
    check(VERSIONS[version]("float16", "RC", **SMALL), m, n, 72, whole[:, offset : offset + n])
    assert (np.delete(whole, np.s_[offset : offset + n], axis=1) == 7).all()


def test_one_row_off_16_bytes() -> None:
    whole = np.full(50, 7, np.float16)
    check(GemmV4("float16", "RC", **SMALL), 1, 40, 64, whole[1:41].reshape(1, 40))
    assert (whole[[0, *range(41, 50)]] == 7).all()


def test_the_public_function_runs_the_kernel() -> None:
    a, b = matrix(5, 72, "R", "float16", 0), matrix(72, 9, "C", "float16", 1)
    with pinned(GemmV3("float16", "RC", **SMALL)):
        y = gemm(a, b, backend="emulator")
    np.testing.assert_array_equal(y, gemm(a, b, backend="reference"))


def test_the_sample() -> None:
    made = v3_sample(SM90A, m=16, n=72, k=200, layout="CR", stages=2)
    assert made.run(schedules=2).is_clean
    assert made.error() <= made.limit
    with pytest.raises(ArgumentError, match=r"^k: got 4"):
        v3_sample(SM90A, k=4)
