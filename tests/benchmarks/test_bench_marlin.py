"""The Marlin benchmark without a GPU: cells, table, the time limit, and the continuation of a file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import marlin
from benchmarks.harness import BLOCK_S, Measured, Timing
from benchmarks.layer import CellKey
from benchmarks.report import Result
from cudatma.errors import ArgumentError
from tools.dev.readme_tables import table_text

KEY = CellKey(8192, 28672, 16)

# ---- Shapes and arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["--shapes", "x"], ["--m", "0"], ["--m", "1,x"], ["--rivals", "others"], ["--resume"]]
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        marlin.main(arguments)
    assert ended.value.code == 2


# ---- Cells ----------------------------------------------------------------------------------------------------------


def measured(errors: dict[str, str] | None = None, **us: float) -> Measured:
    timings = {name.replace("_", " "): Timing(value, value - 1, value + 1, 11) for name, value in us.items()}
    return Measured(timings, errors or {})


TOGETHER = measured(ours=40.0, floor=32.0, cublas_kn=120.0, cublaslt_nk_3=100.0, humming=44.0)
PAIRS = {
    "cublas": (TOGETHER, ["cublas kn", "cublas nk", "cublaslt nk 3"]),
    "humming": (TOGETHER, ["humming"]),
}
CHAINED = measured(ours_chained=30.0, floor_chained=25.0)


def test_each_rival_is_compared_with_ours_in_its_own_blocks() -> None:
    pairs = {
        "cublas": (measured(ours=700.0, cublaslt_kn_0=770.0), ["cublaslt kn 0"]),
        "humming": (measured(ours=600.0, humming=630.0), ["humming"]),
    }
    cell = marlin.make_cell(CellKey(8192, 8192, 1024), "float16", pairs["cublas"][0], pairs, {})
    assert cell["us"] == 700.0
    assert cell["x_cublas"] == pytest.approx(1.1)
    assert cell["rivals"]["humming"]["x"] == pytest.approx(1.05)


def test_a_rival_that_failed_is_named_and_the_cell_stands() -> None:
    pairs = {"cublas": (measured({"cublas kn": "RuntimeError: x"}), ["cublas kn"])}
    cell = marlin.make_cell(KEY, "float16", TOGETHER, pairs, {"tinygemm": "ValueError: bf16 only"})
    assert cell["errors"] == {"tinygemm": "ValueError: bf16 only", "cublas kn": "RuntimeError: x"}
    assert "error" not in cell
    assert cell["x_cublas"] is None
    assert "tinygemm: ValueError: bf16 only" in marlin.line_of(cell)


def test_the_table_is_what_the_readme_takes() -> None:
    cell = marlin.make_cell(KEY, "float16", TOGETHER, PAIRS, {}, CHAINED)
    failed = marlin.failed_cell(CellKey(4096, 4096, 1), "float16", "x")
    text = table_text("x", {"table": marlin.summary_table([cell, failed]).as_json()})
    assert "| 8192 x 28672 | 32.0 | - | 40 (2.50, humming 1.10) |" in text


# ---- The run --------------------------------------------------------------------------------------------------------


def test_no_cell_begins_after_the_budget() -> None:
    now, cells = [0.0], []

    class Bench:
        options = argparse.Namespace(dtype="float16")

        def open(self, shape: Any, m_values: Any) -> None:
            cells.append(shape)

        def cell(self, key: CellKey) -> dict[str, Any]:
            now[0] += 10.0
            return {"k": key.k, "n": key.n, "m": key.m, "us": 1.0}

        def close(self) -> None:
            cells.append("closed")

    keys = [CellKey(64, n, m) for n in (64, 128) for m in (1, 16)]
    result = Result({}, marlin.summary_table, machine={}, revision="")
    marlin.run(Bench(), keys, result, 25.0, lambda: now[0])
    assert [marlin.key_of(cell) for cell in result.cells] == keys[:3]
    assert cells == [(64, 64), "closed", (64, 128)]


# ---- A file that is continued ---------------------------------------------------------------------------------------

SETTINGS = {"dtype": "float16", "group_size": 128, "symmetric": True, "block_seconds": BLOCK_S}
MACHINE = {"card": "NVIDIA H200", "driver": "580"}


def stored(path: Path, **changed: Any) -> Path:
    cells = [{"k": 64, "n": 64, "m": 1, "us": 1.0}, {"k": 64, "n": 64, "m": 2, "error": "x"}]
    path.write_text(json.dumps({"settings": SETTINGS, "machine": MACHINE, "cells": cells} | changed))
    return path


def test_only_failed_cells_are_measured_again(tmp_path: Path) -> None:
    path = stored(tmp_path / "a.json")
    assert [cell["m"] for cell in marlin.cells_of(path, SETTINGS, MACHINE)] == [1]
    assert marlin.cells_of(tmp_path / "none.json", SETTINGS, MACHINE) == []


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"settings": SETTINGS | {"dtype": "bfloat16"}}, "dtype"),
        ({"machine": MACHINE | {"card": "NVIDIA H100"}}, "H100"),
        ({"machine": MACHINE | {"driver": "570"}}, "driver"),
        ({"cells": None, "settings": None}, "result"),
    ],
)
def test_cells_of_two_gpus_are_not_put_into_one_file(tmp_path: Path, changed: dict[str, Any], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        marlin.cells_of(stored(tmp_path / "a.json", **changed), SETTINGS, MACHINE)
