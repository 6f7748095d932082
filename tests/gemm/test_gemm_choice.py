"""What the dense GEMM's choice loses to the fastest of the kernels that were measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gemm_builders import problem
from measured_gpus import readings

from cudatma.kernels.choice import choice_table
from cudatma.kernels.cost import cheapest_first
from cudatma.kernels.gemm.choose import GEMM, times
from cudatma.kernels.gemm.config import GemmConfig
from cudatma.kernels.gemm.problem import Problem
from cudatma.kernels.gpu import H200, Gpu

FP8 = "float8_e4m3fn"
#: With candidates of every version, and tiles that serve at some M only.
SHAPES = (
    problem(m=1),
    problem(m=1, n=1000, k=3000, layout="CC"),
    problem(m=1, n=128, k=128, dtype="bfloat16", layout="CR", batch=8),
    problem(m=1, n=28672, k=8192, layout="RR", epilogue="gelu", out_dtype="float32"),
    problem(m=1, n=2048, k=7168, dtype=FP8),
    problem(m=1, n=7168, k=16384, dtype=FP8, block_scales=True, scales_by_tma=True),
    problem(m=1, version="mma_sync"),
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.description)
def test_times_at_many_m_are_the_costs_at_each(shape: Problem) -> None:
    ms = [1, 7, 64, 65, 300, 1000, 5000]
    for config, us in times(shape, np.array(ms), H200):
        costs = np.array([config.cost(replace(shape, m=m), H200).us for m in ms])
        np.testing.assert_allclose(us, np.where(np.isfinite(us), costs, np.inf), rtol=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.description)
def test_few_kernels_serve_small_m_and_none_loses_3_percent(shape: Problem) -> None:
    table = choice_table(GEMM, shape, H200, 8192)
    ms = np.array([*range(1, 256, 8), *range(257, 8192, 64)])
    by_spec = dict(times(shape, ms, H200))
    cheapest = np.min(list(by_spec.values()), axis=0)
    for index, m in enumerate(ms.tolist()):
        assert by_spec[table.at(m)][index] <= 1.03 * cheapest[index], m
    assert len(table.configs_up_to(255)) <= 24


def lost(measured: Problem, gpu: Gpu, us: dict[str, float]) -> float:
    """How many times as long as the fastest kernel takes the one that the model ranks first, of those that were
    measured. us: by kernel."""
    entry = next(config.entry for config, _ in cheapest_first(times, measured, gpu) if config.entry in us)
    return us[entry] / min(us.values())


@pytest.mark.parametrize(
    ("name", "most", "average"),
    [("gemm.json", 1.04, 1.005), ("gemm_h200.json", 1.04, 1.005), ("gemm_waves.json", 1.1, 1.01)],
)
def test_the_choice_loses_little_against_the_versions(name: str, most: float, average: float) -> None:
    """With the tile that was measured for each (cudatma bench gemm). `auto` and a version may be the same kernel, which
    was then measured twice: the mean counts."""
    found, of_few_rows = [], []
    cells, gpu = readings(name)
    for cell in cells:
        measured = Problem(**{name: cell[name] for name in ("m", "n", "k", "dtype", "layout")})
        times: dict[str, list[float]] = {}
        for version, entry in cell["entries"].items():
            times.setdefault(entry, []).append(cell["us"][version])
        us = {entry: sum(each) / len(each) for entry, each in times.items()}
        found.append(lost(measured, gpu, us))
        if measured.m <= 128:
            of_few_rows.append(found[-1])
    assert max(found) < most
    assert sum(found) / len(found) < average
    assert sum(of_few_rows) <= 1.005 * len(of_few_rows)


@pytest.mark.parametrize(
    ("name", "most", "mean"),
    [
        ("gemm_tiles.json", 1.12, 1.012),
        ("gemm_middle.json", 1.08, 1.01),
        ("gemm_tiles_h100.json", 1.14, 1.013),
        ("gemm_few_rows.json", 1.03, 1.01),
        ("gemm_block_scales_tiles.json", 1.1, 1.012),
    ],
)
def test_the_choice_loses_little_against_every_tile(name: str, most: float, mean: float) -> None:
    """Of small, odd and large products; of middle ones, some with rows that split sectors; of few rows; with scales of
    blocks."""
    found = []
    cells, gpu = readings(name)
    for cell in cells:
        us = cell.pop("us")
        found.append(lost(Problem(**cell), gpu, us))
    assert max(found) < most
    assert sum(found) / len(found) < mean


def test_a_second_shape_of_a_kind_builds_no_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates depend on dtype, layout, epilogue and GPU, and are kept."""
    ms, built = np.array([1, 300]), []
    check = GemmConfig.__post_init__
    monkeypatch.setattr(GemmConfig, "__post_init__", lambda config: (built.append(config), check(config)))
    kind = {"m": 1, "dtype": "bfloat16", "layout": "CC", "epilogue": "silu"}
    first = times(problem(n=1504, k=1216, **kind), ms, H200)
    built.clear()
    second = times(problem(n=3008, k=2432, **kind), ms, H200)
    assert [config for config, _ in second] == [config for config, _ in first]
    assert not built
