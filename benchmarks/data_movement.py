"""Bandwidth of copy, transpose, reduce_into and broadcast on arrays of 256 MB and more, and of CuPy in the same run,
and what a call costs on the host.

Both are timed as a graph of launches and as calls that the host makes one by one. The better of the two counts: what
the driver does for a copy on a stream need not be what it does for a node of a graph.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Contender, cold, measuring_stream, require_gpu
from benchmarks.host_cost import quantiles_us, time_calls
from benchmarks.report import Cell, Result, Table, failure, print_table, ratio, shown

OURS, CUPY = "cudatma", "cupy"
#: Launches of one graph: each moves hundreds of megabytes, so that L2 holds nothing of the one before.
LAUNCHES = 10
SIDE = 16384
#: Calls whose host time is taken: fewer than a launch queue holds, so that none waits for the GPU.
HOST_CALLS = 300


Variants = Callable[[Any, int], Iterator[tuple[str, Any, Any]]]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation. moved_bytes: read and written by one call. bar: how many times as fast as CuPy it has to be, 0 for
    no bar. make: the arrays, then two calls that each overwrite the result. yardstick: the case of whose CuPy the bar
    counts bytes per second, "" for this one's."""

    name: str
    moved_bytes: int
    bar: float
    make: Callable[[], Prepared]
    yardstick: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """ours, cupys: enqueue the operation on the current stream. right: whether what ``ours`` has just written is right.
    variants: other configurations of the launch in ``ours``, by name, for a place with a given number of thread blocks
    per SM; None where none are known."""

    ours: Callable[[], object]
    cupys: Callable[[], object]
    right: Callable[[], bool]
    variants: Variants | None = None


def _random(shape: tuple[int, ...], dtype: str) -> Any:
    """Bytes without a pattern, made in place on the GPU."""
    import cupy

    words = cupy.arange(int(_size(shape, dtype)) // 4, dtype=cupy.uint32)
    words *= cupy.uint32(2654435761)
    words >>= cupy.uint32(1)  # no NaN: they would not be equal to themselves
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
            lambda place, blocks_per_sm: _rings(source, result, offset, place, blocks_per_sm),
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
            lambda place, _: _tiles(source, result, place),
        )

    return make


def _reduce(shape: tuple[int, ...], columns: int) -> Callable[[], Prepared]:
    def make() -> Prepared:
        import cupy

        import cudatma

        wide, source = cupy.zeros(shape, cupy.float32), cupy.ones((shape[0], columns), cupy.float32)
        part = wide[:, :columns]

        def right() -> bool:
            """Each call adds 1; small whole numbers are exact."""
            before = float(part[0, 0])
            cudatma.reduce_into(wide, source, "add")
            return bool((part == before + 1).all())

        return Prepared(
            lambda: cudatma.reduce_into(wide, source, "add"), lambda: cupy.add(part, source, out=part), right
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


_WHOLE = "copy, contiguous"
_MATRIX, _WINDOW = SIDE * SIDE * 4, 12000 * 12000 * 4
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(_WHOLE, 2 * _MATRIX, 1.0, _copy((SIDE, SIDE), (0, 0), (SIDE, SIDE))),
        Case("copy, window fp32", 2 * _WINDOW, 2.2, _copy((SIDE, SIDE), (1000, 1004), (12000, 12000))),
        Case("transpose fp32", 2 * _MATRIX, 3.0, _transpose(SIDE, "float32")),
        Case("transpose fp16", _MATRIX, 2.5, _transpose(SIDE, "float16")),
        Case("transpose uint8", _MATRIX // 2, 0.0, _transpose(SIDE, "uint8")),
        Case("transpose fp64", _MATRIX, 0.0, _transpose(SIDE // 2, "float64")),
        Case("reduce_into, contiguous", 3 * _MATRIX, 0.75, _reduce((SIDE, SIDE), SIDE), _WHOLE),
        Case("reduce_into, window fp32", 3 * _WINDOW, 0.75, _reduce((12000, SIDE), 12000), _WHOLE),
        Case("broadcast to 4", 5 * _MATRIX // 4, 0.0, _broadcast(_MATRIX // 4, 4)),
    )
}


def measure(stream: Any, case: Case, replays: int, search: bool, before: Sequence[Cell] = ()) -> Cell:
    """One case: microseconds and terabytes per second of both, and of a search each configuration's microseconds.

    before: cells of the same run, among them the yardstick's.
    """
    prepared = case.make()
    prepared.ours()
    right = prepared.right()
    stream.synchronize()
    cell: Cell = {"case": case.name, "moved_bytes": case.moved_bytes, "right": right, "bar": case.bar}
    contenders = [Contender(OURS, lambda _: prepared.ours(), 1, LAUNCHES)]
    contenders += [Contender(CUPY, lambda _: prepared.cupys(), 1, LAUNCHES)]
    in_graph = cold(stream, contenders, replays)
    ways = {"graph": {name: in_graph.us(name) for name in (OURS, CUPY)}, "calls": called(stream, contenders, replays)}
    cell |= better(ways)
    ours, theirs = (cell["us"][name] for name in (OURS, CUPY))
    cell |= {"tb_s": case.moved_bytes / ours / 1e6 if ours else None, "x_cupy": ratio(theirs, ours)}
    cell |= {"cupy_tb_s": case.moved_bytes / theirs / 1e6 if theirs else None}
    if case.yardstick:
        rates = [each.get("cupy_tb_s") for each in before if each["case"] == case.yardstick]
        cell |= {"yardstick": case.yardstick, "x_yardstick": ratio(cell["tb_s"], rates[0] if rates else None)}
    cell["host_us"] = host_us(prepared.ours, stream.synchronize)
    if in_graph.errors:
        cell["error"] = "; ".join(f"{name}: {text}" for name, text in in_graph.errors.items())
    elif not right:
        cell["error"] = "the result is wrong"
    if search and prepared.variants is not None:
        cell["search"] = _search(stream, prepared.variants, replays)
    return cell


def called(stream: Any, contenders: Sequence[Contender], replays: int) -> dict[str, float | None]:
    """Median microseconds of a launch that the host enqueues by a call, LAUNCHES of them between two events; contenders
    take turns, each turn beginning with another and each contender with as many calls that are not timed."""
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
    times = {name: [cupy.cuda.get_elapsed_time(*span) for span in some] for name, some in spans.items()}
    return {name: statistics.median(some) * 1e3 / LAUNCHES for name, some in times.items()}


def better(ways: Mapping[str, Mapping[str, float | None]]) -> Cell:
    """From microseconds by variant and contender: all, and for each contender the least, ``us``, and its ``way``."""
    us: dict[str, float | None] = {}
    way: dict[str, str | None] = {}
    for name in (OURS, CUPY):
        found = [(time, each) for each, times in ways.items() if (time := times.get(name)) is not None]
        us[name], way[name] = min(found) if found else (None, None)
    return {"us": us, "way": way, "us_by_way": {each: dict(times) for each, times in ways.items()}}


def host_us(call: Callable[[], object], drain: Callable[[], object]) -> float:
    """Median microseconds of a repeated call on the host; the GPU is waited for before and after all of them."""
    return quantiles_us(time_calls(lambda _: call(), drain, HOST_CALLS))["median_us"]


def _search(stream: Any, variants: Variants, replays: int) -> dict[str, float | str]:
    """Microseconds of every configuration of the launch that fits, the best first; errors as text."""
    from cudatma.context import current_device
    from cudatma.kernels.data_movement.movement import Place
    from cudatma.kernels.gpu import gpu_of
    from cudatma.target import detect

    device = current_device()
    target, found = detect(device), {}
    for blocks_per_sm in (1, 2, 3, 4):
        place = Place(target, blocks_per_sm * gpu_of(device).sm_count)
        for name, planned, arrays in variants(place, blocks_per_sm):
            label = f"{blocks_per_sm} blocks per SM, {name}"
            try:
                planned.config.check_target(target)
                if blocks_per_sm * (planned.config.smem_bytes + 1024) > target.smem_per_sm_bytes:
                    continue
                measured = cold(stream, [_contender(label, planned, arrays, target, device)], max(3, replays // 3))
                found[label] = measured.us(label) or measured.errors[label]
            except Exception as error:
                found[label] = failure(error)
    return dict(sorted(found.items(), key=lambda item: (isinstance(item[1], str), item[1])))


def _contender(name: str, planned: Any, arrays: Sequence[Any], target: Any, device: int) -> Contender:
    from cudatma.kernels.replay import Replay
    from cudatma.library_streams import current_stream

    names, addresses = ("src", "out"), tuple([info.pointer for info in arrays])
    replay = Replay(planned, planned.kernel(target), device, names, dict(zip(names, addresses, strict=True)))
    return Contender(name, lambda _: replay.run(planned.sizes, addresses, current_stream("cupy", device)), 1, LAUNCHES)


def _rings(
    source: Any, result: Any, offset: Sequence[int], place: Any, blocks_per_sm: int
) -> Iterator[tuple[str, Any, Any]]:
    """A copy with other rings."""
    from cudatma.arrays import describe
    from cudatma.kernels.data_movement.copy import window_of
    from cudatma.kernels.data_movement.plans import run_plan, window_plan
    from cudatma.kernels.data_movement.ring import BLOCKS_PER_SM, Setting
    from cudatma.kernels.data_movement.window import carried, cropped, simplify

    arrays = describe(source), describe(result)
    window = simplify(window_of(*arrays, offset))
    usual = place._replace(ctas=max(1, place.ctas * BLOCKS_PER_SM // blocks_per_sm))
    plan, part = (run_plan, window) if window.is_one_run else (window_plan, carried(cropped(window), 8))
    seen = set()
    for slot, stages, cache in itertools.product((16384, 8192, 24576, 32768), (3, 4, 6, 8, 12), ("", "evict_first")):
        for in_flight in sorted({1, stages // 2, stages - 1}):
            setting = Setting(slot, blocks_per_sm, stages, in_flight, cache, cache)
            planned = plan(part, arrays, usual, setting=setting)
            if planned.config not in seen:
                seen.add(planned.config)
                yield f"{planned.config}", planned, arrays


def _tiles(source: Any, result: Any, place: Any) -> Iterator[tuple[str, Any, Any]]:
    """A transpose with other tiles and rings."""
    from cudatma.arrays import describe
    from cudatma.kernels.data_movement.transpose import TransposeSpec, tile_plan

    size, arrays = source.dtype.itemsize, (describe(source), describe(result))
    for squares in {1: ((1, 1), (2, 1)), 8: ((4, 2), (2, 4), (4, 4))}.get(
        size, ((1, 1), (2, 1), (1, 2), (2, 2), (4, 2))
    ):
        for stages, turned in ((2, 1), (3, 2), (4, 2)):
            for warps in (4, 8):
                for group in (1, 16):
                    spec = TransposeSpec(size, *squares, stages, turned, warps, group)
                    name = f"squares {squares}, {stages} stages, {turned} turned, {warps} warps, raster group {group}"
                    yield name, tile_plan(*arrays, place, spec), arrays


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
            verdict(cell),
        )
        for cell in cells
    ]
    note = (
        "Microseconds, and terabytes per second read and written, medians, each the better of two: a graph, or "
        "calls. Host us: of a call on the host, nothing synchronised. The bar is a multiple of CuPy's speed; "
        "reduce_into's, of the bytes per second of CuPy's contiguous copy."
    )
    columns = ("operation", "us", "TB/s", "CuPy us", "CuPy TB/s", "times CuPy", "ways", "host us", "bar")
    return Table(columns, tuple(rows), note)


def verdict(cell: Cell) -> str:
    """What became of a cell's bar."""
    if not cell.get("bar"):
        return "none"
    reached = cell.get("x_yardstick" if cell.get("yardstick") else "x_cupy")
    if cell.get("error") or reached is None:
        return f"{cell['bar']}: not measured"
    return f"{cell['bar']}: {'met' if reached >= cell['bar'] else 'missed'}"


def chosen(names: Sequence[str]) -> list[str]:
    """The cases of these names, all where there are none, and in front of them the yardsticks that they need."""
    wanted = list(names or CASES)
    return list(dict.fromkeys([*filter(None, (CASES[name].yardstick for name in wanted)), *wanted]))


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench data_movement``; returns the exit status: 1 if a case could not be measured or was wrong."""
    parser = argparse.ArgumentParser(prog="cudatma bench data_movement", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    add("--replays", type=int, default=11, help="timed turns of each (default: 11)")
    add("--case", choices=tuple(CASES), action="append", metavar="NAME", help=f"repeatable: {', '.join(CASES)}")
    add("--search", action="store_true", help="also time other rings, tiles and numbers of blocks")
    options = parser.parse_args(argv)
    require_gpu(parser)
    settings = {"replays": options.replays, "launches": LAUNCHES, "search": options.search}
    result = Result(settings, data_movement_table, options.json)
    with measuring_stream() as stream:
        for name in chosen(options.case or ()):
            result.add(*_cell(stream, CASES[name], options.replays, options.search, result.cells))
    print_table(result.console, data_movement_table(result.cells), "Data movement")
    return int(any(cell.get("error") for cell in result.cells))


def _cell(stream: Any, case: Case, replays: int, search: bool, before: Sequence[Cell]) -> tuple[Cell, str]:
    import cupy

    try:
        cell = measure(stream, case, replays, search, before)
    except Exception as error:
        cell = {"case": case.name, "moved_bytes": case.moved_bytes, "bar": case.bar, "error": failure(error)}
    cupy.get_default_memory_pool().free_all_blocks()
    line = f"{case.name}: {shown(cell.get('tb_s'))} TB/s, {shown(cell.get('x_cupy'))} times CuPy"
    if case.yardstick:
        line += f", {shown(cell.get('x_yardstick'))} of CuPy's {case.yardstick}"
    for label, value in list(cell.get("search", {}).items())[:3]:
        line += f"\n    {value if isinstance(value, str) else f'{value:.1f} us'}  {label}"
    return cell, line


if __name__ == "__main__":
    raise SystemExit(main())
