"""What the Marlin benchmark measures: models' layers, the plan within a budget, the run by a clock, going on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import marlin, marlin_bench, plan, shapes
from benchmarks.cells import summary_table
from benchmarks.harness import BLOCK_S
from benchmarks.operands import packed_bytes
from benchmarks.plan import CellKey, Costs
from benchmarks.report import Cell, Result
from cudatma.errors import ArgumentError

COSTS = Costs(11, 3.0, ("cublas", "humming"))

# ---- Shapes ---------------------------------------------------------------------------------------------------------


def test_the_layers_of_the_models() -> None:
    llama = shapes.MODELS["llama3-70b"].projections
    assert llama == {"qkv": (8192, 10240), "o": (8192, 8192), "gate_up": (8192, 57344), "down": (28672, 8192)}
    assert shapes.model_shapes("llama3-8b") == ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
    assert shapes.model_shapes("qwen2.5-7b") == ((3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584))
    assert shapes.model_shapes("qwen2.5-72b") == ((8192, 10240), (8192, 8192), (8192, 59136), (29568, 8192))
    assert shapes.model_shapes("mixtral-8x7b") == shapes.model_shapes("llama3-8b")
    assert shapes.uses((8192, 10240)) == ["llama3-70b qkv", "qwen2.5-72b qkv"]
    every = shapes.all_shapes()
    assert every[:5] == shapes.FIVE
    assert len(every) == len(set(every)) == 16
    assert all(k % 64 == n % 64 == k % 128 == 0 for k, n in every), "what the packed layout and the groups need"


def test_shapes_are_chosen_by_name() -> None:
    assert shapes.parse_shapes("five") == shapes.FIVE
    assert shapes.parse_shapes("all") == shapes.all_shapes()
    assert shapes.parse_shapes("8192x28672,llama3-70b,8192X8192") == (
        *((8192, 28672), (8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)),
    )
    assert shapes.parse_m_values("64,1,16,1") == (1, 16, 64)
    assert shapes.parse_m_values("all") == shapes.M_VALUES


@pytest.mark.parametrize("text", ["4096", "4096x", "4096x100", "0x64", "ax64", "64x64x64", "llama", "", "five,"])
def test_a_wrong_shape_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        shapes.parse_shapes(text)
    with pytest.raises(SystemExit) as ended:
        marlin.main(["--shapes", text])
    assert ended.value.code == 2


@pytest.mark.parametrize("arguments", [["--m", "0"], ["--m", "1,x"], ["--rivals", "others"], ["--resume"]])
def test_other_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        marlin.main(arguments)
    assert ended.value.code == 2


# ---- The plan -------------------------------------------------------------------------------------------------------


def test_the_important_cells_come_first() -> None:
    assert plan.importance(CellKey(8192, 57344, 16)) < plan.importance(CellKey(8192, 57344, 2048))
    assert plan.importance(CellKey(8192, 28672, 16)) < plan.importance(CellKey(3584, 4608, 16))
    assert plan.importance(CellKey(8192, 10240, 1)) == plan.importance(CellKey(4096, 4096, 512))
    assert plan.importance(CellKey(3584, 4608, 2)) == max(
        plan.importance(key) for key in plan.all_cells(shapes.all_shapes(), shapes.M_VALUES)
    )


@given(st.floats(0, 3000), st.lists(st.sampled_from(shapes.all_shapes()), min_size=1, max_size=6, unique=True))
def test_a_plan_keeps_to_its_budget(budget_s: float, some: list[tuple[int, int]]) -> None:
    keys = plan.all_cells(some, shapes.M_VALUES)
    chosen, late = plan.choose(keys, COSTS, budget_s)
    assert COSTS.total_s(chosen) <= budget_s + 1e-6
    assert sorted([*chosen, *late]) == sorted(keys)
    assert [key for key in keys if key in chosen] == chosen, "in the order that was asked for"
    for key in late:
        assert COSTS.total_s(chosen) + COSTS.cell_s(key) + COSTS.shape_s() > budget_s, "there was no room for it"
    assert plan.choose(keys, COSTS, None) == (keys, [])


def test_estimates_follow_what_is_asked_for() -> None:
    key = CellKey(8192, 28672, 1024)
    assert Costs(11, 6.0, ("cublas",)).cell_s(key) > Costs(11, 3.0, ("cublas",)).cell_s(key) > 3.0
    assert COSTS.cell_s(key) - Costs(11, 3.0, ("cublas",)).cell_s(key) == pytest.approx(3.0), "a pair a rival"
    few = CellKey(8192, 28672, 1)
    assert Costs(50, 3.0, ()).cell_s(few) > Costs(11, 3.0, ()).cell_s(few) > 0
    assert Costs(11, 3.0, ()).shape_s() < COSTS.shape_s()
    assert plan.expected_us(8192, 28672, 1) == pytest.approx(packed_bytes(8192, 28672) / 4e6, rel=0.2)
    assert plan.expected_us(8192, 28672, 8192) == pytest.approx(2 * 8192 * 8192 * 28672 / 6e8, rel=0.01)
    assert plan.described([CellKey(64, 128, 1), CellKey(64, 128, 2), CellKey(64, 64, 1)]) == "64x128 M=1,2; 64x64 M=1"


# ---- The run --------------------------------------------------------------------------------------------------------


class FakeBench:
    """Takes ``slower`` times what was estimated; a layer or a cell may fail."""

    def __init__(self, slower: float = 1.0, no_layer: object = None, no_cell: CellKey | None = None) -> None:
        self.now, self.slower, self.no_layer, self.no_cell = 0.0, slower, no_layer, no_cell
        self.log: list[object] = []

    def open(self, shape: tuple[int, int], tokens: Sequence[int]) -> None:
        self.now += COSTS.shape_s() * self.slower
        self.log.append((shape, tuple(tokens)))
        if shape == self.no_layer:
            raise MemoryError("too large")

    def cell(self, key: CellKey) -> Cell:
        self.now += COSTS.cell_s(key) * self.slower
        if key == self.no_cell:
            raise RuntimeError("illegal instruction")
        return {"k": key.k, "n": key.n, "m": key.m, "us": 1.0, "rivals": {}}

    def is_alive(self) -> bool:
        return self.no_cell is None or self.no_cell.n != 192

    def close(self) -> None:
        self.log.append("close")


def result() -> Result:
    return Result({"dtype": "float16"}, summary_table, machine={}, revision="")


def keys_of(cells: Sequence[Cell]) -> list[CellKey]:
    return [CellKey(cell["k"], cell["n"], cell["m"]) for cell in cells]


def test_everything_is_measured_without_a_budget() -> None:
    keys = plan.all_cells(shapes.FIVE, (1, 2, 64, 1024))
    bench, to = FakeBench(slower=9.0), result()
    assert marlin_bench.run(bench, keys, COSTS, None, to, lambda: bench.now) == []
    assert sorted(keys_of(to.cells)) == sorted(keys)
    assert [entry for entry in bench.log if entry != "close"] == [(shape, (1, 2, 64, 1024)) for shape in shapes.FIVE]
    assert keys_of(to.cells)[:4] == [CellKey(4096, 4096, m) for m in (1, 64, 1024, 2)], "the important ones first"


@pytest.mark.parametrize("slower", [0.3, 1.0, 2.5])
def test_the_clock_keeps_the_budget(slower: float) -> None:
    keys = plan.all_cells(shapes.all_shapes(), shapes.M_VALUES)
    bench, to = FakeBench(slower), result()
    left_out = marlin_bench.run(bench, keys, COSTS, 400.0, to, lambda: bench.now)
    assert sorted([*keys_of(to.cells), *left_out]) == sorted(keys)
    longest = max(map(COSTS.cell_s, keys)) + COSTS.shape_s()
    assert bench.now <= 400.0 + longest * slower
    assert bench.now >= 250.0, "the time there is, is used"
    assert bench.log.count("close") == len(bench.log) / 2, "every layer's memory is given back"


def test_a_failure_is_a_cell_and_the_run_goes_on() -> None:
    keys = plan.all_cells(((64, 64), (64, 128)), (1, 16))
    bench, to = FakeBench(no_layer=(64, 64), no_cell=CellKey(64, 128, 1)), result()
    assert marlin_bench.run(bench, keys, COSTS, None, to, lambda: bench.now) == []
    assert [cell.get("error") for cell in to.cells] == [
        *["MemoryError: too large"] * 2,
        *("RuntimeError: illegal instruction", None),
    ]
    assert bench.log.count("close") == 2


def test_a_run_ends_when_the_gpu_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    keys = plan.all_cells(((64, 64), (64, 192), (64, 256)), (1, 16))
    bench, to = FakeBench(no_cell=CellKey(64, 192, 1)), result()
    left_out = marlin_bench.run(bench, keys, COSTS, None, to, lambda: bench.now)
    assert keys_of(to.cells) == keys[:3]
    assert left_out == keys[3:]
    assert "no longer computes" in capsys.readouterr().out


# ---- Going on with a file, and the command line ---------------------------------------------------------------------

SETTINGS = {"dtype": "float16", "group_size": 128, "symmetric": True, "block_seconds": BLOCK_S}
MACHINE = {"card": "NVIDIA H200", "driver": "580"}


def stored(path: Path, **changed: Any) -> Path:
    cells = [{"k": 64, "n": 64, "m": 1, "us": 1.0}, {"k": 64, "n": 64, "m": 2, "error": "x"}]
    path.write_text(json.dumps({"settings": SETTINGS, "machine": MACHINE, "cells": cells} | changed))
    return path


def test_a_run_goes_on_with_the_cells_that_were_measured(tmp_path: Path) -> None:
    path = stored(tmp_path / "a.json")
    assert [cell["m"] for cell in marlin.cells_of(path, SETTINGS, MACHINE)] == [1], "what failed is measured again"
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
def test_cells_of_two_gpus_do_not_stand_in_one_file(tmp_path: Path, changed: dict[str, Any], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        marlin.cells_of(stored(tmp_path / "a.json", **changed), SETTINGS, MACHINE)


def test_the_plan_needs_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--plan", "--shapes", "all", "--budget-minutes", "9"]
    assert marlin.main(arguments) == 0
    said = capsys.readouterr().out
    assert " min " in said.splitlines()[0]
    assert "no time for" in said
    path = stored(tmp_path / "a.json", machine=marlin.machine_facts())
    assert marlin.main(["--plan", "--shapes", "64x64", "--m", "1,2", "--json", str(path), "--resume"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "64x64 M=2"
    assert "(1 kept)" in said


def test_settings_name_the_rivals() -> None:
    options = marlin._parsed(marlin._parser(), ["--rivals", "humming,cublas", "--quick"])
    assert options.rivals == ("cublas", "humming")
    assert options.shapes == marlin.QUICK_SHAPES
    settings = marlin.settings_of(options)
    assert set(settings["rivals"]) == {"cublas", "humming"}
    assert settings["sustained_seconds"] == marlin.QUICK_SECONDS
    assert json.loads(json.dumps(settings)) == settings
    assert marlin.parse_rivals("none") == ()
    by_default = {
        dtype: marlin._parsed(marlin._parser(), ["--dtype", dtype]).rivals for dtype in ("float16", "bfloat16")
    }
    assert by_default == {"float16": ("cublas", "humming"), "bfloat16": ("cublas", "humming", "quack", "tinygemm")}
    assert marlin.package_version("no-such-distribution") == "none"
