"""The mma.sync GEMM on its load paths, TMA, cp.async, cp.async with TMA for the scales: time, code, counters."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks import load_path_code
from benchmarks.harness import Measured, cold, measuring_stream, require_gpu, sustained
from benchmarks.layer import make_layer, ours
from benchmarks.ncu import counters_table, profile_cell
from benchmarks.operands import GROUP_SIZE
from benchmarks.plan import SUSTAINED_FROM, CellKey
from benchmarks.report import Cell, Result, Table, failure, print_table, ratio, shown
from benchmarks.shapes import parse_m_values, parse_shapes
from benchmarks.subjects import LOAD_PATHS, TITLES, spec_of
from cudatma.kernels.marlin.problem import LinearShape
from cudatma.target import Target
from tools.command_line import seconds

SHAPES, M_VALUES = ((8192, 28672), (4096, 4096)), (1, 16, 64, 256, 1024, 4096)
#: What of a load path's code goes into a cell.
_CODE = ("registers", "copies", "loop", "producer_slots", "consumer_slots", "slots")


def measure(stream: Any, layer: Any, m: int, replays: int, seconds: float) -> Measured:
    """The three load paths of one cell, taking turns, all of the mma.sync kernel: the other kernels use TMA alone."""
    contenders = [ours(layer, m, name, spec=spec_of(name, LinearShape.of(layer.packed[0]), m)) for name in LOAD_PATHS]
    return cold(stream, contenders, replays) if m < SUSTAINED_FROM else sustained(stream, contenders, seconds)


def code_of(k: int, n: int, m: int, target: Target) -> dict[str, Any]:
    """By load path, what one pipeline stage of its code costs (load_path_code), or why nobody knows."""
    layer = LinearShape(k, n, GROUP_SIZE, False, "float16")
    cells = {name: load_path_code.make_cell(layer, m, name, target) for name in LOAD_PATHS}
    return {
        name: {"error": cell["error"]} if "error" in cell else {key: cell[key] for key in _CODE}
        for name, cell in cells.items()
    }


def make_cell(k: int, n: int, m: int, measured: Measured) -> Cell:
    """Microseconds by load path, and how much faster TMA for all operands is than cp.async for all."""
    times = {name: measured.us(name) for name in LOAD_PATHS}
    cell: Cell = {"k": k, "n": n, "m": m, "us": times, "speed_up": ratio(times["cp_async"], times["tma"])}
    if measured.errors:
        cell["error"] = "; ".join(f"{name}: {text}" for name, text in measured.errors.items())
    return cell


def load_paths_table(cells: Sequence[Cell]) -> Table:
    """Times; where the code was read too, of TMA and cp.async: registers, loads and issue slots of a stage."""
    has_code = any(cell.get("code") for cell in cells)

    def code(cell: Cell, key: str) -> tuple[str, ...]:
        found = cell.get("code", {})
        return (" / ".join(str(found.get(name, {}).get(key, "-")) for name in ("tma", "cp_async")),)

    rows = [
        (
            *(f"{c['k']} x {c['n']}", c["m"]),
            *(shown(c.get("us", {}).get(name)) for name in LOAD_PATHS),
            shown(c.get("speed_up")),
            *(code(c, "registers") + code(c, "copies") + code(c, "slots") if has_code else ()),
        )
        for c in cells
    ]
    note = "Microseconds, weights cold in L2, group 128, fp16; cp.async over TMA."
    columns = ("K x N", "M", *(TITLES[name] for name in LOAD_PATHS), "TMA is faster by")
    if has_code:
        columns += ("registers", "loads", "issue slots")
        note += " After it, TMA / cp.async: registers of a thread, load instructions and issue slots of one stage."
    return Table(columns, tuple(rows), note)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cudatma bench load_paths", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    add("--shapes", type=parse_shapes, default=SHAPES, metavar="S", help="layers (default: 8192x28672,4096x4096)")
    add("--m", type=parse_m_values, default=M_VALUES, metavar="M,..", help="values of M (default: six, 1 to 4096)")
    add("--replays", type=int, default=11, help="timed replays for M < 256 (default: 11)")
    add("--seconds", type=seconds, default=1.0, help="how long load paths alternate from M = 256 on (default: 1)")
    add("--ncu", action="store_true", help="then let Nsight Compute count one launch of each (see cudatma bench ncu)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench load_paths``; returns the exit status: 1 if a cell could not be measured."""
    parser = _parser()
    options = parser.parse_args(argv)
    require_gpu(parser)
    settings = {"dtype": "float16", "group_size": GROUP_SIZE, "replays": options.replays}
    result = Result({**settings, "sustained_seconds": options.seconds}, load_paths_table, options.json)
    with measuring_stream() as stream:
        for k, n in options.shapes:
            _measure_layer(stream, result, (k, n), options)
    print_table(result.console, load_paths_table(result.cells), "Load paths")
    if options.ncu:
        _count(result)
    return int(any(cell.get("error") for cell in result.cells))


def _measure_layer(stream: Any, result: Result, shape: tuple[int, int], options: argparse.Namespace) -> None:
    from cudatma.target import detect

    k, n = shape
    layer = None
    for m in options.m:
        try:
            layer = layer or make_layer(k, n, "float16", max(options.m), with_dense=False)
            cell = make_cell(k, n, m, measure(stream, layer, m, options.replays, options.seconds))
            cell["code"] = code_of(k, n, m, detect())
        except Exception as error:
            cell = {"k": k, "n": n, "m": m, "error": failure(error)}
        times = "  ".join(f"{TITLES[name]} {shown(us)} us" for name, us in cell.get("us", {}).items())
        result.add(cell, f"{k} x {n}, M = {m}: {times}  {shown(cell.get('speed_up'))}x")


def _count(result: Result) -> None:
    """Counters of every cell into the result; the file is written anew after each."""
    for cell in result.cells:
        key = CellKey(cell["k"], cell["n"], cell["m"])
        cell["ncu"] = {name: profile_cell(name, key) for name in LOAD_PATHS}
        for name, found in cell["ncu"].items():
            result.say(f"{key}, {TITLES[name]}: {found.get('error') or found.get('instructions')}")
        result.write()
    print_table(result.console, counters_table(result.cells), "Counters")


if __name__ == "__main__":
    raise SystemExit(main())
