"""Print the report of a benchmark (machine, commit, settings, cells and a table) and write it as JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

ROOT = Path(__file__).resolve().parents[1]
COMMIT_VARIABLE = "CUDATMA_COMMIT"
_ABSENT = "none"
#: Width of the output to a pipe. Tables that are wrapped at 80 columns are hard to read.
_PIPE_WIDTH = 200
#: Number of significant digits of the numbers in a file.
_DIGITS = 5

Cell = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """A table for tools/dev/readme_tables.py. Each row has one value for each column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float, ...], ...]
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"columns": list(self.columns), "rows": [list(row) for row in self.rows], "note": self.note}


@dataclass(slots=True)
class Result:
    """The cells of one run.

    After each new cell, the cell is printed and the file is rewritten, so that an interrupted run keeps its cells.

    Attributes
    ----------
    settings : mapping
        Options of the run.
    table : callable
        Function that creates the docs' table from the cells.
    path : pathlib.Path or None
        The JSON file, or None.
    summary : callable
        Function that creates additional lines from the cells. The lines are printed at the end.
    """

    settings: Mapping[str, Any]
    table: Callable[[Sequence[Cell]], Table]
    path: Path | None = None
    summary: Callable[[Sequence[Cell]], Sequence[str]] = lambda cells: ()
    cells: list[Cell] = field(default_factory=list)
    machine: Mapping[str, str] = field(default_factory=lambda: machine_facts())
    revision: str = field(default_factory=lambda: commit())
    console: Console = field(default_factory=lambda: make_console())

    def add(self, cell: Cell, line: str) -> None:
        """Add a cell, print its line, and write the file."""
        self.cells.append(cell)
        self.say(f"{line}  FAILED: {cell['error']}" if cell.get("error") else line)
        self.write()

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def finish(self, title: str) -> int:
        """Print the table and the summary, and return the exit status (1 if a cell failed)."""
        print_table(self.console, self.table(self.cells), title)
        for line in self.summary(self.cells):
            self.say(line)
        return int(any(cell.get("error") for cell in self.cells))

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": dict(self.machine),
            "commit": self.revision,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "settings": dict(self.settings),
            "cells": self.cells,
            "table": self.table(self.cells).as_json(),
        }

    def write(self) -> None:
        """Write the JSON file atomically, if ``path`` is not None."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            aside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            aside.write_text(dumps(self.as_json()))
            aside.replace(self.path)


def dumps(content: Mapping[str, Any]) -> str:
    """Return the text of a file, with one line per cell and per row of the table, and numbers with _DIGITS digits."""
    table = content.get("table", {})
    parts = {name: _line(value) for name, value in content.items()}
    if "cells" in content:
        parts["cells"] = _lines(content["cells"])
    if table:
        rest = {name: value for name, value in table.items() if name != "rows"}
        parts["table"] = f'{_line(rest)[:-1]},"rows":{_lines(table["rows"])}}}'
    return "{" + ",\n".join(f"{json.dumps(name)}:{text}" for name, text in parts.items()) + "}\n"


def _lines(values: Sequence[Any]) -> str:
    return "[\n" + ",\n".join(map(_line, values)) + "]" if values else "[]"


def _line(value: Any) -> str:
    return json.dumps(_rounded(value), separators=(",", ":"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def make_parser(name: str, description: str | None, examples: str = "") -> argparse.ArgumentParser:
    """Return the parser of ``cudatma bench NAME`` with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(
        prog=f"cudatma bench {name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file after each cell")
    return parser


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)


def print_table(console: Console, table: Table, title: str) -> None:
    """Print a table with four digits per number."""
    shown = RichTable(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in table.rows:
        shown.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    console.print(shown)
    if table.note:
        console.print(table.note, markup=False, highlight=False)


def machine_facts() -> dict[str, str]:
    """Return the GPU, the driver and the versions that affect a measurement. Missing items are "none"."""
    gpu, driver = _nvidia_smi()
    return {
        "card": gpu,
        "driver": driver,
        "cuda": _fact(_cuda),
        "nvrtc": _fact(_nvrtc),
        "cupy": _fact(_cupy),
        # Importing torch takes seconds, but its version is available without an import.
        "torch": _fact(lambda: version("torch")),
        "python": platform.python_version(),
    }


def _fact(read: Callable[[], str]) -> str:
    """Return the result of ``read``, or "none" if it fails because a library or its driver is absent."""
    try:
        return read()
    except Exception:
        return _ABSENT


def _nvidia_smi() -> tuple[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        name, _, driver = done.stdout.splitlines()[0].partition(", ")
    except (OSError, subprocess.SubprocessError, IndexError):
        return _ABSENT, _ABSENT
    return name, driver


def _cuda() -> str:
    import cupy

    number = int(cupy.cuda.runtime.driverGetVersion())
    return f"{number // 1000}.{number % 1000 // 10}" if number else _ABSENT


def _nvrtc() -> str:
    from cudatma.build.nvrtc import nvrtc_version

    return ".".join(map(str, nvrtc_version()))


def _cupy() -> str:
    import cupy

    return str(cupy.__version__)


def commit(root: Path = ROOT) -> str:
    """Return $CUDATMA_COMMIT, otherwise the commit of the checkout ("+changes" if files differ), or "unknown".

    The variable takes precedence, because a machine that receives the files of a commit may have a different checkout.
    """
    if name := os.environ.get(COMMIT_VARIABLE):
        return name
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            head = _git(root, "rev-parse", "--short=12", "HEAD")
            changed = _git(root, "status", "--porcelain", "--untracked-files=no")
            return f"{head}+changes" if changed else head
    return "unknown"


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def failure(error: BaseException) -> str:
    """Return a one-line description of an exception for a cell."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0] if words else ''}"[:300]


def ratio(above: float | None, below: float | None) -> float | None:
    """Return above / below, or None if either was not measured."""
    return above / below if above is not None and below else None


def shown(value: float | None, digits: int = 2) -> str:
    """Format a number for a table, or return "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"
