"""The benchmarks without a GPU: operands with NumPy, tables as the README takes them, results, scripts.
test_bench_*.py hold the rest."""

from __future__ import annotations

import json
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import (
    cells,
    first_call,
    harness,
    host_cost,
    load_path_code,
    load_paths,
    marlin,
    ncu,
    operands,
    quantize,
    read_floor,
    report,
)
from cudatma.errors import DriverError
from tools import bench
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


@given(st.integers(0, 40), st.integers(1, 12))
def test_filled_repeats_its_block(size: int, block: int) -> None:
    pattern = np.arange(block, dtype=np.uint16)
    assert operands.filled(np, (size,), pattern).tolist() == [i % block for i in range(size)]


# ---- Tables ---------------------------------------------------------------------------------------------------------


def cell(m: int, x_cublas: float | None, x_floor: float | None = None, k: int = 8192, n: int = 28672) -> dict[str, Any]:
    return {"k": k, "n": n, "m": m, "us": 10.0, "x_cublas": x_cublas, "x_floor": x_floor, "floor_us": 8.0}


FAILED = {"k": 4096, "n": 4096, "m": 1, "case": "torch", "load_path": "tma", "bytes": 1, "error": "x"}
CODE = dict.fromkeys(
    ("registers", "copies", "threads", "loop", "loop_integer", "producer_slots", "consumer_slots", "slots"), 7
)


@pytest.mark.parametrize(
    ("table", "rows", "expected"),
    [
        (cells.summary_table, [cell(1, 2.5, 1.3), cell(16, None)], "| 8192 x 28672 | 8.0 | 10 (2.50) | 10 (-) |"),
        (
            cells.detail_table,
            [cell(1, 2.5, 1.3) | {"rivals": {"humming": {"us": 12.0, "x": 1.2}}}],
            "| 8192 x 28672 | 1 | 10.00 | 8.00 | 1.30 | - | - | - | 2.50 | 1.20 | - | - | - |",
        ),
        (
            read_floor.floor_table,
            [{"k": 1, "n": 2, "bytes": 1e6, "us": 3.0, "tb_s": 4.0, "config": "c"}],
            "| 1 x 2 | 1.0 | 3.00 | 4.00 | c | - |",
        ),
        (
            load_paths.load_paths_table,
            [{"k": 1, "n": 2, "m": 3, "us": {"tma": 1.0, "scales": None, "cp_async": 2.0}, "speed_up": 2.0}],
            "| 1 x 2 | 3 | 1.00 | - | 2.00 | 2.00 |",
        ),
        (
            load_paths.load_paths_table,
            [{"k": 1, "n": 2, "m": 3, "us": {}, "code": {"tma": {"registers": 83, "copies": 7, "slots": 99}}}],
            "| 1 x 2 | 3 | - | - | - | - | 83 / - | 7 / - | 99 / - |",
        ),
        (
            ncu.counters_table,
            [{"k": 1, "n": 2, "m": 3, "ncu": {"tma": {"us": 4.0, "instructions": 2e6, "stalls": {"wait": 1.5}}}}],
            "| 1 x 2 | 3 | TMA | 4.00 | 2.00 | - | - | - | - | wait 1.5 |",
        ),
        (
            load_path_code.code_table,
            [{"m": 1, "load_path": "tma", **CODE}],
            "| M = 1 | TMA | 7 | 7 | 7 | 7 | 7 | 7 | 7 | 7 |",
        ),
        (
            host_cost.host_table,
            [{"case": "CuPy", "median_us": 8.0, "p90_us": 9.0, "p99_us": 12.5, "least_us": 7.0}],
            "| CuPy | 8.00 | 9.00 | 12.50 | 7.00 |",
        ),
        (
            first_call.first_call_table,
            [{"m": 1, "compile_ms": 217.0, "cold_ms": {"load": 275.0}, "warm_ms": {"load": 4.3}}],
            "275.00 | 4.30 |",
        ),
    ],
)
def test_tables_are_what_the_readme_takes(
    table: Callable[[list[dict[str, Any]]], report.Table], rows: list[dict[str, Any]], expected: str
) -> None:
    assert expected in table_text("x", {"table": table(rows).as_json()})
    assert table_text("x", {"table": table([]).as_json()})
    assert table_text("x", {"table": table([*rows, FAILED]).as_json()}), "a failed cell breaks no table"


# ---- Results --------------------------------------------------------------------------------------------------------


def test_a_result_is_written_as_it_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "marlin.json"
    result = report.Result({"dtype": "float16"}, cells.summary_table, path, machine={"card": "H200"})
    result.add(cell(1, 2.5), "first")
    early = json.loads(path.read_text())
    result.add({**cell(16, None), "us": None, "error": "broken"}, "second")
    late = json.loads(path.read_text())
    assert set(late) == {"machine", "commit", "date", "settings", "cells", "table"}
    assert (len(early["cells"]), len(late["cells"])) == (1, 2)
    assert late["table"]["rows"] == [["8192 x 28672", "8.0", "10 (2.50)", "-"]]
    assert [entry.name for entry in path.parent.iterdir()] == ["marlin.json"]
    assert capsys.readouterr().out.splitlines() == ["first", "second  FAILED: broken"]
    result.more = lambda found: {"bars": len(found)}
    assert result.as_json()["bars"] == 2


def test_machine_facts_name_everything() -> None:
    facts = report.machine_facts()
    assert list(facts) == ["card", "driver", "cuda", "nvrtc", "cupy", "torch", "python"]
    assert all(isinstance(fact, str) and fact for fact in facts.values())


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

NAMES = {
    "emulator",
    "load_path_code",
    "load_paths",
    "first_call",
    "host_cost",
    "marlin",
    "ncu",
    "plot",
    "quantize",
    "read_floor",
}


def test_the_scripts_are_found_with_a_summary() -> None:
    found = bench.benchmarks()
    assert set(found) >= NAMES
    assert all(found.values())


@pytest.mark.parametrize("module", [load_paths, host_cost, marlin, read_floor])
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


def test_quantizing_is_timed_and_its_memory_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "quantize.json"
    assert quantize.main(["--k", "256", "--n", "192", "--libraries", "numpy", "--json", str(path)]) == 0
    cells = json.loads(path.read_text())["cells"]
    assert [cell["dtype"] for cell in cells] == list(quantize.TYPES)
    assert all(cell["memory"] * (2 if cell["dtype"] == "float32" else 1) > 0.25 and cell["ms"] > 0 for cell in cells)
    assert "| numpy, float16 |" in table_text("x", {"table": quantize.quantize_table(cells).as_json()})


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


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=300))
def test_quantiles(samples: list[int]) -> None:
    found = host_cost.quantiles_us(samples)
    assert found["median_us"] == pytest.approx(np.median(samples) / 1e3)
    assert found["least_us"] == min(samples) / 1e3
    assert found["median_us"] <= found["p90_us"] * (1 + 1e-9)
    assert found["p90_us"] <= found["p99_us"] <= max(samples) / 1e3
    assert sum(sample / 1e3 <= found["p90_us"] for sample in samples) >= 0.9 * len(samples)


def test_first_call_bars() -> None:
    good = {"m": 1, "compile_ms": 1999.0, "warm_ms": {"load": 9.9}}
    assert first_call.misses([good]) == []
    assert len(first_call.misses([good | {"compile_ms": 2001.0}, good | {"warm_ms": {"load": 11.0}}, FAILED])) == 3


@pytest.mark.slow
def test_first_call_in_fresh_processes() -> None:
    found = first_call.measure(1, "sm_90a", warm_runs=1)
    assert "error" not in found, found
    assert found["compile_ms"] > 50
    assert found["warm_ms"]["load"] < found["cold_ms"]["load"] / 2
    assert set(found["cold_ms"]) == {"load"}, "nothing touches a GPU where a target is named"


def test_first_call_keeps_a_child_that_fails() -> None:
    assert "sm_1" in first_call.measure(1, "sm_1", warm_runs=1)["error"]
