"""What the dense GEMM's choice loses to the fastest of the kernels that were measured."""

from __future__ import annotations

import pytest
from measured_gpus import readings

from cudatma.kernels.cost import ranked
from cudatma.kernels.gemm.choose import candidates
from cudatma.kernels.gemm.problem import Problem
from cudatma.kernels.gpu import Gpu


def lost(problem: Problem, gpu: Gpu, us: dict[str, float]) -> float:
    """How many times as long as the fastest kernel takes the one that the model ranks first, of those that were
    measured. us: by kernel."""
    entry = next(spec.entry for spec, _ in ranked(candidates(problem, gpu)) if spec.entry in us)
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
        cell.pop("rivals")
        found.append(lost(Problem(**cell), gpu, us))
    assert max(found) < most
    assert sum(found) / len(found) < mean
