"""The Marlin kernels on the emulator: marlin_gemm's results against float64, load paths, and batch invariance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from marlin_builders import BY_CP_ASYNC, mma_sync
from marlin_runner import relative_error, run_marlin

from cudatma import marlin_gemm
from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.emulator import Trace
from cudatma.kernels.choice import shortlist
from cudatma.kernels.engine import emulate
from cudatma.kernels.gpu import H200, imagined_gpu
from cudatma.kernels.marlin import gemm as marlin
from cudatma.kernels.marlin.arguments import gemm_arguments
from cudatma.kernels.marlin.candidates import choose_mma_sync
from cudatma.kernels.marlin.choose import MARLIN, choose_untuned
from cudatma.kernels.marlin.gemm import MARLIN_GEMM, MarlinOptions, weight_of
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.schedule import schedule
from cudatma.kernels.tuning import pinned
from cudatma.quantization import quantize

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


#: Pitches off 16 bytes: rows that are copied first, plain stores.
OFF_16_BYTES: tuple[int, int, int, dict[str, Any]] = (5, 333, 77, {"group_size": 32, "symmetric": False})


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("target", "m", "k", "n", "options"),
    [
        ("sm_90a", 1, 256, 128, {}),
        ("sm_90a", *OFF_16_BYTES),
        ("sm_120a", 16, 512, 256, {"dtype": "bfloat16"}),
        ("sm_120a", 40, 128, 64, {"group_size": -1}),
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
    with pinned(choose_mma_sync(Problem.of(weight, m), imagined_gpu(target, 132), **BY_CP_ASYNC)):
        by_threads = marlin_gemm(x, weight, bias=bias, backend="emulator")
    assert error(by_threads, x, weight, bias) < TOLERANCE[weight.dtype]
    if m == 40:  # the same tile by TMA
        assert np.array_equal(by_threads, y)


def test_a_given_out_is_filled_and_nothing_around_it() -> None:
    x, weight, bias = operands(3, 128, 64)
    wide = np.full((3, 128), np.nan, np.float16)
    out = wide[:, :64]
    assert marlin_gemm(x, weight, out=out, bias=bias, backend="emulator") is out
    assert error(out, x, weight, bias) < TOLERANCE["float16"]
    assert np.isnan(wide[:, 64:]).all()


def test_m_of_0() -> None:
    x, weight, _ = operands(0, 128, 64)
    assert marlin_gemm(x, weight, backend="emulator").shape == (0, 64)


@pytest.mark.slow
def test_the_copy_and_the_dependent_gemm_are_clean() -> None:
    """In several interleavings; the GEMM has to wait for the copy, and the copy for the writer of the activations."""
    x, weight, _ = operands(40, 192, 72)
    permuted = replace(weight, perm=RNG.permutation(192).astype(np.int32))
    out = np.empty((40, 72), np.float16)
    checked = MARLIN_GEMM.check((x, None), out, MarlinOptions(False, False), permuted)
    arrays = MARLIN_GEMM.named(checked) | weight_of(permuted).arrays
    report = emulate(MARLIN_GEMM, checked.problem, arrays, schedules=2)
    assert report.is_clean
    assert error(out, x, permuted, np.zeros(1)) < TOLERANCE["float16"]


def test_a_hostile_order_reads_nothing_outside_of_x() -> None:
    """Weights are checked when they are made, but their arrays can be written to afterwards. An error is raised for a
    read out of bounds."""
    x, weight, bias = operands(3, 128, 64)
    permuted = replace(weight, perm=np.arange(128, dtype=np.int32))
    permuted.perm[[0, 77, 127]] = (-1, 2**31 - 1, 128)
    y = marlin_gemm(x, permuted, bias=bias, backend="emulator")
    taken = np.where((permuted.perm < 0) | (permuted.perm > 127), 127, permuted.perm)
    ordered = np.ascontiguousarray(x[:, taken])
    assert np.array_equal(y, marlin_gemm(ordered, weight, bias=bias, backend="emulator"))


@pytest.mark.slow
def test_a_row_is_the_same_in_every_batch() -> None:
    x, weight, bias = operands(70, 256, 136)
    whole = marlin_gemm(x, weight, bias=bias, backend="emulator", batch_invariant=True)
    assert error(whole, x, weight, bias) < TOLERANCE[weight.dtype]
    for rows in (slice(0, 1), slice(30, 50)):
        part = marlin_gemm(x[rows], weight, bias=bias, backend="emulator", batch_invariant=True)
        assert part.tobytes() == whole[rows].tobytes()


def test_act_order() -> None:
    x, weight, bias = operands(20, 136, 40)
    permuted = replace(weight, perm=RNG.permutation(136).astype(np.int32))
    y = marlin_gemm(x, permuted, bias=bias, backend="emulator")
    assert error(y, x, permuted, bias) < TOLERANCE["float16"]
    # The GEMM is the one that permuted activations get.
    ordered = np.ascontiguousarray(x[:, permuted.perm])
    assert np.array_equal(y, marlin_gemm(ordered, weight, bias=bias, backend="emulator"))


def test_a_view_at_any_element() -> None:
    x, weight, bias = operands(3, 128, 64)
    buffer = np.full((3, 140), np.nan, np.float16)
    for offset in (1, 8, 11):
        buffer[:, offset : offset + 128] = x
        y = marlin_gemm(buffer[:, offset : offset + 128], weight, bias=bias, backend="emulator")
        assert np.array_equal(y, marlin_gemm(x, weight, bias=bias, backend="emulator"))


def test_a_pinned_configuration_is_what_a_gemm_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner runs its candidates in this way. This config is not the untuned choice."""
    layer, m = LinearShape(512, 136, 128, False, "float16"), 9
    mine = shortlist(MARLIN, Problem(layer, m), H200, 12)[-1].config
    weight = quantize(np.random.default_rng(0).standard_normal((layer.k, layer.n)).astype(np.float32))
    x = np.random.default_rng(1).standard_normal((m, layer.k)).astype(np.float16)
    seen: list[Any] = []

    def watched(problem: Problem, config: Any, *rest: Any) -> Any:
        seen.append(config)
        return gemm_arguments(problem, config, *rest)

    monkeypatch.setattr(marlin, "gemm_arguments", watched)
    with pinned(mine):
        out = marlin_gemm(x, weight, backend="emulator")
    assert [config.in_form("none") for config in seen] == [mine]
    assert relative_error(out, x, weight) < 1e-3


K, N, PROCESSORS = 320, 136, 3
#: Each tile of either kernel, tails in M, and several tiles a CTA.
M_VALUES = (1, 11, 50, 150)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype", "group", "symmetric"),
    [("sm_90a", "bfloat16", -1, False), ("sm_120a", "float16", 64, False)],
)
def test_a_row_has_the_same_bits_in_every_batch(target: str, dtype: str, group: int, symmetric: bool) -> None:
    rng = np.random.default_rng(5)
    w = quantize(rng.normal(size=(K, N)) * 0.05, dtype=dtype, group_size=group, symmetric=symmetric)
    x = rng.normal(size=(max(M_VALUES), K)).astype(np.dtype(w.scales.dtype))
    layer = LinearShape(K, N, group, not symmetric, dtype)
    results, entries = [], set()
    for m in M_VALUES:
        config = choose_untuned(Problem(layer, m, True), imagined_gpu(target, PROCESSORS))
        entries.add(config.entry)
        out, report = run_marlin(
            np.ascontiguousarray(x[:m]),
            w,
            target=target,
            processors=PROCESSORS,
            config=config,
            divide=False,
            schedules=1,
        )
        assert report.is_clean
        results.append(out)
    assert len(entries) >= 4
    for out in results[:-1]:
        assert out.tobytes() == results[-1][: len(out)].tobytes()
    assert relative_error(results[-1], x, w) < (1e-3 if dtype == "float16" else 6e-3)


# ---- The mma.sync kernel


def problem(m: int, k: int, n: int, dtype: str = "float16", **options: object) -> tuple[object, object]:
    rng = np.random.default_rng(m + k + n)
    weight = rng.normal(size=(k, n)).astype(np.float32) * 0.05
    w = quantize(weight, dtype=dtype, **options)  # type: ignore[arg-type]
    return rng.normal(size=(m, k)).astype(np.dtype(w.scales.dtype)), w


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize(
    ("m", "k", "n", "options"),
    [
        (16, 512, 256, {}),
        (3, 192, 72, {"group_size": 64, "symmetric": False}),
        (17, 256, 64, {"group_size": -1, "dtype": "bfloat16"}),
    ],
)
def test_products_are_right_and_clean(target: str, m: int, k: int, n: int, options: dict[str, object]) -> None:
    x, w = problem(m, k, n, **options)  # type: ignore[arg-type]
    out, report = run_marlin(x, w, target=target, schedules=1)
    assert report.is_clean
    assert relative_error(out, x, w) < (6e-3 if "dtype" in options else 1e-3)


@pytest.mark.slow
def test_blocks_that_share_tiles_add_their_parts_in_a_fixed_order() -> None:
    x, w = problem(16, 1024, 128)
    config = mma_sync(tile_m=16, tile_n=64, tile_k=128, warps_n=2, slice_k=2, stages=3, scale_on="accumulator")
    assert schedule(config, 16, 128, 1024, 5, eager=True).stream_tiles
    first, report = run_marlin(x, w, config=config, processors=5, schedules=2)
    assert report.is_clean
    again, _ = run_marlin(x, w, config=config, processors=5, schedules=1, replay=7)
    assert relative_error(first, x, w) < 1e-3
    assert first.tobytes() == again.tobytes()


def test_cp_async_load_path() -> None:
    x, w = problem(16, 256, 128)
    config = choose_mma_sync(Problem.of(w, 16), H200, **BY_CP_ASYNC)
    out, report = run_marlin(x, w, config=config, schedules=1)
    assert report.is_clean
    assert relative_error(out, x, w) < 1e-3


def test_trace_shows_copies_waits_phases_and_products() -> None:
    x, w = problem(16, 1024, 64)
    trace = Trace()
    run_marlin(x, w, target="sm_120a", processors=1, schedules=1, trace=trace)
    assert {"copy", "wait", "phase", "mma"} <= {event.kind for event in trace.events}
    assert trace.to_svg().startswith("<svg ")
    assert '"ph": "X"' in trace.to_json()
