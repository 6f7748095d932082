"""Draw an SVG of Marlin benchmark results, with the speed relative to cuBLAS and the times of one layer."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # The checkout need not be installed.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

from benchmarks.report import Cell
from benchmarks.shapes import FIVE, LARGE
from cudatma.emulator.trace.svg import FAINT_INK, GRID, INK, Svg, text_width, tint
from tools.model_layers import Shape

#: Preferred layers for the second panel. If none of them was measured, the panel shows the result's first layer.
SHOWN: tuple[Shape, ...] = tuple(dict.fromkeys((*LARGE, *FIVE)))
WIDTH, PANEL_HEIGHT = 800, 260
LEFT, _RIGHT, PANEL_GAP = 66, 24, 96
_PANEL_WIDTH = WIDTH - LEFT - _RIGHT
_SIZE, _LABEL_SIZE = 12.5, 13.0
_NAMES = {
    "cublas": "cuBLAS",
    "humming": "Humming",
    "machete": "Machete",
    "marlin": "Marlin",
    "quack": "QuACK",
    "tinygemm": "torch's int4",
}
#: Okabe and Ito's colors, which color-blind readers can distinguish.
_OURS, _OTHER_LAYERS = "#0072b2", "#3d8fbf"
_COLORS = {
    "cublas": INK,
    "humming": "#d55e00",
    "machete": "#00805f",
    "marlin": "#a8508a",
    "quack": "#5c4b8a",
    "tinygemm": "#9a6a00",
}
#: Positions along each segment of a line at which the placement of a label is tried.
_WHERE = (0.0, 0.25, 0.5, 0.75, 1.0)

Point = tuple[int, float]
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """A line in a panel. Thin lines have no dots.

    Attributes
    ----------
    points : tuple of (int, float)
        M and value, in ascending order of M.
    band : tuple of (int, float, float)
        M, minimum and maximum around the points.
    """

    name: str
    color: str
    points: tuple[Point, ...]
    width: float = 2.5
    band: tuple[tuple[int, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: tuple[Line, ...]


def points_of(cells: Sequence[Cell], value: Callable[[Cell], float | None]) -> tuple[Point, ...]:
    """Return (M, value) for each M at which cells have a value, using the geometric mean of these values."""
    return tuple((m, geometric_mean(values)) for m, values in _by_m(cells, value).items())


def _by_m(cells: Sequence[Cell], value: Callable[[Cell], float | None]) -> dict[int, list[float]]:
    by_m: dict[int, list[float]] = {}
    for cell in cells:
        number = value(cell)
        if number is not None and number > 0:
            by_m.setdefault(int(cell["m"]), []).append(float(number))
    return dict(sorted(by_m.items()))


def measured(result: Mapping[str, Any]) -> list[Cell]:
    """Return a result's cells that contain a time."""
    return [cell for cell in result["cells"] if cell.get("us") is not None]


def _layers(cells: Iterable[Cell]) -> set[Shape]:
    return {(cell["k"], cell["n"]) for cell in cells}


def rival_us(cell: Cell, rival: str) -> float | None:
    """Return a competing library's microseconds, or None if the library was not measured."""
    us = cell.get("rivals", {}).get(rival, {}).get("us")
    return None if us is None else float(us)


def rival_over_cublas(cell: Cell, rival: str) -> float | None:
    """Return a competing library's speedup over cuBLAS, or None if either was not measured."""
    us, cublas = rival_us(cell, rival), rival_us(cell, "cublas")
    return None if us is None or cublas is None or us <= 0 else cublas / us


def rivals_of(result: Mapping[str, Any]) -> list[str]:
    """Return the competing libraries, except cuBLAS, with times in a result."""
    return sorted({name for cell in measured(result) for name in cell.get("rivals", {})} - {"cublas"})


def _name(rival: str, result: Mapping[str, Any]) -> str:
    version = result.get("settings", {}).get("rivals", {}).get(rival, "")
    return f"{_NAMES.get(rival, rival)} {version}".strip()


def _color(rival: str) -> str:
    return _COLORS.get(rival, FAINT_INK)


def _count(layers: int, which: str = "") -> str:
    return f"{layers} {which}layer{'' if layers == 1 else 's'}"


def panels_of(results: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return the panels for the first result, with competing libraries and additional layers from the other results."""
    first = measured(results[0])
    mean = "" if len(_layers(first)) == 1 else "geometric mean of "

    def over_cublas(cell: Cell) -> float | None:
        return cell.get("x_cublas")

    band = tuple((m, min(values), max(values)) for m, values in _by_m(first, over_cublas).items())
    name = f"cudatma, {mean}{_count(len(_layers(first)))}"
    ratios = [Line(name, _OURS, points_of(first, over_cublas), 3.5, band if mean else ())]
    for result in results[1:]:
        if cells := [c for c in measured(result) if (c["k"], c["n"]) not in _layers(first)]:
            name = f"cudatma, {_count(len(_layers(cells)), 'other ')}"
            ratios.append(Line(name, _OTHER_LAYERS, points_of(cells, over_cublas), 1.4))
    shape = next((s for s in SHOWN if s in _layers(first)), (first[0]["k"], first[0]["n"]) if first else (0, 0))
    own = [cell for cell in first if (cell["k"], cell["n"]) == shape]
    times = [
        Line("cudatma", _OURS, points_of(own, lambda c: c["us"]), 3.5),
        Line("cuBLAS", INK, points_of(own, lambda c: c.get("cublas_us"))),
        Line("reading the weights once", FAINT_INK, points_of(own, lambda c: c.get("floor_us")), 1.4),
    ]
    drawn: set[str] = set()
    for result in results:
        for rival in (name for name in rivals_of(result) if name not in drawn):
            drawn.add(rival)
            cells = measured(result)
            own_cells = [cell for cell in cells if (cell["k"], cell["n"]) == shape]
            speeds = points_of(cells, partial(rival_over_cublas, rival=rival))
            ratios.append(Line(_name(rival, result), _color(rival), speeds))
            us = points_of(own_cells, partial(rival_us, rival=rival))
            times.append(Line(_name(rival, result), _color(rival), us))
    if all_m := [m for line in ratios for m, _ in line.points]:
        ratios.append(Line("cuBLAS", INK, ((min(all_m), 1.0), (max(all_m), 1.0)), 1.4))
    panels = [
        Panel("Speed relative to cuBLAS (higher is faster)", tuple(line for line in ratios if line.points)),
        Panel(f"Microseconds of one call, K x N = {shape[0]} x {shape[1]} (lower is faster)", tuple(times)),
    ]
    return [Panel(p.title, lines) for p in panels if (lines := tuple(line for line in p.lines if line.points))]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two bounds, denser if the bounds are closer together."""
    decades = math.log10(high / low)
    digits = (1, 1.5, 2, 3, 4, 5, 7) if decades < 1 else (1, 2, 5) if decades < 3.5 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [d * 10.0**p for p in powers for d in digits if low * (1 - 1e-9) <= d * 10.0**p <= high * (1 + 1e-9)]


class _Axes:
    """Logarithmic mapping of M and values to pixel positions in a panel."""

    def __init__(self, panel: Panel, x: float, y: float) -> None:
        self.x, self.y = x, y
        self.ms = sorted({m for line in panel.lines for m, _ in line.points})
        values = [value for line in panel.lines for _, value in line.points]
        values += [value for line in panel.lines for _, *both in line.band for value in both]
        self.low, self.high = min(values) / 1.15, max(values) * 1.15
        self.low /= (self.high / self.low) ** 0.06  # Leave space for a label below the lowest line.

    def at_m(self, m: float) -> float:
        first, last = math.log2(self.ms[0]), math.log2(self.ms[-1])
        fraction = (math.log2(m) - first) / (last - first) if last > first else 0.5
        return self.x + 14 + (_PANEL_WIDTH - 28) * fraction

    def at_value(self, value: float) -> float:
        return self.y + PANEL_HEIGHT * (1 - math.log(value / self.low) / math.log(self.high / self.low))

    def places(self, line: Line) -> list[tuple[float, float]]:
        return [(self.at_m(m), self.at_value(value)) for m, value in line.points]


def crosses(box: Box, x0: float, y0: float, x1: float, y1: float) -> bool:
    """Return whether a straight line, about 4 pixels wide, crosses a box."""
    if max(x0, x1) < box[0] - 2 or min(x0, x1) > box[2] + 2 or max(y0, y1) < box[1] - 2 or min(y0, y1) > box[3] + 2:
        return False
    steps = max(1, math.ceil(math.hypot(x1 - x0, y1 - y0) / 2))
    along = ((x0 + (x1 - x0) * n / steps, y0 + (y1 - y0) * n / steps) for n in range(steps + 1))
    return any(box[0] - 2 <= x <= box[2] + 2 and box[1] - 2 <= y <= box[3] + 2 for x, y in along)


def label_place(
    line: Line, axes: _Axes, own: Sequence[Box], foreign: Sequence[Box], occupied: Sequence[Box]
) -> Box | None:
    """Return a box without overlaps for a line's name, above or below the line and as close to it as possible.

    ``own`` and ``foreign`` are the segments of this line and of the other lines. Return None if no box fits.
    """
    wide, candidates = text_width(line.name, _LABEL_SIZE), []
    places = axes.places(line)
    for (x0, y0), (x1, y1) in itertools.pairwise(places) if len(places) > 1 else [(places[0], places[0])]:
        for fraction in _WHERE:
            x, y = x0 + (x1 - x0) * fraction, y0 + (y1 - y0) * fraction
            for left in (x, x - wide / 2, x - wide):
                for distance in (8, 14, 20):
                    for top in (y - distance - _LABEL_SIZE, y + distance):
                        box = (left, top, left + wide, top + _LABEL_SIZE)
                        is_inside = axes.x <= box[0] and box[2] <= axes.x + _PANEL_WIDTH
                        is_inside &= axes.y <= box[1] and box[3] <= axes.y + PANEL_HEIGHT
                        if not is_inside or any(_overlap(box, other) for other in occupied):
                            continue
                        if any(crosses(box, *segment) for segment in own):
                            continue
                        around = (box[0], box[1] - distance, box[2], box[3] + distance)
                        if not any(crosses(around, *segment) for segment in foreign):
                            candidates.append((distance, box))
    return min(candidates)[1] if candidates else None


def _overlap(first: Box, second: Box) -> bool:
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]


def draw_panel(out: Svg, panel: Panel, x: float, y: float) -> list[Line]:
    """Draw a panel with its upper left corner at (x, y), and return the lines that have no space for a label."""
    axes = _Axes(panel, x, y)
    out.text(18, y - 14, panel.title, size=14.5, bold=True)
    for value in log_ticks(axes.low, axes.high):
        out.line(x, axes.at_value(value), x + _PANEL_WIDTH, axes.at_value(value), GRID)
        out.text(x - 8, axes.at_value(value) + 4, f"{value:g}", size=_SIZE, fill=FAINT_INK, anchor="end")
    bottom, right = y + PANEL_HEIGHT, -math.inf
    for m in axes.ms:
        out.line(axes.at_m(m), bottom, axes.at_m(m), bottom + 4, FAINT_INK)
    for m in (m for m in axes.ms if m & (m - 1) == 0 or len(axes.ms) < 4):
        half = text_width(str(m), _SIZE) / 2
        if axes.at_m(m) - half > right + 4:
            right = axes.at_m(m) + half
            out.text(axes.at_m(m), bottom + 19, str(m), size=_SIZE, fill=FAINT_INK, anchor="middle")
    out.text(x + _PANEL_WIDTH / 2, bottom + 38, "M, rows of activations", size=_SIZE, fill=FAINT_INK, anchor="middle")
    for line in panel.lines:
        if line.band:
            upper = [(axes.at_m(m), axes.at_value(high)) for m, _, high in line.band]
            lower = [(axes.at_m(m), axes.at_value(low)) for m, low, _ in reversed(line.band)]
            out.polygon((*upper, *lower), tint(line.color, 0.12), "slowest to fastest layer")
    segments: list[list[Box]] = []
    for line in panel.lines:
        places = axes.places(line)
        segments.append([(*begin, *end) for begin, end in itertools.pairwise(places)])
        for x0, y0, x1, y1 in segments[-1]:
            out.line(x0, y0, x1, y1, line.color, width=line.width)
        if line.width > 2:
            for at_x, at_y in places:
                out.circle(at_x, at_y, line.width + 0.8, line.color)
                segments[-1].append((at_x - 4, at_y, at_x + 4, at_y))
    occupied: list[Box] = []
    unlabeled = []
    for number, line in enumerate(panel.lines):
        foreign = [segment for other, others in enumerate(segments) if other != number for segment in others]
        box = label_place(line, axes, segments[number], foreign, occupied)
        if box is None:
            unlabeled.append(line)
            continue
        occupied.append((box[0] - 10, box[1], box[2] + 10, box[3]))
        out.text(box[0], box[3] - 2.5, line.name, size=_LABEL_SIZE, fill=line.color, bold=line.width > 3)
    return unlabeled


def draw_legend(out: Svg, lines: Sequence[Line], y: float) -> float:
    """Draw the colors and names of lines without labels, from ``y`` downward, and return the legend's lower end."""
    x = 18.0
    for line in {line.name: line for line in lines}.values():
        if x + 34 + text_width(line.name, _SIZE) > WIDTH - 20:
            x, y = 18.0, y + 20
        out.line(x, y - 4, x + 22, y - 4, line.color, width=line.width + 1)
        out.text(x + 28, y, line.name, size=_SIZE)
        x += 50 + text_width(line.name, _SIZE)
    return y


def about(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the machine and the commits of the results. Raises ValueError if they are from different machines."""
    machines = {(r.get("machine", {}).get("card", ""), r.get("machine", {}).get("driver", "")) for r in results}
    if len(machines) > 1:
        raise ValueError("the results must be from the same GPU and driver")
    (gpu, driver) = machines.pop()
    settings = results[0].get("settings", {})
    where = f"{gpu}, driver {driver}; {settings.get('dtype', '')}, group {settings.get('group_size', '')}"
    commits: dict[str, list[str]] = {}
    for number, result in enumerate(results):
        rivals = [_NAMES.get(rival, rival) for rival in rivals_of(result)]
        if number == 0:
            what = ", ".join(("cudatma", "cuBLAS", *rivals)) if rivals else "cudatma and cuBLAS"
        else:
            what = ", ".join(rivals) or "other layers"
        commits.setdefault(result.get("commit") or "unknown", []).append(what)
    commits_text = "; ".join(f"commit {commit}: {', '.join(dict.fromkeys(what))}" for commit, what in commits.items())
    how = "Weights cold in L2; M >= 256 measured in long runs at the power limit"
    has_band = any(line.band for panel in panels_of(results) for line in panel.lines)
    return [where, commits_text, how + ("; shaded: slowest to fastest layer" if has_band else "")]


def picture(result: Mapping[str, Any], *more: Mapping[str, Any]) -> str:
    """Return results as an SVG document. Raises ValueError if nothing was measured.

    ``more`` are results on the same machine that add competing libraries or other layers.
    """
    results = (result, *more)
    panels, title = panels_of(results), "W4A16 Marlin GEMM"
    if not panels:
        raise ValueError("the result contains no measured cells")
    out, y = Svg(), 34.0
    out.text(18, y, title, size=18, bold=True)
    for text in about(results):
        y += 19
        out.text(18, y, text, size=_SIZE, fill=FAINT_INK)
    y += 46
    unlabeled: list[Line] = []
    for panel in panels:
        unlabeled += draw_panel(out, panel, LEFT, y)
        y += PANEL_HEIGHT + PANEL_GAP
    end = draw_legend(out, unlabeled, y - 28) if unlabeled else y - 46
    return out.document(WIDTH, end + 20, title)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench plot`` and return the exit status."""
    parser = argparse.ArgumentParser(prog="cudatma bench plot", description=__doc__)
    parser.add_argument("result", type=Path, help="JSON of cudatma bench marlin")
    parser.add_argument(
        "more", type=Path, nargs="*", help="results for other libraries or layers, measured on the same machine"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.svg", help="output file (default: in the folder of the result)"
    )
    options = parser.parse_args(argv)
    target = options.out or options.result.with_suffix(".svg")
    reading = options.result
    try:
        results = []
        for reading in (options.result, *options.more):
            results.append(json.loads(reading.read_text()))
        reading = options.result
        text = picture(*results)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        parser.exit(2, f"{parser.prog}: {reading}: {error}\n")
    print(target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
