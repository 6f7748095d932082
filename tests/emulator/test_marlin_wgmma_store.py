"""The wgmma Marlin kernel whose result leaves by TMA, on the CPU: right, within the result's bounds, free of hazards in
20 schedules, and never without its fence and its waits. Bands of token tiles beside it."""

from __future__ import annotations

import numpy as np
import pytest
from marlin_runner import TOLERANCE, operands, relative_error, run_marlin
from ptx_of import ptx_of_template
from test_marlin_wgmma import SCHEDULES, spec

from cudatma.errors import ArgumentError, HazardError
from cudatma.kernels.marlin.plan import resolve_store
from cudatma.kernels.marlin.problem import schedule

#: M, K, N, blocks, spec. A block has several tiles, or shares of one; results end inside of boxes, in both directions.
CASES = {
    # K shorter than the ring: nothing but the store's own waits orders one tile's boxes and the next one's.
    "short_depth": (100, 64, 72, 1, spec(block_m=32, store_tokens=8, stages=4)),
    "three_buffers": (100, 128, 72, 1, spec(block_m=48, store_tokens=16)),
    "four_buffers_twice": (150, 64, 72, 1, spec(block_m=128, store_tokens=16)),
    "stream_k": (40, 256, 72, 3, spec(block_m=32, store_tokens=16)),
    "stack_2": (40, 72, 200, 1, spec(block_m=32, store_tokens=16, stack=2, stages=3)),
    "multicast_stream_k": (20, 192, 136, 6, spec(cluster=2, store_tokens=8)),
    "multicast_setmaxnreg": (
        20, 128, 200, 2,
        spec(cluster=2, steps=1, in_flight=3, block_k=128, consumer_registers=232, group_size=64, store_tokens=8),
    ),
    "two_warpgroups_bf16_zeros": (
        20, 64, 136, 2, spec(dtype="bfloat16", has_zeros=True, warpgroups=2, group_size=64, store_tokens=8)
    ),
    "column_zeros": (
        20, 200, 72, 1,
        spec(group_size=-1, has_zeros=True, dtype="bfloat16", block_k=256, steps=4, in_flight=3, store_tokens=8),
    ),
    "depth_divided": (20, 256, 72, 1, spec(warpgroups_k=2, block_k=128, group_size=64, steps=1, store_tokens=8)),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if "stream_k" in name])
def test_tiles_are_divided(name: str) -> None:
    m, k, n, processors, of, *_ = CASES[name]
    assert schedule(of, m, n, k, processors, eager=True).stream_tiles


@pytest.mark.parametrize("name", CASES)
def test_products_are_right_and_clean(name: str) -> None:
    m, k, n, processors, of = CASES[name]
    x, w, bias = operands(m, k, n, of)
    out, report = run_marlin(x, w, spec=of, processors=processors, bias=bias, schedules=SCHEDULES)
    assert report.is_clean
    assert relative_error(out, x, w, bias) < TOLERANCE[of.dtype]


@pytest.mark.parametrize("name", ["four_buffers_twice", "stream_k"])
def test_the_bits_are_those_of_the_other_way(name: str) -> None:
    m, k, n, processors, of = CASES[name]
    x, w, bias = operands(m, k, n, of)
    by_tma, plain = (
        run_marlin(x, w, spec=one, processors=processors, bias=bias, schedules=1)[0]
        for one in (of, resolve_store(of, 1, 2))
    )
    assert by_tma.tobytes() == plain.tobytes()


def test_nothing_outside_of_the_result_is_written() -> None:
    """A result inside of a larger array: its boxes end with it, in tokens and in channels."""
    of = spec(block_m=32, store_tokens=16)
    x, w, bias = operands(37, 128, 72, of)
    whole = np.full((40, 96), 7.0, x.dtype)
    run_marlin(x, w, spec=of, processors=2, bias=bias, schedules=4, out=whole[:37, 8:80])
    assert relative_error(whole[:37, 8:80], x, w, bias) < TOLERANCE["float16"]
    whole[:37, 8:80] = 7.0
    assert (whole == 7.0).all()


@pytest.mark.parametrize(("n", "width"), [(68, 68), (72, 76)])
def test_rows_that_tma_would_overrun_leave_the_other_way(n: int, width: int) -> None:
    of = spec(block_m=32, store_tokens=16)
    x, w, bias = operands(20, 128, n, of)
    out = np.zeros((20, width), x.dtype)[:, :n]
    with pytest.raises(ArgumentError, match="whole 16-byte pieces"):
        run_marlin(x, w, spec=of, processors=2, out=out, schedules=1)
    resolved = resolve_store(of, n, out.strides[0])
    assert resolved.entry == spec(block_m=32).entry
    run_marlin(x, w, spec=resolved, processors=2, bias=bias, out=out, schedules=1)
    assert relative_error(out, x, w, bias) < TOLERANCE["float16"]


@pytest.mark.parametrize(
    ("instruction", "kind"),
    [
        ("fence.proxy.async", "missing_proxy_fence"),
        ("cp.async.bulk.wait_group.read 2;", "store_source_reused"),
        ("cp.async.bulk.wait_group.read 0;", "exit_with_pending_store"),
        ("cp.async.bulk.commit_group;", "uncommitted_group"),
    ],
)
def test_what_is_left_out_is_reported(monkeypatch: pytest.MonkeyPatch, instruction: str, kind: str) -> None:
    of = spec(block_m=128, store_tokens=16)
    x, w, _ = operands(250, 64, 64, of)
    ptx = ptx_of_template(of.template, of)
    assert instruction in ptx
    lines = [line for line in ptx.splitlines() if not line.strip().startswith(instruction)]
    monkeypatch.setattr("marlin_runner.ptx_of_template", lambda *_: "\n".join(lines))
    with pytest.raises(HazardError, match=kind):
        run_marlin(x, w, spec=of, processors=1, schedules=4)


@pytest.mark.parametrize(("band", "processors"), [(1, 2), (2, 3), (3, 1), (100, 3)])
def test_bands_compute_every_tile(band: int, processors: int) -> None:
    """Four token tiles: whole tiles and divided ones, the last band narrower than the others."""
    of = spec(store_tokens=8)
    x, w, bias = operands(60, 192, 136, of)
    out, report = run_marlin(x, w, spec=of, processors=processors, bias=bias, schedules=2, band=band)
    assert report.is_clean
    assert relative_error(out, x, w, bias) < TOLERANCE["float16"]
