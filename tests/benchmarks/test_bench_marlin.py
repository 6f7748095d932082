"""The Marlin benchmark without a GPU: cells, table, a run with a scripted clock, and the continuation of a file."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import types
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import FakeGpu

from benchmarks import marlin
from benchmarks.harness import BLOCK_S, Contender, Measured, Timing
from benchmarks.layer import CellKey
from benchmarks.read_floor import Floor, FloorConfig
from benchmarks.report import Result
from benchmarks.rivals import Field
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

EVERYBODY = "cublas,humming,tinygemm"
CONFIG = FloorConfig(16384, 4, 2, False)


class World:
    """Replacements for everything that needs a GPU. speeds: microseconds per launch at M = 1 of each contender."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.opened = gpu, list[tuple[Any, ...]]()
        self.speeds = {"ours": 10.0, "ours chained": 8.0, "floor": 9.0, "floor chained": 7.5, "cublas nk": 30.0}
        self.speeds |= {"cublaslt kn 2": 25.0, "humming": 12.0}

    def contender(self, name: str, m: int) -> Contender:
        us = self.speeds[name] * max(1, m / 64)
        return Contender(name, lambda index: self.gpu.launch(us), 2, 20)

    def make_layer(self, k: int, n: int, dtype: str, max_m: int, *, with_dense: bool) -> Any:
        self.opened.append((k, n, dtype, max_m, with_dense))
        if k == 64:
            raise MemoryError("out of memory")
        return types.SimpleNamespace(k=k, n=n)

    def ours(self, layer: Any, m: int, *, name: str, programmatic: bool = False) -> Contender:
        assert programmatic == (name == "ours chained")
        return self.contender(name, m)

    def make_field(self, names: Any, layer: Any, m_values: Any, vllm: Any) -> Field:
        rivals: list[Any] = []
        for name, ways in {"cublas": ["cublas nk", "cublaslt kn 2"], "humming": ["humming"]}.items():
            if name in names:
                rivals.append(FakeRival(self, name, ways))
        return Field(rivals, {"tinygemm": "ValueError: bf16 only"} if "tinygemm" in names else {})


class FakeRival:
    def __init__(self, world: World, name: str, ways: list[str]) -> None:
        self.world, self.name, self.ways, self.errors = world, name, ways, dict[str, str]()

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        fastest = sorted(self.ways, key=lambda way: self.world.speeds[way])
        return [self.world.contender(name, m) for name in fastest[:count]]


class FakeFloorBench:
    def __init__(self, world: World) -> None:
        self.world = world

    def search(self, stream: Any, nbytes: int, replays: int, *, programmatic: bool) -> Floor:
        return Floor(7.5 if programmatic else 9.0, CONFIG)

    def contender(self, nbytes: int, config: FloorConfig, name: str, *, programmatic: bool) -> Contender:
        assert config is CONFIG
        assert programmatic == (name == "floor chained")
        return self.world.contender(name, 1)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(FakeGpu())

    @contextlib.contextmanager
    def stream() -> Iterator[FakeGpu]:
        yield made.gpu

    monkeypatch.setitem(sys.modules, "cupy", made.gpu.module)
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(init=lambda: None, empty_cache=lambda: None))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(marlin, "require_gpu", lambda parser: None)
    monkeypatch.setattr(marlin, "measuring_stream", stream)
    monkeypatch.setattr(marlin, "FloorBench", lambda nbytes: FakeFloorBench(made))
    for name in ("make_layer", "ours", "make_field"):
        monkeypatch.setattr(marlin, name, getattr(made, name))
    return made


def run(tmp_path: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    path = tmp_path / "marlin.json"
    assert marlin.main(["--json", str(path), "--seconds", "0.5", *arguments]) == status
    stored: dict[str, Any] = json.loads(path.read_text())
    return stored


def test_a_whole_run(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "marlin.svg"
    arguments = ["--shapes", "4096x4096,64x64", "--m", "1,32,256", "--rivals", EVERYBODY, "--plot", str(picture)]
    stored = run(tmp_path, *arguments, status=1)
    cells = {(cell["k"], cell["m"]): cell for cell in stored["cells"]}
    assert len(cells) == 6
    one = cells[4096, 1]
    assert (one["us"], one["floor_us"], one["cublas_us"]) == (10.0, 9.0, 25.0)
    assert one["x_floor_programmatic"] == pytest.approx(8.0 / 7.5, rel=1e-4)
    assert one["rivals"]["cublas"] == {"us": 25.0, "x": 2.5, "way": "cublaslt kn 2"}
    assert one["errors"] == {"tinygemm": "ValueError: bf16 only"}
    assert "x_floor_programmatic" not in cells[4096, 32], "chains are measured up to M = 16"
    late = cells[4096, 256]
    assert (late["us"], late["cublas_us"], late["floor_us"]) == (40.0, 100.0, None)
    assert all(cells[64, m]["error"] == "MemoryError: out of memory" for m in (1, 32, 256))
    assert stored["settings"]["sustained_seconds"] == 0.5
    assert stored["table"]["rows"][0][:3] == ["4096 x 4096", "9.0", "10 (2.50, humming 1.20)"]
    assert world.opened == [(4096, 4096, "float16", 256, True), (64, 64, "float16", 256, True)]
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "6 cells to measure (0 kept)"
    assert "tinygemm: ValueError: bf16 only" in said


def test_a_second_run_continues_the_file(world: World, tmp_path: Path) -> None:
    first = run(tmp_path, "--shapes", "4096x4096", "--m", "1", "--rivals", "cublas")
    world.speeds["ours"] = 99.0
    both = run(tmp_path, "--shapes", "4096x4096", "--m", "1,16", "--rivals", "none", "--resume")
    assert both["cells"][0] == first["cells"][0]
    assert (both["cells"][1]["m"], both["cells"][1]["us"], both["cells"][1]["rivals"]) == (16, 99.0, {})
    assert world.opened[-1][-1] is False, "no dense weights without cuBLAS"


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


def test_a_run_ends_when_the_gpu_is_lost(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.speeds["ours"] = -1.0
    world.contender = lambda name, m: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    world.gpu.synchronize = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    assert marlin.main(["--shapes", "4096x4096,8192x8192", "--m", "32,64", "--rivals", "none"]) == 1
    said = capsys.readouterr().out
    assert "4096x4096 M=32: this process can no longer use the GPU" in said
    assert len(world.opened) == 1


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
