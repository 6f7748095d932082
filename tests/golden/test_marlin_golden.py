"""The Marlin kernels' sources, as text that is reviewed: each template once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from marlin_builders import mma_sync, skinny, wgmma

from cudatma.build.render import render
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.target import get_target

#: Written out: no golden depends on the configurations that marlin_gemm chooses.
CONFIGS = {
    # M of 8, weights streamed by TMA, groups scaled in the accumulators, slice-K.
    "mma_sync": mma_sync(
        has_zeros=True,
        tile_m=8,
        tile_n=128,
        tile_k=256,
        warps_n=4,
        slice_k=2,
        stages=4,
        scale_on="accumulator",
    ),
    # A cluster that divides K, groups that end within 64 of K, half a row of weights.
    "skinny": skinny(
        dtype="bfloat16",
        group_size=64,
        has_zeros=True,
        tile_m=16,
        tile_n=96,
        tile_k=256,
        slice_k=2,
        stages=3,
        cluster_k=2,
    ),
    # Two warpgroups in turn, a cluster, scale and offset in one multiply-add.
    "wgmma": wgmma(
        tile_m=128,
        tile_n=128,
        tile_k=128,
        warpgroups=1,
        stages=4,
        cluster_n=2,
        mmas_per_commit=1,
        commits_in_flight=3,
        consumer_registers=232,
        scale_form="as_stored",
        pingpong=True,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_source(golden: Callable[[str, str], None], name: str) -> None:
    config = CONFIGS[name]
    config.check_target(get_target("sm_90a"))
    golden(f"marlin_{name}.cu", render(config.template, config, "sm_90a"))


@pytest.mark.parametrize(
    "config", [CONFIGS["mma_sync"], replace(CONFIGS["skinny"], cluster_k=1)], ids=["mma_sync", "skinny"]
)
def test_both_targets_run_the_same_kernel(config: MarlinConfig) -> None:
    """SM120 computes what was reviewed, and what was run on another GPU."""
    one, other = (render(config.template, config, target).partition("\n")[2] for target in ("sm_90a", "sm_120a"))
    assert one == other
