"""What the dense GEMM's choice loses to the fastest of the kernels that were measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from measured_gpus import readings

from cudatma.kernels.choice_table import choice_table
from cudatma.kernels.cost import cheapest_first
from cudatma.kernels.gemm.choose import GEMM, times
from cudatma.kernels.gemm.problem import Problem
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.gpu import H200, Gpu

FP8 = "float8_e4m3fn"
#: With candidates of every version, and tiles that serve at some M only.
SHAPES = (
    Problem(1, 4096, 4096, "float16"),
    Problem(1, 1000, 3000, "float16", "CC"),
    Problem(1, 128, 128, "bfloat16", "CR", batch=8),
    Problem(1, 28672, 8192, "float16", "RR", epilogue="gelu", out_dtype="float32"),
    Problem(1, 2048, 7168, FP8),
    Problem(1, 7168, 16384, FP8, block_scales=True, scales_by_tma=True),
    Problem(1, 4096, 4096, "float16", version="p1"),
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.description)
def test_times_at_many_m_are_the_costs_at_each(shape: Problem) -> None:
    ms = [1, 7, 64, 65, 300, 1000, 5000]
    for spec, us in times(shape, np.array(ms), H200):
        costs = np.array([spec.cost(replace(shape, m=m), H200).us for m in ms])
        np.testing.assert_allclose(us, np.where(np.isfinite(us), costs, np.inf), rtol=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.description)
def test_few_kernels_serve_small_m_and_none_loses_3_percent(shape: Problem) -> None:
    table = choice_table(GEMM, shape, H200, 8192)
    ms = np.array([*range(1, 256, 8), *range(257, 8192, 64)])
    by_spec = dict(times(shape, ms, H200))
    cheapest = np.min(list(by_spec.values()), axis=0)
    for index, m in enumerate(ms.tolist()):
        assert by_spec[table.at(m)][index] <= 1.03 * cheapest[index], m
    assert len(table.specs_up_to(255)) <= 24


def lost(problem: Problem, gpu: Gpu, us: dict[str, float]) -> float:
    """How many times as long as the fastest kernel takes the one that the model ranks first, of those that were
    measured. us: by kernel."""
    entry = next(spec.entry for spec, _ in cheapest_first(times, problem, gpu) if spec.entry in us)
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
        problem = Problem(*(cell[name] for name in ("m", "n", "k", "dtype", "layout")))
        times: dict[str, list[float]] = {}
        for version, entry in cell["entries"].items():
            times.setdefault(entry, []).append(cell["us"][version])
        us = {entry: sum(each) / len(each) for entry, each in times.items()}
        found.append(lost(problem, gpu, us))
        if problem.m <= 128:
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
    check = GemmSpec.__post_init__
    monkeypatch.setattr(GemmSpec, "__post_init__", lambda spec: (built.append(spec), check(spec)))
    first = times(Problem(1, 1504, 1216, "bfloat16", "CC", epilogue="silu"), ms, H200)
    built.clear()
    second = times(Problem(1, 3008, 2432, "bfloat16", "CC", epilogue="silu"), ms, H200)
    assert [spec for spec, _ in second] == [spec for spec, _ in first]
    assert not built
