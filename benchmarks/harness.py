"""Timing on the GPU with cold weights: CUDA graphs of launches that rotate over buffers larger than L2, rivals
alternating within one loop, medians.

Each launch of a graph reads another buffer: L2 (60 MB on an H200) has dropped a buffer long before it is read again.
Before each turn the GPU rests for some milliseconds, or its power limit would decide. Each turn begins with an untimed
replay, in which the TLBs still hold the addresses of the previous contender. Long runs have no rests: they measure at
the power limit. Who comes before decides there what power is left (up to 12 % of one kernel's time): so the order is
shuffled for each turn, and every second turn reverses the one before it.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.report import failure
from cudatma.errors import CudaTmaError, DriverError
from cudatma.target import detect

#: All buffers that one graph rotates over are together at least this large; several times any L2.
ROTATION_BYTES = 350_000_000
#: A graph reads about this much: the gap between two graphs (some microseconds) is negligible then.
GRAPH_BYTES = 2_000_000_000
MIN_LAUNCHES, MAX_LAUNCHES = 20, 200
#: While one copy is read, it evicts the other from L2: both are larger than L2, or there are many of them.
MIN_COPIES = 2
REPLAYS = 11
#: Replays at the beginning of a turn that are not timed.
WARM_REPLAYS = 1
#: How long the GPU rests before each turn: else its power limit decides from about M = 32 on.
REST_S = 0.006
#: A period of a long run, in which contenders alternate, and the most that its graph may take. In periods of 0.04 s the
#: power limit gives all contenders one clock; in those of 0.2 s and more each has that of its own power. [H200]
BLOCK_S, GRAPH_S = 0.3, 0.01
LEAST_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to be timed. ``run(i)`` enqueues one launch on the current stream, reading buffer i % copies.

    copies: buffers it rotates over. launches: launches in its graph, a multiple of copies. delay: enqueues a wait of so
    many microseconds; given where a library refuses to be captured: its launches are then calls behind such a wait.
    """

    name: str
    run: Callable[[int], object]
    copies: int
    launches: int
    delay: Callable[[float], object] | None = None


class Calls:
    """What stands for a graph where a library cannot be captured: its launches, enqueued while the GPU waits."""

    def __init__(self, stream: Any, contender: Contender) -> None:
        self.contender = contender
        for index in range(contender.copies):
            contender.run(index)
        stream.synchronize()
        began = time.perf_counter()
        self.launch(stream)
        self.host_us = (time.perf_counter() - began) * 1e6
        stream.synchronize()

    def launch(self, stream: Any) -> None:
        for index in range(self.contender.launches):
            self.contender.run(index)

    def wait(self, turns: int) -> None:
        """Keep the GPU busy for longer than the host needs for so many launch()."""
        if self.contender.delay is not None:
            self.contender.delay(1.5 * turns * self.host_us)


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one launch: median, least and most over the samples."""

    us: float
    low_us: float
    high_us: float
    samples: int


@dataclass(slots=True)
class Measured:
    """By contender: a timing, or the error that kept it from being timed."""

    timings: dict[str, Timing] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def us(self, name: str) -> float | None:
        return self.timings[name].us if name in self.timings else None


def require_gpu(parser: argparse.ArgumentParser) -> None:
    """End the script with status 2 and the reason unless there is a GPU that cudatma launches on, and CuPy."""
    try:
        import cupy  # noqa: F401

        detect()
    except (CudaTmaError, ImportError) as error:
        # A driver's remedy is about computing, not measuring.
        why = f"{error.call}: {error.detail}" if isinstance(error, DriverError) else str(error)
        parser.exit(2, f"{parser.prog} measures on a GPU: {why}\n")


def copies_for(bytes_per_launch: int) -> int:
    """Buffers of this size to rotate over: more than ROTATION_BYTES together, and at least MIN_COPIES."""
    return max(MIN_COPIES, ROTATION_BYTES // bytes_per_launch + 1)


def launches_for(bytes_per_launch: int, copies: int, expected_us: float = 0.0) -> int:
    """Launches in one graph: a multiple of ``copies``, at least MIN_LAUNCHES; more, up to about MAX_LAUNCHES, while the
    graph reads less than GRAPH_BYTES. Fewer, down to ``copies``, where one takes so long that the graph would take more
    than GRAPH_S."""
    wanted = min(MAX_LAUNCHES, max(MIN_LAUNCHES, GRAPH_BYTES // bytes_per_launch))
    launches = max(-(-MIN_LAUNCHES // copies), wanted // copies) * copies
    fitting = int(GRAPH_S * 1e6 / expected_us) // copies * copies if expected_us else launches
    return max(copies, min(launches, fitting))


def summary(samples_us: Sequence[float]) -> Timing:
    """Median, least and most of some samples (at least one)."""
    return Timing(statistics.median(samples_us), min(samples_us), max(samples_us), len(samples_us))


@contextlib.contextmanager
def measuring_stream() -> Iterator[Any]:
    """A non-blocking CuPy stream that is current for CuPy and, where it is imported, for torch."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    torch = sys.modules.get("torch")
    on_torch: Any = torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)) if torch else contextlib.nullcontext()
    with stream, on_torch:
        yield stream
        # After a trap no call to the GPU succeeds; earlier measurements are still to be shown.
        with contextlib.suppress(Exception):
            stream.synchronize()


def capture(stream: Any, contender: Contender) -> Any:
    """The contender's launches as an instantiated CUDA graph; runs each buffer once before, outside the capture."""
    for index in range(contender.copies):
        contender.run(index)
    stream.synchronize()
    stream.begin_capture()
    try:
        for index in range(contender.launches):
            contender.run(index)
    except BaseException:
        # On a stream that stays in capture every later call would fail.
        with contextlib.suppress(Exception):
            stream.end_capture()
        raise
    graph = stream.end_capture()
    graph.upload(stream)
    stream.synchronize()
    return graph


def _captured(stream: Any, contenders: Sequence[Contender], into: Measured) -> dict[str, tuple[Any, int]]:
    graphs = {}
    for contender in contenders:
        try:
            graph = capture(stream, contender) if contender.delay is None else Calls(stream, contender)
            graphs[contender.name] = (graph, contender.launches)
        except Exception as error:
            into.errors[contender.name] = failure(error)
    return graphs


def cold(stream: Any, contenders: Sequence[Contender], replays: int = REPLAYS, rest_s: float = REST_S) -> Measured:
    """Time contenders with cold weights: their graphs take turns, ``replays`` times, in a changing order, on a GPU that
    has rested for ``rest_s``.

    What cannot be run is an error of its contender, not an exception.
    """
    measured = Measured()
    graphs = _captured(stream, contenders, measured)
    try:
        orders = _orders(graphs)
        spans = [_turn(stream, graphs, {}, next(orders), rest_s) for _ in range(replays)]
        stream.synchronize()
        for name, (_, launches) in graphs.items():
            measured.timings[name] = summary([_us(turn[name]) / launches for turn in spans])
    except Exception as error:
        measured.errors |= dict.fromkeys(graphs, failure(error))
    return measured


def quick(stream: Any, contender: Contender, launches: int, replays: int = 2) -> Measured:
    """A rough time of one contender, with ``launches`` launches a graph, for choosing among many."""
    return cold(stream, [replace(contender, copies=1, launches=launches)], replays, 0.0)


def sustained(stream: Any, contenders: Sequence[Contender], seconds: float = 3.0, block_s: float = BLOCK_S) -> Measured:
    """Time contenders on a GPU that is as warm, and its clock as low, as in long runs.

    They alternate in periods of about ``block_s``, or less where ``seconds`` would not hold four rounds of them, in a
    changing order; the second half of the rounds counts.
    """
    measured = Measured()
    graphs = _captured(stream, contenders, measured)
    try:
        orders = _orders(graphs)
        first = _turn(stream, graphs, {}, next(orders))
        stream.synchronize()
        block_us = 1e6 * min(block_s, seconds / (LEAST_ROUNDS * len(first)))
        repeats = {name: max(1, round(block_us / _us(span))) for name, span in first.items()}
        round_s = sum(_us(span) * (repeats[name] + WARM_REPLAYS) for name, span in first.items()) * 1e-6
        rounds = []
        for _ in range(max(LEAST_ROUNDS, round(seconds / round_s)) if round_s else 0):
            rounds.append(_turn(stream, graphs, repeats, next(orders)))
            stream.synchronize()  # a period is far longer than what the host needs to begin the next
        for name, (_, launches) in graphs.items():
            samples = [_us(each[name]) / (launches * repeats[name]) for each in rounds[len(rounds) // 2 :]]
            measured.timings[name] = summary(samples)
    except Exception as error:
        measured.errors |= dict.fromkeys(graphs, failure(error))
    return measured


def _orders(names: Iterable[str]) -> Iterator[list[str]]:
    """Of each turn: shuffled, and then the reverse of that. The same in each run."""
    each, shuffled = list(names), random.Random(1)
    while True:
        order = shuffled.sample(each, len(each))
        yield order
        yield order[::-1]


def _turn(
    stream: Any,
    graphs: Mapping[str, tuple[Any, int]],
    repeats: Mapping[str, int],
    order: Sequence[str],
    rest_s: float = 0.0,
) -> dict[str, tuple[Any, Any]]:
    """Enqueue each graph in this order, WARM_REPLAYS times and then ``repeats`` times (once unless named) between two
    events. rest_s: time that the GPU is idle before each graph."""
    import cupy

    spans = {}
    for name in order:
        graph = graphs[name][0]
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        if rest_s:
            stream.synchronize()
            time.sleep(rest_s)
        if isinstance(graph, Calls):
            graph.wait(WARM_REPLAYS + repeats.get(name, 1))
        for _ in range(WARM_REPLAYS):
            graph.launch(stream)
        begin.record(stream)
        for _ in range(repeats.get(name, 1)):
            graph.launch(stream)
        end.record(stream)
        spans[name] = (begin, end)
    return spans


def _us(span: tuple[Any, Any]) -> float:
    """Microseconds between the two events of a span; both have happened."""
    import cupy

    return float(cupy.cuda.get_elapsed_time(*span)) * 1e3
