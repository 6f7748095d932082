"""What a run of the dense GEMM's benchmark says: lines, tables, and a summary over products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.bars import geometric_mean
from benchmarks.report import Cell, Table, ratio, shown
from benchmarks.rivals.dense import ALWAYS, CUBLASLT, OPTIONAL, TORCH
from cudatma.kernels.gemm.versions import VERSIONS

AUTO = "auto"
LADDER = tuple(f"v{version}" for version in VERSIONS)
RIVALS = (*ALWAYS, *(name for name, _, _ in OPTIONAL.values()))
#: Smaller squares take as long as a launch does.
SQUARES_FROM = 512
WARM, COLD = "operands warm in L2", "operands cold in L2"


def tflops(cell: Cell, name: str) -> float | None:
    us = cell.get("us", {}).get(name)
    return None if not us else 2e-6 * cell["m"] * cell["n"] * cell["k"] / us


def times_as_fast(cell: Cell, rival: str, ours: str = AUTO) -> float | None:
    """How many times as fast as a rival ours is; None where one of them was not measured."""
    us = cell.get("us", {})
    return ratio(us.get(rival) or None, us.get(ours))


def present(cells: Sequence[Cell], names: Iterable[str]) -> list[str]:
    """Those of the names that a cell has a time of, or a reason that it has none."""
    found = {name for cell in cells for part in ("us", "refused") for name in cell.get(part, {})}
    return [name for name in names if name in found]


def size_of(cell: Cell) -> str:
    return f"{cell['m']} x {cell['n']} x {cell['k']}"


def gemm_table(cells: Sequence[Cell], operands: str = "") -> Table:
    """TFLOP/s of each contender, and how many times as fast as cuBLAS the choice is."""
    names = [*present(cells, RIVALS), *present(cells, LADDER), *present(cells, (AUTO,))]
    over = [name for name in (CUBLASLT, TORCH) if name in names and AUTO in names]
    rows = []
    for cell in cells:
        rates = [shown(tflops(cell, name), 0) for name in names]
        times = [shown(times_as_fast(cell, name), 3) for name in over]
        rows.append((size_of(cell), cell["layout"], cell["dtype"], *rates, *times))
    columns = ("M x N x K", "layout", "dtype", *names, *(f"auto / {name}" for name in over))
    return Table(columns, tuple(rows), f"TFLOP/s; {operands}" if operands else "TFLOP/s")


def rates_line(cell: Cell, what: str) -> str:
    """A cell for people: TFLOP/s, what rivals have chosen, and which were not measured, with the reason."""
    rates = ", ".join(f"{name} {shown(tflops(cell, name), 0)}" for name in cell.get("us", {}))
    line = f"{what}: {rates} TFLOP/s" if rates else f"{what}: nothing measured"
    if (over := times_as_fast(cell, CUBLASLT)) is not None:
        line += f", {AUTO} / {CUBLASLT} {over:.3f}"
    line += "".join(f"; {name}: {detail}" for name, detail in cell.get("chosen", {}).items())
    return line + "".join(f"; no {name}: {why}" for name, why in cell.get("refused", {}).items())


def compared(cells: Sequence[Cell], rival: str, ours: str = AUTO) -> dict[str, Any] | None:
    """Over cells: how many times as fast as a rival ours is, and how much further off its results are. None where the
    rival was never measured."""
    known = [(times, cell) for cell in cells if (times := times_as_fast(cell, rival, ours)) is not None]
    if not known:
        return None
    least, where = min(known, key=lambda each: each[0])
    found: dict[str, Any] = {
        "rival": rival,
        "cells": len(known),
        "not_measured": len(cells) - len(known),
        "geometric_mean": geometric_mean([times for times, _ in known]),
        "least": least,
        "least_at": f"{size_of(where)} {where['layout']}",
    }
    for field in ("rms_error", "largest_error"):
        pairs = [(cell.get(field, {}).get(ours), cell.get(field, {}).get(rival)) for _, cell in known]
        parts = [part for pair in pairs if (part := ratio(*pair)) is not None]
        if parts:
            found[f"most_{field}_ratio"] = max(parts)
    return found


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


def summary_line(entry: dict[str, Any], ours: str = AUTO) -> str:
    """An entry of a summary, for people."""
    line = f"{entry['group']}: {ours} / {entry['rival']}: geometric mean {entry['geometric_mean']:.3f}, least "
    line += f"{entry['least']:.3f} at {entry['least_at']}, {entry['cells']} cells"
    if entry["not_measured"]:
        line += f" ({entry['not_measured']} more not measured)"
    if (off := entry.get("most_rms_error_ratio")) is not None:
        line += f"; errors at most {off:.2f} times as large"
        line += f", the largest of a result {entry['most_largest_error_ratio']:.2f} times"
    return line
