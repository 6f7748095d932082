"""The tuner's measurements with a fake CuPy whose clock advances by the given time of each launch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cudatma.errors import LaunchError
from cudatma.kernels import sample as operands
from cudatma.kernels.choice import Listed, shortlist
from cudatma.kernels.gpu import H200
from cudatma.kernels.marlin import sample
from cudatma.kernels.marlin.choose import MARLIN, decide
from cudatma.kernels.marlin.gemm import weight_of
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.marlin.sample import MarlinTrial, random_weight
from cudatma.kernels.operation import Weight
from cudatma.quantization import PackedWeight
from tools.tune_measure import GpuBench

LAYER = LinearShape(2048, 520, 128, True, "float16")


@dataclass
class FakeStream:
    """A stream that runs everything at once unless it is being captured."""

    non_blocking: bool = False
    ptr: int = 7
    clock_us: float = 0.0
    captured: list[Any] | None = None
    graphs: list[Any] = field(default_factory=list)

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def enqueue(self, what: Any) -> None:
        if self.captured is not None:
            self.captured.append(what)
        else:
            what()

    def begin_capture(self) -> None:
        assert self.non_blocking, "the default stream cannot be captured"
        assert self.captured is None
        self.captured = []

    def end_capture(self) -> Any:
        launches, self.captured = self.captured, None
        assert launches is not None
        graph = SimpleNamespace(launches=launches, upload=lambda stream: None)
        graph.launch = lambda stream: [launch() for launch in launches]
        self.graphs.append(graph)
        return graph

    def synchronize(self) -> None:
        assert self.captured is None, "a capture cannot be waited for"


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.at_us = stream.clock_us

    def synchronize(self) -> None:
        pass


@dataclass
class World:
    """us: time of a launch for each kernel entry. seen: (entry, index of the weight's copy) of each launch."""

    stream: FakeStream
    us: dict[str, float] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    seen: list[tuple[str, int]] = field(default_factory=list)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    stream = FakeStream(non_blocking=True)
    here = World(stream)
    cupy: Any = ModuleType("cupy")
    cupy.asarray, cupy.empty, cupy.ones, cupy.ndarray = np.asarray, np.empty, np.ones, FakeStream  # no array is one
    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    cupy.cuda = SimpleNamespace(
        Device=lambda ordinal: nullcontext(),
        Stream=lambda non_blocking: stream,
        Event=FakeEvent,
        get_elapsed_time=lambda begin, end: (end.at_us - begin.at_us) / 1e3,
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    rng = np.random.default_rng(0)

    def launch_of(operation: Any, problem: Any, device: int, handle: int, named: Any, weight: Weight) -> Any:
        """Choose as the engine does. The launch writes the same result for every copy."""
        assert handle == stream.ptr
        assert weight is weight_of(copies[0])
        assert not problem.programmatic
        assert not problem.batch_invariant
        assert named["out"].shape == (problem.m, problem.n)
        config = decide(problem, H200).config
        return SimpleNamespace(replays=[SimpleNamespace(config=config)], run=partial(run, config.entry))

    def run(entry: str, addresses: tuple[int, ...], handle: int, weight: Weight) -> None:
        (copy,) = (index for index, w in enumerate(copies) if weight_of(w) is weight)

        def launch() -> None:
            here.seen.append((entry, copy))
            stream.clock_us += here.us.get(entry, 10.0)
            bits = bench._trial.out.view(np.uint16)
            bits[...] = rng.integers(0, 9, bits.shape) if entry in here.wrong else 5

        stream.enqueue(launch)

    copies: list[PackedWeight] = []

    def to_device(self: PackedWeight, device: int | None = None) -> PackedWeight:
        twin = random_weight(LAYER)
        copies.append(twin)
        return twin

    monkeypatch.setattr(PackedWeight, "to_device", to_device)
    monkeypatch.setattr(sample, "launch_of", launch_of)
    monkeypatch.setattr(operands, "_ROTATION_BYTES", 5 * random_weight(LAYER).nbytes)
    bench = GpuBench(MarlinTrial(0))
    here.bench = bench  # type: ignore[attr-defined]
    with bench.opened():
        yield here


def listed(m: int) -> list[Listed]:
    return shortlist(MARLIN, Problem(LAYER, m), H200, 12)[:4]


@pytest.mark.parametrize("m", [3, 300])
def test_times_are_those_of_the_launches_and_every_copy_is_read_in_turn(world: World, m: int) -> None:
    bench: Any = world.bench  # type: ignore[attr-defined]
    found = listed(m)
    world.us = {one.config.entry: 20.0 + index for index, one in enumerate(found)}
    bench.prepare(Problem(LAYER, m))
    assert bench.times(found, 0.2) == pytest.approx([20.0 + index for index in range(len(found))])
    assert len(world.stream.graphs) == len(found)
    assert world.stream.captured is None
    for graph in world.stream.graphs:
        world.seen.clear()
        graph.launch(world.stream)
        copies = [copy for _, copy in world.seen]
        assert copies == [index % 6 for index in range(len(copies))], "whole rounds over six copies"
        assert len(copies) >= 60, "some 1.5 ms"


def test_a_short_look_tells_them_apart(world: World) -> None:
    bench: Any = world.bench  # type: ignore[attr-defined]
    found = listed(3)
    world.us = {one.config.entry: 20.0 + index for index, one in enumerate(found)}
    bench.prepare(Problem(LAYER, 3))
    assert [bench.screen(one) for one in found] == pytest.approx([20.0 + index for index in range(len(found))])


def test_a_result_is_written_whole_and_the_same_twice(world: World) -> None:
    bench: Any = world.bench  # type: ignore[attr-defined]
    first, second = listed(64)[:2]
    bench.prepare(Problem(LAYER, 64))
    kept = bench.keep(bench.result(first))
    assert kept.shape == (64, 520)
    assert (kept.view(np.uint16) == 5).all()
    assert [copy for _, copy in world.seen] == [0, 1], "two copies of the weight"
    world.wrong.add(second.config.entry)
    with pytest.raises(LaunchError, match="bitwise reproducible"):
        bench.result(second)
    assert (kept.view(np.uint16) == 5).all(), "what is kept does not change"


def test_a_choice_that_would_run_otherwise_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Any = world.bench  # type: ignore[attr-defined]
    rule, *_, other = shortlist(MARLIN, Problem(LAYER, 9), H200, 12)
    bench.prepare(Problem(LAYER, 9))
    bench.result(other)
    monkeypatch.setattr(sample, "pinned", lambda config: nullcontext())
    bench.result(rule)
    with pytest.raises(LaunchError, match=f"the kernel of {other.config.entry}"):
        bench.result(other)


def test_a_capture_that_fails_leaves_the_stream_free(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Any = world.bench  # type: ignore[attr-defined]
    bench.prepare(Problem(LAYER, 4))
    enqueue = world.stream.enqueue

    def fail(what: Any) -> None:
        if world.stream.captured:
            raise RuntimeError("no more")
        enqueue(what)

    monkeypatch.setattr(world.stream, "enqueue", fail)
    with pytest.raises(RuntimeError, match="no more"):
        bench.times(listed(4)[:1], 0.1)
    assert world.stream.captured is None
    assert bench.is_usable()
