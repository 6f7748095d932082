"""Ours and rivals over the cells of a run: how many times as fast, and how much further off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.bars import geometric_mean
from benchmarks.report import Cell, ratio

AUTO = "auto"


def times_as_fast(cell: Cell, rival: str, ours: str = AUTO) -> float | None:
    """How many times as fast as a rival ours is; None where one of them was not measured."""
    us = cell.get("us", {})
    return ratio(us.get(rival) or None, us.get(ours))


def present(cells: Sequence[Cell], names: Iterable[str]) -> list[str]:
    """Those of the names that a cell has a time of, or a reason that it has none."""
    found = {name for cell in cells for part in ("us", "refused") for name in cell.get(part, {})}
    return [name for name in names if name in found]


def compared(
    cells: Sequence[Cell], rival: str, place: Callable[[Cell], str], ours: str = AUTO
) -> dict[str, Any] | None:
    """Over cells: how many times as fast as a rival ours is, and how much further off its results are. None where the
    rival was never measured. place: names a cell."""
    known = [(times, cell) for cell in cells if (times := times_as_fast(cell, rival, ours)) is not None]
    if not known:
        return None
    least, where = min(known, key=lambda each: each[0])
    found: dict[str, Any] = {
        "rival": rival,
        "cells": len(known),
        "not_measured": len(cells) - len(known),
        "geometric_mean": geometric_mean([times for times, _ in known]),
        "least": least,
        "least_at": place(where),
    }
    for field in ("rms_error", "largest_error"):
        pairs = [(cell.get(field, {}).get(ours), cell.get(field, {}).get(rival)) for _, cell in known]
        parts = [part for pair in pairs if (part := ratio(*pair)) is not None]
        if parts:
            found[f"most_{field}_ratio"] = max(parts)
    return found


def summary_line(entry: dict[str, Any], ours: str = AUTO) -> str:
    """An entry of a summary, for people."""
    line = f"{entry['group']}: {ours} / {entry['rival']}: geometric mean {entry['geometric_mean']:.3f}, least "
    line += f"{entry['least']:.3f} at {entry['least_at']}, {entry['cells']} cells"
    if entry["not_measured"]:
        line += f" ({entry['not_measured']} more not measured)"
    if (off := entry.get("most_rms_error_ratio")) is not None:
        line += f"; errors at most {off:.2f} times as large"
        line += f", the largest of a result {entry['most_largest_error_ratio']:.2f} times"
    return line
