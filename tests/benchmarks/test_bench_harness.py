"""The harness and the read floor on a GPU with a scripted clock: turns, idle times, long runs, captures and
rotation."""

from __future__ import annotations

import itertools
import sys
import types

import numpy as np
import pytest
from fake_gpu import FakeGpu

from benchmarks import harness, read_floor
from benchmarks.harness import Contender, Timing
from cudatma.target import get_target


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setitem(sys.modules, "cupy", fake.module)
    return fake


def steady(gpu: FakeGpu, name: str, us: float, copies: int = 4, launches: int = 20) -> Contender:
    return Contender(name, lambda i: gpu.launch(us), copies, launches)


def test_cold_takes_turns_and_gives_the_time_of_one_launch(gpu: FakeGpu) -> None:
    measured = harness.cold(gpu, [steady(gpu, "a", 5.0), steady(gpu, "b", 7.0, launches=40)], replays=3)
    assert measured.timings == {"a": Timing(5.0, 5.0, 5.0, 3), "b": Timing(7.0, 7.0, 7.0, 3)}
    a, b = [100.0] * 2, [280.0] * 2
    assert gpu.log == ["upload", "upload", *a, *b, *b, *a, *b, *a], "each replays once untimed"


def test_orders_are_shuffled_and_reversed() -> None:
    names = ["a", "b", "c", "d"]
    orders = list(itertools.islice(harness._orders(names), 40))
    assert all(orders[i + 1] == orders[i][::-1] and sorted(orders[i]) == names for i in range(0, 40, 2))
    assert len({tuple(order) for order in orders}) > 10


def test_cold_does_not_time_the_first_replay_of_a_turn(gpu: FakeGpu) -> None:
    # Whatever follows a switch takes three times as long.
    def slowdown(now_us: float) -> float:
        return 3.0 if len(gpu.log) < 2 or gpu.log[-1] != gpu.log[-2] else 1.0

    gpu.slowdown = slowdown
    measured = harness.cold(gpu, [steady(gpu, "a", 5.0), steady(gpu, "b", 7.0)], replays=4)
    assert (measured.us("a"), measured.us("b")) == (5.0, 7.0)


@pytest.fixture
def rests(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool]]:
    """Record the seconds of each idle time, and whether the GPU had nothing to do. The GPU's log also contains it."""
    found: list[tuple[float, bool]] = []
    at = [-1.0]  # the GPU's time when it was last waited for

    def sleep(seconds: float) -> None:
        found.append((seconds, at[0] == gpu.now_us))
        gpu.log.append("rest")

    monkeypatch.setattr(gpu, "synchronize", lambda: at.__setitem__(0, gpu.now_us))
    monkeypatch.setattr(harness, "time", types.SimpleNamespace(sleep=sleep))
    return found


def test_the_gpu_rests_before_each_turn(gpu: FakeGpu, rests: list[tuple[float, bool]]) -> None:
    contenders = [steady(gpu, "a", 5.0), steady(gpu, "b", 7.0)]
    measured = harness.cold(gpu, contenders, replays=2)
    assert (measured.us("a"), measured.us("b")) == (5.0, 7.0)
    a, b = ["rest", 100.0, 100.0], ["rest", 140.0, 140.0]
    assert gpu.log == ["upload", "upload", *a, *b, *b, *a]
    assert rests == [(harness.REST_S, True)] * 4
    harness.cold(gpu, contenders, replays=1, rest_s=0.5)
    assert rests[4:] == [(0.5, True)] * 2


def test_long_and_quick_runs_do_not_rest(gpu: FakeGpu, rests: list[tuple[float, bool]]) -> None:
    harness.quick(gpu, steady(gpu, "a", 5.0), launches=3)
    harness.sustained(gpu, [steady(gpu, "a", 100.0)], seconds=0.5)
    harness.cold(gpu, [steady(gpu, "a", 5.0)], replays=2, rest_s=0.0)
    assert rests == []


def test_quick_takes_fewer_launches(gpu: FakeGpu) -> None:
    measured = harness.quick(gpu, steady(gpu, "a", 5.0, launches=200), launches=3)
    assert measured.us("a") == 5.0
    assert gpu.log == ["upload", *[15.0] * 4]


def test_cold_touches_every_buffer_before_the_capture(gpu: FakeGpu) -> None:
    seen: list[tuple[bool, int]] = []

    def run(index: int) -> None:
        seen.append((gpu.capturing, index))
        gpu.launch(1.0)

    harness.cold(gpu, [Contender("a", run, 3, 6)], replays=1)
    assert seen == [(False, i) for i in range(3)] + [(True, i) for i in range(6)]


@pytest.mark.parametrize("in_capture", [False, True])
def test_a_contender_that_fails_stops_nobody(gpu: FakeGpu, in_capture: bool) -> None:
    def run(index: int) -> None:
        if gpu.capturing or not in_capture:
            raise ValueError("no such kernel\nsecond line")

    measured = harness.cold(gpu, [Contender("broken", run, 4, 20), steady(gpu, "a", 5.0)], replays=1)
    assert measured.errors == {"broken": "ValueError: no such kernel"}
    assert measured.us("a") == 5.0
    assert measured.us("broken") is None
    assert not gpu.capturing


def test_sustained_counts_the_second_half(gpu: FakeGpu) -> None:
    # A cold GPU is twice as fast for the first half second.
    gpu.slowdown = lambda now_us: 1.0 if now_us < 0.5e6 else 2.0
    measured = harness.sustained(gpu, [steady(gpu, "a", 100.0), steady(gpu, "b", 200.0)], seconds=1.0, block_s=0.04)
    assert (measured.us("a"), measured.us("b")) == (200.0, 400.0)
    assert measured.timings["a"].samples >= 3
    replays = [entry for entry in gpu.log if entry != "upload"]
    switches = sum(replays[i] != replays[i - 1] for i in range(1, len(replays)))
    assert switches > 6, "contenders alternate in blocks of 40 ms"


def test_sustained_without_anything_to_run(gpu: FakeGpu) -> None:
    def run(index: int) -> None:
        raise RuntimeError("gone")

    assert harness.sustained(gpu, [Contender("a", run, 4, 20)]).errors == {"a": "RuntimeError: gone"}


@pytest.mark.parametrize("name", ["sm_90a", "sm_120a"])
def test_floor_configurations_fit(name: str) -> None:
    target = get_target(name)
    found = read_floor.configurations(target.smem_per_block_bytes, target.smem_per_sm_bytes)
    assert len(found) == len(set(found)) > 10
    for config in found:
        block = config.ring_bytes + 1024  # what the system keeps
        assert config.ring_bytes + 512 <= target.smem_per_block_bytes
        assert block * config.ctas_per_sm <= target.smem_per_sm_bytes
        assert 2 <= config.stages <= 32, "the kernel's barriers"


@pytest.mark.parametrize("name", ["sm_90a", "sm_120a"])
def test_the_floor_kernel_compiles(name: str) -> None:
    from cudatma.build.kernel import compile

    kernel = compile(read_floor.SOURCE, target=name, template=True)
    assert [parameter.size_bytes for parameter in kernel.parameters] == [8, 8, 8, 4, 4, 4]
    assert "cp.async.bulk.shared::cta.global" in kernel.ptx
    assert kernel.ptx.count("griddepcontrol.") == 2, "launched in a chain, it lets the next one in and waits"
    assert f".maxntid {read_floor.THREADS}" in kernel.ptx


def test_the_floor_kernel_has_no_hazard() -> None:
    from cudatma.build.kernel import compile

    kernel = compile(read_floor.SOURCE, target="sm_90a", template=True)
    source, sink = np.arange(8192, dtype=np.uint32).view(np.uint8), np.zeros(1, np.uint32)
    nbytes = source.nbytes - 48  # the last copy is shorter; two blocks go round a ring of two slots
    for interleaved in (0, 1):
        arguments = (source, sink, nbytes, 4096, 2, interleaved)
        report = kernel.emulate(2, read_floor.THREADS, arguments, shared_bytes=2 * 4096, schedules=3)
        assert not report.hazards, str(report)
    assert sink[0] == 0
