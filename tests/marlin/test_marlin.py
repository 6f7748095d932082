"""The Marlin kernel, as NVRTC compiles it, on the CPU: right, and free of hazards."""

from __future__ import annotations

import numpy as np
import pytest
from marlin_builders import BY_CP_ASYNC, mma_sync
from marlin_runner import relative_error, run_marlin

from cudatma.emulator import Trace
from cudatma.kernels.gpu import H200
from cudatma.kernels.marlin.candidates import choose_mma_sync
from cudatma.kernels.marlin.problem import Problem
from cudatma.kernels.schedule import schedule
from cudatma.quantization import quantize


def problem(m: int, k: int, n: int, dtype: str = "float16", **options: object) -> tuple[object, object]:
    rng = np.random.default_rng(m + k + n)
    weight = rng.normal(size=(k, n)).astype(np.float32) * 0.05
    w = quantize(weight, dtype=dtype, **options)  # type: ignore[arg-type]
    return rng.normal(size=(m, k)).astype(np.dtype(w.scales.dtype)), w


@pytest.mark.sweep(3)
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
    out, report = run_marlin(x, w, target=target, schedules=3)
    assert report.is_clean
    assert relative_error(out, x, w) < (6e-3 if "dtype" in options else 1e-3)


def test_blocks_that_share_tiles_add_their_parts_in_a_fixed_order() -> None:
    x, w = problem(16, 1024, 128)
    config = mma_sync(tile_m=16, tile_n=64, tile_k=128, warps_n=2, slice_k=2, stages=3, scale_on="accumulator")
    assert schedule(config, 16, 128, 1024, 5, eager=True).stream_tiles
    first, report = run_marlin(x, w, config=config, processors=5, schedules=4)
    assert report.is_clean
    again, _ = run_marlin(x, w, config=config, processors=5, schedules=1, replay=7)
    assert relative_error(first, x, w) < 1e-3
    assert first.tobytes() == again.tobytes()


def test_cp_async_load_path() -> None:
    x, w = problem(16, 256, 128)
    config = choose_mma_sync(Problem.of(w, 16), H200, **BY_CP_ASYNC)
    out, report = run_marlin(x, w, config=config, schedules=3)
    assert report.is_clean
    assert relative_error(out, x, w) < 1e-3


def test_trace_shows_copies_waits_phases_and_products() -> None:
    x, w = problem(16, 1024, 64)
    trace = Trace()
    run_marlin(x, w, target="sm_120a", processors=1, schedules=3, trace=trace)
    assert {"copy", "wait", "phase", "mma"} <= {event.kind for event in trace.events}
    assert trace.to_svg().startswith("<svg ")
    assert '"ph": "X"' in trace.to_json()
