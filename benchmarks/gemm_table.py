"""What a run of the dense GEMM's benchmark says: lines, tables, and a summary over products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import compare
from benchmarks.bars import geometric_mean
from benchmarks.compare import AUTO, present, times_as_fast
from benchmarks.report import Cell, Table, shown
from benchmarks.rivals.dense import ALWAYS, CUBLASLT, OPTIONAL, TORCH
from cudatma.kernels.gemm.config import PRESETS

LADDER = tuple(PRESETS)
RIVALS = (*ALWAYS, *(name for name, _, _ in OPTIONAL.values()))
#: Smaller squares take as long as a launch does.
SQUARES_FROM = 512
WARM, COLD = "operands warm in L2", "operands cold in L2"


def tflops(cell: Cell, name: str) -> float | None:
    us = cell.get("us", {}).get(name)
    return None if not us else 2e-6 * cell["m"] * cell["n"] * cell["k"] / us


def size_of(cell: Cell) -> str:
    return f"{cell['m']} x {cell['n']} x {cell['k']}"


def gemm_table(cells: Sequence[Cell], operands: str = "") -> Table:
    """By product, over its layouts: TFLOP/s of each contender, how many times as fast as cuBLAS the choice is, and how
    many times at least."""
    names = [*present(cells, RIVALS), *present(cells, LADDER), *present(cells, (AUTO,))]
    over = [name for name in (CUBLASLT, TORCH) if name in names and AUTO in names]
    products: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        products.setdefault((size_of(cell), cell["dtype"]), []).append(cell)
    rows = []
    for (size, dtype), its in products.items():
        rates = [shown(_mean([tflops(cell, name) for cell in its]), 0) for name in names]
        times = [[times_as_fast(cell, name) for cell in its] for name in over]
        ratios = [shown(found, 3) for each in times for found in (_mean(each), _least(each))]
        rows.append((size, dtype, " ".join(cell["layout"] for cell in its), *rates, *ratios))
    columns = ("M x N x K", "dtype", "layouts", *names)
    columns += tuple(title for name in over for title in (f"auto / {name}", "least"))
    note = "TFLOP/s, geometric mean over the layouts"
    return Table(columns, tuple(rows), f"{note}; {operands}" if operands else note)


def _mean(values: Sequence[float | None]) -> float | None:
    """The geometric mean of what was measured."""
    known = [value for value in values if value]
    return geometric_mean(known) if known else None


def _least(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value), default=None)


def rates_line(cell: Cell, what: str) -> str:
    """A cell for people: TFLOP/s, what rivals have chosen, and which were not measured, with the reason."""
    rates = ", ".join(f"{name} {shown(tflops(cell, name), 0)}" for name in cell.get("us", {}))
    line = f"{what}: {rates} TFLOP/s" if rates else f"{what}: nothing measured"
    if (over := times_as_fast(cell, CUBLASLT)) is not None:
        line += f", {AUTO} / {CUBLASLT} {over:.3f}"
    line += "".join(f"; {name}: {detail}" for name, detail in cell.get("chosen", {}).items())
    return line + "".join(f"; no {name}: {why}" for name, why in cell.get("refused", {}).items())


def compared(cells: Sequence[Cell], rival: str) -> dict[str, Any] | None:
    """compare.compared() of products."""
    return compare.compared(cells, rival, lambda cell: f"{size_of(cell)} {cell['layout']}")


def groups(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells by what is summed up: squares and transformer layers, by type."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.get("layer"):
            found.setdefault(f"{cell['dtype']}, transformer layers", []).append(cell)
        elif cell["m"] == cell["n"] == cell["k"] >= SQUARES_FROM:
            found.setdefault(f"{cell['dtype']}, squares from {SQUARES_FROM} on", []).append(cell)
    return found


def gemm_summary(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """``auto`` over each rival, by group of products."""
    return [
        {"group": group, **found}
        for group, its in groups(cells).items()
        for rival in present(its, (CUBLASLT, *(name for name in RIVALS if name != CUBLASLT)))
        if (found := compared(its, rival)) is not None
    ]
