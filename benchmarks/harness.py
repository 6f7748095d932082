"""Timing on the card with cold weights: CUDA graphs of launches that rotate over buffers larger than L2, rivals
alternating within one loop, medians.

Each launch of a graph reads another buffer, so that by the time one comes round again L2 (60 MB on an H200) has long
dropped it. Replays are enqueued back to back, so that the card never waits for the host between two of them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import failure
from cudatma.errors import CudaTmaError
from cudatma.target import detect

#: All buffers that one graph rotates over are together at least this large; several times any L2.
ROTATION_BYTES = 350_000_000
#: A graph reads about this much, so that the gap between two graphs (some microseconds) is lost in it.
GRAPH_BYTES = 2_000_000_000
MIN_LAUNCHES, MAX_LAUNCHES = 20, 200
MIN_COPIES = 4
REPLAYS = 11


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to be timed. ``run(i)`` enqueues one launch on the current stream, reading buffer i % copies.

    copies: buffers it rotates over. launches: launches in its graph, a multiple of copies.
    """

    name: str
    run: Callable[[int], object]
    copies: int
    launches: int


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


def require_card(parser: argparse.ArgumentParser) -> None:
    """End the script with status 2 and the reason unless there is a card that cudatma launches on, and CuPy."""
    try:
        import cupy  # noqa: F401

        detect()
    except (CudaTmaError, ImportError) as error:
        parser.exit(2, f"{parser.prog} measures on a card: {error}\n")


def copies_for(bytes_per_launch: int) -> int:
    """Buffers of this size to rotate over: more than ROTATION_BYTES together, and at least MIN_COPIES."""
    return max(MIN_COPIES, ROTATION_BYTES // bytes_per_launch + 1)


def launches_for(bytes_per_launch: int, copies: int) -> int:
    """Launches in one graph: a multiple of ``copies``, at least MIN_LAUNCHES; more, up to about MAX_LAUNCHES, while the
    graph reads less than GRAPH_BYTES."""
    wanted = min(MAX_LAUNCHES, max(MIN_LAUNCHES, GRAPH_BYTES // bytes_per_launch))
    return max(-(-MIN_LAUNCHES // copies), wanted // copies) * copies


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
        # After a trap nothing on the card works any more; what was measured before is to be shown all the same.
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
        # A stream that stays in capture would fail everything after it.
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
            graphs[contender.name] = (capture(stream, contender), contender.launches)
        except Exception as error:
            into.errors[contender.name] = failure(error)
    return graphs


def cold(stream: Any, contenders: Sequence[Contender], replays: int = REPLAYS) -> Measured:
    """Time contenders with cold weights: their graphs take turns, ``replays`` times after one turn that does not count.

    What cannot be run is an error of its contender, not an exception.
    """
    measured = Measured()
    graphs = _captured(stream, contenders, measured)
    try:
        spans = [_turn(stream, graphs, {}) for _ in range(replays + 1)]
        stream.synchronize()
        for name, (_, launches) in graphs.items():
            measured.timings[name] = summary([_us(turn[name]) / launches for turn in spans[1:]])
    except Exception as error:
        measured.errors |= dict.fromkeys(graphs, failure(error))
    return measured


def sustained(stream: Any, contenders: Sequence[Contender], seconds: float = 1.0, block_s: float = 0.04) -> Measured:
    """Time contenders on a card that is as warm, and its clock as low, as long runs make it.

    They take turns in blocks of about ``block_s`` for about ``seconds``; the second half of the turns counts.
    """
    measured = Measured()
    graphs = _captured(stream, contenders, measured)
    try:
        _turn(stream, graphs, {})  # the first replay of a graph is slower
        first = _turn(stream, graphs, {})
        stream.synchronize()
        repeats = {name: max(1, round(block_s * 1e6 / _us(span))) for name, span in first.items()}
        turn_s = sum(_us(span) * repeats[name] for name, span in first.items()) * 1e-6
        turns = []
        for _ in range(max(4, round(seconds / turn_s)) if turn_s else 0):
            turns.append(_turn(stream, graphs, repeats))
            stream.synchronize()  # a block is far longer than what the host needs to begin the next
        for name, (_, launches) in graphs.items():
            samples = [_us(turn[name]) / (launches * repeats[name]) for turn in turns[len(turns) // 2 :]]
            measured.timings[name] = summary(samples)
    except Exception as error:
        measured.errors |= dict.fromkeys(graphs, failure(error))
    return measured


def _turn(stream: Any, graphs: Mapping[str, tuple[Any, int]], repeats: Mapping[str, int]) -> dict[str, tuple[Any, Any]]:
    """Enqueue each graph, ``repeats`` times (once unless named), between two events."""
    import cupy

    spans = {}
    for name, (graph, _) in graphs.items():
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
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
