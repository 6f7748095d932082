"""HTML pages and fragments for notebooks, with one style sheet.

Templates escape text. The style applies only inside ``.cudatma-page``, and follows the light or dark colors of the
reader's system.
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
    """Render a template of this folder."""
    return Markup(_environment().get_template(template).render(**context))


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> Markup:
    """Return a table. A severity in the first cell of a row sets the color of the cell.

    In the other cells, the first line is set as code and further lines in a small font.
    """
    cells = [[str(cell).split("\n") for cell in row] for row in rows]
    return render("table.html.j2", rows=cells, head=head)


def text(content: str) -> Markup:
    """Return preformatted text."""
    return Markup("<pre>{}</pre>").format(content)


def figure(svg: str) -> Markup:
    """Return an SVG picture that scrolls on a narrow page."""
    return render("figure.html.j2", picture=Markup(svg))


def parts(sections: Iterable[tuple[str, str]]) -> Markup:
    """Return sections, given as pairs of heading and HTML. Plain text is escaped."""
    return render("parts.html.j2", parts=sections)


def fragment(body: Markup, theme: str = "auto", style: str = "") -> str:
    """Return one HTML element with its style, for a notebook. ``style`` names another style sheet of this folder."""
    return str(render("fragment.html.j2", body=body, theme=theme, style=style))


def document(title: str, body: Markup, theme: str = "auto", style: str = "", script: str = "") -> str:
    """Return a self-contained HTML document. ``style`` and ``script`` name files of this folder to include."""
    return str(render("document.html.j2", title=title, body=body, theme=theme, style=style, script=script))
