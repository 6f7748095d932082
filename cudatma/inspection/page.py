"""HTML description of a tensor map in one file: picture, fields, effect of accesses, risks and every bit.

fragment() returns HTML for notebooks; page() returns a document. Both follow the reader's light or dark colors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_CLASS = "cudatma-page"
_LIGHT = "--paper:#fff;--ink:#1d2330;--faint:#5a6475;--rule:#dde1e8;--error:#c0262d;--warning:#9a5b00;--note:#5a6475"
_DARK = "--paper:#0e1116;--ink:#e9ecf2;--faint:#9aa5b7;--rule:#2c333e;--error:#ff6b6b;--warning:#e8b04b;--note:#9aa5b7"
#: The cells of one element in the two pictures have the same key.
_SCRIPT = """document.querySelectorAll('.cudatma-map').forEach(function(map){
  function mark(event,on){var cell=event.target.closest('[data-key]');if(!cell)return;
    map.querySelectorAll('[data-key="'+cell.dataset.key+'"]').forEach(function(twin){twin.classList.toggle('hot',on)})}
  map.addEventListener('mouseover',function(event){mark(event,true)});
  map.addEventListener('mouseout',function(event){mark(event,false)})})"""


def _style(theme: str) -> str:
    first = _DARK if theme == "dark" else _LIGHT
    colours = f".{_CLASS}{{{first}}}"
    if theme == "auto":
        colours += f"@media(prefers-color-scheme:dark){{.{_CLASS}{{{_DARK}}}}}"
    scope = f".{_CLASS}"
    return (
        f"{colours}{scope}{{color:var(--ink);background:var(--paper);max-width:1060px;padding:4px 8px;"
        "font:14px/1.5 system-ui,'Segoe UI',Helvetica,Arial,sans-serif}"
        f"{scope} svg{{max-width:100%;height:auto}}{scope} h2{{font-size:15px;margin:22px 0 6px}}"
        f"{scope} table{{border-collapse:collapse;color:var(--ink)}}"
        f"{scope} td,{scope} th{{border-top:1px solid var(--rule);padding:3px 14px 3px 0;text-align:left;"
        "vertical-align:top;background:none}"
        f"{scope} td:first-child{{color:var(--faint);white-space:nowrap}}"
        f"{scope} code{{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12.5px;"
        "color:inherit;background:none}"
        f"{scope} td.error{{color:var(--error)}}{scope} td.warning{{color:var(--warning)}}"
        f"{scope} td.note{{color:var(--note)}}"
        f"{scope} small{{color:var(--faint);font-size:12px}}"
    )


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return rows of plain text as an HTML table. A severity in the first cell of a row sets the cell's color."""
    top = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    body = []
    for row in rows:
        kind = f' class="{row[0]}"' if row and row[0] in ("error", "warning", "note") else ""
        cells = "".join(
            f"<td{kind if i == 0 else ''}>{_multiline(cell) if i else escape(cell)}</td>" for i, cell in enumerate(row)
        )
        body.append(f"<tr>{cells}</tr>")
    return f"<table>{top}{''.join(body)}</table>"


def _multiline(cell: str) -> str:
    """Return a cell whose first line is code and whose other lines are in small print."""
    first, *rest = cell.split("\n")
    return f"<code>{escape(first)}</code>" + "".join(f"<br><small>{escape(line)}</small>" for line in rest)


def fragment(parts: Iterable[tuple[str, str]], theme: str) -> str:
    """Return (heading, HTML) parts in one element with its own style."""
    inside = "".join((f"<h2>{escape(heading)}</h2>" if heading else "") + body for heading, body in parts)
    return f'<div class="{_CLASS}"><style>{_style(theme)}</style>{inside}</div>'


def page(title: str, parts: Iterable[tuple[str, str]], theme: str) -> str:
    """Return an HTML document."""
    colours = {"light": _LIGHT, "dark": _DARK}.get(theme, _LIGHT)
    body = f"html{{{colours}}}body{{margin:16px;background:var(--paper)}}"
    if theme == "auto":
        body += f"@media(prefers-color-scheme:dark){{html{{{_DARK}}}}}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{body}</style></head>\n<body>{fragment(parts, theme)}\n"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )
