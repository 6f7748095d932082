"""The dense GEMM: each version of the ladder and what `gemm` chooses, beside torch.mm (cuBLAS), in one run.

Operands are normally distributed and the same bits for all; they are as warm in L2 as a launch leaves them. Every
result is compared with torch.mm's.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import Contender, cold, measuring_stream, require_gpu
from benchmarks.report import Cell, Result, Table, failure, print_table, ratio
from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.kernels.gemm.explain import gemm_explain
from cudatma.kernels.gemm.gemm import gemm
from cudatma.kernels.gemm.problem import LAYOUTS
from cudatma.kernels.gemm.versions import VERSIONS

SIZES = (256, 512, 1024, 2048, 4096, 8192)
#: M, N, K of products of a decoder with 8192 rows of activations, and with few.
TRANSFORMER = ((8192, 6144, 4096), (8192, 4096, 14336), (2048, 28672, 8192), (128, 28672, 8192), (64, 4096, 4096))
CUBLAS, AUTO = "torch.mm", "auto"
ASKED: tuple[str | int, ...] = (AUTO, *VERSIONS)
#: Part of a result's norm that it may differ from torch.mm's: both round once.
_ALLOWED = {"float16": 1e-3, "bfloat16": 6e-3}
#: A graph takes about this long.
_GRAPH_US = 4000.0
#: TFLOP/s by which the length of a graph is guessed.
_GUESS = 600e6


def measure(stream: Any, sizes: tuple[int, int, int], layout: str, dtype: str, replays: int) -> Cell:
    """One product, by all contenders."""
    import torch

    m, n, k = sizes
    a, b = _operand(m, k, layout[0], dtype), _operand(k, n, layout[1], dtype)
    ways: dict[str, Callable[[Any], object]] = {CUBLAS: lambda out: torch.mm(a, b, out=out)}
    for version in ASKED:
        ways[_name(version)] = lambda out, version=version: gemm(a, b, out=out, version=version)  # type: ignore[misc]
    outs = {name: torch.full((m, n), math.nan, dtype=a.dtype, device="cuda") for name in ways}
    launches = max(2, min(400, round(_GRAPH_US / (2 + 2 * m * n * k / _GUESS))))
    made = [Contender(name, lambda _, name=name: ways[name](outs[name]), 1, launches) for name in ways]  # type: ignore[misc]
    found = cold(stream, made, replays)
    cell: Cell = {"m": m, "n": n, "k": k, "layout": layout, "dtype": dtype, "us": {}, "entries": {}}
    wanted = outs[CUBLAS].float()
    for name, timing in found.timings.items():
        off = float(torch.linalg.norm(outs[name].float() - wanted) / torch.linalg.norm(wanted))
        if not off <= _ALLOWED[dtype]:
            found.errors[name] = f"wrong: {off:.2e} off"
        else:
            cell["us"][name] = timing.us
    cell["entries"] = {_name(v): gemm_explain(a, b, version=v).spec.entry for v in ASKED}
    if found.errors:
        cell["error"] = "; ".join(f"{name}: {why}" for name, why in found.errors.items())
    return cell


def _name(version: str | int) -> str:
    return AUTO if version == AUTO else f"v{version}"


def _operand(rows: int, columns: int, letter: str, dtype: str) -> Any:
    import torch

    shape = (rows, columns) if letter == "R" else (columns, rows)
    made = torch.randn(shape, device="cuda", dtype=torch.float32).to(getattr(torch, dtype))
    return made if letter == "R" else made.T


def _tflops(cell: Cell, name: str) -> float | None:
    us = cell["us"].get(name)
    return None if us is None else 2e-6 * cell["m"] * cell["n"] * cell["k"] / us


def gemm_table(cells: Sequence[Cell]) -> Table:
    """TFLOP/s of each contender, and how many times as fast as torch.mm the choice is."""
    names = (CUBLAS, *(_name(version) for version in VERSIONS), AUTO)
    rows = []
    for cell in cells:
        if not cell.get("us"):
            continue
        rates = [_tflops(cell, name) for name in names]
        told = ["failed" if rate is None else f"{rate:.0f}" for rate in rates]
        times = ratio(rates[-1], rates[0]) if rates[-1] and rates[0] else None
        size = f"{cell['m']} x {cell['n']} x {cell['k']}"
        rows.append((size, cell["layout"], cell["dtype"], *told, "" if times is None else f"{times:.3f}"))
    return Table(("M x N x K", "layout", "dtype", *names, "auto / torch.mm"), tuple(rows), "TFLOP/s")


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench gemm``; returns the exit status: 1 if a contender failed or was wrong."""
    parser = argparse.ArgumentParser(prog="cudatma bench gemm", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    add("--replays", type=int, default=11, help="timed turns of each (default: 11)")
    add("--size", type=int, action="append", metavar="N", help=f"N cubed, repeatable (default: {SIZES})")
    add("--layout", choices=LAYOUTS, action="append", help=f"repeatable (default: {', '.join(LAYOUTS)})")
    add("--dtype", choices=tuple(ACTIVATION_TYPES), action="append", help="repeatable (default: float16)")
    add("--transformer", action="store_true", help="also products of a decoder")
    options = parser.parse_args(argv)
    require_gpu(parser)
    import torch  # noqa: F401  (before measuring_stream(), which makes its stream current for torch too)

    products = [(size, size, size) for size in options.size or SIZES]
    products += TRANSFORMER if options.transformer else ()
    result = Result({"replays": options.replays}, gemm_table, options.json)
    with measuring_stream() as stream:
        for sizes in products:
            for layout in options.layout or LAYOUTS:
                for dtype in options.dtype or ("float16",):
                    result.add(*_cell(stream, sizes, layout, dtype, options.replays))
    print_table(result.console, gemm_table(result.cells), "Dense GEMM")
    return int(any(cell.get("error") for cell in result.cells))


def _cell(stream: Any, sizes: tuple[int, int, int], layout: str, dtype: str, replays: int) -> tuple[Cell, str]:
    import torch

    try:
        cell = measure(stream, sizes, layout, dtype, replays)
    except Exception as error:
        m, n, k = sizes
        cell = {"m": m, "n": n, "k": k, "layout": layout, "dtype": dtype, "us": {}, "error": failure(error)}
    torch.cuda.empty_cache()
    rates = {name: _tflops(cell, name) for name in cell["us"]}
    told = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items() if rate is not None)
    return cell, f"{' x '.join(map(str, sizes))} {layout} {dtype}: {told} TFLOP/s"


if __name__ == "__main__":
    raise SystemExit(main())
