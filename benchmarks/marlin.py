"""Compare the Marlin GEMM with cuBLAS, other int4 kernels and the read floor F, with weights cold in L2.

Weights are symmetric with groups of 128.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # The checkout need not be installed.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.harness import BLOCK_S, Contender, Measured, cold, measuring_stream, require_gpu, sustained
from benchmarks.layer import CellKey, Layer, make_layer, ours
from benchmarks.operands import GROUP_SIZE, packed_bytes
from benchmarks.plot import picture
from benchmarks.read_floor import FloorBench
from benchmarks.report import Cell, Result, Table, failure, machine_facts, make_parser, ratio, shown
from benchmarks.rivals import BF16_ONLY, RIVALS, VLLM, Field, make_field
from benchmarks.rivals.vllm import version_of
from benchmarks.shapes import FIVE, M_VALUES, parse_m_values, parse_shapes
from cudatma.errors import ArgumentError, duration
from tools.command_line import seconds
from tools.model_layers import Shape

OURS, CHAINED = "ours", "ours chained"
FLOOR, FLOOR_CHAINED = "floor", "floor chained"
#: Minimum M at which marlin_gemm and each competing library alternate in long blocks, because clocks drop in long runs.
SUSTAINED_FROM = 256
#: Largest M at which chains of programmatic launches are also measured.
PROGRAMMATIC_UP_TO = 16
#: Number of cuBLAS variants that take turns in a cell.
FINALISTS = 3
#: Name of the distribution of each competing library that is a Python package.
_PACKAGES = {"humming": "humming-kernels", "quack": "quack-kernels"}
#: Settings and facts about the machine that must be equal if one file contains cells of two runs.
_SAME_SETTINGS, _SAME_MACHINE = ("dtype", "group_size", "symmetric", "block_seconds"), ("card", "driver")
EXAMPLES = """examples:
  cudatma bench marlin --json marlin.json --plot marlin.svg
  cudatma bench marlin --shapes 8192x28672 --m 1,16,256 --rivals cublas,humming
  cudatma bench marlin --shapes all --budget-minutes 9 --json marlin.json --resume
"""


# ---- A cell ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Floors:
    """The read-floor kernel F for one layer, in ordinary and in chained launches, or the reason why F is absent."""

    plain: Contender | None = None
    chained: Contender | None = None
    errors: Mapping[str, str] = field(default_factory=dict)


class Bench:
    """Measure the cells of one layer at a time on the current device. ``floor_bench`` measures F unless it is None."""

    def __init__(
        self, stream: Any, result: Result, options: argparse.Namespace, floor_bench: FloorBench | None
    ) -> None:
        self.stream, self.result, self.options, self.floor_bench = stream, result, options, floor_bench
        self.layer: Layer | None = None
        self.field, self.floors = Field(), Floors()

    def open(self, shape: Shape, m_values: Sequence[int]) -> None:
        """Create the operands, F and the competing libraries for a layer.

        Raises an error with the reason if the operands cannot be created.
        """
        k, n = shape
        self.floors = self._floors(k, n, min(m_values)) if min(m_values) < SUSTAINED_FROM else Floors()
        rivals = self.options.rivals
        self.layer = make_layer(k, n, self.options.dtype, max(m_values), with_dense="cublas" in rivals)
        self.field = make_field(rivals, self.layer, m_values, self.options.vllm)
        for name, why in self.field.errors.items():
            self.result.say(f"{k} x {n}: {name}: {why}")

    def _floors(self, k: int, n: int, min_m: int) -> Floors:
        contenders: dict[str, Contender] = {}
        errors: dict[str, str] = {}
        bench, nbytes = self.floor_bench, packed_bytes(k, n)
        for name, programmatic in ((FLOOR, False), (FLOOR_CHAINED, True)):
            if bench is None or (programmatic and min_m > PROGRAMMATIC_UP_TO):
                continue
            try:
                best = bench.search(self.stream, nbytes, self.options.replays, programmatic=programmatic)
                self.result.say(f"{k} x {n}: {name} {best.us:.2f} us, {best.config}")
                contenders[name] = bench.contender(nbytes, best.config, name, programmatic=programmatic)
            except Exception as error:
                errors[name] = failure(error)
        return Floors(contenders.get(FLOOR), contenders.get(FLOOR_CHAINED), errors)

    def cell(self, key: CellKey) -> Cell:
        """Measure one cell. If our kernel cannot be measured, the cell contains the error."""
        try:
            if self.layer is None:
                raise RuntimeError("open() must be called before cell()")
            return (self._cold if key.m < SUSTAINED_FROM else self._sustained)(self.layer, key)
        except Exception as error:
            return failed_cell(key, self.options.dtype, failure(error))

    def _cold(self, layer: Layer, key: CellKey) -> Cell:
        replays, floors = self.options.replays, self.floors
        variants, errors = self.field.contenders(self.stream, key.m, FINALISTS)
        rivals = [variant for ways in variants.values() for variant in ways]
        with_floor = [floors.plain] if floors.plain else []
        together = cold(self.stream, [ours(layer, key.m, name=OURS), *with_floor, *rivals], replays)
        chained = Measured()
        if key.m <= PROGRAMMATIC_UP_TO:
            chain = [ours(layer, key.m, name=CHAINED, programmatic=True)]
            chained = cold(self.stream, [*chain, *([floors.chained] if floors.chained else [])], replays)
        pairs = {name: (together, [way.name for way in ways]) for name, ways in variants.items()}
        return make_cell(key, self.options.dtype, together, pairs, {**floors.errors, **errors}, chained)

    def _sustained(self, layer: Layer, key: CellKey) -> Cell:
        variants, errors = self.field.contenders(self.stream, key.m, 1)
        pairs = {}
        for name, ways in variants.items():
            both = sustained(self.stream, [ours(layer, key.m, name=OURS), *ways], self.options.seconds)
            pairs[name] = both, [way.name for way in ways]
        if pairs:
            together = next(iter(pairs.values()))[0]  # cuBLAS is the first library.
        else:
            together = sustained(self.stream, [ours(layer, key.m, name=OURS)], self.options.seconds)
        return make_cell(key, self.options.dtype, together, pairs, errors)

    def is_alive(self) -> bool:
        """Return whether the GPU can still be used. After a trap, every call in this process fails."""
        try:
            self.stream.synchronize()
        except Exception:
            return False
        return True

    def close(self) -> None:
        """Free the layer's memory, because the operands of the next layer have different sizes."""
        self.layer, self.field, self.floors = None, Field(), Floors()
        gc.collect()
        with contextlib.suppress(Exception):  # After a trap, even freeing memory fails.
            import cupy

            self.stream.synchronize()
            cupy.get_default_memory_pool().free_all_blocks()
            if torch := sys.modules.get("torch"):
                torch.cuda.empty_cache()


def make_cell(
    key: CellKey,
    dtype: str,
    together: Measured,
    pairs: Mapping[str, tuple[Measured, Sequence[str]]],
    errors: Mapping[str, str],
    chained: Measured | None = None,
) -> Cell:
    """Return the cell for the file.

    ``x_LIBRARY`` is the library's time divided by ours, in the same turns or blocks.

    ``together`` contains the measurements of our kernel, F and, below SUSTAINED_FROM, all competing libraries.
    ``pairs`` maps each competing library to a measurement that includes ours, and to the names of its contenders.
    ``errors`` is keyed by competing library or contender. The cell's ``error`` is the reason why our kernel has no
    time. Its ``errors`` are the reasons why other contenders could not run.
    """
    k, n, m = key
    chained = chained or Measured()
    us, floor_us = together.us(OURS), together.us(FLOOR)
    rivals = {name: _rival(*pair) for name, pair in pairs.items()}
    cell: Cell = {
        "k": k,
        "n": n,
        "m": m,
        "dtype": dtype,
        "us": us,
        "floor_us": floor_us,
        "x_floor": ratio(us, floor_us),
    }
    cublas = rivals.get("cublas", {})
    cell |= {"cublas_us": cublas.get("us"), "x_cublas": cublas.get("x")}
    ours_us, floor_chain_us = chained.us(CHAINED), chained.us(FLOOR_CHAINED)
    if ours_us is not None or floor_chain_us is not None:
        cell |= {
            "programmatic_us": ours_us,
            "programmatic_floor_us": floor_chain_us,
            "x_floor_programmatic": ratio(ours_us, floor_chain_us),
        }
    cell["rivals"] = rivals
    all_errors = {**together.errors, **chained.errors, **errors}
    for measured, _ in pairs.values():
        all_errors |= measured.errors
    if all_errors:
        cell["errors"] = all_errors
    if us is None:
        cell["error"] = "; ".join(f"{name}: {text}" for name, text in all_errors.items()) or "not measured"
    return cell


def _rival(measured: Measured, names: Sequence[str]) -> Cell:
    """Return the fastest of a competing library's contenders."""
    times = [(us, name) for name in names if (us := measured.us(name)) is not None]
    us, way = min(times, default=(None, ""))
    return {"us": us, "x": ratio(us, measured.us(OURS)), "way": way}


def failed_cell(key: CellKey, dtype: str, error: str) -> Cell:
    return {"k": key.k, "n": key.n, "m": key.m, "dtype": dtype, "error": error}


def key_of(cell: Cell) -> CellKey:
    return CellKey(cell["k"], cell["n"], cell["m"])


# ---- The report -----------------------------------------------------------------------------------------------------


def line_of(cell: Cell) -> str:
    line = (
        f"{cell['k']:>6} x {cell['n']:<6} M {cell['m']:<5} {shown(cell.get('us')):>9} us"
        f"  {shown(cell.get('x_floor')):>5} F  chained {shown(cell.get('x_floor_programmatic')):>5} F"
    )
    for name, rival in cell.get("rivals", {}).items():
        line += f"  {name} {shown(rival['us'])} us {shown(rival['x'])}x"
    return line + "".join(f"  {name}: {why}" for name, why in cell.get("errors", {}).items() if not cell.get("error"))


def summary_table(cells: Sequence[Cell]) -> Table:
    """Return a table with a row per layer and a column per M. An entry contains microseconds and speedups in brackets.

    The speedup over cuBLAS precedes the speedups over the other libraries. Each layer has one F.
    """
    shapes = list(dict.fromkeys((c["k"], c["n"]) for c in cells))
    m_values = sorted({c["m"] for c in cells})
    by_key = {key_of(cell): cell for cell in cells}

    def value(k: int, n: int, m: int) -> str:
        cell = by_key.get(CellKey(k, n, m), {})
        if cell.get("us") is None:
            return "-"
        over = [shown(cell.get("x_cublas"))]
        over += [f"{name} {shown(rival['x'])}" for name, rival in cell.get("rivals", {}).items() if name != "cublas"]
        us = float(f"{cell['us']:.3g}")
        return f"{us:g} ({', '.join(over)})"

    rows = []
    for k, n in shapes:
        floors = [c["floor_us"] for c in cells if (c["k"], c["n"]) == (k, n) and c.get("floor_us") is not None]
        rows.append((f"{k} x {n}", shown(min(floors, default=None), 1), *(value(k, n, m) for m in m_values)))
    note = (
        "Times are microseconds, and the number in brackets is the speed-up over cuBLAS in the same run (the fastest "
        "of torch.mm and cuBLASLt's algorithms, with the weight in either orientation). Weights are cold in L2, group "
        "128, symmetric. Below M = 256 the GPU is idle before each turn. For larger M, where power is the limit, both "
        "kernels alternate in blocks. F is the time to read the int4 weights and scales."
    )
    return Table(("K x N", "F", *(f"M = {m}" for m in m_values)), tuple(rows), note)


# ---- The run --------------------------------------------------------------------------------------------------------


def run(
    bench: Any, keys: Sequence[CellKey], result: Result, budget_s: float | None, clock: Any = time.monotonic
) -> None:
    """Measure cells layer by layer, and add each cell to ``result``. End after ``budget_s`` seconds unless it is None.

    The run ends early if a trap prevents this process from using the GPU.
    """
    began = clock()
    shapes = list(dict.fromkeys((key.k, key.n) for key in keys))
    for shape in shapes:
        layer_keys = [key for key in keys if (key.k, key.n) == shape]
        try:
            bench.open(shape, [key.m for key in layer_keys])
            problem = ""
        except Exception as error:
            problem = failure(error)
        for key in layer_keys:
            if budget_s is not None and clock() - began >= budget_s:
                result.say(f"{duration(clock() - began)} have passed; pass --resume to continue with {key}")
                return
            cell = failed_cell(key, bench.options.dtype, problem) if problem else bench.cell(key)
            result.add(cell, line_of(cell))
            if (cell.get("error") or cell.get("errors")) and not bench.is_alive():
                result.say(
                    f"{key}: this process can no longer use the GPU; pass --resume and fewer --rivals to continue"
                )
                return
        bench.close()


def cells_of(path: Path, settings: Mapping[str, Any], machine: Mapping[str, str]) -> list[Cell]:
    """Return the measured cells of the file that this run continues, or an empty list if the file does not exist.

    Raises ArgumentError if the file is not a result, or if its settings or its GPU differ.
    """
    if not path.is_file():
        return []
    try:
        stored = json.loads(path.read_text())
        before, where, cells = dict(stored["settings"]), dict(stored["machine"]), list(stored["cells"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError("--resume", str(path), "a result of this benchmark", "pass another file") from error
    pairs = [(name, before.get(name), settings[name]) for name in _SAME_SETTINGS]
    pairs += [(name, where.get(name), machine[name]) for name in _SAME_MACHINE]
    for name, old, new in pairs:
        if old != new:
            raise ArgumentError(f"--resume: {name} of {path}", old, repr(new), "write these cells to another file")
    return [cell for cell in cells if not cell.get("error")]


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "dtype": options.dtype,
        "group_size": GROUP_SIZE,
        "symmetric": True,
        "replays": options.replays,
        "sustained_seconds": options.seconds,
        "block_seconds": BLOCK_S,
        "rivals": {name: _version(name, options.vllm) for name in options.rivals},
    }


def _version(rival: str, vllm: Path | None) -> str:
    """Return the version of a competing library, or "" if the library belongs to torch."""
    if rival in VLLM:
        return version_of(vllm)
    try:
        return version(_PACKAGES[rival]) if rival in _PACKAGES else ""
    except PackageNotFoundError:
        return "none"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench marlin`` and return the exit status (1 if a cell could not be measured)."""
    parser = _parser()
    options = _parsed(parser, argv)
    settings = settings_of(options)
    kept: list[Cell] = []
    if options.resume:
        try:
            kept = cells_of(options.json, settings, machine_facts())
        except ArgumentError as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
    done = {key_of(cell) for cell in kept}
    keys = [key for k, n in options.shapes for m in options.m if (key := CellKey(k, n, m)) not in done]
    require_gpu(parser)
    result = Result(settings, summary_table, options.json, cells=kept)
    result.say(f"{len(keys)} cells to measure ({len(kept)} kept)")
    try:
        import torch

        torch.cuda.init()
    except Exception as error:  # Our kernel and F do not need torch.
        result.say(f"competing libraries are not measured: {failure(error)}")
        options.rivals = ()
    budget_s = None if options.budget_minutes is None else 60 * options.budget_minutes
    with measuring_stream() as stream:
        floor_bench = None
        try:
            floor_bench = FloorBench(max((packed_bytes(key.k, key.n) for key in keys), default=1 << 20))
        except Exception as error:
            result.say(f"F is not measured: {failure(error)}")
        run(Bench(stream, result, options, floor_bench), keys, result, budget_s)
    result.write()
    if options.plot and any(cell.get("us") for cell in result.cells):
        options.plot.write_text(picture(result.as_json()))
    return result.finish(f"Marlin W4A16, {options.dtype}")


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser.parse_args(argv)
    if options.resume and options.json is None:
        parser.error("--resume requires --json with the file to continue")
    if options.rivals is None:
        absent = set(BF16_ONLY) if options.dtype == "float16" else set()
        absent |= set() if options.vllm else set(VLLM)
        options.rivals = tuple(name for name in RIVALS if name not in absent)
    return options


def parse_rivals(text: str) -> tuple[str, ...]:
    """Parse a list of libraries such as ``"cublas,humming"`` or ``"none"``, and return them in the order of RIVALS.

    Raises argparse's ArgumentTypeError for an unknown name.
    """
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in RIVALS:
            raise argparse.ArgumentTypeError(f"must be {', '.join(RIVALS)} or none, got {name!r}")
    return tuple(name for name in RIVALS if name in names)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("marlin", __doc__, EXAMPLES)
    add = parser.add_argument
    help_shapes = "layers: five, all, names of models, or KxN, separated by commas (default: five)"
    help_rivals = f"{', '.join(RIVALS)} (the last two only for bf16), or none"
    add("--resume", action="store_true", help="keep the measured cells of the file and measure the other cells")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the results in an SVG file")
    add("--dtype", choices=("float16", "bfloat16"), default="float16", help="dtype of activations and scales")
    add("--shapes", type=parse_shapes, default=FIVE, metavar="S", help=help_shapes)
    add("--m", type=parse_m_values, default=M_VALUES, metavar="M,...", help="values of M (default: 1 to 8192)")
    add("--rivals", type=parse_rivals, metavar="R,...", help=help_rivals)
    add("--vllm", type=Path, metavar="FOLDER", help="folder with the libraries of vLLM's wheel (see rivals/vllm.py)")
    add("--replays", type=int, default=11, help="number of timed replays for M < 256 (default: 11)")
    add(
        "--seconds",
        type=seconds,
        default=3.0,
        help="seconds per pair of contenders for M >= 256 (default: 3)",
    )
    add("--budget-minutes", type=float, metavar="MIN", help="do not start another cell after MIN minutes")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
