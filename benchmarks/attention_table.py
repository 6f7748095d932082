"""What a run of attention's benchmark says: lines, tables, and a summary over calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.compare import AUTO, compared, present, times_as_fast
from benchmarks.report import Cell, Table, ratio, shown
from benchmarks.rivals.attention import RIVALS
from cudatma.kernels.attention.config import CHOICE

LADDER = CHOICE.names
#: The fastest rival of a cell, whoever that is.
BEST = "best"
#: Lengths over which the summary of all calls is taken.
SUMMED = (512, 16384)


def tflops(cell: Cell, name: str) -> float | None:
    """A causal call counts half."""
    us = cell.get("us", {}).get(name)
    return None if not us else 1e-6 * cell["flops"] / us


def with_best(cell: Cell) -> Cell:
    """The cell with the fastest rival as one of its own."""
    us = {name: cell["us"][name] for name in RIVALS if name in cell.get("us", {})}
    if not us:
        return cell
    best = min(us, key=lambda name: us[name])
    made = {**cell, "us": {**cell["us"], BEST: us[best]}, BEST: best}
    for field in ("rms_error", "largest_error"):
        if best in cell.get(field, {}):
            made[field] = {**cell[field], BEST: cell[field][best]}
    return made


def heads_of(cell: Cell) -> str:
    heads, kv_heads = cell["heads"], cell["kv_heads"]
    return str(heads) if heads == kv_heads else f"{heads}/{kv_heads}"


def kind_of(cell: Cell) -> str:
    """What a cell has besides its length."""
    return f"{cell['dtype']}, {heads_of(cell)} heads of {cell['head_dim']}, {cell['mask']}"


def place_of(cell: Cell) -> str:
    return f"{cell['length']}, {kind_of(cell)}"


def attention_table(cells: Sequence[Cell]) -> Table:
    """TFLOP/s of each contender, and how many times as fast as the fastest rival the choice is."""
    names = [*present(cells, RIVALS), *present(cells, LADDER), *present(cells, (AUTO,))]
    rows = []
    for cell in cells:
        facts = cell["head_dim"], heads_of(cell), cell["mask"], cell["dtype"], f"{cell['batch']} x {cell['length']}"
        rates = [shown(tflops(cell, name), 0) for name in names]
        rows.append((*facts, *rates, shown(times_as_fast(with_best(cell), BEST), 3)))
    columns = ("head dim", "heads", "mask", "dtype", "batch x length", *names, f"{AUTO} / {BEST}")
    return Table(columns, tuple(rows), "TFLOP/s, causal calls counted half")


def rates_line(cell: Cell, what: str) -> str:
    """A cell for people: TFLOP/s, errors, and which were not measured, with the reason."""
    rates = ", ".join(f"{name} {shown(tflops(cell, name), 0)}" for name in cell.get("us", {}))
    line = f"{what}: {rates} TFLOP/s" if rates else f"{what}: nothing measured"
    if (over := times_as_fast(with_best(cell), BEST)) is not None:
        line += f", {AUTO} / {BEST} {over:.3f}"
    if (off := cell.get("rms_error", {})).get(AUTO) is not None:
        line += f", {AUTO} {off[AUTO]:.1e} off"
        rivals = [each for name in RIVALS if (each := ratio(off[AUTO], off.get(name))) is not None]
        line += f", at most {max(rivals):.2f} times the rivals'" if rivals else ""
    return line + "".join(f"; no {name}: {why}" for name, why in cell.get("refused", {}).items())


def groups(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells by what is summed up: all of some lengths, then each kind."""
    least, most = SUMMED
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        if least <= cell["length"] <= most:
            found.setdefault(f"{cell['dtype']}, all, {least} to {most}", []).append(cell)
    for cell in cells:
        found.setdefault(kind_of(cell), []).append(cell)
    return found


def attention_summary(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """``auto`` over the fastest rival of each cell, and over each rival, by group of calls."""
    return [
        {"group": group, **found}
        for group, its in groups([with_best(cell) for cell in cells]).items()
        for rival in (BEST, *present(its, RIVALS))
        if (found := compared(its, rival, place_of)) is not None
    ]
