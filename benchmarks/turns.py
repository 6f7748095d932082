"""One cell of a benchmark in which contenders take turns: who takes part, the turns, and the check of results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Contender, cold
from benchmarks.report import Cell, failure


@dataclass(frozen=True, slots=True)
class Entrant:
    """One candidate of a rival. contender: named as its rival; several of one rival differ in ``detail``, their
    algorithm. out: where its result is."""

    rival: str
    contender: Contender
    out: Any
    detail: str = ""


def entered(
    stream: Any, operands: Any, field: Mapping[str, Callable[[Any, Any], list[Entrant]]]
) -> tuple[list[Entrant], dict[str, str]]:
    """(the rivals' entrants, by rival why it has none)."""
    entrants: list[Entrant] = []
    refused: dict[str, str] = {}
    for name, rival in field.items():
        try:
            entrants += rival(stream, operands)
        except Exception as error:
            refused[name] = failure(error)
    return entrants, refused


def timed(
    stream: Any,
    rest_s: float,
    entrants: Sequence[Entrant],
    replays: int,
    cell: Cell,
    refused: dict[str, str],
    required: Sequence[str],
) -> None:
    """Put microseconds by rival into the cell, of its faster entrant, and what this one is; and why a rival has none,
    which of those that are required is an error. rest_s: of the GPU before each turn."""
    found = cold(stream, [each.contender for each in entrants], replays, rest_s)
    cell["us"], cell["chosen"] = {}, {}
    for each in sorted(entrants, key=lambda each: found.us(each.contender.name) or 0.0):
        us = found.us(each.contender.name)
        if us is None:
            refused.setdefault(each.rival, found.errors.get(each.contender.name, "not measured"))
        elif each.rival not in cell["us"]:
            cell["us"][each.rival] = us
            if each.detail:
                cell["chosen"][each.rival] = each.detail
    cell["us"] = {
        name: cell["us"][name] for name in dict.fromkeys(each.rival for each in entrants) if name in cell["us"]
    }
    absent = {name: why for name, why in refused.items() if name not in cell["us"]}
    failed = [f"{name}: {absent.pop(name)}" for name in required if name in absent]
    if absent:
        cell["refused"] = absent
    if failed:
        cell["error"] = "; ".join(failed)


def chosen(cell: Cell, entrants: Sequence[Entrant]) -> dict[str, Any]:
    """By rival, the result of the entrant that counts: several of one rival write into the same array."""
    outs = {}
    for each in entrants:
        if each.rival in cell["us"] and each.detail == cell["chosen"].get(each.rival, ""):
            if each.detail:
                each.out.fill_(math.nan)
                each.contender.run(0)
            outs[each.rival] = each.out
    return outs


def judged(cell: Cell, errors: Mapping[str, tuple[float, float]], allowed: float) -> None:
    """Put into the cell how far results are off, by name (root mean square, largest), as parts of the root mean square
    of what they should be; the time of a wrong one is taken out."""
    cell["rms_error"], cell["largest_error"] = {}, {}
    for name, (rms, largest) in errors.items():
        cell["rms_error"][name], cell["largest_error"][name] = rms, largest
        if not rms <= allowed:
            del cell["us"][name], cell["rms_error"][name], cell["largest_error"][name]
            wrong = f"{name}: wrong, {rms:.2e} off"
            cell["error"] = f"{cell['error']}; {wrong}" if cell.get("error") else wrong
