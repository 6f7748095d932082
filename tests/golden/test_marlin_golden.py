"""The Marlin kernels' sources for specs that together use every part of the templates, as text that is reviewed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from marlin_builders import mma_sync, skinny, wgmma

from cudatma.build.render import render
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.target import get_target

Golden = Callable[[str, str], None]
KernelSource = Callable[[str, Any, str], str]

#: Written out: no golden depends on the configurations that marlin_gemm chooses.
SPECS = {
    # M = 1, weights streamed by TMA, groups scaled in the accumulators.
    "decode_tma": mma_sync(tile_m=8, tile_n=128, tile_k=256, warps_n=4, stages=4, scale_on="accumulator"),
    # Every operand by cp.async, zero points among them, and slice-K of two warps.
    "zeros_cp_async": mma_sync(
        dtype="bfloat16",
        group_size=32,
        has_zeros=True,
        tile_m=64,
        tile_n=64,
        tile_k=128,
        warps_n=4,
        slice_k=2,
        stages=3,
        weight_load_path="cp_async",
        scale_load_path="cp_async",
        activation_load_path="cp_async",
    ),
    # Large M, whole-column scales in the epilogue, setmaxnreg, activations by cp.async.
    "wide_column": mma_sync(
        group_size=-1,
        has_zeros=True,
        tile_m=128,
        tile_n=256,
        tile_k=64,
        warps_n=8,
        stages=3,
        activation_load_path="cp_async",
        scale_on="epilogue",
        consumer_registers=232,
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_source(golden: Golden, kernel_source: KernelSource, name: str) -> None:
    spec = SPECS[name]
    golden(f"marlin_mma_sync_{name}.cu", kernel_source(spec.template, spec, "sm_90a"))


#: Small M: half a row of weights, groups that end within 64 of K; whole rows, scales in the epilogue.
SKINNY = {
    "odd_zeros": skinny(
        dtype="bfloat16", group_size=32, has_zeros=True, tile_m=16, tile_n=96, tile_k=256, slice_k=4, stages=3
    ),
    "column": skinny(group_size=-1, tile_m=8, tile_n=64, tile_k=512, slice_k=1, stages=3, blocks_per_sm=2),
    # A stage's activations in one box.
    "deep_box": skinny(tile_m=16, tile_n=32, tile_k=512, slice_k=8, stages=3, deep_box=True),
}


#: Clusters that divide K: one N tile and one row, which the mma's columns repeat; three N tiles for two CTAs.
CLUSTERS = {
    "cluster": skinny(tile_m=1, tile_n=32, tile_k=512, slice_k=4, stages=3, deep_box=True, cluster_k=3),
    "cluster_columns": skinny(
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
def test_both_targets_run_the_same_kernel(spec: MarlinConfig) -> None:
    """SM120 computes what was reviewed, and what was run on another GPU."""
    targets = ("sm_90a", "sm_120a")
    for target in targets:
        replace(spec, blocks_per_sm=1).check_target(get_target(target))
    one, other = (
        render(spec.template, spec, target).removeprefix(f"// cudatma: {spec.template} for {target}")
        for target in targets
    )
    assert one == other


#: Small M with everything but a cluster; large M with a cluster and setmaxnreg.
WGMMA = {
    "zeros_odd": wgmma(
        dtype="bfloat16",
        group_size=32,
        has_zeros=True,
        tile_m=24,
        tile_n=256,
        tile_k=128,
        warpgroups=2,
        stages=4,
        mmas_per_commit=4,
    ),
    "wide_multicast": wgmma(
        group_size=-1,
        tile_m=256,
        tile_n=128,
        tile_k=64,
        warpgroups=2,
        stages=5,
        cluster_n=2,
        mmas_per_commit=1,
        commits_in_flight=3,
        consumer_registers=232,
    ),
    # Scale and offset in one multiply-add, groups that end within 64 of K; bf16, and longer groups.
    "fused": wgmma(group_size=32, tile_m=64, tile_n=256, tile_k=128, warpgroups=2, stages=4, scale_form="as_stored"),
    # A cluster that divides K, as two warpgroups of each of its CTAs do.
    "cluster_k": wgmma(tile_m=64, tile_n=64, tile_k=256, warpgroups=1, stages=4, slice_k=2, cluster_k=3),
    "fused_bf16": wgmma(
        dtype="bfloat16", tile_m=64, tile_n=128, tile_k=128, warpgroups=2, stages=4, scale_form="as_stored"
    ),
    "pingpong": wgmma(
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


@pytest.mark.parametrize("name", WGMMA)
def test_the_wgmma_source(golden: Golden, kernel_source: KernelSource, name: str) -> None:
    spec = WGMMA[name]
    spec.check_target(get_target("sm_90a"))
    golden(f"marlin_wgmma_{name}.cu", kernel_source(spec.template, spec, "sm_90a"))
