"""The card behind `cudatma tune`: one layer's operands, and candidates launched as marlin_gemm would launch them.

Measured as benchmarks/harness.py does: CUDA graphs of launches that rotate over copies of the weight larger than L2
together, one replay untimed at the beginning of each turn, medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.dtypes import activation_type
from cudatma.errors import LaunchError
from cudatma.kernels.marlin.operands import check_input, check_output
from cudatma.kernels.marlin.plan import Plan
from cudatma.kernels.marlin.problem import LinearShape, resolve_fused
from cudatma.kernels.shortlist import Listed
from cudatma.kernels.stream_workspaces import stream_workspace
from cudatma.kernels.tuning import pinned
from cudatma.library_streams import stream_handle
from cudatma.quantization import PackedWeight

#: All copies of a weight together, several times any L2; while one is read, it pushes another out. Of a weight that is
#: tiny not even the most are, but with it nobody waits for memory.
_ROTATION_BYTES, _LEAST_COPIES, _MOST_COPIES = 350_000_000, 2, 200
#: A graph takes about so long, in which its own launch (some microseconds) is lost; and at most so many launches.
_GRAPH_US, _MOST_LAUNCHES = 1_500.0, 200
#: From so many tokens on clocks fall in long runs: candidates run one by one, in blocks of so long.
_SUSTAINED_FROM, _BLOCK_US = 256, 40_000.0
#: Of a candidate, where they take turns; before each the card rests, or its power limit would decide.
_LEAST_SAMPLES, _MOST_SAMPLES, _REST_S = 5, 51, 0.004
#: Random values are taken in turn from so many, a prime, so that no two rows or columns are equal.
_POOL = 1_048_573
_NAN_BITS = 0xFFFF

Launch = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Graph:
    """An instantiated CUDA graph of so many launches."""

    graph: Any
    launches: int


class CardBench:
    """A tune_run.Bench on a device; everything happens inside of ``with bench.opened():``.

    Raises ArgumentTypeError for bf16 where CuPy has none, DriverError without CuPy or a card.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self._stream: Any = None
        self._layer: LinearShape | None = None
        self._weights: list[PackedWeight] = []
        self._x: Any = None
        self._out: Any = None
        self._m = 0

    @contextmanager
    def opened(self) -> Iterator[CardBench]:
        """A stream of its own, which can be captured, is current for CuPy."""
        import cupy

        with cupy.cuda.Device(self.device), cupy.cuda.Stream(non_blocking=True) as self._stream:
            yield self

    def prepare(self, layer: LinearShape, m: int) -> None:
        """Random weights, unless they are there, and activations for m tokens."""
        import cupy

        if layer != self._layer:
            self._layer, self._weights = None, []
            cupy.get_default_memory_pool().free_all_blocks()
            host = random_weight(layer)
            copies = min(_MOST_COPIES, max(_LEAST_COPIES, _ROTATION_BYTES // host.nbytes + 1))
            self._weights = [host.to_device(self.device) for _ in range(copies)]
            self._layer = layer
        kind = activation_type(layer.dtype).numpy
        bits = np.random.default_rng(m).standard_normal(_POOL, dtype=np.float32).astype(kind).view(np.uint16)
        self._m = m
        # TMA takes rows that begin at multiples of 16 bytes; marlin_gemm would arrange others in a kernel of its own.
        self._x = cupy.asarray(np.resize(bits, (m, -(-layer.k // 8) * 8))).view(kind)[:, : layer.k]
        self._out = cupy.empty((m, layer.n), np.uint16).view(kind)

    def result(self, candidate: Listed) -> Any:
        """(m, n) on the card. Two runs, on two copies of the weight, must give the same bits. Raises LaunchError if
        they do not, if the candidate would not be launched as it says, and whatever the launch raises."""
        launch = self._launcher(candidate, 2)
        bits = self._out.view(np.uint16)
        seen = []
        for index in range(2):
            bits[...] = _NAN_BITS  # what is not written is found
            launch(index)
            self._stream.synchronize()
            seen.append(bits.copy() if not index else bits)
        if not bool((seen[0] == seen[1]).all()):
            raise LaunchError("candidate", candidate.label, "the same bits every time", "two runs of it differ")
        return self._out

    def keep(self, result: Any) -> Any:
        return result.view(np.uint16).copy().view(result.dtype)

    def screen(self, candidate: Listed) -> float:
        """Microseconds of a launch in one replay of its graph, by itself on a card that has rested."""
        graph = self._captured(self._launcher(candidate, len(self._weights)))
        time.sleep(_REST_S)
        return self._replay_us(graph) / graph.launches

    def times(self, candidates: Sequence[Listed], seconds: float) -> list[float]:
        """Median microseconds of a launch of each. Few tokens: graphs take turns, in an order that changes, on a card
        that rests between. Many: each runs by itself for its share of the time, twice, and the second halves count."""
        launchers = [self._launcher(candidate, len(self._weights)) for candidate in candidates]
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

    def _launcher(self, candidate: Listed, copies: int) -> Launch:
        """launch(i) enqueues the candidate on the i-th of so many copies of the weight. Its kernel is loaded then."""
        handle = stream_handle(self._stream, "cupy", self.device)
        space = stream_workspace(self.device, handle)
        x = check_input(self._x, self._weights[0])
        out = check_output(self._out, x, self._weights[0])
        with pinned(candidate.spec):
            plans = [
                Plan(weight, x, out, programmatic=False, batch_invariant=False, stream=handle)
                for weight in self._weights[:copies]
            ]
        spec, work = plans[0].spec, plans[0].schedule
        if resolve_fused(spec, "none") != candidate.spec:
            raise LaunchError("candidate", f"{spec.entry}, {work}", f"what was asked for: {candidate.label}")
        space.require_room(spec, work)

        def launch(index: int) -> None:
            plans[index % len(plans)].run(x.info.pointer, out.info.pointer, 0, space, handle)

        return launch

    def _captured(self, launch: Launch) -> _Graph:
        """Whole rounds over the copies of the weight, about _GRAPH_US of them."""
        copies = len(self._weights)

        def all_copies() -> None:
            for index in range(copies):
                launch(index)

        all_copies()
        each_us = max(0.1, self._elapsed_us(all_copies) / copies)
        rounds = max(1, round(min(_MOST_LAUNCHES, _GRAPH_US / each_us) / copies))
        self._stream.begin_capture()
        try:
            for _ in range(rounds):
                all_copies()
        finally:
            # A stream that stays in capture would fail everything after it.
            graph = self._stream.end_capture()
        graph.upload(self._stream)
        return _Graph(graph, rounds * copies)

    def _in_turns(self, graphs: Sequence[_Graph], seconds: float) -> list[float]:
        turn_us = sum(2 * self._replay_us(graph) + _REST_S * 1e6 for graph in graphs)
        turns = min(_MOST_SAMPLES, max(_LEAST_SAMPLES, round(seconds * 1e6 / turn_us)))
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
        share_us = seconds * 1e6 / (2 * len(graphs))
        for index in (*order, *reversed(order)):
            graph = graphs[index]
            repeats = max(1, round(_BLOCK_US / self._replay_us(graph)))
            blocks = max(2, round(share_us / (repeats * self._replay_us(graph))))
            block_us = [self._replay_us(graph, repeats) for _ in range(blocks)]
            samples[index] += [us / (repeats * graph.launches) for us in block_us[blocks // 2 :]]
        return [statistics.median(each) for each in samples]

    def _replay_us(self, graph: _Graph, repeats: int = 1) -> float:
        """Microseconds of so many replays, behind one that is not timed: it still shows what ran before."""
        graph.graph.launch(self._stream)

        def replay() -> None:
            for _ in range(repeats):
                graph.graph.launch(self._stream)

        return self._elapsed_us(replay)

    def _elapsed_us(self, enqueue: Callable[[], None]) -> float:
        """Microseconds on the card between before and behind what ``enqueue`` puts on the stream."""
        import cupy

        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(self._stream)
        enqueue()
        end.record(self._stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e3


def random_weight(layer: LinearShape) -> PackedWeight:
    """A weight of random values on the host whose results are near 1: what a tensor core draws depends on them."""
    rng = np.random.default_rng((layer.k, layer.n))
    k64, n64 = -(-layer.k // 64), -(-layer.n // 64)
    groups = 1 if layer.group_size == -1 else -(-layer.k // layer.group_size)
    scales = rng.uniform(0.5, 1.5, (groups, 64 * n64)) / (4.8 * layer.k**0.5)
    zeros = rng.integers(0, 16, (groups, 64 * n64), dtype=np.uint8) if layer.has_zeros else None
    return PackedWeight(
        qweight=rng.integers(0, 256, (n64 * k64, 2048), dtype=np.uint8),
        scales=scales.astype(activation_type(layer.dtype).numpy),
        zeros=zeros,
        perm=None,
        shape=(layer.k, layer.n),
        group_size=layer.group_size,
        dtype=layer.dtype,
    )
