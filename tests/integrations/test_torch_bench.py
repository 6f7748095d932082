"""benchmarks/torch_ops.py as far as it runs on a CPU: both calls of a pair, the child process, tables and bars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks import harness, torch_ops
from cudatma.errors import DriverError
from tools.dev.readme_tables import table_text


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")


def test_both_calls_of_a_pair_give_the_same_and_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = torch_ops.pairs("cpu", 128, 64)
    assert set(known) == {
        "marlin_gemm", "marlin_gemm, out given", "MarlinLinear", "gemm, out given", "attention, out given"
    }  # fmt: skip
    for case in ("marlin_gemm", "MarlinLinear"):
        direct, operator = known[case]
        torch.testing.assert_close(operator(0), direct(0), rtol=0, atol=0)
    monkeypatch.setattr(torch_ops, "_WARM_UP", 1)
    cell = torch_ops.measure("MarlinLinear", *known["MarlinLinear"], lambda: None, 3, 2)
    assert cell["calls"] == 6
    assert cell["overhead_us"] == cell["operator"]["median_us"] - cell["direct"]["median_us"]


def test_the_first_result_is_timed_with_an_empty_and_a_warm_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    caches: list[str] = []

    def run(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        """The child, in this process."""
        python, script, *arguments = command
        assert (python, Path(script)) == (sys.executable, Path(torch_ops.__file__))
        caches.append(env["CUDATMA_CACHE_DIR"])
        monkeypatch.setattr(torch_ops, "child", lambda *_: float(len(caches)))
        return subprocess.CompletedProcess(command, torch_ops.main(arguments), capsys.readouterr().out, "")

    monkeypatch.setattr(torch_ops.subprocess, "run", run)
    cell = torch_ops.first_result("cpu", 128, 64, 3)
    assert (cell["cold_s"], cell["warm_s"]) == (1.0, 3.0)
    assert len(caches) == 4
    assert len(set(caches)) == 1
    failed = subprocess.CompletedProcess([], 3, "", "a warning\nout of memory\n")
    monkeypatch.setattr(torch_ops.subprocess, "run", lambda *_, **__: failed)
    assert "child ended with 3: out of memory" in torch_ops.first_result("cpu", 128, 64, 1)["error"]


def test_tables_and_bars() -> None:
    quantiles = {"median_us": 8.0}
    cells: list[dict[str, Any]] = [
        {"case": "gemm", "direct": quantiles, "operator": {"median_us": 12.5}, "overhead_us": 4.5},
        {"case": "first result", "cold_s": 3.0, "warm_s": 1.25},
    ]
    assert "| gemm | 8.00 | 12.50 | 4.50 |" in table_text("x", {"table": torch_ops.torch_table(cells).as_json()})
    assert "1.25 s with a warm cache" in torch_ops.torch_table(cells).note
    assert torch_ops.misses(cells) == []
    slow = [cells[0] | {"overhead_us": 8.1}, cells[1] | {"warm_s": 2.1}, {"case": "x", "error": "broken"}]
    assert len(torch_ops.misses(slow)) == 3


def test_without_a_gpu_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def no_gpu() -> None:
        raise DriverError("cuInit", None, "no CUDA driver on this machine")

    monkeypatch.setattr(harness, "detect", no_gpu)
    with pytest.raises(SystemExit):
        torch_ops.main(["--json", str(tmp_path / "x.json")])
    assert "no CUDA driver" in capsys.readouterr().err
    torch_ops.main(["--child", "cpu", "128", "64"])
    assert json.loads(capsys.readouterr().out) > 0
