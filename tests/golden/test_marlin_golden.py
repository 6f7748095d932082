"""The Marlin kernels' sources, as text that is reviewed: each template once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cudatma.build.render import render
from cudatma.kernels.marlin.mma_sync import MmaSyncSpec
from cudatma.kernels.marlin.skinny import SkinnySpec
from cudatma.kernels.marlin.wgmma import WgmmaSpec
from cudatma.target import get_target

#: Written out: no golden depends on the configurations that marlin_gemm chooses.
SPECS = {
    # M of 8, weights streamed by TMA, groups scaled in the accumulators, slice-K.
    "mma_sync": MmaSyncSpec("float16", 128, True, 8, 128, 256, 4, 2, 4, scale_on="accumulator"),
    # A cluster that divides K, groups that end within 64 of K, half a row of weights.
    "skinny": SkinnySpec("bfloat16", 64, True, 16, 3, 256, 2, 3, cluster_k=2),
    # Two warpgroups in turn, a cluster, scale and offset in one multiply-add.
    "wgmma": WgmmaSpec("float16", 128, False, 128, 128, 1, 2, 4, 2, 1, 3, 232, fused="as_stored", pingpong=True),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_source(golden: Callable[[str, str], None], name: str) -> None:
    spec = SPECS[name]
    spec.check_target(get_target("sm_90a"))
    golden(f"marlin_{name}.cu", render(spec.template, spec, "sm_90a"))


@pytest.mark.parametrize("name", ["mma_sync", "skinny"])
def test_both_targets_run_the_same_kernel(name: str) -> None:
    """SM120 computes what was reviewed, and what was run on another GPU."""
    spec = {**SPECS, "skinny": SkinnySpec("bfloat16", 64, True, 16, 3, 256, 2, 3)}[name]
    one, other = (render(spec.template, spec, target).partition("\n")[2] for target in ("sm_90a", "sm_120a"))
    assert one == other
