"""cudatma bench paths on a machine without a GPU: its table, and what it says."""

from __future__ import annotations

import pytest

from benchmarks import harness, paths
from cudatma.errors import DriverError


def test_a_cell_and_its_row() -> None:
    measured = harness.Measured(errors={"dequantize": "no memory"})
    for name, us in (("ordered", 2.0), ("act_order", 3.0)):
        measured.timings[name] = harness.Timing(us, us, us, 1)
    cell = paths.make_cell(64, 128, 16, measured)
    assert (cell["act_order_costs"], cell["error"]) == (1.5, "dequantize: no memory")
    (row, broken) = paths.paths_table([cell, {"k": 1, "n": 2, "m": 3, "error": "all"}]).rows
    assert row == ("64 x 128", 16, "2.00", "3.00", "-", "-", "1.50")
    assert broken[:3] == ("1 x 2", 3, "-")


def test_without_a_gpu_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_gpu() -> None:
        raise DriverError("cuInit", None, "no CUDA driver on this machine")

    monkeypatch.setattr(harness, "detect", no_gpu)
    with pytest.raises(SystemExit) as ended:
        paths.main([])
    assert ended.value.code == 2
    assert "no CUDA driver" in capsys.readouterr().err
