"""Draw a result of the Marlin benchmark: speed-up, bandwidth, TFLOP/s over the tokens, and each rival, as one SVG."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.bars import geometric_mean
from benchmarks.cells import rival_x
from benchmarks.report import Cell
from benchmarks.shapes import FIVE, LARGE
from cudatma.emulator.trace.svg import FAINT_INK, GRID, INK, STAGE_COLOURS, Svg, text_width
from tools.model_layers import Shape

#: Layers with a line of their own, where they were measured; all others go into the mean alone.
SHOWN: tuple[Shape, ...] = tuple(dict.fromkeys((*FIVE, *LARGE)))
_WIDTH, _PANEL_WIDTH, _PANEL_HEIGHT = 1120, 470, 250
_LEFT, _TOP, _GAP_X, _GAP_Y = 62, 92, 78, 86
_SIZE = 12.0
_BANDWIDTH_UP_TO = 64
_RIVAL_NAMES = {"cublas": "cuBLAS", "humming": "Humming", "tinygemm": "torch's int4"}

Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Line:
    """points: (tokens, value), ascending."""

    name: str
    colour: str
    points: tuple[Point, ...]
    width: float = 2.0


@dataclass(frozen=True, slots=True)
class Panel:
    """title: what stands above it. one: the value that a thicker grid line marks, if any."""

    title: str
    lines: tuple[Line, ...]
    one: float | None = None


def points_of(cells: Sequence[Cell], value: Callable[[Cell], float | None]) -> tuple[Point, ...]:
    """(tokens, value) of the cells that have one; the geometric mean where several have the same tokens."""
    by_tokens: dict[int, list[float]] = {}
    for cell in cells:
        found = value(cell)
        if found is not None and found > 0:
            by_tokens.setdefault(int(cell["m"]), []).append(float(found))
    return tuple((m, geometric_mean(values)) for m, values in sorted(by_tokens.items()))


def _times_faster(rival: str) -> Callable[[Cell], float | None]:
    return lambda cell: rival_x(cell, rival)


def panels_of(cells: Sequence[Cell]) -> list[Panel]:
    """What there is to draw; panels without a point are left out."""
    shapes = [shape for shape in SHOWN if any((c["k"], c["n"]) == shape for c in cells)]
    colours = {shape: STAGE_COLOURS[number % len(STAGE_COLOURS)] for number, shape in enumerate(SHOWN)}

    def by_shape(value: Callable[[Cell], float | None], *, with_mean: bool) -> tuple[Line, ...]:
        lines = []
        for k, n in shapes:
            points = points_of([c for c in cells if (c["k"], c["n"]) == (k, n)], value)
            lines.append(Line(f"{k} x {n}", colours[k, n], points))
        count = len({(c["k"], c["n"]) for c in cells})
        if with_mean and count > 1:
            lines.append(Line(f"geometric mean of {count} layers", INK, points_of(cells, value), 3.5))
        return tuple(line for line in lines if line.points)

    def bandwidth(cell: Cell) -> float | None:
        x = cell.get("x_floor")
        return 100 / x if x and cell["m"] <= _BANDWIDTH_UP_TO else None

    rivals = sorted({name for cell in cells for name in cell.get("rivals", {})})
    names = [f"over {_RIVAL_NAMES.get(name, name)}" for name in rivals]
    against = [
        Line(names[number], STAGE_COLOURS[-1 - number], points_of(cells, _times_faster(name)), 3)
        for number, name in enumerate(rivals)
    ]
    best = Line("over the fastest of them", INK, points_of(cells, lambda c: c.get("x_best")), 3)
    panels = [
        Panel("Times faster than cuBLAS", by_shape(lambda c: c.get("x_cublas"), with_mean=True), 1.0),
        Panel("Per cent of the speed of merely streaming the weight (F)", by_shape(bandwidth, with_mean=False), 100.0),
        Panel("TFLOP/s", by_shape(lambda c: c.get("tflop_s"), with_mean=False)),
    ]
    if len(rivals) > 1:
        lines = tuple(line for line in (*against, best) if line.points)
        panels.append(Panel("Times faster than each rival, geometric mean", lines, 1.0))
    return [panel for panel in panels if panel.lines]


def nice_step(span: float, most: int = 6) -> float:
    """1, 2 or 5 times a power of ten, so that ``span`` has at most ``most`` steps."""
    least = span / most
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


class _Axes:
    """Pixels of a panel's tokens (logarithmic) and values (linear, from 0)."""

    def __init__(self, panel: Panel, x: float, y: float) -> None:
        self.x, self.y = x, y
        self.tokens = sorted({m for line in panel.lines for m, _ in line.points})
        values = [value for line in panel.lines for _, value in line.points] + [panel.one or 0.0]
        self.step = nice_step(max(values))
        self.top = self.step * math.ceil(max(values) / self.step * (1 + 1e-9))

    def at_tokens(self, m: int) -> float:
        first, last = math.log2(self.tokens[0]), math.log2(self.tokens[-1])
        return self.x + _PANEL_WIDTH * ((math.log2(m) - first) / (last - first) if last > first else 0.5)

    def at_value(self, value: float) -> float:
        return self.y + _PANEL_HEIGHT * (1 - value / self.top)


def draw_panel(out: Svg, panel: Panel, x: float, y: float) -> None:
    """One panel with its upper left corner at (x, y)."""
    axes = _Axes(panel, x, y)
    out.text(x - 40, y - 16, panel.title, size=14, bold=True)
    for number in range(round(axes.top / axes.step) + 1):
        value = number * axes.step
        out.line(x, axes.at_value(value), x + _PANEL_WIDTH, axes.at_value(value), GRID)
        out.text(x - 8, axes.at_value(value) + 4, f"{value:g}", size=_SIZE, fill=FAINT_INK, anchor="end")
    if panel.one is not None:
        out.line(x, axes.at_value(panel.one), x + _PANEL_WIDTH, axes.at_value(panel.one), FAINT_INK, width=1.5)
    bottom = y + _PANEL_HEIGHT
    for m in axes.tokens:
        out.line(axes.at_tokens(m), bottom, axes.at_tokens(m), bottom + 4, FAINT_INK)
        out.text(axes.at_tokens(m), bottom + 18, str(m), size=_SIZE, fill=FAINT_INK, anchor="middle")
    out.text(x + _PANEL_WIDTH / 2, bottom + 36, "tokens (M)", size=_SIZE, fill=FAINT_INK, anchor="middle")
    for line in panel.lines:
        places = [(axes.at_tokens(m), axes.at_value(value)) for m, value in line.points]
        for (x0, y0), (x1, y1) in itertools.pairwise(places):
            out.line(x0, y0, x1, y1, line.colour, width=line.width)
        for at_x, at_y in places:
            out.circle(at_x, at_y, line.width + 0.8, line.colour)


def draw_legend(out: Svg, lines: Sequence[Line], y: float) -> float:
    """The lines' colours and names, each once, from ``y`` on; where the legend ends."""
    x = float(_LEFT - 40)
    for line in {line.name: line for line in lines}.values():
        if x + 34 + text_width(line.name, _SIZE) > _WIDTH - 20:
            x, y = float(_LEFT - 40), y + 20
        out.line(x, y - 4, x + 22, y - 4, line.colour, width=line.width + 1)
        out.text(x + 28, y, line.name, size=_SIZE)
        x += 50 + text_width(line.name, _SIZE)
    return y


def picture(result: Mapping[str, Any]) -> str:
    """A result as an SVG document. Raises ValueError where it has nothing to draw."""
    panels = panels_of([cell for cell in result["cells"] if cell.get("us") is not None])
    if not panels:
        raise ValueError("the result has no measured cell")
    settings, machine, out = result.get("settings", {}), result.get("machine", {}), Svg()
    title = f"W4A16 Marlin GEMM, {settings.get('dtype', '')}, group {settings.get('group_size', '')}"
    out.text(_LEFT - 40, 34, title, size=18, bold=True)
    how = "weights cold in L2; from M = 256 on in long runs, at the power limit"
    about = f"{machine.get('card', '')}, driver {machine.get('driver', '')}; {how}"
    out.text(_LEFT - 40, 54, about, size=_SIZE, fill=FAINT_INK)
    for number, panel in enumerate(panels):
        column, row = number % 2, number // 2
        x, y = _LEFT + column * (_PANEL_WIDTH + _GAP_X), _TOP + 8 + row * (_PANEL_HEIGHT + _GAP_Y)
        draw_panel(out, panel, x, y)
    bottom = _TOP + -(-len(panels) // 2) * (_PANEL_HEIGHT + _GAP_Y)
    end = draw_legend(out, [line for panel in panels for line in panel.lines], bottom + 6)
    return out.document(_WIDTH, end + 24, title)


def write_picture(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a result. Raises ValueError where it has nothing to draw."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(picture(result))


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench plot``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cudatma bench plot", description=__doc__)
    parser.add_argument("result", type=Path, help="JSON of cudatma bench marlin")
    parser.add_argument("--out", type=Path, metavar="FILE.svg", help="default: beside the result")
    options = parser.parse_args(argv)
    to = options.out or options.result.with_suffix(".svg")
    try:
        write_picture(json.loads(options.result.read_text()), to)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.exit(2, f"{parser.prog}: {options.result}: {error}\n")
    print(to)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
