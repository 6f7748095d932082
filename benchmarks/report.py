"""What every benchmark stores: the machine, the commit, its cells, and a table, printed and as JSON."""

from __future__ import annotations

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
#: A pipe has no width, and a table that is folded to 80 columns cannot be read.
_PIPE_WIDTH = 200

Cell = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """A table as tools/dev/readme_tables.py takes it: every row has one value a column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float, ...], ...]
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"columns": list(self.columns), "rows": [list(row) for row in self.rows], "note": self.note}


@dataclass(slots=True)
class Result:
    """The cells of one run. They are printed, and the file is written anew, as each comes: a run that is cut short
    leaves what it has measured.

    settings: what the run was asked for. table: cells -> the table for the README. path: the JSON file, or None.
    more: cells -> what else the file holds.
    """

    settings: Mapping[str, Any]
    table: Callable[[Sequence[Cell]], Table]
    path: Path | None = None
    more: Callable[[Sequence[Cell]], Mapping[str, Any]] = lambda cells: {}
    cells: list[Cell] = field(default_factory=list)
    machine: Mapping[str, str] = field(default_factory=lambda: machine_facts())
    revision: str = field(default_factory=lambda: commit())
    console: Console = field(default_factory=lambda: make_console())

    def add(self, cell: Cell, line: str) -> None:
        """Keep a cell, print its line, write the file."""
        self.cells.append(cell)
        self.say(f"{line}  FAILED: {cell['error']}" if cell.get("error") else line)
        self.write()

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": dict(self.machine),
            "commit": self.revision,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "settings": dict(self.settings),
            "cells": self.cells,
            "table": self.table(self.cells).as_json(),
            **self.more(self.cells),
        }

    def write(self) -> None:
        """Write the JSON file, if one was asked for, aside and by renaming, so that it is never half a file."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            aside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            aside.write_text(json.dumps(self.as_json(), indent=1) + "\n")
            aside.replace(self.path)


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)


def print_table(console: Console, table: Table, title: str) -> None:
    """The table for people; numbers with four digits."""
    shown = RichTable(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in table.rows:
        shown.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    console.print(shown)
    if table.note:
        console.print(table.note, markup=False, highlight=False)


def machine_facts() -> dict[str, str]:
    """GPU, driver and the versions that a measurement depends on, as text; "none" for what is not there."""
    gpu, driver = _nvidia_smi()
    return {
        "card": gpu,
        "driver": driver,
        "cuda": _fact(_cuda),
        "nvrtc": _fact(_nvrtc),
        "cupy": _fact(_cupy),
        # Importing torch takes seconds and is not needed for its version.
        "torch": _fact(lambda: version("torch")),
        "python": platform.python_version(),
    }


def _fact(read: Callable[[], str]) -> str:
    """What ``read`` says, or "none": a library may be absent, or be there without its driver."""
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
    """$CUDATMA_COMMIT, else the commit of the checkout (with "+changes" where files differ), else "unknown".

    The variable comes first: a machine that is sent the files of a commit may have another one checked out.
    """
    if told := os.environ.get(COMMIT_VARIABLE):
        return told
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
    """An exception as one line for a cell."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0] if words else ''}"[:300]


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below, or None where either was not measured."""
    return above / below if above is not None and below else None


def shown(value: float | None, digits: int = 2) -> str:
    """A number for a table, "-" where it was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"
