"""How many clusters fit on a GPU, and what a config looks like whose K they divide."""

from __future__ import annotations

import pytest
from marlin_builders import wgmma

from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.schedule import schedule
from cudatma.target import get_target


def config(**fields: object) -> MarlinConfig:
    return wgmma(**{"tile_m": 64, "tile_k": 128, "warpgroups": 2, "stages": 3, "cluster_k": 4} | fields)


def test_each_cta_holds_the_sums_of_the_other_ctas_for_its_rows() -> None:
    for tile_m, cluster_k, own in ((64, 4, 16), (40, 3, 16), (72, 4, 24), (24, 8, 8)):
        of = config(tile_m=tile_m, cluster_k=cluster_k)
        parts = {name: size for name, _, size in of.smem_layout()}
        assert parts["cluster_sums"] == (cluster_k - 1) * own * 128 * 4
        assert parts["cluster_barrier"] == 8
        assert of.staging_rows == own
        assert own * cluster_k >= tile_m
    alone = {name: size for name, _, size in config(cluster_k=1).smem_layout()}
    assert alone["cluster_sums"] == alone["cluster_barrier"] == 0


def test_each_tile_has_a_cluster() -> None:
    of = config(cluster_k=4)
    plan = schedule(of, 100, 300, 1000, 132)
    assert (plan.tiles_m, plan.tiles_n, plan.stream_tiles) == (2, 3, 0)
    assert plan.ctas == 2 * 3 * 4
    assert plan.partial_ctas == 0, "nothing goes through the workspace"
    assert of.launch_cluster == 4


def test_cluster_k_excludes_multicast() -> None:
    with pytest.raises(ArgumentError, match="1 with cluster_n 2") as caught:
        config(cluster_n=2)
    assert caught.value.field == "cluster_k"


def test_out_of_range() -> None:
    for wrong in (0, 9, "2"):
        with pytest.raises(ArgumentError) as caught:
            config(cluster_k=wrong)
        assert caught.value.field == "cluster_k"
    with pytest.raises(TargetError):
        config().check_target(get_target("sm_120a"))
