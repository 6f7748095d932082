"""The paths to a product: ordered and act-order weights, and the kernels before it by themselves."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.harness import Contender, Measured, cold, launches_for, measuring_stream, require_gpu, sustained
from benchmarks.layer import Layer, make_layer, ours
from benchmarks.operands import GROUP_SIZE, packed_bytes
from benchmarks.plan import SUSTAINED_FROM
from benchmarks.report import Cell, Result, Table, failure, print_table, ratio, shown
from benchmarks.shapes import parse_m_values, parse_shapes
from tools.command_line import seconds

SHAPES, M_VALUES = ((8192, 28672), (4096, 4096)), (1, 16, 64, 256, 1024, 4096)
#: Contender -> its title.
WAYS = {
    "ordered": "ordered",
    "act_order": "act-order",
    "dequantize": "dequantize alone",
    "dequantize_rows": "the same, act-order",
}


def act_order(layer: Layer) -> Layer:
    """The same weights, packed in a random order of their rows."""
    import cupy

    order = cupy.asarray(np.random.default_rng(6).permutation(layer.k).astype(np.int32))
    return replace(layer, packed=[replace(weight, perm=order) for weight in layer.packed])


def dequantizer(layer: Layer, name: str) -> Contender:
    """cudatma.dequantize of each packed weight in turn."""
    import cupy

    import cudatma

    dense = cupy.empty((layer.k, layer.n), cupy.uint16).view(layer.x.dtype)
    weights = layer.packed
    nbytes = packed_bytes(layer.k, layer.n) + layer.dense_bytes
    launches = launches_for(nbytes, len(weights), nbytes / 4e6)
    return Contender(name, lambda i: cudatma.dequantize(weights[i % len(weights)], out=dense), len(weights), launches)


def measure(stream: Any, layer: Layer, permuted: Layer, m: int, options: argparse.Namespace) -> Measured:
    """All paths of one cell, taking turns. What does not depend on M is in every cell: a check of the run."""
    contenders = [ours(layer, m, "ordered"), ours(permuted, m, "act_order")]
    contenders += [dequantizer(layer, "dequantize"), dequantizer(permuted, "dequantize_rows")]
    if m < SUSTAINED_FROM:
        return cold(stream, contenders, options.replays)
    return sustained(stream, contenders, options.seconds)


def make_cell(k: int, n: int, m: int, measured: Measured) -> Cell:
    """Microseconds by path; what act-order costs of the ordered time."""
    times = {name: measured.us(name) for name in WAYS}
    cell: Cell = {"k": k, "n": n, "m": m, "us": times}
    cell["act_order_costs"] = ratio(times["act_order"], times["ordered"])
    if measured.errors:
        cell["error"] = "; ".join(f"{name}: {text}" for name, text in measured.errors.items())
    return cell


def paths_table(cells: Sequence[Cell]) -> Table:
    """Times, and what act-order costs."""
    rows = [
        (
            *(f"{c['k']} x {c['n']}", c["m"]),
            *(shown(c.get("us", {}).get(name)) for name in WAYS),
            shown(c.get("act_order_costs")),
        )
        for c in cells
    ]
    columns = ("K x N", "M", *WAYS.values(), "act-order / ordered")
    note = "Microseconds, weights cold in L2, group 128, fp16."
    return Table(columns, tuple(rows), note)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cudatma bench paths", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    add("--shapes", type=parse_shapes, default=SHAPES, metavar="S", help="layers (default: 8192x28672,4096x4096)")
    add("--m", type=parse_m_values, default=M_VALUES, metavar="M,..", help="values of M (default: six, 1 to 4096)")
    add("--replays", type=int, default=11, help="timed replays for M < 256 (default: 11)")
    add("--seconds", type=seconds, default=1.0, help="how long paths alternate from M = 256 on (default: 1)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench paths``; returns the exit status: 1 if a cell could not be measured."""
    parser = _parser()
    options = parser.parse_args(argv)
    require_gpu(parser)
    settings = {"dtype": "float16", "group_size": GROUP_SIZE, "replays": options.replays}
    result = Result({**settings, "sustained_seconds": options.seconds}, paths_table, options.json)
    with measuring_stream() as stream:
        for k, n in options.shapes:
            layers: tuple[Layer, Layer] | None = None
            for m in options.m:
                try:
                    if layers is None:
                        layer = make_layer(k, n, "float16", max(options.m), with_dense=False)
                        layers = layer, act_order(layer)
                    cell = make_cell(k, n, m, measure(stream, *layers, m, options))
                except Exception as error:
                    cell = {"k": k, "n": n, "m": m, "error": failure(error)}
                times = "  ".join(f"{WAYS[name]} {shown(us)} us" for name, us in cell.get("us", {}).items())
                result.add(cell, f"{k} x {n}, M = {m}: {times}")
    print_table(result.console, paths_table(result.cells), "Paths")
    return int(any(cell.get("error") for cell in result.cells))


if __name__ == "__main__":
    raise SystemExit(main())
