"""Time of the portable Marlin GEMM fed by TMA, by cp.async, and by cp.async with TMA for the scales only."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Measured, cold, measuring_stream, require_card, sustained
from benchmarks.marlin import SUSTAINED_FROM, make_layer, ours, parse_shape
from benchmarks.report import Cell, Result, Table, failure, print_table, ratio, shown

SHAPES, TOKENS = ((8192, 28672), (4096, 4096)), (1, 16, 64, 256, 1024, 4096)
#: Name -> the ``feed`` argument of marlin_gemm. Scales alone are what an existing cp.async kernel can migrate first.
FEEDS: dict[str, Any] = {
    "tma": "tma",
    "scales": {"weight": "cp_async", "scale": "tma", "activation": "cp_async"},
    "cp_async": "cp_async",
}
TITLES = {"tma": "TMA", "scales": "TMA for scales only", "cp_async": "cp.async"}
#: Warp instructions executed, those of the load-store unit (cp.async goes through it, TMA does not), time, issue share.
NCU_METRICS = (
    "smsp__inst_executed.sum",
    "sm__inst_executed_pipe_lsu.sum",
    "sm__inst_executed_pipe_alu.sum",
    "gpu__time_duration.sum",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
)


def measure(stream: Any, layer: Any, m: int, replays: int, seconds: float) -> Measured:
    """The three feeds of one cell, taking turns, all on the portable kernel: the others know TMA alone."""
    from cudatma.kernels.marlin import config, plan

    vars(plan)["choose"] = config.choose_portable
    contenders = [ours(layer, m, feed, name) for name, feed in FEEDS.items()]
    return cold(stream, contenders, replays) if m < SUSTAINED_FROM else sustained(stream, contenders, seconds)


def make_cell(k: int, n: int, m: int, measured: Measured) -> Cell:
    """Microseconds by feed, and how much faster TMA for all operands is than cp.async for all."""
    times = {name: measured.us(name) for name in FEEDS}
    cell: Cell = {"k": k, "n": n, "m": m, "us": times, "speed_up": ratio(times["cp_async"], times["tma"])}
    if measured.errors:
        cell["error"] = "; ".join(f"{name}: {text}" for name, text in measured.errors.items())
    return cell


def feeds_table(cells: Sequence[Cell]) -> Table:
    rows = [
        (
            *(f"{c['k']} x {c['n']}", c["m"]),
            *(shown(c.get("us", {}).get(name)) for name in FEEDS),
            shown(c.get("speed_up")),
        )
        for c in cells
    ]
    note = "Microseconds, weights cold in L2, group 128, fp16; the last column is cp.async over TMA."
    return Table(("K x N", "M", *TITLES.values(), "TMA is faster by"), tuple(rows), note)


def ncu_commands(shapes: Sequence[tuple[int, int]], tokens: Sequence[int], script: str) -> list[str]:
    """Command lines that let Nsight Compute count the instructions of one launch each."""
    options = f"--metrics {','.join(NCU_METRICS)} --kernel-name regex:marlin_ --launch-count 1"
    return [
        f"ncu {options} {sys.executable} {script} --once {name} --shape {k}x{n} --m {m}"
        for k, n in shapes
        for m in tokens
        for name in FEEDS
    ]


def run_once(name: str, shape: tuple[int, int], m: int) -> None:
    """One launch of one feed, for a profiler to look at."""
    import cupy

    from benchmarks.operands import random_packed
    from cudatma import marlin_gemm

    k, n = shape
    x, out = cupy.ones((m, k), cupy.float16), cupy.zeros((m, n), cupy.float16)
    marlin_gemm(x, random_packed(cupy, k, n, "float16", 1)[0], out=out, feed=FEEDS[name])
    cupy.cuda.get_current_stream().synchronize()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cudatma bench feeds", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    add("--shape", type=parse_shape, action="append", metavar="KxN", help="a layer, repeatable (default: two)")
    add("--m", type=int, action="append", metavar="M", help="tokens, repeatable (default: 1 to 4096)")
    add("--replays", type=int, default=11, help="timed replays for M < 256 (default: 11)")
    add("--seconds", type=float, default=1.0, help="how long feeds alternate from M = 256 on (default: 1)")
    add("--ncu", action="store_true", help="print the command lines that count instructions, measure nothing")
    add("--once", choices=tuple(FEEDS), help="launch once with this feed, for a profiler")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench feeds``; returns the exit status: 1 if a cell could not be measured."""
    parser = _parser()
    options = parser.parse_args(argv)
    shapes, tokens = options.shape or SHAPES, options.m or TOKENS
    if options.ncu:
        print("\n".join(ncu_commands(shapes, tokens, str(Path(__file__).resolve()))))
        return 0
    require_card(parser)
    if options.once:
        run_once(options.once, shapes[0], tokens[0])
        return 0
    settings = {"dtype": "float16", "group_size": 128, "replays": options.replays, "sustained_seconds": options.seconds}
    result = Result(settings, feeds_table, options.json)
    with measuring_stream() as stream:
        for k, n in shapes:
            _measure_layer(stream, result, (k, n), tokens, options)
    print_table(result.console, feeds_table(result.cells), "Feeds")
    return int(any(cell.get("error") for cell in result.cells))


def _measure_layer(
    stream: Any, result: Result, shape: tuple[int, int], tokens: Sequence[int], options: argparse.Namespace
) -> None:
    k, n = shape
    layer = None
    for m in tokens:
        try:
            layer = layer or make_layer(k, n, "float16", max(tokens), with_dense=False)
            cell = make_cell(k, n, m, measure(stream, layer, m, options.replays, options.seconds))
        except Exception as error:
            cell = {"k": k, "n": n, "m": m, "error": failure(error)}
        times = "  ".join(f"{TITLES[name]} {shown(us)} us" for name, us in cell.get("us", {}).items())
        result.add(cell, f"{k} x {n}, M = {m}: {times}  {shown(cell.get('speed_up'))}x")


if __name__ == "__main__":
    raise SystemExit(main())
