"""A table as text: rich's where rich is installed, plain columns elsewhere."""

from __future__ import annotations

import io
from collections.abc import Sequence

#: A kernel's entry takes some 60 columns, and a folded table cannot be read.
_WIDTH = 160


def table_text(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A title, and the rows below their columns' names, without colours or markup."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return plain_table(title, columns, rows)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column == "us" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    page = io.StringIO()
    Console(file=page, width=_WIDTH, color_system=None, markup=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same without rich."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([title, *shown])
