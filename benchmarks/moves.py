"""Bandwidth of copy, transpose, reduce_into and broadcast on arrays of 256 MB and more, beside CuPy in the same run,
and what a call costs on the host."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness import Contender, cold, measuring_stream, require_card
from benchmarks.host_cost import quantiles_us, time_calls
from benchmarks.report import Cell, Result, Table, failure, print_table, ratio, shown

OURS, CUPY = "cudatma", "cupy"
#: Launches of one graph: each moves hundreds of megabytes, so that L2 holds nothing of the one before.
LAUNCHES = 10
SIDE = 16384
#: Calls whose host time is taken: fewer than a launch queue holds, so that none waits for the card.
HOST_CALLS = 300


@dataclass(frozen=True, slots=True)
class Case:
    """One operation. moved_bytes: read and written by one call. bar: how many times as fast as CuPy it has to be, 0 for
    no bar. make: the arrays, then two calls that each overwrite the result."""

    name: str
    moved_bytes: int
    bar: float
    make: Callable[[], Prepared]


@dataclass(frozen=True, slots=True)
class Prepared:
    """ours, cupys: enqueue the operation on the current stream. right: whether what ``ours`` has just written is right.
    variants: other configurations of the launch behind ``ours`` at a place, by name; None where none are known."""

    ours: Callable[[], object]
    cupys: Callable[[], object]
    right: Callable[[], bool]
    variants: Callable[[Any], Iterator[tuple[str, Any]]] | None = None


def _random(shape: tuple[int, ...], dtype: str) -> Any:
    """Bytes without a pattern, made in place on the card."""
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
        from cudatma.arrays import describe
        from cudatma.kernels.moves.copy import plan_copy

        source, result = _random(shape, "float32"), cupy.empty(extent, cupy.float32)
        part = source[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]
        # A run of bytes is cut anywhere; boxes were made for slots of 16 KiB.
        sizes = (8192, 16384, 32768) if shape == extent else (16384,)
        return Prepared(
            lambda: cudatma.copy(source, result, offset=offset, shape=extent, via="tma"),
            lambda: cupy.copyto(result, part),
            lambda: bool((result == part).all()),
            lambda place: _rings(plan_copy(describe(source), describe(result), offset, place, via="tma"), sizes),
        )

    return make


def _transpose(side: int, dtype: str) -> Callable[[], Prepared]:
    def make() -> Prepared:
        import cupy

        import cudatma

        source = _random((side, side), dtype)
        result = cupy.empty_like(source)
        return Prepared(
            lambda: cudatma.transpose(source, result, via="tma"),
            lambda: cupy.copyto(result, source.T),
            lambda: bool((result == source.T).all()),
            lambda place: _tiles(source, result, place),
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
            lambda: cudatma.broadcast(source, copies, result),
            lambda: cupy.copyto(result, source[None]),
            lambda: bool((result == source).all()),
        )

    return make


_MATRIX, _WINDOW = SIDE * SIDE * 4, 12000 * 12000 * 4
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("copy, contiguous", 2 * _MATRIX, 1.0, _copy((SIDE, SIDE), (0, 0), (SIDE, SIDE))),
        Case("copy, window fp32", 2 * _WINDOW, 2.2, _copy((SIDE, SIDE), (1000, 1004), (12000, 12000))),
        Case("transpose fp32", 2 * _MATRIX, 3.0, _transpose(SIDE, "float32")),
        Case("transpose fp16", _MATRIX, 2.5, _transpose(SIDE, "float16")),
        Case("transpose uint8", _MATRIX // 2, 0.0, _transpose(SIDE, "uint8")),
        Case("transpose fp64", _MATRIX, 0.0, _transpose(SIDE // 2, "float64")),
        Case("reduce_into, contiguous", 3 * _MATRIX, 0.0, _reduce((SIDE, SIDE), SIDE)),
        Case("reduce_into, window fp32", 3 * _WINDOW, 0.0, _reduce((12000, SIDE), 12000)),
        Case("broadcast to 4", 5 * _MATRIX // 4, 0.0, _broadcast(_MATRIX // 4, 4)),
    )
}


def measure(stream: Any, case: Case, replays: int, search: bool) -> Cell:
    """One case: microseconds and terabytes per second of both, and of a search each configuration's microseconds."""
    prepared = case.make()
    prepared.ours()
    right = prepared.right()
    stream.synchronize()
    contenders = [Contender(OURS, lambda _: prepared.ours(), 1, LAUNCHES)]
    contenders += [Contender(CUPY, lambda _: prepared.cupys(), 1, LAUNCHES)]
    measured = cold(stream, contenders, replays)
    cell: Cell = {"case": case.name, "moved_bytes": case.moved_bytes, "right": right, "bar": case.bar}
    cell |= {"us": {name: measured.us(name) for name in (OURS, CUPY)}}
    ours, theirs = (measured.us(name) for name in (OURS, CUPY))
    cell |= {"tb_s": case.moved_bytes / ours / 1e6 if ours else None, "x_cupy": ratio(theirs, ours)}
    cell |= {"cupy_tb_s": case.moved_bytes / theirs / 1e6 if theirs else None}
    cell["host_us"] = host_us(prepared.ours, stream.synchronize)
    if measured.errors:
        cell["error"] = "; ".join(f"{name}: {text}" for name, text in measured.errors.items())
    elif not right:
        cell["error"] = "the result is wrong"
    if search and prepared.variants is not None:
        cell["search"] = _search(stream, prepared.variants, replays)
    return cell


def host_us(call: Callable[[], object], drain: Callable[[], object]) -> float:
    """Median microseconds of a repeated call on the host; the card is waited for before and after all of them."""
    return quantiles_us(time_calls(lambda _: call(), drain, HOST_CALLS))["median_us"]


def _search(stream: Any, variants: Callable[[Any], Iterator[tuple[str, Any]]], replays: int) -> dict[str, float | str]:
    """Microseconds of every configuration of the launch that fits, the best first; errors as text."""
    from cudatma.context import current_device
    from cudatma.kernels.moves.place import Place, processors
    from cudatma.target import detect

    device = current_device()
    target, found = detect(device), {}
    for blocks_per_sm in (1, 2, 3, 4):
        place = Place("cuda", device, target, blocks_per_sm * processors(device))
        for name, move in variants(place):
            label = f"{blocks_per_sm} blocks a multiprocessor, {name}"
            try:
                move.spec.check_target(target)
                if blocks_per_sm * (move.spec.smem_bytes + 1024) > target.smem_per_sm_bytes:
                    continue
                measured = cold(stream, [_contender(label, move, place)], max(3, replays // 3))
                found[label] = measured.us(label) or measured.errors[label]
            except Exception as error:
                found[label] = failure(error)
    return dict(sorted(found.items(), key=lambda item: (isinstance(item[1], str), item[1])))


def _contender(name: str, move: Any, place: Any) -> Contender:
    from cudatma.arrays import current_stream
    from cudatma.kernels.moves.launches import Launch

    launch = Launch(move, move.touched, place)
    return Contender(name, lambda _: launch.run(move.touched, current_stream("cupy", place.device)), 1, LAUNCHES)


def _rings(move: Any, sizes: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """A launch with other rings; sizes: of a slot, where the kernel does not care."""
    for stage_bytes in sizes:
        for stages in (3, 4, 6, 8, 12):
            for in_flight in sorted({1, stages // 2, stages - 1}):
                for cache in ("", "evict_first"):
                    fields = {"stage_bytes": stage_bytes, "stages": stages, "in_flight": in_flight, "cache": cache}
                    yield str(fields), replace(move, spec=replace(move.spec, **fields))


def _tiles(source: Any, result: Any, place: Any) -> Iterator[tuple[str, Any]]:
    """A transpose with other tiles and rings."""
    from cudatma.arrays import describe
    from cudatma.kernels.moves.transpose import TransposeSpec, tile_plan

    size = source.dtype.itemsize
    for squares in {1: ((1, 1), (2, 1)), 8: ((4, 2), (2, 4), (4, 4))}.get(
        size, ((1, 1), (2, 1), (1, 2), (2, 2), (4, 2))
    ):
        for stages, turned in ((2, 1), (3, 2), (4, 2)):
            for warps in (4, 8):
                for band in (1, 16):
                    spec = TransposeSpec(size, *squares, stages, turned, warps, band)
                    name = f"squares {squares}, {stages} stages, {turned} turned, {warps} warps, band {band}"
                    yield name, tile_plan(describe(source), describe(result), place, spec)


def moves_table(cells: Sequence[Cell]) -> Table:
    rows = [
        (
            cell["case"],
            shown(cell.get("us", {}).get(OURS), 1),
            shown(cell.get("tb_s")),
            shown(cell.get("us", {}).get(CUPY), 1),
            shown(cell.get("cupy_tb_s")),
            shown(cell.get("x_cupy")),
            shown(cell.get("host_us"), 1),
            verdict(cell),
        )
        for cell in cells
    ]
    note = (
        "Microseconds, and terabytes per second read and written, medians; host us: of a call on the host, nothing "
        "synchronised; the bar is a multiple of CuPy's speed."
    )
    columns = ("operation", "us", "TB/s", "CuPy us", "CuPy TB/s", "times CuPy", "host us", "bar")
    return Table(columns, tuple(rows), note)


def verdict(cell: Cell) -> str:
    """What became of a cell's bar."""
    if not cell.get("bar"):
        return "none"
    if cell.get("error") or cell.get("x_cupy") is None:
        return f"{cell['bar']}: not measured"
    return f"{cell['bar']}: {'met' if cell['x_cupy'] >= cell['bar'] else 'missed'}"


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench moves``; returns the exit status: 1 if a case could not be measured or was wrong."""
    parser = argparse.ArgumentParser(prog="cudatma bench moves", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    add("--replays", type=int, default=11, help="timed turns of each (default: 11)")
    add("--case", choices=tuple(CASES), action="append", metavar="NAME", help=f"repeatable: {', '.join(CASES)}")
    add("--search", action="store_true", help="also time other rings, tiles and numbers of blocks")
    options = parser.parse_args(argv)
    require_card(parser)
    settings = {"replays": options.replays, "launches": LAUNCHES, "search": options.search}
    result = Result(settings, moves_table, options.json)
    with measuring_stream() as stream:
        for name in options.case or CASES:
            result.add(*_cell(stream, CASES[name], options.replays, options.search))
    print_table(result.console, moves_table(result.cells), "Moves")
    return int(any(cell.get("error") for cell in result.cells))


def _cell(stream: Any, case: Case, replays: int, search: bool) -> tuple[Cell, str]:
    import cupy

    try:
        cell = measure(stream, case, replays, search)
    except Exception as error:
        cell = {"case": case.name, "moved_bytes": case.moved_bytes, "bar": case.bar, "error": failure(error)}
    cupy.get_default_memory_pool().free_all_blocks()
    line = f"{case.name}: {shown(cell.get('tb_s'))} TB/s, {shown(cell.get('x_cupy'))} times CuPy"
    for label, value in list(cell.get("search", {}).items())[:3]:
        line += f"\n    {value if isinstance(value, str) else f'{value:.1f} us'}  {label}"
    return cell, line


if __name__ == "__main__":
    raise SystemExit(main())
