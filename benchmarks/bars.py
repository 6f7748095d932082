"""What the Marlin GEMM has to reach on an H200, and whether measured cells do. Pure functions of cells.

A cell has k, n, m, us, and where they were measured floor_us, x_floor (ours / F), x_floor_programmatic (the same in a
chain of dependent launches), x_cublas (P: the fastest of cuBLAS / ours) and x_best (the fastest rival of all / ours).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.operands import packed_bytes
from benchmarks.report import Cell
from benchmarks.shapes import LARGE
from tools.model_layers import Shape

Value = Callable[[Cell], float | None]


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: a value of every cell it applies to, or their geometric mean, must be at most or at least ``limit``.

    value: of a cell, None where it was not measured. unit: after the number, as in "1.10 F".
    """

    name: str
    value: Value
    limit: float
    at_most: bool
    applies: Callable[[Cell], bool]
    unit: str = ""
    is_mean: bool = False

    def holds(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit

    @property
    def bound(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g}{self.unit}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar against the cells it applies to.

    measured: the geometric mean, or the value of the worst cell. worst: the cell furthest on the wrong side, None if
    none was measured. below: cells that miss the bar. missing: cells without a value: they or their rival failed.
    """

    bar: Bar
    measured: float | None
    worst: Cell | None
    below: tuple[Cell, ...]
    missing: tuple[Cell, ...]

    @property
    def status(self) -> str:
        """What became of the bar: "met", "missed", or "not measured" where nothing misses it but values are missing."""
        if self.measured is not None and not self.bar.holds(self.measured):
            return "missed"
        return "met" if self.measured is not None and not self.missing else "not measured"

    def as_json(self) -> dict[str, Any]:
        return {
            "bar": self.bar.name,
            "bound": self.bar.bound,
            "status": self.status,
            "measured": self.measured,
            "worst": None if self.worst is None else cell_name(self.worst),
            "below": [f"{cell_name(cell)}: {self.bar.value(cell):.3f}" for cell in self.below],
            "missing": [cell_name(cell) for cell in self.missing],
        }

    def __str__(self) -> str:
        text = f"{self.status}: {self.bar.name} {self.bar.bound}"
        if self.measured is None or self.worst is None:
            return text
        text += f": {self.measured:.3f}{self.bar.unit}"
        text += ", geometric mean" if self.bar.is_mean else f" at {cell_name(self.worst)}"
        text += f"; {len(self.below)} cells miss it" if self.below and not self.bar.is_mean else ""
        return text + (f"; {len(self.missing)} cells not measured" if self.missing else "")


def cell_name(cell: Cell) -> str:
    return f"{cell['k']} x {cell['n']}, M = {cell['m']}"


def _field(name: str) -> Value:
    return lambda cell: cell.get(name)


def _above_floor(cell: Cell) -> float | None:
    us, floor = cell.get("us"), cell.get("floor_us")
    return None if us is None or floor is None else float(us - floor)


def _shape(cell: Cell) -> Shape:
    return cell["k"], cell["n"]


def _megabytes(cell: Cell) -> float:
    """What the layer streams: int4 values and scales."""
    return packed_bytes(cell["k"], cell["n"]) / 1e6


def _at(m_values: Sequence[int], *shapes: Shape) -> Callable[[Cell], bool]:
    return lambda cell: cell["m"] in m_values and (not shapes or _shape(cell) in shapes)


def _floor(name: str, limit: float, applies: Callable[[Cell], bool], field: str = "x_floor") -> Bar:
    return Bar(name, _field(field), limit, True, applies, " F")


def _times(
    name: str, limit: float, applies: Callable[[Cell], bool], rival: str = "x_cublas", mean: bool = False
) -> Bar:
    return Bar(name, _field(rival), limit, False, applies, " x", mean)


_FEW = range(1, 17)
_SMALL, _SQUARE = (4096, 4096), (8192, 8192)
_UP_TO_128, _FROM_256 = range(1, 129), range(256, 1 << 20)

BARS: tuple[Bar, ...] = (
    _floor("M = 1, over 30 MB", 1.10, lambda c: c["m"] == 1 and _megabytes(c) > 30),
    _floor("M = 16, over 30 MB", 1.18, lambda c: c["m"] == 16 and _megabytes(c) > 30),
    Bar("M <= 16, 8 to 30 MB, above F", _above_floor, 1.5, True,
        lambda c: c["m"] in _FEW and 8 <= _megabytes(c) <= 30, " us"),
    _floor("M <= 16, 4096 x 4096", 1.35, _at(_FEW, _SMALL)),
    _floor("M <= 16, chained, over 30 MB", 1.15, lambda c: c["m"] in _FEW and _megabytes(c) > 30,
           "x_floor_programmatic"),
    _floor("M <= 16, chained, 4096 x 4096", 1.6, _at(_FEW, _SMALL), "x_floor_programmatic"),
    _floor("M = 32, 70B layers", 1.35, _at((32,), *LARGE)),
    _times("M = 64, 70B layers, over cuBLAS", 2.4, _at((64,), *LARGE)),
    _times("M = 64, 8192 x 8192, over cuBLAS", 1.9, _at((64,), _SQUARE)),
    _times("M = 64, 4096 x 4096, over cuBLAS", 1.3, _at((64,), _SMALL)),
    _times("M = 128, 8192 x 28672, over cuBLAS", 1.5, _at((128,), (8192, 28672))),
    _times("M = 128, 28672 x 8192, over cuBLAS", 1.45, _at((128,), (28672, 8192))),
    _times("M = 128, 8192 x 8192, over cuBLAS", 1.3, _at((128,), _SQUARE)),
    _times("M = 128, 4096 x 4096, over cuBLAS", 1.05, _at((128,), _SMALL)),
    _times("M = 256, 70B layers, over cuBLAS", 1.12, _at((256,), *LARGE)),
    _times("M = 256, 4096 x 4096, over cuBLAS", 1.0, _at((256,), _SMALL)),
    _times("M = 512, all layers, over cuBLAS", 1.06, _at((512,)), mean=True),
    _times("M = 1024, all layers, over cuBLAS", 1.06, _at((1024,)), mean=True),
    _times("M = 512 and 1024, each layer, over cuBLAS", 1.0, _at((512, 1024))),
    _times("M = 2048 to 8192, 70B layers, over cuBLAS", 1.02, _at((2048, 4096, 8192), *LARGE)),
    _times("M = 2048 to 8192, each layer, over cuBLAS", 0.97, _at((2048, 4096, 8192))),
    _times("M <= 128, over the best rival", 1.2, _at(_UP_TO_128), "x_best", mean=True),
    _times("M >= 256, over the best rival", 1.0, _at(_FROM_256), "x_best", mean=True),
    _times("each cell, over the best rival", 0.95, lambda c: True, "x_best"),
)  # fmt: skip


def geometric_mean(values: Sequence[float]) -> float:
    """Of at least one positive number."""
    return math.exp(sum(map(math.log, values)) / len(values))


def judge(bar: Bar, cells: Sequence[Cell]) -> Verdict:
    """One bar against all cells."""
    concerned = [(cell, bar.value(cell)) for cell in cells if bar.applies(cell)]
    known = [(cell, value) for cell, value in concerned if value is not None]
    missing = tuple(cell for cell, value in concerned if value is None)
    if not known:
        return Verdict(bar, None, None, (), missing)
    worst, extreme = (max if bar.at_most else min)(known, key=lambda item: item[1])
    measured = geometric_mean([value for _, value in known]) if bar.is_mean else extreme
    return Verdict(bar, measured, worst, tuple(cell for cell, value in known if not bar.holds(value)), missing)


def verdicts(cells: Sequence[Cell]) -> list[Verdict]:
    """All bars, in their order."""
    return [judge(bar, cells) for bar in BARS]
