"""Draw results of attention's benchmark as one SVG: TFLOP/s over the length, and speed relative to the fastest
rival."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.attention_table import BEST, LADDER, kind_of, tflops, with_best
from benchmarks.compare import AUTO, present, times_as_fast
from benchmarks.plot import Line, Panel, drawing, points_of
from benchmarks.report import Cell
from benchmarks.rivals.attention import CUDNN, FA2, FA3, FA4, FLASHINFER, RIVALS
from cudatma.emulator.trace.svg import INK

_LADDER, _LABEL = "#7fa8c9", "queries and keys of a sequence"
#: Okabe and Ito's colors, as in the other pictures.
_COLOURS = {
    CUDNN: INK,
    FA2: "#6b7280",
    FA3: "#d55e00",
    FA4: "#00805f",
    FLASHINFER: "#a8508a",
    AUTO: "#0072b2",
}


def panels_of(result: Mapping[str, Any]) -> list[Panel]:
    """TFLOP/s of each kind of call, then how many times as fast as the fastest rival each kind is."""
    cells = [{**with_best(cell), "m": cell["length"]} for cell in result["cells"]]
    kinds: dict[str, list[Cell]] = {}
    for cell in cells:
        kinds.setdefault(kind_of(cell), []).append(cell)
    panels = [Panel(f"TFLOP/s, {kind}", _lines(its), _LABEL) for kind, its in kinds.items()]
    over = [
        Line(kind, colour, points_of(its, partial(times_as_fast, rival=BEST)))
        for (kind, its), colour in zip(kinds.items(), [*_COLOURS.values()] * len(kinds), strict=False)
    ]
    panels.append(Panel("Speed relative to the fastest rival", tuple(line for line in over if line.points), _LABEL))
    return [panel for panel in panels if panel.lines]


def _lines(cells: list[Cell]) -> tuple[Line, ...]:
    found = []
    for name in present(cells, (*LADDER, *RIVALS, AUTO)):  # the last one is drawn on top
        width = 3.5 if name == AUTO else 1.4 if name in LADDER else 2.5
        found.append(Line(name, _COLOURS.get(name, _LADDER), points_of(cells, partial(tflops, name=name)), width))
    return tuple(line for line in found if line.points)


def picture(result: Mapping[str, Any]) -> str:
    """A result as an SVG document. Raises ValueError where there is nothing to draw."""
    machine = result.get("machine", {})
    about = (
        f"{machine.get('card', '')}, driver {machine.get('driver', '')}; causal calls counted half",
        f"commit {result.get('commit') or 'unknown'}; {', '.join(LADDER)}: the versions, auto: what attention chooses",
    )
    return drawing("Attention, forward", about, panels_of(result))
