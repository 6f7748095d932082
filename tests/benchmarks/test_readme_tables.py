"""Generated tables in README and docs are filled from results and left alone if they are current."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cudatma.errors import ArgumentError
from tools.dev import readme_tables

PAGE = "before\n<!-- table: speed -->\nold\n<!-- end table -->\nafter\n"
RESULT: dict[str, Any] = {
    "table": {"columns": ["K, N", "us"], "rows": [["4096, 4096", 8.51234], ["a|b", 7]], "note": "Cold L2."},
    "machine": {"gpu": "H200", "CUDA": "13.0"},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for name in readme_tables.PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(PAGE)
    return tmp_path


def put(root: Path, result: object) -> None:
    (root / "benchmarks" / "results" / "speed.json").write_text(json.dumps(result))


@pytest.mark.parametrize("name", readme_tables.PAGES)
def test_a_result_becomes_a_table(name: str, root: Path) -> None:
    put(root, RESULT)
    assert readme_tables.main(["--check"], root) == 1
    assert (root / name).read_text() == PAGE, "--check changes nothing"
    assert readme_tables.main([], root) == 0
    assert (root / name).read_text() == (
        "before\n<!-- table: speed -->\n"
        "| K, N | us |\n| --- | ---: |\n| 4096, 4096 | 8.512 |\n| a\\|b | 7 |\n"
        "\nCold L2.\n\nMeasured on gpu H200, CUDA 13.0.\n"
        "<!-- end table -->\nafter\n"
    )
    assert readme_tables.main(["--check"], root) == 0


def test_a_page_that_is_not_current_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(root, RESULT)
    readme_tables.main([], root)
    (root / readme_tables.PAGES[1]).write_text(PAGE)
    capsys.readouterr()
    assert readme_tables.main(["--check"], root) == 1
    assert capsys.readouterr().err.startswith(f"{readme_tables.PAGES[1]} is not current")


@pytest.mark.parametrize(
    ("selection", "table"),
    [
        ("first 1 rows", "| K, N | us |\n| --- | ---: |\n| 4096, 4096 | 8.512 |\n\nCold L2."),
        ("every 2nd row", "| K, N | us |\n| --- | ---: |\n| 4096, 4096 | 8.512 |\n\nCold L2."),
        ("without K, N", "| us |\n| --- |\n| 8.512 |\n| 7 |\n\nCold L2."),
    ],
)
def test_a_marker_selects_rows_and_columns(selection: str, table: str, root: Path) -> None:
    put(root, RESULT)
    (root / "README.md").write_text(PAGE.replace("speed -->", f"speed, {selection} -->"))
    assert readme_tables.main([], root) == 0
    assert f"<!-- table: speed, {selection} -->\n{table}" in (root / "README.md").read_text()


def test_a_column_that_a_table_lacks_is_refused(root: Path) -> None:
    put(root, RESULT)
    (root / "README.md").write_text(PAGE.replace("speed -->", "speed, without ms -->"))
    with pytest.raises(ArgumentError, match="got ms"):
        readme_tables.main([], root)


@pytest.mark.parametrize(
    ("machine", "line"),
    [
        ({"card": "NVIDIA H200", "cuda": "13.0"}, "Measured on NVIDIA H200, cuda 13.0."),
        ({"card": "none", "cuda": "none", "nvrtc": "13.0"}, "Compiled without a GPU: nvrtc 13.0."),
        ("a laptop", "Measured on a laptop."),
    ],
)
def test_the_machine_is_named_below_the_table(machine: object, line: str, root: Path) -> None:
    put(root, {**RESULT, "machine": machine})
    assert readme_tables.main([], root) == 0
    assert f"\n{line}\n" in (root / "README.md").read_text()


def test_a_page_says_that_a_result_is_missing(root: Path) -> None:
    assert readme_tables.main([], root) == 0
    assert readme_tables.MISSING in (root / "README.md").read_text()
    assert readme_tables.main(["--check"], root) == 0


@pytest.mark.parametrize(
    "result", [[], {}, {"table": {"columns": []}}, {"table": {"columns": ["a"], "rows": [["1", "2"]]}}]
)
def test_a_result_without_a_table_is_refused(result: object, root: Path) -> None:
    put(root, result)
    with pytest.raises(ArgumentError, match=r"speed\.json"):
        readme_tables.main([], root)


def test_a_damaged_result_is_refused(root: Path) -> None:
    (root / "benchmarks" / "results" / "speed.json").write_text("{")
    with pytest.raises(ArgumentError, match="JSON"):
        readme_tables.main([], root)


def test_the_summary_compares_with_the_fastest_rival() -> None:
    marlin = [{"m": m, "us": 2.0, "rivals": {"a": {"us": 3.0}, "b": {"us": 9.0}}} for m in (1, 64, 256)]
    attention = {"machine": {"card": "NVIDIA H200"}, "table": {"rows": [["512", "1.250"], ["1024", "0.800"]]}}
    results = {
        "marlin_rivals": {"machine": {"card": "NVIDIA H200"}, "cells": marlin},
        "gemm": {"machine": {"card": "NVIDIA H100 80GB"}, "cells": [{"us": {"cuBLASLt": 3, "torch.mm": 4, "auto": 4}}]},
        "attention": attention,
        "attention_decode": attention,
    }
    rows = readme_tables.summary(results)["table"]["rows"]
    assert [row[1:] for row in rows] == [
        ["H200", "1.50", "1.50", "2"],
        ["H200", "1.50", "1.50", "1"],
        ["H100", "0.75", "0.75", "1"],
        ["H200", "1.00", "0.80", "2"],
        ["H200", "1.00", "0.80", "2"],
    ]
