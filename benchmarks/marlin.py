"""W4A16 Marlin GEMM against cuBLAS, other int4 kernels and the read floor, weights cold in L2, group 128, symmetric."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.bars import verdicts
from benchmarks.cells import detail_table, key_of, summary_table
from benchmarks.contest import drawn
from benchmarks.harness import BLOCK_S, WARM_REPLAYS, measuring_stream, require_gpu
from benchmarks.marlin_bench import GpuBench, run
from benchmarks.operands import GROUP_SIZE, packed_bytes
from benchmarks.plan import CellKey, Costs, all_cells, choose, described
from benchmarks.plot import picture
from benchmarks.power import find_reader
from benchmarks.read_floor import FloorBench
from benchmarks.report import Cell, Result, failure, machine_facts, print_table
from benchmarks.rivals import BF16_ONLY, RIVALS, VLLM
from benchmarks.rivals.vllm import version_of
from benchmarks.shapes import FIVE, M_VALUES, parse_m_values, parse_shapes
from cudatma.errors import ArgumentError, duration
from tools.command_line import seconds

QUICK_SHAPES, QUICK_M_VALUES, QUICK_SECONDS = ((4096, 4096), (8192, 28672)), (1, 16, 64, 256, 1024), 0.5
#: Rivals that a package brings.
_PACKAGES = {"humming": "humming-kernels", "quack": "quack-kernels"}
#: Settings and facts of the machine that must agree for the cells of two runs to be in one file.
_SAME_SETTINGS, _SAME_MACHINE = ("dtype", "group_size", "symmetric", "block_seconds"), ("card", "driver")
EXAMPLES = """examples:
  cudatma bench marlin --plan --shapes all --budget-minutes 9
  cudatma bench marlin --json marlin.json --plot marlin.svg
  cudatma bench marlin --shapes all --budget-minutes 9 --json marlin.json --resume
"""


def parse_rivals(text: str) -> tuple[str, ...]:
    """``"cublas,humming"`` in the order of RIVALS; ``"none"``. Raises ArgumentTypeError of argparse."""
    asked = [] if text == "none" else text.split(",")
    for name in asked:
        if name not in RIVALS:
            raise argparse.ArgumentTypeError(f"{name!r}: {', '.join(RIVALS)}, or none")
    return tuple(name for name in RIVALS if name in asked)


def cells_of(path: Path, settings: Mapping[str, Any], machine: Mapping[str, str]) -> list[Cell]:
    """The measured cells of an earlier run that this one goes on with; none where there is no such file.

    Raises ArgumentError where the file is no result, or was measured with other settings or on another GPU.
    """
    if not path.is_file():
        return []
    try:
        stored = json.loads(path.read_text())
        before, where, cells = dict(stored["settings"]), dict(stored["machine"]), list(stored["cells"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError("--resume", str(path), "a result of this benchmark", "name another file") from error
    pairs = [(name, before.get(name), settings[name]) for name in _SAME_SETTINGS]
    pairs += [(name, where.get(name), machine[name]) for name in _SAME_MACHINE]
    for name, old, new in pairs:
        if old != new:
            raise ArgumentError(f"--resume: {name} of {path}", old, repr(new), "write these cells to another file")
    return [cell for cell in cells if not cell.get("error")]


def package_version(name: str) -> str:
    """A distribution's version, "none" where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "dtype": options.dtype,
        "group_size": GROUP_SIZE,
        "symmetric": True,
        "replays": options.replays,
        "warm_replays": WARM_REPLAYS,
        "sustained_seconds": options.seconds,
        "block_seconds": BLOCK_S,
        "rivals": {name: _version(name, options.vllm) for name in options.rivals},
    }


def _version(rival: str, vllm: Path | None) -> str:
    """A rival's version where it is not torch's."""
    if rival in VLLM:
        return version_of(vllm)
    return package_version(_PACKAGES[rival]) if rival in _PACKAGES else ""


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench marlin``; returns the exit status: with --check 1 unless every bar is met."""
    parser = _parser()
    options = _parsed(parser, argv)
    costs = Costs(options.replays, options.seconds, options.rivals)
    keys = all_cells(options.shapes, options.m)
    budget_s = None if options.budget_minutes is None else 60 * options.budget_minutes
    settings = settings_of(options)
    kept: list[Cell] = []
    if options.resume:
        try:
            kept = cells_of(options.json, settings, machine_facts())
        except ArgumentError as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
        done = {key_of(cell) for cell in kept}
        keys = [key for key in keys if key not in done]
    chosen, late = choose(keys, costs, budget_s)
    print(f"{len(chosen)} cells, about {duration(costs.total_s(chosen))}", f"({len(kept)} kept)" if kept else "")
    if late:
        print(f"no time for {len(late)} cells: {described(late)}")
    if options.plan:
        print(described(chosen))
        return 0
    require_gpu(parser)
    left_out: list[CellKey] = []
    result = Result(settings, summary_table, options.json, lambda cells: _more(cells, left_out), kept)
    left_out += _measured(result, keys, costs, budget_s, options.vllm)
    return _told(result, left_out, options)


def _measured(
    result: Result, keys: Sequence[CellKey], costs: Costs, budget_s: float | None, vllm: Path | None
) -> list[CellKey]:
    """Measure on the GPU; returns the cells there was no time for."""
    began = time.monotonic()
    torch_error = ""
    try:
        import torch

        torch.cuda.init()
    except Exception as error:  # ours and F need no torch
        torch_error = failure(error)
        result.say(f"no rivals without torch: {torch_error}")
        costs = Costs(costs.replays, costs.seconds, ())
    with measuring_stream() as stream:
        floor_bench = None
        try:
            floor_bench = FloorBench(max((packed_bytes(key.k, key.n) for key in keys), default=1 << 20))
        except Exception as error:
            result.say(f"no F: {failure(error)}")
        reader = find_reader()
        if reader is None:
            result.say("clocks and watts cannot be read: neither NVML nor nvidia-smi answers")
        dtype = str(result.settings["dtype"])
        bench = GpuBench(stream, dtype, costs, floor_bench, reader, result.say, vllm)
        spent = time.monotonic() - began
        left_out = run(bench, keys, costs, None if budget_s is None else budget_s - spent, result)
    result.say(duration(time.monotonic() - began))
    return left_out


def _more(cells: Sequence[Cell], left_out: Sequence[CellKey]) -> dict[str, Any]:
    """What the file holds besides cells and table: which bars are met, and what there was no time for."""
    return {"bars": [each.as_json() for each in verdicts(cells)], "left_out": [str(key) for key in left_out]}


def _told(result: Result, left_out: Sequence[CellKey], options: argparse.Namespace) -> int:
    """Print tables, bars and what was left out; write the file and the picture."""
    print_table(result.console, detail_table(result.cells), f"Marlin W4A16, {options.dtype}")
    found = verdicts(result.cells)
    for verdict in found:
        result.say(str(verdict))
    if left_out:
        result.say(f"no time for {len(left_out)} cells: {described(left_out)}")
    result.write()
    if options.plot:
        drawn(result, picture, options.plot)
    return int(options.check and any(verdict.status != "met" for verdict in found))


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser.parse_args(argv)
    if options.resume and options.json is None:
        parser.error("--resume goes on with a file: name it with --json")
    options.shapes = options.shapes or (QUICK_SHAPES if options.quick else FIVE)
    options.m = options.m or (QUICK_M_VALUES if options.quick else M_VALUES)
    if options.rivals is None:
        absent = set(BF16_ONLY) if options.dtype == "float16" else set()
        absent |= set() if options.vllm else set(VLLM)
        options.rivals = tuple(name for name in RIVALS if name not in absent)
    if options.quick:
        options.seconds = min(options.seconds, QUICK_SECONDS)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cudatma bench marlin",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the results there, anew after every cell")
    add("--resume", action="store_true", help="keep what that file has already and measure the rest")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the results")
    add("--dtype", choices=("float16", "bfloat16"), default="float16", help="of activations and scales")
    add("--quick", action="store_true", help="two layers, five batch sizes, short runs")
    add(
        "--shapes", type=parse_shapes, metavar="S", help="five, all, a model's name or KxN, with commas (default: five)"
    )
    add("--m", type=parse_m_values, metavar="M,..", help="values of M (default: 1 to 8192)")
    add("--rivals", type=parse_rivals, metavar="R,..", help=f"of {', '.join(RIVALS)} (the last two: bf16 only); none")
    add("--vllm", type=Path, metavar="FOLDER", help="libraries of vLLM's wheel, see rivals/vllm.py")
    add("--replays", type=int, default=11, help="timed replays for M < 256 (default: 11)")
    add("--seconds", type=seconds, default=3.0, help="how long a pair alternates from M = 256 on (default: 3)")
    add("--budget-minutes", type=float, metavar="MIN", help="measure the most important cells in this time")
    add("--plan", action="store_true", help="say what would be measured and how long it would take; needs no GPU")
    add("--check", action="store_true", help="exit status 1 unless every bar is met")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
