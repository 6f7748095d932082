"""Draw results of the dense GEMM's benchmark as one SVG: TFLOP/s over the size of the squares, and speed relative to
cuBLASLt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.compare import AUTO, present
from benchmarks.gemm_table import LADDER, RIVALS, tflops
from benchmarks.plot import Line, Panel, drawing, points_of
from benchmarks.report import Cell, ratio
from benchmarks.rivals.dense import CUBLASLT, CUPY, TORCH
from cudatma.emulator.trace.svg import INK

_LADDER = "#7fa8c9"
#: Okabe and Ito's colors, as in the other picture.
_COLOURS = {
    TORCH: "#6b7280",
    CUBLASLT: INK,
    CUPY: "#9a6a00",
    "Triton": "#d55e00",
    "DeepGEMM": "#00805f",
    "QuACK": "#a8508a",
    AUTO: "#0072b2",
}


def panels_of(result: Mapping[str, Any]) -> list[Panel]:
    """By type: TFLOP/s in each layout, then speed relative to cuBLASLt, the geometric mean of the layouts."""
    squares = [cell for cell in result["cells"] if cell["m"] == cell["n"] == cell["k"] and not cell.get("layer")]
    panels = []
    for dtype in dict.fromkeys(cell["dtype"] for cell in squares):
        own = [cell for cell in squares if cell["dtype"] == dtype]
        layouts = list(dict.fromkeys(cell["layout"] for cell in own))
        for layout in layouts:
            cells = [cell for cell in own if cell["layout"] == layout]
            panels.append(_panel(f"TFLOP/s, {dtype}, {layout}", cells, lambda name: partial(tflops, name=name)))
        title = f"Speed relative to cuBLASLt, {dtype}, {', '.join(layouts)}"
        panels.append(_panel(title, own, lambda name: partial(_over_cublaslt, name=name)))
    return [panel for panel in panels if panel.lines]


def _over_cublaslt(cell: Cell, name: str) -> float | None:
    us = cell.get("us", {})
    return ratio(us.get(CUBLASLT), us.get(name))


def _panel(title: str, cells: list[Cell], value: Callable[[str], Callable[[Cell], float | None]]) -> Panel:
    names = present(cells, (*LADDER, *RIVALS, AUTO))  # the last one is drawn on top
    lines = [
        Line(name, _COLOURS.get(name, _LADDER), points_of(cells, value(name)), 3.5 if name == AUTO else _width(name))
        for name in names
    ]
    return Panel(title, tuple(line for line in lines if line.points), "M = N = K")


def _width(name: str) -> float:
    return 1.4 if name in LADDER else 2.5


def picture(result: Mapping[str, Any]) -> str:
    """A result as an SVG document. Raises ValueError where there is nothing to draw."""
    machine, settings = result.get("machine", {}), result.get("settings", {})
    about = (
        f"{machine.get('card', '')}, driver {machine.get('driver', '')}; {settings.get('operands', '')}",
        f"commit {result.get('commit') or 'unknown'}; {', '.join(LADDER)}: the versions, auto: what gemm chooses",
    )
    return drawing("Dense GEMM", about, panels_of(result))
