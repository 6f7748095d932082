"""The wgmma kernel where clusters divide K: right, and free of hazards in several schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from marlin_builders import wgmma
from marlin_runner import TOLERANCE, launch_programmatically, operands, relative_error, run_marlin

from cudatma.errors import ArgumentError
from cudatma.kernels.marlin.config import MarlinConfig

SCHEDULES = 3  # tests/mutants runs these kernels in 8


def config(**fields: Any) -> MarlinConfig:
    return wgmma(**{"tile_k": 128, "stages": 2, "mmas_per_commit": 1, "commits_in_flight": 3} | fields)


#: Parts of K that are even or not; rows of M for each CTA, for some, fewer for the last; several tiles; tails.
CASES = {
    "2_blocks": (60, 1024, 128, config(tile_m=64, cluster_k=2, warpgroups=2)),
    "3_blocks_of_5_fragments": (40, 1160, 200, config(tile_m=40, cluster_k=3, slice_k=2)),
    "4_blocks_stacked_column": (
        70, 600, 120, config(tile_m=72, cluster_k=4, tile_n=128, group_size=-1, dtype="bfloat16"),
    ),
    "8_blocks_for_3_fragments_zeros": (17, 1088, 100, config(tile_m=24, cluster_k=8, has_zeros=True, stages=3)),
    "several_tiles": (60, 520, 200, config(tile_m=56, cluster_k=4, warpgroups=2, group_size=64)),
    "more_registers": (
        64, 512, 128, config(tile_m=64, cluster_k=2, warpgroups=2, scale_form="as_stored", consumer_registers=152),
    ),
    "fused_bf16_ring_that_wraps": (
        90, 1928, 64, config(tile_m=96, cluster_k=3, scale_form="as_stored", dtype="bfloat16"),
    ),
    "64_deep_stages": (33, 840, 128, config(tile_m=48, tile_k=64, cluster_k=6, group_size=32, warpgroups=2)),
}  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", CASES)
def test_products_are_right_and_clean(name: str) -> None:
    m, k, n, of = CASES[name]
    x, w, bias = operands(m, k, n, of)
    out, report = run_marlin(x, w, config=of, bias=bias, schedules=SCHEDULES)
    assert report.is_clean
    assert relative_error(out, x, w, bias) < TOLERANCE[of.dtype]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2_blocks", "3_blocks_of_5_fragments"])
def test_prefetched_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A programmatic dependent launch of clusters."""
    launch_programmatically(monkeypatch)
    m, k, n, of = CASES[name]
    x, w, _ = operands(m, k, n, of)
    out, report = run_marlin(x, w, config=of, schedules=SCHEDULES)
    assert report.is_clean
    assert relative_error(out, x, w) < TOLERANCE[of.dtype]


def test_each_block_has_a_stage() -> None:
    x, w, _ = operands(20, 256, 64, of := config(tile_m=24, cluster_k=3))
    with pytest.raises(ArgumentError, match="at most 2") as caught:
        run_marlin(x, w, config=of, schedules=1)
    assert caught.value.field == "cluster_k"
    run_marlin(x, w, config=replace(of, cluster_k=2), schedules=1)
