"""Properties of a GPU that the cost model uses, and the number of clusters that run at the same time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from marlin_builders import wgmma

from cudatma.context import Runtime, using_runtime
from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels import gpu as gpu_module
from cudatma.kernels.gpu import H200, Gpu, gpu_of, imagined_gpu
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.schedule import schedule
from cudatma.target import get_target


def test_an_imagined_gpu_is_the_known_one_or_scaled_from_it() -> None:
    assert imagined_gpu("sm_90a", 132) == H200
    small = imagined_gpu("sm_120a", 85)
    assert small.sm_count == 85
    assert small.memory_bytes_per_us == pytest.approx(imagined_gpu("sm_120a", 170).memory_bytes_per_us / 2)
    assert imagined_gpu("sm_90", 132).target == "sm_90"
    assert replace(H200, sm_clock_mhz=1965).clock_class_mhz == H200.clock_class_mhz == 2000


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ((1980000, 3201000, 6144), H200),
        ((1755000, 2619000, 5120), Gpu("sm_90a", 132, 1755, 2619, 5120)),
        ((1980000, 0, 0), H200),  # what a driver may say of memory that is the host's
    ],
)
def test_an_installed_gpu_is_asked_in_khz(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[int, int, int], wanted: Gpu
) -> None:
    names = ("CLOCK_RATE", "MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH")
    attributes = SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in names})
    driver = SimpleNamespace(
        CUdevice_attribute=attributes,
        cuDeviceGet=lambda ordinal: (0, ordinal),
        cuDeviceGetAttribute=lambda name, handle: (0, answers[names.index(name)]),
    )
    monkeypatch.setattr(gpu_module, "detect", lambda device: get_target("sm_90a"))
    monkeypatch.setattr(gpu_module.context, "initialize", lambda: driver)
    monkeypatch.setattr(gpu_module.context, "device", lambda device: SimpleNamespace(sm_count=132))
    with using_runtime(Runtime()):
        assert gpu_of(0) == wanted


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
    with pytest.raises(ArgumentError, match="1 with cluster_n = 2") as caught:
        config(cluster_n=2)
    assert caught.value.field == "cluster_k"


def test_out_of_range() -> None:
    for wrong in (0, 9, "2"):
        with pytest.raises(ArgumentError) as caught:
            config(cluster_k=wrong)
        assert caught.value.field == "cluster_k"
    with pytest.raises(TargetError):
        config().check_target(get_target("sm_120a"))
