"""Time kernels on the GPU with CUDA graphs. Contenders take turns, and the results are medians.

The launches in a graph rotate over buffers that together exceed L2 (60 MB on an H200), so that a buffer is no longer in
L2 when it is read again. The GPU is idle for a few milliseconds before each turn. Otherwise, its power limit would
determine the times. Each turn begins with an untimed replay, because the TLBs still hold the addresses of the previous
contender. Long runs have no idle time, so the power limit determines their times. In a long run, the power used by the
previous contender changes a kernel's time by up to 12%. The order is therefore shuffled for each turn, and every second
turn reverses the order of the previous turn.
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

#: Minimum total size of a graph's buffers, several times the size of any L2.
ROTATION_BYTES = 350_000_000
#: Approximate number of bytes that a graph reads, large enough to make the few microseconds between two graphs
#: negligible.
GRAPH_BYTES = 2_000_000_000
MIN_LAUNCHES, MAX_LAUNCHES = 20, 200
#: Minimum number of copies of a buffer. Either each copy exceeds L2 or there are many copies, so reading the copies
#: evicts the others from L2.
MIN_COPIES = 2
REPLAYS = 11
#: Number of untimed replays at the beginning of a turn.
WARM_REPLAYS = 1
#: Idle time of the GPU before each turn, in seconds. Otherwise, its power limit affects M above about 32.
REST_S = 0.006
#: Contenders in a long run alternate in periods of BLOCK_S. A graph takes at most GRAPH_S. On an H200, all contenders
#: have the same clock in periods of 0.04 s. In periods of 0.2 s or more, each contender's clock depends on its own
#: power.
BLOCK_S, GRAPH_S = 0.3, 0.01
MIN_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Contender:
    """A kernel to time.

    Attributes
    ----------
    run : callable
        ``run(i)`` enqueues one launch on the current stream, which reads buffer i % copies.
    copies : int
        Number of buffers over which the launches rotate.
    launches : int
        Number of launches in the graph, a multiple of ``copies``.
    """

    name: str
    run: Callable[[int], object]
    copies: int
    launches: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one launch: median, minimum and maximum of the samples."""

    us: float
    low_us: float
    high_us: float
    samples: int


@dataclass(slots=True)
class Measured:
    """Timings of each contender, and the errors of contenders that could not be timed."""

    timings: dict[str, Timing] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def us(self, name: str) -> float | None:
        return self.timings[name].us if name in self.timings else None


#: Function that times contenders.
Method = Callable[[Sequence[Contender]], Measured]


def require_gpu(parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and the reason unless CuPy and a supported GPU are present."""
    try:
        import cupy  # noqa: F401

        detect()
    except (CudaTmaError, ImportError) as error:
        # The remedy of a DriverError does not apply to measurements.
        why = f"{error.call}: {error.detail}" if isinstance(error, DriverError) else str(error)
        parser.exit(2, f"{parser.prog} requires a GPU: {why}\n")


def require_torch(parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and the reason unless torch can use the GPU.

    Call this function before measuring_stream(), which also makes its stream current for torch.
    """
    try:
        import torch

        torch.cuda.init()
        torch.set_grad_enabled(False)
    except Exception as error:
        parser.exit(2, f"{parser.prog} requires torch: {failure(error)}\n")


def copies_for(bytes_per_launch: int) -> int:
    """Return the number of buffers of this size, at least MIN_COPIES, whose total size exceeds ROTATION_BYTES."""
    return max(MIN_COPIES, ROTATION_BYTES // bytes_per_launch + 1)


def launches_for(bytes_per_launch: int, copies: int, expected_us: float = 0.0) -> int:
    """Return the number of launches per graph, a multiple of ``copies``.

    The number is at least MIN_LAUNCHES, and at most about MAX_LAUNCHES while the graph reads less than GRAPH_BYTES. If
    the graph would take longer than GRAPH_S, the number is smaller, but at least ``copies``.
    """
    count = min(MAX_LAUNCHES, max(MIN_LAUNCHES, GRAPH_BYTES // bytes_per_launch))
    launches = max(-(-MIN_LAUNCHES // copies), count // copies) * copies
    limit = int(GRAPH_S * 1e6 / expected_us) // copies * copies if expected_us else launches
    return max(copies, min(launches, limit))


def summary(samples_us: Sequence[float]) -> Timing:
    """Return the median, minimum and maximum of the samples. There must be at least one sample."""
    return Timing(statistics.median(samples_us), min(samples_us), max(samples_us), len(samples_us))


@contextlib.contextmanager
def measuring_stream() -> Iterator[Any]:
    """Create a non-blocking stream that is current for CuPy and, if torch is imported, for torch."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    torch = sys.modules.get("torch")
    on_torch: Any = torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)) if torch else contextlib.nullcontext()
    with stream, on_torch:
        yield stream
        # After a trap, no call to the GPU succeeds, but earlier measurements remain valid.
        with contextlib.suppress(Exception):
            stream.synchronize()


def capture(stream: Any, contender: Contender) -> Any:
    """Return the contender's launches as an instantiated CUDA graph. Each buffer is used once before the capture."""
    for index in range(contender.copies):
        contender.run(index)
    stream.synchronize()
    stream.begin_capture()
    try:
        for index in range(contender.launches):
            contender.run(index)
    except BaseException:
        # End the capture, because otherwise all later calls would fail.
        with contextlib.suppress(Exception):
            stream.end_capture()
        raise
    graph = stream.end_capture()
    graph.upload(stream)
    stream.synchronize()
    return graph


def _capture_all(stream: Any, contenders: Sequence[Contender], into: Measured) -> dict[str, tuple[Any, int]]:
    graphs = {}
    for contender in contenders:
        try:
            graphs[contender.name] = (capture(stream, contender), contender.launches)
        except Exception as error:
            into.errors[contender.name] = failure(error)
    return graphs


def cold(stream: Any, contenders: Sequence[Contender], replays: int = REPLAYS, rest_s: float = REST_S) -> Measured:
    """Time contenders with cold weights.

    The graphs of the contenders take ``replays`` turns in a changing order. The GPU is idle for ``rest_s`` seconds
    before each turn. If a contender cannot run, the error is recorded in the result instead of raised.
    """
    measured = Measured()
    graphs = _capture_all(stream, contenders, measured)
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
    """Time one contender with ``launches`` launches in its graph, for a rough choice among many contenders."""
    return cold(stream, [replace(contender, copies=1, launches=launches)], replays, 0.0)


def sustained(stream: Any, contenders: Sequence[Contender], seconds: float = 3.0, block_s: float = BLOCK_S) -> Measured:
    """Time contenders at the temperature and clocks of long runs.

    Contenders alternate in a changing order, in periods of about ``block_s``, or shorter periods if ``seconds`` is too
    short for MIN_ROUNDS rounds. Only the second half of the rounds counts.
    """
    measured = Measured()
    graphs = _capture_all(stream, contenders, measured)
    try:
        orders = _orders(graphs)
        first = _turn(stream, graphs, {}, next(orders))
        stream.synchronize()
        block_us = 1e6 * min(block_s, seconds / (MIN_ROUNDS * len(first)))
        repeats = {name: max(1, round(block_us / _us(span))) for name, span in first.items()}
        round_s = sum(_us(span) * (repeats[name] + WARM_REPLAYS) for name, span in first.items()) * 1e-6
        rounds = []
        for _ in range(max(MIN_ROUNDS, round(seconds / round_s)) if round_s else 0):
            rounds.append(_turn(stream, graphs, repeats, next(orders)))
            stream.synchronize()  # A period takes much longer than the host needs to begin the next period.
        for name, (_, launches) in graphs.items():
            samples = [_us(each[name]) / (launches * repeats[name]) for each in rounds[len(rounds) // 2 :]]
            measured.timings[name] = summary(samples)
    except Exception as error:
        measured.errors |= dict.fromkeys(graphs, failure(error))
    return measured


def _orders(names: Iterable[str]) -> Iterator[list[str]]:
    """Repeatedly yield a shuffled order and then its reverse. The orders are the same in each run."""
    contenders, generator = list(names), random.Random(1)
    while True:
        order = generator.sample(contenders, len(contenders))
        yield order
        yield order[::-1]


def _turn(
    stream: Any,
    graphs: Mapping[str, tuple[Any, int]],
    repeats: Mapping[str, int],
    order: Sequence[str],
    rest_s: float = 0.0,
) -> dict[str, tuple[Any, Any]]:
    """Enqueue each graph in this order, WARM_REPLAYS times and then ``repeats`` times (default 1) between two events.

    The GPU is idle for ``rest_s`` seconds before each graph.
    """
    import cupy

    spans = {}
    for name in order:
        graph = graphs[name][0]
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        if rest_s:
            stream.synchronize()
            time.sleep(rest_s)
        for _ in range(WARM_REPLAYS):
            graph.launch(stream)
        begin.record(stream)
        for _ in range(repeats.get(name, 1)):
            graph.launch(stream)
        end.record(stream)
        spans[name] = (begin, end)
    return spans


def _us(span: tuple[Any, Any]) -> float:
    """Return the microseconds between two completed events."""
    import cupy

    return float(cupy.cuda.get_elapsed_time(*span)) * 1e3
