"""The Marlin kernels' sources for specs that together use every part of the templates, as text that is reviewed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cudatma.build.render import render
from cudatma.kernels.marlin.mma_sync import MmaSyncSpec
from cudatma.kernels.marlin.skinny import SkinnySpec
from cudatma.kernels.marlin.wgmma import WgmmaSpec
from cudatma.target import get_target

Golden = Callable[[str, str], None]
KernelSource = Callable[[str, Any, str], str]

#: Written out: no golden depends on the configurations that marlin_gemm chooses.
SPECS = {
    # M = 1, weights streamed by TMA, groups scaled in the accumulators.
    "decode_tma": MmaSyncSpec(
        "float16", 128, False, 8, 128, 256, 4, 1, 4, scale_on="accumulator"
    ),
    # Every operand by cp.async, zero points among them, and slice-K of two warps.
    "zeros_cp_async": MmaSyncSpec(
        "bfloat16", 32, True, 64, 64, 128, 4, 2, 3,
        weight_load_path="cp_async", scale_load_path="cp_async", activation_load_path="cp_async",
    ),
    # Large M, whole-column scales in the epilogue, setmaxnreg, activations by cp.async.
    "wide_column": MmaSyncSpec(
        "float16", -1, True, 128, 256, 64, 8, 1, 3,
        activation_load_path="cp_async", scale_on="epilogue", consumer_registers=232,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_the_source(golden: Golden, kernel_source: KernelSource, name: str) -> None:
    spec = SPECS[name]
    golden(f"marlin_mma_sync_{name}.cu", kernel_source(spec.template, spec, "sm_90a"))


#: Small M: half a row of weights, groups that end within 64 of K; whole rows, scales in the epilogue.
SKINNY = {
    "odd_zeros": SkinnySpec("bfloat16", 32, True, 16, 3, 256, 4, 3),
    "column": SkinnySpec("float16", -1, False, 8, 2, 512, 1, 3, 2),
    # A stage's activations in one box.
    "deep_box": SkinnySpec("float16", 128, False, 16, 1, 512, 8, 3, deep_box=True),
}


#: Clusters that divide K: one N tile and one row, which the mma's columns repeat; three N tiles for two CTAs.
CLUSTERS = {
    "cluster": SkinnySpec("float16", 128, False, 1, 1, 512, 4, 3, deep_box=True, cluster_k=3),
    "cluster_columns": SkinnySpec("bfloat16", 64, True, 16, 3, 256, 2, 3, cluster_k=2),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_skinny_source_of_clusters(golden: Golden, kernel_source: KernelSource, name: str) -> None:
    spec = CLUSTERS[name]
    spec.check_target(get_target("sm_90a"))
    golden(f"marlin_skinny_{name}.cu", kernel_source(spec.template, spec, "sm_90a"))


@pytest.mark.parametrize("name", SKINNY)
def test_the_skinny_source(golden: Golden, kernel_source: KernelSource, name: str) -> None:
    spec = SKINNY[name]
    golden(f"marlin_skinny_{name}.cu", kernel_source(spec.template, spec, "sm_90a"))


@pytest.mark.parametrize("spec", [*SPECS.values(), *SKINNY.values()], ids=lambda spec: spec.entry)
def test_both_targets_run_the_same_kernel(spec: MmaSyncSpec | SkinnySpec) -> None:
    """SM120 computes what was reviewed, and what was run on another GPU."""
    targets = ("sm_90a", "sm_120a")
    for target in targets:
        spec.check_target(get_target(target))
    one, other = (
        render(spec.template, spec, target).removeprefix(f"// cudatma: {spec.template} for {target}")
        for target in targets
    )
    assert one == other


#: Small M with everything but a cluster; large M with a cluster and setmaxnreg.
WGMMA = {
    "zeros_odd": WgmmaSpec("bfloat16", 32, True, 24, 128, 2, 2, 4, mmas_per_commit=4, commits_in_flight=1),
    "wide_multicast": WgmmaSpec("float16", -1, False, 256, 64, 2, 1, 5, 2, 1, 3, consumer_registers=232),
    # Scale and offset in one multiply-add, groups that end within 64 of K; bf16, and longer groups.
    "fused": WgmmaSpec("float16", 32, False, 64, 128, 2, 2, 4, fused="as_stored"),
    # A cluster that divides K, as two warpgroups of each of its CTAs do.
    "cluster_k": WgmmaSpec("float16", 128, False, 64, 256, 1, 1, 4, warpgroups_k=2, cluster_k=3),
    "fused_bf16": WgmmaSpec("bfloat16", 128, False, 64, 128, 2, 1, 4, fused="as_stored"),
    "pingpong": WgmmaSpec("float16", 128, False, 128, 128, 1, 2, 4, 2, 1, 3, 232, fused="as_stored", pingpong=True),
}


@pytest.mark.parametrize("name", WGMMA)
def test_the_wgmma_source(golden: Golden, kernel_source: KernelSource, name: str) -> None:
    spec = WGMMA[name]
    spec.check_target(get_target("sm_90a"))
    golden(f"marlin_wgmma_{name}.cu", kernel_source(spec.template, spec, "sm_90a"))
