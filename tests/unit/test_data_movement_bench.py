"""The benchmark of the operations over arrays: its cases compute what they time, its searches stay within the card, and
its verdicts. NumPy takes CuPy's place, the emulator the card's."""

from __future__ import annotations

import sys
import time
import types
from typing import Any

import numpy as np
import pytest

from benchmarks import data_movement
from cudatma.kernels.data_movement.movement import Place
from cudatma.target import get_target

#: Cases like the benchmark's, of a few kilobytes.
SMALL = {
    "run": data_movement._copy((32, 64), (0, 0), (32, 64)),
    "window": data_movement._copy((64, 300), (5, 8), (40, 256)),
    "transpose": data_movement._transpose(64, "float16"),
    "reduce run": data_movement._reduce((32, 64), 64),
    "reduce window": data_movement._reduce((32, 64), 48),
    "broadcast": data_movement._broadcast(4096, 4),
}


@pytest.fixture
def numpy_as_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("cupy")
    for name in ("arange", "empty", "empty_like", "zeros", "ones", "copyto", "add", "uint32", "float32"):
        setattr(fake, name, getattr(np, name))
    fake.ndarray = type("ndarray", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setenv("CUDATMA_BACKEND", "emulator")


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.filterwarnings("ignore::cudatma.BackendWarning")
def test_both_contenders_compute_the_same(name: str, numpy_as_cupy: None) -> None:
    prepared = SMALL[name]()
    prepared.ours()
    assert prepared.right()
    prepared.cupys()
    assert prepared.right()


@pytest.mark.parametrize("name", ["run", "window", "transpose"])
@pytest.mark.filterwarnings("ignore::cudatma.BackendWarning")
def test_searches_offer_other_specs(name: str, numpy_as_cupy: None) -> None:
    prepared = SMALL[name]()
    assert prepared.variants is not None
    found = {name: planned for name, planned, _ in prepared.variants(Place(get_target("sm_90a"), 4), 4)}
    assert max(planned.sizes.grid for planned in found.values()) == {"run": 1, "window": 4, "transpose": 1}[name]
    assert len({planned.config for planned in found.values()}) == len(found) > 10
    assert min(planned.config.smem_bytes for planned in found.values()) <= 227 * 1024


def test_host_time_is_a_median_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_movement, "HOST_CALLS", 5)
    events: list[str] = []

    def call() -> None:
        events.append("call")
        if len(events) == 3:
            time.sleep(0.2)

    assert data_movement.host_us(call, lambda: events.append("wait")) < 1e5
    assert events == ["wait", *["call"] * 5, "wait"]


class Clock:
    """A card that takes a millisecond for a launch of ours and two for one of CuPy's, and remembers the order."""

    def __init__(self) -> None:
        self.now, self.order = 0.0, ""

    def run(self, name: str) -> None:
        self.now += {data_movement.OURS: 1.0, data_movement.CUPY: 2.0}[name]
        self.order += name[1]

    def synchronize(self) -> None:
        self.order += "|"


def test_calls_take_turns_and_the_first_ones_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, fake = Clock(), types.ModuleType("cupy")

    class Event:
        def record(self, stream: Clock) -> None:
            self.at = stream.now

    def elapsed(begin: Event, end: Event) -> float:
        return end.at - begin.at

    fake.cuda = types.SimpleNamespace(Event=Event, get_elapsed_time=elapsed)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(data_movement, "LAUNCHES", 2)
    names = (data_movement.OURS, data_movement.CUPY)
    contenders = [data_movement.Contender(name, lambda _, name=name: clock.run(name), 1, 2) for name in names]  # type: ignore[misc]
    assert data_movement.called(clock, contenders, 3) == {data_movement.OURS: 1000.0, data_movement.CUPY: 2000.0}
    ours, cupys = (4 * name[1] for name in names)
    assert clock.order == f"{ours}{cupys}|{cupys}{ours}|{ours}{cupys}|"


def test_the_better_way_of_each_counts() -> None:
    cell = data_movement.better({"graph": {"cudatma": 5.0, "cupy": 9.0}, "calls": {"cudatma": 6.0, "cupy": 7.0}})
    assert cell["us"] == {"cudatma": 5.0, "cupy": 7.0}
    assert cell["way"] == {"cudatma": "graph", "cupy": "calls"}
    assert cell["us_by_way"]["graph"] == {"cudatma": 5.0, "cupy": 9.0}
    assert data_movement.better({"graph": {"cudatma": None, "cupy": 9.0}, "calls": {}})["us"] == {
        "cudatma": None,
        "cupy": 9.0,
    }


def test_a_yardstick_is_measured_first() -> None:
    assert data_movement.chosen(["transpose fp32"]) == ["transpose fp32"]
    wanted = ["transpose fp32", "reduce_into, window fp32", "copy, contiguous"]
    assert data_movement.chosen(wanted) == ["copy, contiguous", *wanted[:2]]
    assert sorted(data_movement.chosen(())) == sorted(data_movement.CASES)


def test_cases_are_large_and_have_the_bars_that_are_asked_for() -> None:
    assert all(case.moved_bytes >= 2 * 256_000_000 for case in data_movement.CASES.values())
    bars = {name: case.bar for name, case in data_movement.CASES.items() if case.bar}
    copies = {"copy, contiguous": 1.0, "copy, window fp32": 2.2}
    reductions = {"reduce_into, contiguous": 0.75, "reduce_into, window fp32": 0.75}
    assert bars == copies | reductions | {"transpose fp32": 3.0, "transpose fp16": 2.5}
    assert {name for name, case in data_movement.CASES.items() if case.yardstick == "copy, contiguous"} == set(
        reductions
    )


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ({"bar": 0.0, "x_cupy": 3.0}, "none"),
        ({"bar": 2.2, "x_cupy": 2.2}, "2.2: met"),
        ({"bar": 2.2, "x_cupy": 2.1}, "2.2: missed"),
        ({"bar": 2.2, "x_cupy": None}, "2.2: not measured"),
        ({"bar": 0.75, "x_cupy": 0.5, "yardstick": "copy", "x_yardstick": 0.9}, "0.75: met"),
        ({"bar": 0.75, "x_cupy": 1.5, "yardstick": "copy", "x_yardstick": 0.7}, "0.75: missed"),
        ({"bar": 0.75, "x_cupy": 1.5, "yardstick": "copy", "x_yardstick": None}, "0.75: not measured"),
        ({"bar": 2.2, "x_cupy": 3.0, "error": "the result is wrong"}, "2.2: not measured"),
    ],
)
def test_verdicts(cell: dict[str, Any], said: str) -> None:
    assert data_movement.verdict(cell) == said


def test_the_table() -> None:
    whole = {
        "case": "copy",
        "us": {"cudatma": 10.0, "cupy": 20.0},
        "tb_s": 3.0,
        "cupy_tb_s": 1.5,
        "x_cupy": 2.0,
        "way": {"cudatma": "graph", "cupy": "calls"},
        "host_us": 9.54,
        "bar": 0,
    }
    table = data_movement.data_movement_table([whole, {"case": "broken", "error": "x", "bar": 1.0}])
    assert [len(row) for row in table.rows] == [len(table.columns)] * 2
    assert table.rows[0][:2] == ("copy", "10.0")
    assert table.rows[0][-3:] == ("graph, calls", "9.5", "none")
    assert table.rows[1][1:] == ("-",) * 7 + ("1.0: not measured",)
