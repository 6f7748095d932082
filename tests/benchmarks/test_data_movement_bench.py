"""The data movement benchmark computes what it times. NumPy replaces CuPy, and the emulator replaces the GPU."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from benchmarks import data_movement

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
    assert prepared.is_correct()
    prepared.cupys()
    assert prepared.is_correct()


class Clock:
    """A GPU on which our launches take one millisecond and CuPy's launches two. It records the order."""

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
    assert data_movement.better({"graph": {"cudatma": None, "cupy": 9.0}, "calls": {}})["us"] == {
        "cudatma": None,
        "cupy": 9.0,
    }


def test_the_table() -> None:
    whole = {
        "case": "copy",
        "us": {"cudatma": 10.0, "cupy": 20.0},
        "tb_s": 3.0,
        "cupy_tb_s": 1.5,
        "x_cupy": 2.0,
        "way": {"cudatma": "graph", "cupy": "calls"},
        "host_us": 9.54,
    }
    table = data_movement.data_movement_table([whole, {"case": "broken", "error": "x"}])
    assert table.rows == (
        ("copy", "10.0", "3.00", "20.0", "1.50", "2.00", "graph, calls", "9.5"),
        ("broken", *"-" * 7),
    )
