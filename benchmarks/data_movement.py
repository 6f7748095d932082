"""Compare the bandwidth and host time of copy, transpose, reduce_into and broadcast with those of CuPy.

Each operation moves at least 256 MB. cudatma and CuPy are timed in two ways: as a graph of launches and as single calls
from the host. The shorter time is reported, because the driver may handle a copy on a stream and a copy node in a
graph differently.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # The checkout need not be installed.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Contender, cold, measuring_stream, require_gpu
from benchmarks.host_cost import quantiles_us, time_calls
from benchmarks.report import Cell, Result, Table, failure, make_parser, ratio, shown

OURS, CUPY = "cudatma", "cupy"
#: Number of launches per graph. Each launch moves hundreds of megabytes, so L2 keeps no data from the previous launch.
LAUNCHES = 10
SIDE = 16384
#: Number of calls whose host time is measured. The launch queue has room for more calls, so calls do not wait for the
#: GPU.
HOST_CALLS = 300


@dataclass(frozen=True, slots=True)
class Prepared:
    """Operations to compare.

    ``ours`` and ``cupys`` enqueue the operation on the current stream and overwrite the result. ``is_correct`` returns
    whether the result that ``ours`` has just written is correct.
    """

    ours: Callable[[], object]
    cupys: Callable[[], object]
    is_correct: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Case:
    """An operation, and the number of bytes that one call reads and writes."""

    name: str
    moved_bytes: int
    make: Callable[[], Prepared]


def _random(shape: tuple[int, ...], dtype: str) -> Any:
    """Return random data created on the GPU."""
    import cupy

    words = cupy.arange(int(_size(shape, dtype)) // 4, dtype=cupy.uint32)
    words *= cupy.uint32(2654435761)
    words >>= cupy.uint32(1)  # Avoid NaNs, which do not equal themselves.
    words &= cupy.uint32(0x3BFF3BFF)
    return words.view(dtype).reshape(shape)


def _size(shape: tuple[int, ...], dtype: str) -> int:
    import numpy as np

    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def _copy(shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...]) -> Callable[[], Prepared]:
    def make() -> Prepared:
        import cupy

        import cudatma

        source, result = _random(shape, "float32"), cupy.empty(extent, cupy.float32)
        part = source[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]
        return Prepared(
            lambda: cudatma.copy(source, out=result, offset=offset, shape=extent, via="tma"),
            lambda: cupy.copyto(result, part),
            lambda: bool((result == part).all()),
        )

    return make


def _transpose(side: int, dtype: str) -> Callable[[], Prepared]:
    def make() -> Prepared:
        import cupy

        import cudatma

        source = _random((side, side), dtype)
        result = cupy.empty_like(source)
        return Prepared(
            lambda: cudatma.transpose(source, out=result, via="tma"),
            lambda: cupy.copyto(result, source.T),
            lambda: bool((result == source.T).all()),
        )

    return make


def _reduce(shape: tuple[int, ...], columns: int) -> Callable[[], Prepared]:
    def make() -> Prepared:
        import cupy

        import cudatma

        wide, source = cupy.zeros(shape, cupy.float32), cupy.ones((shape[0], columns), cupy.float32)
        part = wide[:, :columns]

        def is_correct() -> bool:
            """Return whether a call added 1. The comparison is exact, because the values are small integers."""
            before = float(part[0, 0])
            cudatma.reduce_into(wide, source, "add")
            return bool((part == before + 1).all())

        return Prepared(
            lambda: cudatma.reduce_into(wide, source, "add"), lambda: cupy.add(part, source, out=part), is_correct
        )

    return make


def _broadcast(nbytes: int, copies: int) -> Callable[[], Prepared]:
    def make() -> Prepared:
        import cupy

        import cudatma

        source = _random((nbytes // 4,), "uint32")
        result = cupy.empty((copies, nbytes // 4), cupy.uint32)
        return Prepared(
            lambda: cudatma.broadcast(source, copies, out=result),
            lambda: cupy.copyto(result, source[None]),
            lambda: bool((result == source).all()),
        )

    return make


_MATRIX, _WINDOW = SIDE * SIDE * 4, 12000 * 12000 * 4
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("copy, contiguous", 2 * _MATRIX, _copy((SIDE, SIDE), (0, 0), (SIDE, SIDE))),
        Case("copy, window fp32", 2 * _WINDOW, _copy((SIDE, SIDE), (1000, 1004), (12000, 12000))),
        Case("transpose fp32", 2 * _MATRIX, _transpose(SIDE, "float32")),
        Case("transpose fp16", _MATRIX, _transpose(SIDE, "float16")),
        Case("transpose uint8", _MATRIX // 2, _transpose(SIDE, "uint8")),
        Case("transpose fp64", _MATRIX, _transpose(SIDE // 2, "float64")),
        Case("reduce_into, contiguous", 3 * _MATRIX, _reduce((SIDE, SIDE), SIDE)),
        Case("reduce_into, window fp32", 3 * _WINDOW, _reduce((12000, SIDE), 12000)),
        Case("broadcast to 4", 5 * _MATRIX // 4, _broadcast(_MATRIX // 4, 4)),
    )
}


def measure(stream: Any, case: Case, replays: int) -> Cell:
    """Measure the microseconds and the terabytes per second of cudatma and CuPy."""
    prepared = case.make()
    prepared.ours()
    is_correct = prepared.is_correct()
    stream.synchronize()
    cell: Cell = {"case": case.name, "moved_bytes": case.moved_bytes}
    contenders = [Contender(OURS, lambda _: prepared.ours(), 1, LAUNCHES)]
    contenders += [Contender(CUPY, lambda _: prepared.cupys(), 1, LAUNCHES)]
    in_graph = cold(stream, contenders, replays)
    ways = {"graph": {name: in_graph.us(name) for name in (OURS, CUPY)}, "calls": called(stream, contenders, replays)}
    cell |= better(ways)
    ours, theirs = (cell["us"][name] for name in (OURS, CUPY))
    cell |= {"tb_s": ratio(case.moved_bytes / 1e6, ours), "cupy_tb_s": ratio(case.moved_bytes / 1e6, theirs)}
    cell |= {"x_cupy": ratio(theirs, ours)}
    cell["host_us"] = host_us(prepared.ours, stream.synchronize)
    if in_graph.errors:
        cell["error"] = "; ".join(f"{name}: {text}" for name, text in in_graph.errors.items())
    elif not is_correct:
        cell["error"] = "wrong result"
    return cell


def called(stream: Any, contenders: Sequence[Contender], replays: int) -> dict[str, float | None]:
    """Return the median microseconds of LAUNCHES calls from the host, measured between two events.

    Contenders take turns. Each turn begins with a different contender, and each contender first makes LAUNCHES untimed
    calls.
    """
    import cupy

    spans: dict[str, list[tuple[Any, Any]]] = {contender.name: [] for contender in contenders}
    for number in range(replays):
        first = number % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            for event in (begin, end):
                for index in range(LAUNCHES):
                    contender.run(index)
                event.record(stream)
            spans[contender.name].append((begin, end))
        stream.synchronize()
    times = {name: [cupy.cuda.get_elapsed_time(*span) for span in elapsed] for name, elapsed in spans.items()}
    return {name: statistics.median(elapsed) * 1e3 / LAUNCHES for name, elapsed in times.items()}


def better(ways: Mapping[str, Mapping[str, float | None]]) -> Cell:
    """Return the shorter time of each contender, and how this time was measured."""
    us: dict[str, float | None] = {}
    way: dict[str, str | None] = {}
    for name in (OURS, CUPY):
        candidates = [(time, label) for label, times in ways.items() if (time := times.get(name)) is not None]
        us[name], way[name] = min(candidates) if candidates else (None, None)
    return {"us": us, "way": way}


def host_us(call: Callable[[], object], drain: Callable[[], object]) -> float:
    """Return the median host time of a repeated call in microseconds. The GPU is idle before and after all calls."""
    return quantiles_us(time_calls(lambda _: call(), drain, HOST_CALLS))["median_us"]


def data_movement_table(cells: Sequence[Cell]) -> Table:
    rows = [
        (
            cell["case"],
            shown(cell.get("us", {}).get(OURS), 1),
            shown(cell.get("tb_s")),
            shown(cell.get("us", {}).get(CUPY), 1),
            shown(cell.get("cupy_tb_s")),
            shown(cell.get("x_cupy")),
            ", ".join(str(way) for way in cell.get("way", {}).values()) or "-",
            shown(cell.get("host_us"), 1),
        )
        for cell in cells
    ]
    note = (
        "Times are medians in microseconds, the better of a graph and of single calls. TB/s counts the bytes read and "
        'written. "host us" is the host time of a call, without synchronization.'
    )
    columns = ("operation", "us", "TB/s", "CuPy us", "CuPy TB/s", "times CuPy", "ways", "host us")
    return Table(columns, tuple(rows), note)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench data_movement`` and return the exit status (1 if a case failed or a result was wrong)."""
    parser = make_parser("data_movement", __doc__)
    add = parser.add_argument
    add("--replays", type=int, default=11, help="number of timed turns (default: 11)")
    add("--case", choices=tuple(CASES), action="append", metavar="NAME", help=f"repeatable: {', '.join(CASES)}")
    options = parser.parse_args(argv)
    require_gpu(parser)
    import cupy

    result = Result({"replays": options.replays, "launches": LAUNCHES}, data_movement_table, options.json)
    with measuring_stream() as stream:
        for case in map(CASES.__getitem__, options.case or CASES):
            try:
                cell = measure(stream, case, options.replays)
            except Exception as error:
                cell = {"case": case.name, "error": failure(error)}
            cupy.get_default_memory_pool().free_all_blocks()
            result.add(cell, f"{case.name}: {shown(cell.get('tb_s'))} TB/s, {shown(cell.get('x_cupy'))} times CuPy")
    return result.finish("Data movement")


if __name__ == "__main__":
    raise SystemExit(main())
