"""Launch candidates on a family's operands and time them on the GPU, for `cudatma tune`.

The method is that of benchmarks/harness.py. Times are medians over replays of CUDA graphs. The launches in a graph
rotate over copies of the operand that together exceed L2. Each turn begins with one untimed replay.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.errors import LaunchError
from cudatma.kernels.choice import Listed
from cudatma.kernels.sample import Launch, Trial
from cudatma.library_streams import stream_handle

#: Duration of a graph, long enough to make its launch cost (a few microseconds) negligible, and maximum number of
#: launches in a graph.
_GRAPH_US, _MAX_LAUNCHES = 1_500.0, 200
#: Minimum M at which clock rates fall in long runs. At or above this M, candidates run one by one, in periods of
#: _PERIOD_US.
_SUSTAINED_FROM, _PERIOD_US = 256, 40_000.0
#: Number of samples per candidate if candidates take turns. The GPU is idle before each sample, so that its power limit
#: has no effect.
_MIN_SAMPLES, _MAX_SAMPLES, _REST_S = 5, 51, 0.004
_NAN_BITS = 0xFFFF


@dataclass(frozen=True, slots=True)
class _Graph:
    """An instantiated CUDA graph of ``launches`` launches."""

    graph: Any
    launches: int


class GpuBench:
    """A tune_run.Bench on a GPU. Its methods must be called inside ``with bench.opened():``.

    The methods raise the errors of the trial.
    """

    def __init__(self, trial: Trial) -> None:
        self.device, self._trial = trial.device, trial
        self._stream: Any = None
        self._m = 0

    @contextmanager
    def opened(self) -> Iterator[GpuBench]:
        """Create a stream that can be captured, and make it current for CuPy."""
        import cupy

        with cupy.cuda.Device(self.device), cupy.cuda.Stream(non_blocking=True) as self._stream:
            yield self

    def prepare(self, problem: Any) -> None:
        """Create random operands."""
        self._trial.prepare(problem)
        self._m = problem.m

    def result(self, candidate: Listed[Any]) -> Any:
        """Return the result on the GPU.

        Raise LaunchError if two runs on two copies of the operand have different bits, or if the call would launch
        another kernel. Raise the errors of the launch.
        """
        launch = self._launcher(candidate, 2)
        bits = self._trial.out.view(np.uint16)
        results = []
        for index in range(2):
            bits[...] = _NAN_BITS  # unwritten elements differ
            launch(index)
            self._stream.synchronize()
            results.append(bits.copy() if not index else bits)
        if not bool((results[0] == results[1]).all()):
            raise LaunchError(f"candidate {candidate.label}", "different results in two runs", "bitwise reproducible")
        return self._trial.out

    def keep(self, result: Any) -> Any:
        return result.view(np.uint16).copy().view(result.dtype)

    def screen(self, candidate: Listed[Any]) -> float:
        """Return the time per launch, in microseconds, in one replay of the candidate's graph on an idle GPU."""
        graph = self._captured(self._launcher(candidate, self._trial.copies))
        time.sleep(_REST_S)
        return self._replay_us(graph) / graph.launches

    def times(self, candidates: Sequence[Listed[Any]], seconds: float) -> list[float]:
        """Return the median time per launch of each candidate in microseconds.

        For small M, graphs take turns in a changing order, and the GPU is idle before each graph. For large M, each
        candidate runs alone twice, for its share of the time, and only the second half of each run counts.
        """
        launchers = [self._launcher(candidate, self._trial.copies) for candidate in candidates]
        graphs = [self._captured(launch) for launch in launchers]
        if self._m >= _SUSTAINED_FROM:
            return self._sustained(graphs, seconds)
        return self._in_turns(graphs, seconds)

    def is_usable(self) -> bool:
        import cupy

        try:
            self._stream.synchronize()
            return int(cupy.ones(1, np.int32).sum()) == 1
        except Exception:
            return False

    def _launcher(self, candidate: Listed[Any], copies: int) -> Launch:
        return self._trial.launcher(candidate, copies, stream_handle(self._stream, "cupy", self.device))

    def _captured(self, launch: Launch) -> _Graph:
        """Return a graph that takes about _GRAPH_US and uses each copy of the operand equally often."""
        copies = self._trial.copies

        def all_copies() -> None:
            for index in range(copies):
                launch(index)

        all_copies()
        each_us = max(0.1, self._elapsed_us(all_copies) / copies)
        rounds = max(1, round(min(_MAX_LAUNCHES, _GRAPH_US / each_us) / copies))
        self._stream.begin_capture()
        try:
            for _ in range(rounds):
                all_copies()
        finally:
            # If the stream stayed in capture, every later call on it would fail.
            graph = self._stream.end_capture()
        graph.upload(self._stream)
        return _Graph(graph, rounds * copies)

    def _in_turns(self, graphs: Sequence[_Graph], seconds: float) -> list[float]:
        turn_us = sum(2 * self._replay_us(graph) + _REST_S * 1e6 for graph in graphs)
        turns = min(_MAX_SAMPLES, max(_MIN_SAMPLES, round(seconds * 1e6 / turn_us)))
        samples: list[list[float]] = [[] for _ in graphs]
        shuffled = np.random.default_rng(0)
        for _ in range(turns):
            for index in shuffled.permutation(len(graphs)):
                time.sleep(_REST_S)
                samples[index].append(self._replay_us(graphs[index]) / graphs[index].launches)
        return [statistics.median(each) for each in samples]

    def _sustained(self, graphs: Sequence[_Graph], seconds: float) -> list[float]:
        samples: list[list[float]] = [[] for _ in graphs]
        order = list(range(len(graphs)))
        each_us = seconds * 1e6 / (2 * len(graphs))
        for index in (*order, *reversed(order)):
            graph = graphs[index]
            repeats = max(1, round(_PERIOD_US / self._replay_us(graph)))
            periods = max(2, round(each_us / (repeats * self._replay_us(graph))))
            period_us = [self._replay_us(graph, repeats) for _ in range(periods)]
            samples[index] += [us / (repeats * graph.launches) for us in period_us[periods // 2 :]]
        return [statistics.median(each) for each in samples]

    def _replay_us(self, graph: _Graph, repeats: int = 1) -> float:
        """Return the time of ``repeats`` replays in microseconds. An untimed replay absorbs effects of earlier work."""
        graph.graph.launch(self._stream)

        def replay() -> None:
            for _ in range(repeats):
                graph.graph.launch(self._stream)

        return self._elapsed_us(replay)

    def _elapsed_us(self, enqueue: Callable[[], None]) -> float:
        """Return the GPU time in microseconds for the work that ``enqueue`` puts on the stream."""
        import cupy

        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(self._stream)
        enqueue()
        end.record(self._stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e3
