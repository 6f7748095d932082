"""The bars of the Marlin GEMM on made-up cells: which cells each concerns, what meets it, what does not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bars
from benchmarks.shapes import FIVE, LARGE, M_VALUES

SHAPES = tuple(dict.fromkeys((*FIVE, *LARGE)))
#: Everything meets every bar.
GOOD: dict[str, Any] = {"us": 10.0, "floor_us": 10.0, "x_floor": 1.0, "x_floor_programmatic": 1.0}
GOOD |= {"x_cublas": 3.0, "x_best": 2.0}


def cell(m: int, shape: tuple[int, int] = (8192, 28672), **changed: float | None) -> dict[str, Any]:
    return {"k": shape[0], "n": shape[1], "m": m, **GOOD, **changed}


def all_good() -> list[dict[str, Any]]:
    return [cell(m, shape) for shape in SHAPES for m in M_VALUES]


def missed(cells: list[dict[str, Any]]) -> list[str]:
    return [verdict.bar.name for verdict in bars.verdicts(cells) if verdict.status == "missed"]


def test_good_cells_meet_every_bar() -> None:
    assert {verdict.status for verdict in bars.verdicts(all_good())} == {"met"}


LARGE_CELL, DOWN, SQUARE, SMALL, MEDIUM = (8192, 28672), (28672, 8192), (8192, 8192), (4096, 4096), (4096, 12288)
#: (tokens, layer, field, the last value that meets the bar, the first that does not, bars that are then missed)
EDGES = [
    (1, LARGE_CELL, "x_floor", 1.10, 1.11, "M = 1, over 30 MB"),
    (16, DOWN, "x_floor", 1.18, 1.19, "M = 16, over 30 MB"),
    (8, MEDIUM, "us", 11.5, 11.6, "M <= 16, 8 to 30 MB, above F"),
    (2, SMALL, "x_floor", 1.35, 1.36, "M <= 16, 4096 x 4096"),
    (4, SQUARE, "x_floor_programmatic", 1.15, 1.16, "M <= 16, chained, over 30 MB"),
    (16, SMALL, "x_floor_programmatic", 1.6, 1.61, "M <= 16, chained, 4096 x 4096"),
    (32, (8192, 57344), "x_floor", 1.35, 1.36, "M = 32, 70B layers"),
    (64, DOWN, "x_cublas", 2.4, 2.39, "M = 64, 70B layers, over cuBLAS"),
    (64, SQUARE, "x_cublas", 1.9, 1.89, "M = 64, 8192 x 8192, over cuBLAS"),
    (64, SMALL, "x_cublas", 1.3, 1.29, "M = 64, 4096 x 4096, over cuBLAS"),
    (128, LARGE_CELL, "x_cublas", 1.5, 1.49, "M = 128, 8192 x 28672, over cuBLAS"),
    (128, DOWN, "x_cublas", 1.45, 1.44, "M = 128, 28672 x 8192, over cuBLAS"),
    (128, SQUARE, "x_cublas", 1.3, 1.29, "M = 128, 8192 x 8192, over cuBLAS"),
    (128, SMALL, "x_cublas", 1.05, 1.04, "M = 128, 4096 x 4096, over cuBLAS"),
    (256, DOWN, "x_cublas", 1.12, 1.11, "M = 256, 70B layers, over cuBLAS"),
    (256, SMALL, "x_cublas", 1.0, 0.99, "M = 256, 4096 x 4096, over cuBLAS"),
    (512, SQUARE, "x_cublas", 1.0, 0.99, "M = 512 and 1024, each layer, over cuBLAS"),
    (2048, LARGE_CELL, "x_cublas", 1.02, 1.01, "M = 2048 to 8192, 70B layers, over cuBLAS"),
    (8192, SMALL, "x_cublas", 0.97, 0.96, "M = 2048 to 8192, each layer, over cuBLAS"),
    (4, MEDIUM, "x_best", 0.95, 0.94, "each cell, over the best rival"),
]


@pytest.mark.parametrize(("m", "shape", "field", "good", "bad", "name"), EDGES, ids=[edge[-1] for edge in EDGES])
def test_each_bar_has_its_edge(m: int, shape: tuple[int, int], field: str, good: float, bad: float, name: str) -> None:
    others = [each for each in all_good() if (each["k"], each["n"], each["m"]) != (*shape, m)]
    assert missed([*others, cell(m, shape, **{field: good})]) == []
    wrong = cell(m, shape, **{field: bad})
    assert missed([*others, wrong]) == [name]
    verdict = next(each for each in bars.verdicts([*others, wrong]) if each.bar.name == name)
    assert verdict.worst is wrong
    assert verdict.below == (wrong,)
    assert verdict.measured == pytest.approx(bad - 10.0 if field == "us" else bad)
    assert bars.cell_name(wrong) in str(verdict)
    assert verdict.as_json()["status"] == "missed"


@pytest.mark.parametrize(
    ("tokens", "field", "limit", "name"),
    [
        ((512,), "x_cublas", 1.06, "M = 512, all layers, over cuBLAS"),
        ((1024,), "x_cublas", 1.06, "M = 1024, all layers, over cuBLAS"),
        (M_VALUES[:8], "x_best", 1.2, "M <= 128, over the best rival"),
        (M_VALUES[8:], "x_best", 1.0, "M >= 256, over the best rival"),
    ],
)
def test_means_are_geometric(tokens: tuple[int, ...], field: str, limit: float, name: str) -> None:
    others = [each for each in all_good() if each["m"] not in tokens]
    concerned = [cell(m, shape) for m in tokens for shape in SHAPES]

    def spread(mean: float) -> list[dict[str, Any]]:
        """Half of the cells above the mean by 4 %, half below."""
        return [each | {field: mean * 1.04 ** (1 if i % 2 else -1)} for i, each in enumerate(concerned)]

    assert name not in missed([*others, *spread(limit * 1.001)])
    assert name in missed([*others, *spread(limit * 0.999)])


def test_what_was_not_measured_is_not_met() -> None:
    assert {verdict.status for verdict in bars.verdicts([])} == {"not measured"}
    without = [*all_good()[:-1], cell(8192, SHAPES[-1], x_cublas=None, x_best=None)]
    unknown = [verdict for verdict in bars.verdicts(without) if verdict.status == "not measured"]
    assert [verdict.bar.name for verdict in unknown] == [
        "M = 2048 to 8192, 70B layers, over cuBLAS",
        "M = 2048 to 8192, each layer, over cuBLAS",
        "M >= 256, over the best rival",
        "each cell, over the best rival",
    ]
    assert all(verdict.missing for verdict in unknown)
    failed = {"k": 8192, "n": 28672, "m": 16, "error": "x"}
    assert "M = 16, over 30 MB" in [v.bar.name for v in bars.verdicts([failed]) if v.status == "not measured"]


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20))
def test_geometric_mean(values: list[float]) -> None:
    mean = bars.geometric_mean(values)
    assert math.isclose(mean ** len(values), math.prod(values), rel_tol=1e-6)
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
