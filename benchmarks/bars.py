"""What the portable Marlin kernel has to reach on an H200, and whether measured cells do. Pure functions of cells.

A cell has k, n, m, us, and, where they were measured, x_cublas (cuBLAS time / ours), x_alternating (the same in turns)
and x_floor (ours / F).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.report import Cell


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: ``value`` of a cell's field must be at most (``at_most``) or at least ``limit`` wherever it applies."""

    name: str
    field: str
    limit: float
    at_most: bool
    applies: Callable[[Cell], bool]

    def holds(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar against the cells it applies to.

    worst: the cell furthest on the wrong side, None if none was measured. below: cells that miss the bar. missing:
    cells without a value, because they or their rival failed.
    """

    bar: Bar
    worst: Cell | None
    below: tuple[Cell, ...]
    missing: tuple[Cell, ...]

    @property
    def status(self) -> str:
        """What became of the bar: "met", "missed", or "not measured" where no cell misses it but some have no value."""
        if self.below:
            return "missed"
        return "met" if self.worst is not None and not self.missing else "not measured"

    def __str__(self) -> str:
        if self.worst is None:
            return f"{self.status}: {self.bar.name}"
        worst = f"worst {self.worst[self.bar.field]:.2f} at {cell_name(self.worst)}"
        count = f"{len(self.below)} cells miss it, " if self.below else ""
        unknown = f", {len(self.missing)} cells not measured" if self.missing else ""
        return f"{self.status}: {self.bar.name}: {count}{worst}{unknown}"


BARS: tuple[Bar, ...] = (
    Bar(
        "at most 1.5 F for M <= 16 on (8192, 28672)",
        "x_floor",
        1.5,
        True,
        lambda c: c["m"] <= 16 and (c["k"], c["n"]) == (8192, 28672),
    ),
    Bar("never slower than cuBLAS for M <= 32", "x_cublas", 1.0, False, lambda c: c["m"] <= 32),
    Bar("at least 0.9x cuBLAS at M = 64", "x_cublas", 0.9, False, lambda c: c["m"] == 64),
    Bar("at least 0.5x cuBLAS for M = 256..4096", "x_cublas", 0.5, False, lambda c: 256 <= c["m"] <= 4096),
    Bar("the same in alternating blocks", "x_alternating", 0.5, False, lambda c: 256 <= c["m"] <= 4096),
)


def cell_name(cell: Cell) -> str:
    return f"{cell['k']} x {cell['n']}, M = {cell['m']}"


def judge(bar: Bar, cells: Sequence[Cell]) -> Verdict:
    """One bar against all cells."""
    concerned = [cell for cell in cells if bar.applies(cell)]
    measured = [cell for cell in concerned if cell.get(bar.field) is not None]
    missing = tuple(cell for cell in concerned if cell.get(bar.field) is None)
    pick = max if bar.at_most else min
    worst = pick(measured, key=lambda cell: float(cell[bar.field]), default=None)
    return Verdict(bar, worst, tuple(cell for cell in measured if not bar.holds(cell[bar.field])), missing)


def verdicts(cells: Sequence[Cell]) -> list[Verdict]:
    """All bars, in their order."""
    return [judge(bar, cells) for bar in BARS]
