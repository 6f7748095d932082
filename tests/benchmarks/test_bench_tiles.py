"""The benchmark of every configuration: its products, a measurement without a GPU, its table."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gemm_builders import problem

from benchmarks import tiles
from benchmarks.harness import Contender, Measured, Timing
from cudatma.kernels.gemm.choose import GEMM
from cudatma.kernels.gpu import H200

PROBLEM = problem(m=64, n=512, k=512, version="mma_sync")


def test_products_come_from_the_cells_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"cells": [{**PROBLEM.as_json(), "version": "mma_sync", "us": {"an entry": 1.0}}]}))
    assert tiles.products(path, GEMM) == [PROBLEM]


class Trial:
    """Launches every configuration but one."""

    device = 0

    def prepare(self, problem: Any) -> None:
        self.problem = problem

    def launcher(self, candidate: Any, copies: int, stream: int) -> Any:
        if candidate.config.tile_m == 256:
            raise MemoryError("no room")
        return lambda index: None


def test_every_configuration_is_timed_and_those_that_cannot_be_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(stream: Any, contenders: list[Contender], replays: int) -> Measured:
        us = {each.name: float(10 + number) for number, each in enumerate(reversed(contenders))}
        return Measured({name: Timing(each, each, each, replays) for name, each in us.items()})

    monkeypatch.setattr(tiles, "cold", timed)
    monkeypatch.setattr(tiles, "gpu_of", lambda device: H200)
    monkeypatch.setattr(tiles, "stream_handle", lambda *_: 0)
    cell = tiles.measure(SimpleNamespace(), GEMM, Trial(), PROBLEM, 3)
    assert list(cell["us"].values()) == sorted(cell["us"].values())
    assert set(cell["us"]) == set(cell["predicted_us"])
    assert len(cell["us"]) > 5
    assert set(cell["refused"].values()) == {"MemoryError: no room"}
    assert (cell["m"], cell["version"]) == (64, "mma_sync")
    (row,) = tiles.tiles_table([cell]).rows
    assert row[:3] == ("64 x 512 x 512", next(iter(cell["us"])), "10.00")
    assert float(row[4]) > 1, "the one that the cost model takes was the slowest"


def test_a_file_without_products_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(SystemExit):
        tiles.main(["gemm", str(path)])
    assert "other.json: KeyError: 'cells'" in capsys.readouterr().err
