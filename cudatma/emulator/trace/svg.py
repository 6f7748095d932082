"""SVG elements, colors and the legend for pictures of traces.

The output is deterministic. It contains no identifiers or times.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

INK, FAINT_INK, PANEL, BORDER, TRACK, GRID = "#1f2430", "#5b6478", "#fcfcfd", "#c9cfdb", "#eceff4", "#dfe3ea"
HAZARD = "#c62828"
#: Colors of stages, which repeat if there are more stages than colors. Color-blind readers can distinguish them, and
#: labels are readable on all of them.
STAGE_COLOURS = (
    *("#3b6fb6", "#d9772b", "#2f7d4b", "#a8489b", "#0f7a82", "#c2434d"),
    *("#6c5dba", "#7d6d26", "#4f6d7a", "#b3567d", "#4d7a24", "#7d5a45"),
)
#: Opacity of a stage's color while its copies are in flight, and while a warp works on the stage.
FLYING, WORKING = 0.16, 0.4
#: Color of events that do not belong to a stage.
NEUTRAL = "#66738a"
HATCH, HATCH_GROUND = "cudatma-wait", "#f3f4f7"
_FONT = "Helvetica, Arial, DejaVu Sans, sans-serif"
#: Mean advance width of a character, relative to the font size.
_ADVANCE = 0.6


def text_width(text: str, size: float) -> float:
    """Return the approximate width of a text."""
    return len(text) * size * _ADVANCE


def tint(colour: str, strength: float) -> str:
    """Return a mixture of a color and white. Strength 1 returns the color itself."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - channel) * strength):02x}" for channel in channels)


def luminance(colour: str) -> float:
    """Return the relative luminance of a color, from 0 to 1, as defined by WCAG."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(colour: str, other: str) -> float:
    """Return the contrast ratio of two colors, 1 to 21. WCAG requires 4.5 for text and 3 for large text."""
    low, high = sorted((luminance(colour), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def ink_on(fill: str) -> str:
    """Return white or dark ink, whichever is more readable on a color."""
    return max(("#ffffff", INK), key=lambda ink: contrast(ink, fill))


def stage_colour(number: int | None) -> str:
    return NEUTRAL if number is None else STAGE_COLOURS[number % len(STAGE_COLOURS)]


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


class Svg:
    """SVG elements in drawing order. Coordinates are in pixels."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.top: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        title: str = "",
        radius: float = 0,
        is_crisp: bool = False,
        is_on_top: bool = False,
    ) -> None:
        """Draw a rectangle.

        ``title`` is a tooltip. ``is_crisp`` disables smoothing where rectangles touch. ``is_on_top`` places the
        rectangle above all elements that are drawn later.
        """
        place = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
        more = f' rx="{_number(radius)}"' if radius else ""
        more += ' shape-rendering="crispEdges"' if is_crisp else ""
        end = f"><title>{escape(title)}</title></rect>" if title else "/>"
        layer = self.top if is_on_top else self.parts
        layer.append(f'<rect {place} fill="{fill}"{more}{end}')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
        is_on_top: bool = False,
    ) -> None:
        """Draw a line of text. ``is_on_top`` places it above all elements that are drawn later."""
        weight = ' font-weight="bold"' if bold else ""
        side = f' text-anchor="{anchor}"' if anchor != "start" else ""
        place = f'x="{_number(x)}" y="{_number(y)}" font-size="{size:g}" fill="{fill}"'
        layer = self.top if is_on_top else self.parts
        layer.append(f"<text {place}{side}{weight}>{escape(text)}</text>")

    def line(self, x: float, y: float, to_x: float, to_y: float, stroke: str, *, width: float = 1) -> None:
        ends = f'x1="{_number(x)}" y1="{_number(y)}" x2="{_number(to_x)}" y2="{_number(to_y)}"'
        self.parts.append(f'<line {ends} stroke="{stroke}" stroke-width="{width:g}"/>')

    def circle(self, x: float, y: float, radius: float, fill: str) -> None:
        self.parts.append(f'<circle cx="{_number(x)}" cy="{_number(y)}" r="{radius:g}" fill="{fill}"/>')

    def polygon(self, corners: Iterable[tuple[float, float]], fill: str, title: str) -> None:
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in corners)
        self.parts.append(f'<polygon points="{points}" fill="{fill}"><title>{escape(title)}</title></polygon>')

    def flag(self, x: float, y: float, title: str) -> None:
        """Draw a red triangle whose tip is at (x, y)."""
        self.polygon(((x, y), (x - 6, y - 11), (x + 6, y - 11)), HAZARD, title)

    def document(self, width: float, height: float, title: str) -> str:
        """Return the picture on a panel that is readable on light and dark pages."""
        size = f'width="{_number(width)}" height="{_number(height)}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_number(width)} {_number(height)}" '
            f'font-family="{_FONT}" role="img" aria-label={quoteattr(title)}>',
            f"<title>{escape(title)}</title>",
            f'<defs><pattern id="{HATCH}" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)">'
            f'<rect width="6" height="6" fill="{HATCH_GROUND}"/>'
            '<rect width="2" height="6" fill="#aab2c0"/></pattern></defs>',
            f'<rect x="0.5" y="0.5" width="{_number(width - 1)}" height="{_number(height - 1)}" rx="10" '
            f'fill="{PANEL}" stroke="{BORDER}"/>',
        )
        return "\n".join([*head, *self.parts, *self.top, "</svg>"]) + "\n"


_LEFT, _LINE, _SIZE = 18.0, 19, 11.5


def draw_legend(out: Svg, y: float, right: float, kinds: set[str], has_stages: bool) -> float:
    """Draw the legend at y for a picture with these kinds of events. Return the y coordinate of its lower end."""
    x = _LEFT
    work = "a warp works on a stage" + ("; dark: tensor-core instructions" if kinds & {"mma", "wgmma"} else "")
    entries = (
        ("tick", "a thread issues a copy or a store", bool(kinds & {"copy", "cp.async", "store"})),
        ("flying", "copies in flight into a stage", has_stages),
        ("solid", "stage full, with the phase of its barrier", has_stages),
        ("work", work, has_stages),
        ("hatch", "a warp waits", "wait" in kinds),
        ("line", "the end of a phase ends a wait", has_stages),
        ("flag", "hazard", "hazard" in kinds),
    )
    for mark, text, is_there in entries:
        if not is_there:
            continue
        if x + 24 + text_width(text, _SIZE) > right:
            x, y = _LEFT, y + _LINE
        _mark(out, mark, x, y)
        out.text(x + 22, y + 10, text, size=_SIZE, fill=FAINT_INK)
        x += 42 + text_width(text, _SIZE)
    return y + 14


def _mark(out: Svg, mark: str, x: float, y: float) -> None:
    colour = stage_colour(0)
    if mark == "tick":
        out.rect(x + 6, y, 3, 13, colour)
    elif mark == "flying":
        out.rect(x, y, 16, 13, tint(colour, FLYING))
        out.rect(x, y + 2, 12, 3, colour)
        out.rect(x, y + 8, 16, 3, colour)
    elif mark == "solid":
        out.rect(x, y, 16, 13, colour, radius=2)
    elif mark == "work":
        out.rect(x, y, 16, 13, tint(colour, WORKING), radius=2)
        out.rect(x + 6, y + 9, 6, 4, colour)
    elif mark == "hatch":
        out.rect(x, y, 16, 13, f"url(#{HATCH})", radius=2)
    elif mark == "line":
        out.line(x + 8, y, x + 8, y + 11, colour, width=0.8)
        out.circle(x + 8, y + 11, 2.2, colour)
    else:
        out.flag(x + 8, y + 12, "")
