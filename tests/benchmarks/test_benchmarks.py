"""The benchmarks without a GPU: operands, the report, tables for the README, and scripts."""

from __future__ import annotations

import json
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import (
    all_reduce,
    attention_decode,
    data_movement,
    experts,
    first_call,
    harness,
    host_cost,
    marlin,
    operands,
    report,
)
from cudatma.errors import DriverError
from tools.dev.readme_tables import table_text

# ---- Operands -------------------------------------------------------------------------------------------------------


def test_random_operands() -> None:
    numbers = operands.random_numbers(np, 1 << 16, "float16", 3, 0.5).astype(float)
    assert abs(numbers.mean()) < 0.01
    assert abs(numbers.std() - 0.5) < 0.01
    assert not np.array_equal(operands.random_words(np, 100, 1), operands.random_words(np, 100, 2))
    counts = np.bincount(operands.random_words(np, 1 << 16, 1).view(np.uint8), minlength=256)
    assert counts.min() > 800, "about 1024 of each byte"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_packed_weights_are_valid_and_apart(dtype: str) -> None:
    first, second = operands.random_packed(np, 256, 192, dtype, 2)
    assert first.nbytes == operands.packed_bytes(256, 192)
    assert not np.shares_memory(first.qweight, second.qweight)
    assert not np.shares_memory(first.scales, second.scales)
    values = first.dequantize()
    assert np.isfinite(values).all()
    assert values.std() > 0.01


# ---- Tables ---------------------------------------------------------------------------------------------------------


FAILED = {"k": 4096, "n": 4096, "m": 1, "case": "torch", "batch": 1, "length": 1, "model": "qwen", "error": "x"}


@pytest.mark.parametrize(
    ("table", "rows", "expected"),
    [
        (
            marlin.summary_table,
            [
                {"k": 8192, "n": 28672, "m": 1, "us": 10.0, "x_cublas": 2.5, "floor_us": 8.0},
                {"k": 8192, "n": 28672, "m": 16, "us": 10.0},
            ],
            "| 8192 x 28672 | 8.0 | 10 (2.50) | 10 (-) |",
        ),
        (
            host_cost.host_table,
            [{"case": "CuPy", "median_us": 8.0, "p90_us": 9.0, "p99_us": 12.5, "min_us": 7.0}],
            "| CuPy | 8.00 | 9.00 | 12.50 | 7.00 |",
        ),
        (
            first_call.first_call_table,
            [{"m": 1, "compile_ms": 217.0, "cold_ms": {"load": 275.0}, "warm_ms": {"load": 4.3}}],
            "275.00 | 4.30 |",
        ),
        (all_reduce.all_reduce_table, [{"m": 1, "nccl_us": 27.0, "cudatma_us": 20.0}], "| 1 | - | 27.00 | - | 20.00 |"),
        (attention_decode.decode_table, [{"batch": 1, "length": 2, "us": {}}], "| 1 x 2 | - |"),
        (
            experts.experts_table,
            [{"model": "qwen", "m": 4, "us": {"Humming": 3.0, "auto": 2.0}}],
            "| qwen | 4 | 3.0 | 2.0 | 1.500 |",
        ),
    ],
)
def test_tables_are_what_the_readme_takes(
    table: Callable[[list[dict[str, Any]]], report.Table], rows: list[dict[str, Any]], expected: str
) -> None:
    assert expected in table_text("x", {"table": table(rows).as_json()})
    assert table_text("x", {"table": table([]).as_json()})
    assert table_text("x", {"table": table([*rows, FAILED]).as_json()}), "a failed cell breaks no table"


# ---- The report -----------------------------------------------------------------------------------------------------


def case_table(cells: Any) -> report.Table:
    return report.Table(("case", "us"), tuple((cell["case"], report.shown(cell.get("us"))) for cell in cells), "note")


def test_a_result_is_written_as_it_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "it.json"
    result = report.Result({"dtype": "float16"}, case_table, path, lambda cells: ["the end"], machine={"card": "H200"})
    result.add({"case": "a", "us": 1.23456789}, "first")
    early = json.loads(path.read_text())
    result.add({"case": "b", "error": "broken"}, "second")
    late = json.loads(path.read_text())
    assert list(late) == ["machine", "commit", "date", "settings", "cells", "table"]
    assert early["cells"] == [{"case": "a", "us": 1.2346}], "five digits"
    assert late["cells"][1:] == [{"case": "b", "error": "broken"}]
    assert late["table"] == {"columns": ["case", "us"], "rows": [["a", "1.23"], ["b", "-"]], "note": "note"}
    assert [entry.name for entry in path.parent.iterdir()] == ["it.json"]
    assert capsys.readouterr().out.splitlines() == ["first", "second  FAILED: broken"]
    assert result.finish("It") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "the end"


def test_a_cell_and_a_row_take_one_line_of_the_file() -> None:
    content = {"machine": {}, "cells": [{"a": 1}, {"a": 2}], "table": {"columns": ["a"], "rows": [["1"], ["2"]]}}
    assert report.dumps(content).splitlines()[1:] == [
        *('"cells":[', '{"a":1},', '{"a":2}],'),
        *('"table":{"columns":["a"],"rows":[', '["1"],', '["2"]]}}'),
    ]


def test_commit_comes_from_git_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(report.COMMIT_VARIABLE, "abc123")
    assert report.commit(tmp_path) == "abc123"
    monkeypatch.delenv(report.COMMIT_VARIABLE)
    assert report.commit(tmp_path) == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert report.commit(tmp_path) == head[:12]
    (tmp_path / "file").write_text("2")
    assert report.commit(tmp_path) == f"{head[:12]}+changes"
    monkeypatch.setenv(report.COMMIT_VARIABLE, "abc123")
    assert report.commit(tmp_path) == "abc123"
    monkeypatch.delenv(report.COMMIT_VARIABLE)
    (tmp_path / ".git" / "HEAD").write_text("nonsense")
    assert report.commit(tmp_path) == "unknown"


# ---- Scripts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [host_cost, marlin, attention_decode, data_movement, all_reduce, experts])
def test_without_a_gpu_the_reason_is_said(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_gpu() -> None:
        raise DriverError("cuInit", None, "no CUDA driver on this machine")

    monkeypatch.setattr(harness, "detect", no_gpu)
    with pytest.raises(SystemExit) as ended:
        module.main([])
    assert ended.value.code == 2
    assert "no CUDA driver" in capsys.readouterr().err


def test_calls_are_timed_without_the_drains() -> None:
    now, order = [0], []

    def call(index: int) -> None:
        order.append(index)
        now[0] += 1000 + index

    def drain() -> None:
        order.append("drain")
        now[0] += 10**9

    samples = host_cost.time_calls(call, drain, 1200, lambda: now[0])
    assert samples == [1000 + index for index in range(1200)]
    assert [i for i, entry in enumerate(order) if entry == "drain"] == [0, 501, 1002, 1203]


def test_first_call_keeps_a_child_that_fails() -> None:
    assert "sm_1" in first_call.measure(1, "sm_1", warm_runs=1)["error"]
