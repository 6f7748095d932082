"""HTML that cudatma writes: pages in one file, and fragments for notebooks, with one style sheet.

Templates escape text. The style applies only inside ``.cudatma-page`` and follows the reader's light or dark colors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

_FOLDER = Path(__file__).parent


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **context: Any) -> Markup:
    """Return a template of this folder with values."""
    return Markup(_environment().get_template(template).render(**context))


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> Markup:
    """Return rows as a table. A severity in the first cell of a row sets the cell's color.

    The first line of each other cell is code, and its further lines are in small print.
    """
    cells = [[str(cell).split("\n") for cell in row] for row in rows]
    return render("table.html.j2", rows=cells, head=head)


def text(content: str) -> Markup:
    """Return plain text in a font of fixed width."""
    return Markup("<pre>{}</pre>").format(content)


def figure(svg: str) -> Markup:
    """Return an SVG picture, which scrolls if the page is narrow."""
    return render("figure.html.j2", picture=Markup(svg))


def parts(sections: Iterable[tuple[str, str]]) -> Markup:
    """Return (heading, HTML) sections one after another. Plain text is escaped."""
    return render("parts.html.j2", parts=sections)


def fragment(body: Markup, theme: str = "auto", style: str = "") -> str:
    """Return HTML in one element with its own style, for a notebook. ``style`` is a further style sheet."""
    return str(render("fragment.html.j2", body=body, theme=theme, style=style))


def document(title: str, body: Markup, theme: str = "auto", style: str = "", script: str = "") -> str:
    """Return an HTML document that needs no other file. It includes ``style`` and ``script``, files of this folder."""
    return str(render("document.html.j2", title=title, body=body, theme=theme, style=style, script=script))
