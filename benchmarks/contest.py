"""A run of a benchmark in which contenders take turns: a cell for each call, then table, summary and picture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.compare import AUTO, summary_line
from benchmarks.report import Cell, Result, failure, print_table

Call = TypeVar("Call")


def measured(
    result: Result,
    calls: Sequence[Call],
    measure: Callable[[Call], Cell],
    facts: Callable[[Call], Cell],
    line: Callable[[Cell, str], str],
) -> None:
    """Add a cell for each call. facts: what a cell says of a call that could not be measured. line: a cell in words,
    which begin with the text that it gets."""
    import torch

    for number, call in enumerate(calls, 1):
        try:
            cell = measure(call)
        except Exception as error:
            cell = {**facts(call), "us": {}, "error": failure(error)}
        with contextlib.suppress(Exception):  # after a trap not even memory can be given back
            torch.cuda.empty_cache()
        result.add(cell, line(cell, f"[{number}/{len(calls)}] {call}"))


def finished(
    result: Result,
    title: str,
    picture: Callable[[Mapping[str, Any]], str] | None = None,
    path: Path | None = None,
) -> int:
    """Print the table and the summary, draw the picture if a path is given; returns the exit status."""
    print_table(result.console, result.table(result.cells), title)
    for entry in result.more(result.cells)["summary"]:
        result.say(summary_line(entry, entry.get("ours", AUTO)))
    if picture and path:
        drawn(result, picture, path)
    return int(any(cell.get("error") for cell in result.cells))


def drawn(result: Result, picture: Callable[[Mapping[str, Any]], str], path: Path) -> None:
    """Write a result's picture, or say why there is none."""
    try:
        text = picture(result.as_json())
    except ValueError as error:
        result.say(f"no picture: {error}")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
