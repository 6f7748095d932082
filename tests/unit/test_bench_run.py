"""The Marlin benchmark from its command line to its file, on a GPU whose clock is scripted."""

from __future__ import annotations

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

from benchmarks import marlin, marlin_bench
from benchmarks.harness import Contender
from benchmarks.read_floor import Floor, FloorConfig
from benchmarks.rivals import Field

EVERYBODY = "cublas,humming,tinygemm"
CONFIG = FloorConfig(16384, 4, 2, False)


class World:
    """Stands in for everything that needs a GPU. speeds: contender -> microseconds of a launch at one token."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.opened, self.chains = gpu, list[tuple[Any, ...]](), list[str]()
        self.speeds = {"ours": 10.0, "ours chained": 8.0, "floor": 9.0, "floor chained": 7.5, "cublas nk": 30.0}
        self.speeds |= {"cublaslt kn 2": 25.0, "humming": 12.0}

    def contender(self, name: str, m: int) -> Contender:
        us = self.speeds[name] * max(1, m / 64)
        return Contender(name, lambda index: self.gpu.launch(us), 2, 20)

    def make_layer(self, k: int, n: int, dtype: str, most: int, *, with_dense: bool) -> Any:
        self.opened.append((k, n, dtype, most, with_dense))
        if k == 64:
            raise MemoryError("out of memory")
        return types.SimpleNamespace(k=k, n=n)

    def ours(self, layer: Any, m: int, *, name: str, programmatic: bool = False) -> Contender:
        assert programmatic == (name == "ours chained")
        return self.contender(name, m)

    def make_field(self, names: Any, layer: Any, tokens: Any, vllm: Any) -> Field:
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

    def search(self, stream: Any, nbytes: int, replays: int, *, programmatic: bool) -> tuple[Floor, dict[Any, float]]:
        return Floor(nbytes, 7.5 if programmatic else 9.0, CONFIG), {}

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
    monkeypatch.setattr(marlin, "find_reader", lambda: lambda: (1755.0, 600.0, 50.0))
    for name in ("make_layer", "ours", "make_field"):
        monkeypatch.setattr(marlin_bench, name, getattr(made, name))
    return made


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "marlin.json"
    assert marlin.main(["--json", str(path), "--seconds", "0.5", *arguments]) == 0
    return json.loads(path.read_text())


def test_a_whole_run(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "marlin.svg"
    stored = run(
        tmp_path, "--shapes", "4096x4096,64x64", "--m", "1,32,256", "--rivals", EVERYBODY, "--plot", str(picture)
    )
    cells = {(cell["k"], cell["m"]): cell for cell in stored["cells"]}
    assert len(cells) == 6
    one = cells[4096, 1]
    assert (one["us"], one["floor_us"], one["cublas_us"], one["regime"]) == (10.0, 9.0, 25.0, "cold")
    assert one["x_floor_programmatic"] == pytest.approx(8.0 / 7.5)
    assert one["rivals"]["cublas"]["ways"] == {"cublaslt kn 2": 25.0, "cublas nk": 30.0}
    assert (one["best_rival"], one["x_best"]) == ("humming", pytest.approx(1.2))
    assert one["errors"] == {"tinygemm": "ValueError: bf16 only"}
    assert "x_floor_programmatic" not in cells[4096, 32], "chains are measured up to 16 tokens"
    late = cells[4096, 256]
    assert (late["regime"], late["us"], late["cublas_us"]) == ("sustained", 40.0, 100.0)
    assert late["rivals"]["humming"]["ours_us"] == 40.0
    assert late["power"]["cublas"]["watts"] == 600.0
    assert all(cells[64, m]["error"] == "MemoryError: out of memory" for m in (1, 32, 256))
    statuses = {bar["bar"]: bar["status"] for bar in stored["bars"]}
    assert statuses["M <= 16, 4096 x 4096"] == "met"
    assert statuses["M = 64, 70B layers, over cuBLAS"] == "not measured"
    assert stored["left_out"] == []
    assert stored["settings"]["sustained_seconds"] == 0.5
    assert stored["table"]["rows"][0][:3] == ["4096 x 4096", "9.0", "10 (2.50, humming 1.20)"]
    assert world.opened == [(4096, 4096, "float16", 256, True), (64, 64, "float16", 256, True)]
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    said = capsys.readouterr().out
    assert said.splitlines()[0].startswith("6 cells, about")
    assert "tinygemm: ValueError: bf16 only" in said
    assert "met: M <= 16, 4096 x 4096 <= 1.35 F: 1.111 F" in said


@pytest.mark.slow
def test_a_second_run_goes_on(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(tmp_path, "--shapes", "4096x4096", "--m", "1", "--rivals", "cublas")
    world.speeds["ours"] = 99.0
    both = run(tmp_path, "--shapes", "4096x4096", "--m", "1,16", "--rivals", "none", "--resume")
    assert both["cells"][0] == first["cells"][0]
    assert (both["cells"][1]["m"], both["cells"][1]["us"], both["cells"][1]["rivals"]) == (16, 99.0, {})
    assert world.opened[-1][-1] is False, "no dense weights without cuBLAS"
    assert "(1 kept)" in capsys.readouterr().out


def test_a_budget_that_is_too_small_leaves_everything_out(world: World, tmp_path: Path) -> None:
    stored = run(tmp_path, "--shapes", "4096x4096", "--m", "1,16", "--budget-minutes", "0.01")
    assert stored["cells"] == []
    assert stored["left_out"] == ["4096x4096 M=1", "4096x4096 M=16"]


def test_check_asks_for_every_bar(world: World, tmp_path: Path) -> None:
    assert marlin.main(["--shapes", "4096x4096", "--m", "1", "--check"]) == 1


def test_without_torch_ours_and_f_are_measured(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    stored = run(tmp_path, "--shapes", "4096x4096", "--m", "1,256")
    assert [cell["us"] for cell in stored["cells"]] == [10.0, 40.0]
    assert stored["cells"][0]["x_floor"] == pytest.approx(10 / 9)
    assert "no rivals without torch" in capsys.readouterr().out
