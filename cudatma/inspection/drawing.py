"""The few SVG elements that the picture of a tensor map is made of, and its colours, light and dark.

Colours are in classes, so that one file follows the reader's light or dark page. Nothing varies from run to run.
"""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from cudatma.errors import ArgumentError

THEMES = ("auto", "light", "dark")
#: One for each 16 bytes of a 128-byte line: four banks. They differ in lightness too, for colour-blind readers.
_BANKS = {
    "light": ("#ffbcb5", "#e6b285", "#efe3a2", "#9fcc99", "#a9ece5", "#86c7ed", "#d3d2ff", "#e1a9d4"),
    "dark": ("#8f4a45", "#6b3a00", "#7d6c10", "#265421", "#0b7a73", "#004e73", "#5d599b", "#66325c"),
}
_COLOURS = {
    "light": {
        "paper": "#ffffff", "panel": "#f6f7f9", "ink": "#1d2330", "faint": "#5a6475", "rule": "#ccd2dc",
        "accent": "#2f62b0", "bad": "#c0262d", "good": "#2c7a4b", "hatch": "#aab2c0", "gap": "#eceff4",
    },
    "dark": {
        "paper": "#14171d", "panel": "#1c2129", "ink": "#e9ecf2", "faint": "#9aa5b7", "rule": "#39414e",
        "accent": "#7fb2ff", "bad": "#ff6b6b", "good": "#63c78d", "hatch": "#566172", "gap": "#222832",
    },
}  # fmt: skip
_FONT = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
_MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
#: Every class is below this one, so that a picture inside of a page changes nothing outside.
ROOT = "cudatma-map"


def number(value: float) -> str:
    """A coordinate, as short as possible."""
    return f"{value:.1f}".removesuffix(".0")


def check_theme(theme: str) -> str:
    """One of THEMES; ArgumentError otherwise."""
    if theme not in THEMES:
        raise ArgumentError("theme", theme, ", ".join(THEMES))
    return theme


def style(theme: str) -> str:
    """CSS of a picture: light, dark, or whichever the reader prefers."""
    fixed = (
        f".{ROOT}{{font-family:{_FONT}}}.{ROOT} .m{{font-family:{_MONO}}}.{ROOT} .h{{font-weight:600}}"
        f".{ROOT} .clear{{fill:none}}.{ROOT} .hot rect{{stroke-width:2.5}}.{ROOT} .out rect:first-of-type{{opacity:.4}}"
    )
    if theme == "auto":
        return fixed + _colours("light") + f"@media(prefers-color-scheme:dark){{{_colours('dark')}}}"
    return fixed + _colours(theme)


def _colours(theme: str) -> str:
    rules = [f".{name}{{fill:{colour}}}" for name, colour in _COLOURS[theme].items()]
    rules += [f".s-{name}{{stroke:{colour}}}" for name, colour in _COLOURS[theme].items()]
    rules += [f".b{index}{{fill:{colour}}}" for index, colour in enumerate(_BANKS[theme])]
    ink = _COLOURS[theme]["ink"]
    rules += [f".hot rect{{stroke:{ink}}}", f".out text{{fill:{_COLOURS[theme]['faint']}}}"]
    return "".join(f".{ROOT} {rule}" for rule in rules)


class Drawing:
    """Collects elements in drawing order. Coordinates are pixels; ``classes`` are those of style()."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, classes: str, *, radius: float = 0, more: str = ""
    ) -> None:
        """A rectangle; more: further attributes as written in the file."""
        place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        corner = f' rx="{number(radius)}"' if radius else ""
        self.parts.append(f'<rect {place}{corner} class="{classes}"{f" {more}" if more else ""}/>')

    def text(self, x: float, y: float, text: str, classes: str = "ink", *, size: float = 12, anchor: str = "") -> None:
        """A line of text. anchor: ``"middle"`` or ``"end"``."""
        side = f' text-anchor="{anchor}"' if anchor else ""
        self.parts.append(
            f'<text x="{number(x)}" y="{number(y)}" font-size="{size:g}" class="{classes}"{side}>{escape(text)}</text>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, classes: str, *, width: float = 1) -> None:
        ends = f'x1="{number(x)}" y1="{number(y)}" x2="{number(to_x)}" y2="{number(to_y)}"'
        self.parts.append(f'<line {ends} class="{classes}" stroke-width="{width:g}"/>')

    def begin(self, title: str, *, classes: str = "", key: str = "") -> None:
        """A group with hover text; key: what its twin elsewhere in the picture has as well."""
        name = f' class="{classes}"' if classes else ""
        mark = f" data-key={quoteattr(key)}" if key else ""
        self.parts.append(f"<g{name}{mark}><title>{escape(title)}</title>")

    def end(self) -> None:
        self.parts.append("</g>")

    def document(self, width: float, height: float, title: str, theme: str) -> str:
        """The picture on a sheet of its own, as an SVG document."""
        size = f'width="{number(width)}" height="{number(height)}"'
        hatch = (
            '<pattern id="cudatma-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="6" height="6" class="gap"/>'
            '<rect width="1.6" height="6" class="hatch"/></pattern>'
            '<pattern id="cudatma-clip" width="5" height="5" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(-45)"><rect width="5" height="5" class="paper"/>'
            '<rect width="2.4" height="5" class="bad"/></pattern>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{ROOT}" {size} '
            f'viewBox="0 0 {number(width)} {number(height)}" role="img" aria-label={quoteattr(title)}>',
            f"<title>{escape(title)}</title>",
            f"<style>{style(theme)}</style><defs>{hatch}</defs>",
            f'<rect x="0.5" y="0.5" width="{number(width - 1)}" height="{number(height - 1)}" rx="10" '
            'class="paper s-rule"/>',
        )
        return "\n".join([*head, *self.parts, "</svg>"]) + "\n"
