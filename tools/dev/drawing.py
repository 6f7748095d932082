"""Shapes for the diagrams in README and docs, and the command line of the scripts that draw them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from cudatma.emulator.trace.svg import text_width

ROOT = Path(__file__).resolve().parents[2]
INK, FAINT, GREY, GREEN, ORANGE, BLUE = "#1f2430", "#4d576e", "#5f6980", "#4a7500", "#b45309", "#2a66a8"
_FONT = "Helvetica, Arial, DejaVu Sans, sans-serif"
_MONO = "DejaVu Sans Mono, Menlo, Consolas, monospace"
#: Colors of arrows.
_HEADS = {"a": INK, "g": GREEN, "o": ORANGE, "b": BLUE, "n": GREY}


class Drawing:
    """Shapes and text that form an SVG document."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        fill: str = FAINT,
        anchor: str = "middle",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        more = ' font-weight="bold"' if bold else ""
        more += f' font-family="{_MONO}"' if mono else ""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}" fill="{fill}"'
        self.lines.append(f"<text {place}{more}>{escape(text)}</text>")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        stroke: str,
        head: str = "",
        lines: Sequence[str] = (),
        *,
        mono: bool = False,
        dashed: bool = False,
    ) -> None:
        """Draw a rectangle with centered text. Raise ValueError if a line is wider than the rectangle."""
        for text, size in ((head, 13.5), *((line, 12) for line in lines)):
            if text_width(text, size) > width - 4:
                raise ValueError(f"{text!r} is wider than its box of {width} pixels")
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.lines.append(f'<rect {place} rx="7" fill="{fill}" stroke="{stroke}" stroke-width="1.5"{dash}/>')
        baseline = y + height / 2 - (17 * len(lines)) / 2 + 5
        if head:
            self.text(x + width / 2, baseline, head, size=13.5, fill=INK, bold=True, mono=mono)
        for number, line in enumerate(lines):
            self.text(x + width / 2, baseline + 17 * (number + 1), line)

    def arrow(self, path: str, kind: str, width: float = 1.8, *, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        color = _HEADS[kind]
        self.lines.append(
            f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width:g}" marker-end="url(#{kind})"{dash}/>'
        )

    def document(self, title: str, width: float, height: float) -> str:
        """Return the SVG document."""
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" orient="auto" '
            f'markerUnits="userSpaceOnUse"><path d="M0 0L10 5L0 10z" fill="{color}"/></marker>'
            for name, color in _HEADS.items()
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'font-family="{_FONT}" role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            f"<defs>{heads}</defs>",
            f'<rect width="{width}" height="{height}" rx="12" fill="#ffffff"/>',
        )
        return "\n".join([*head, *self.lines, "</svg>"]) + "\n"


def write_picture(path: Path, drawn: str, doc: str, argv: Sequence[str] | None) -> int:
    """Write a picture, or with ``--check`` only compare it with the file. Return the exit status."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if the file differs")
    if parser.parse_args(argv).check:
        return int(not path.is_file() or path.read_text(encoding="utf-8") != drawn)
    path.write_text(drawn, encoding="utf-8")
    print(path.relative_to(ROOT))
    return 0
