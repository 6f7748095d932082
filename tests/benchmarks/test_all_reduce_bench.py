"""The parts of benchmarks/all_reduce.py that run on a CPU: processes that fail, and the table."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from benchmarks import all_reduce

CELLS = [
    {"m": 1, "gemm_us": 17.0, "nccl_us": 27.0, "torch_us": 22.0, "cudatma_us": 20.0, "unequal": 0},
    {"m": 4096, "nccl_us": 900.0, "cudatma_us": 910.0},
]


def test_the_table() -> None:
    assert all_reduce.all_reduce_table(CELLS).rows[0][-2:] == ("1.35", "1.10")


def test_fewer_gpus_than_ranks_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(all_reduce, "require_gpu", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):
        all_reduce.main([])
    assert "requires 2 GPUs, got 1; pass --gpus 1" in capsys.readouterr().err
