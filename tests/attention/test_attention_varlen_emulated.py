"""attention_varlen on the emulator: each sequence as if it were alone, whatever the next one holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cudatma
from cudatma.arrays import describe
from cudatma.dtypes import activation_type
from cudatma.kernels.attention.attention import VARLEN_CALL
from cudatma.kernels.attention.check import check_varlen
from cudatma.kernels.attention.reference import attend
from cudatma.kernels.attention.sample import small_config
from cudatma.kernels.gpu import imagined_gpu
from cudatma.target import get_target

SM90A, SM120A = get_target("sm_90a"), get_target("sm_120a")
LIMITS = {"float16": 1e-3, "bfloat16": 6e-3}
#: Arguments of make(), and options of the call.
CASES: dict[str, dict[str, Any]] = {
    "full": {"q_lengths": [65, 1, 130], "k_lengths": [130, 64, 65], "heads": 2},
    "causal": {
        "q_lengths": [130, 0, 70, 1],
        "k_lengths": [130, 40, 200, 300],
        "heads": 2,
        "kv_heads": 2,
        "options": {"causal": True},
    },
    "without_keys": {"q_lengths": [65, 130], "k_lengths": [0, 65], "options": {"causal": True}},
    "window": {"q_lengths": [140, 65], "k_lengths": [200, 65], "options": {"window": (60, 10)}},
    "sinks": {
        "q_lengths": [65, 20],
        "k_lengths": [70, 0],
        "heads": 2,
        "options": {"sink": np.array([4, -1], np.float32)},
    },
    "softcap": {"q_lengths": [65, 20], "k_lengths": [70, 90], "options": {"softcap": 2.0, "causal": True}},
}


def make(
    *,
    q_lengths: list[int],
    k_lengths: list[int],
    heads: int = 1,
    kv_heads: int = 1,
    dim: int = 64,
    dtype: str = "float16",
) -> dict[str, Any]:
    random, kind = np.random.default_rng(0), activation_type(dtype).numpy
    sizes = (sum(q_lengths), heads), (sum(k_lengths), kv_heads), (sum(k_lengths), kv_heads)
    q, k, v = (random.standard_normal((*size, dim), np.float32).astype(kind) for size in sizes)
    begins = [np.cumsum([0, *lengths]).astype(np.int32) for lengths in (q_lengths, k_lengths)]
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": begins[0], "cu_seqlens_k": begins[1]}
    return given | {"max_seqlen_q": max(q_lengths), "max_seqlen_k": max(k_lengths) + 3}


def run(
    given: dict[str, Any],
    schedules: int = 2,
    fields: dict[str, Any] | None = None,
    version: str = "a3",
    **options: Any,
) -> Any:
    """Return the result, lse and the checked call."""
    q = given["q"]
    whole = np.full((*q.shape[:2], q.shape[2] + 8), 7, q.dtype)
    out, lse = whole[..., : q.shape[2]], np.full((q.shape[1], q.shape[0]), np.nan, np.float32)
    checked = check_varlen(**given, out=out, return_lse=True, **options)
    problem = checked.problem
    config = small_config(version, problem, is_varlen=True, **fields or {})
    target = SM90A if version == "a3" else SM120A
    arrays = VARLEN_CALL.named(checked) | {"lse": describe(lse)}
    (launch,) = VARLEN_CALL.arguments(problem, config, imagined_gpu(target, 2), ())
    report = launch.emulate(target, arrays, schedules=schedules)
    assert report.is_clean, str(report)
    assert (whole[..., q.shape[2] :] == 7).all()
    return out, lse, checked


def is_right(given: dict[str, Any], out: Any, lse: Any, checked: Any, sequences: list[int] | None = None) -> None:
    problem, sink = checked.problem, checked.arrays[-1]
    begins = given["cu_seqlens_q"], given["cu_seqlens_k"]
    for index in range(len(begins[0]) - 1) if sequences is None else sequences:
        rows, keys = (slice(begin[index], begin[index + 1]) for begin in begins)
        asked = problem.scale, problem.limits, problem.softcap, sink and sink.owner
        wanted, sums = attend(given["q"][rows], given["k"][keys], given["v"][keys], *asked)
        difference = out[rows].astype(np.float64) - wanted
        assert np.linalg.norm(difference) <= LIMITS[out.dtype.name] * np.linalg.norm(wanted)
        np.testing.assert_allclose(lse[:, rows], sums, rtol=1e-5, atol=1e-5)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("case", "version"),
    [
        *((case, "a3") for case in ("full", "causal", "without_keys", "window")),
        *((case, "mma_sync") for case in ("causal", "without_keys", "sinks", "softcap")),
    ],
)
def test_results_are_right_and_clean(case: str, version: str) -> None:
    sizes: dict[str, Any] = {"dtype": ("float16", "bfloat16")[len(case) % 2]} | CASES[case]
    options = sizes.pop("options", {})
    given = make(**sizes)
    is_right(given, *run(given, version=version, **options))


@pytest.mark.slow
def test_one_warpgroup_and_three() -> None:
    given = make(q_lengths=[130, 20], k_lengths=[100, 130], dim=32)
    for tile_m in (64, 192):
        is_right(given, *run(given, fields={"tile_m": tile_m, "tile_n": 32}, causal=True))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("version", ["a3", "mma_sync"])
def test_a_sequence_does_not_see_what_the_next_one_holds(version: str) -> None:
    given = make(q_lengths=[70, 70], k_lengths=[70, 70])
    for name in ("q", "k", "v"):
        given[name][70:] = np.nan
    is_right(given, *run(given, version=version), sequences=[0])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("version", ["a3", "mma_sync"])
def test_blocks_of_logits_of_minus_infinity(version: str) -> None:
    """Count as keys that are not seen: of one sequence the last block, of another one all."""
    given = make(q_lengths=[70, 70], k_lengths=[200, 70])
    given["q"][..., 0] = np.abs(given["q"][..., 0]) + 1
    given["k"][100:, :, 0] = -np.inf
    is_right(given, *run(given, version=version))


def test_offsets_that_a_device_must_not_trust() -> None:
    given = make(q_lengths=[70, 70], k_lengths=[70, 70], dim=32)
    out, lse = np.full_like(given["q"], 7), np.zeros((1, 140), np.float32)
    checked = check_varlen(**given, out=out, return_lse=True)
    given["cu_seqlens_q"][:] = -5, 2**31 - 1, 60
    given["cu_seqlens_k"][:] = 139, 2**31 - 1, -1
    config = small_config("a3", checked.problem, is_varlen=True)
    arrays = VARLEN_CALL.named(checked) | {"lse": describe(lse)}
    (launch,) = VARLEN_CALL.arguments(checked.problem, config, imagined_gpu(SM90A, 2), ())
    assert launch.emulate(SM90A, arrays).is_clean
    assert np.isfinite(out).all()
    assert (out[70:] == 7).all()  # the first sequence has 70 queries at most, the second one has none


def test_the_public_function_on_the_emulator() -> None:
    given = make(q_lengths=[65, 0, 20], k_lengths=[70, 5, 20], heads=2)
    out, lse = cudatma.attention_varlen(**given, causal=True, return_lse=True, backend="emulator")
    exact, sums = cudatma.attention_varlen(**given, causal=True, return_lse=True, backend="reference")
    np.testing.assert_allclose(out.astype(np.float64), exact.astype(np.float64), atol=2e-3)
    np.testing.assert_allclose(lse, sums, rtol=1e-5, atol=1e-5)
    none = make(q_lengths=[3], k_lengths=[0], heads=2)
    assert not cudatma.attention_varlen(**none, backend="emulator").any()
