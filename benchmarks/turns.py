"""One cell of a benchmark in which contenders take turns: who takes part, the turns, and the check of results."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

from benchmarks.harness import Contender, Measured, cold, sustained
from benchmarks.report import Cell, failure
from cudatma.build.prebuild import compile_all, usable_cores
from cudatma.errors import counted, duration
from cudatma.target import detect


@dataclass(frozen=True, slots=True)
class Entrant:
    """One candidate of a rival. contender: named as its rival; several of one rival differ in ``detail``, their
    algorithm. out: where its result is."""

    rival: str
    contender: Contender
    out: Any
    detail: str = ""


#: Times contenders.
Method = Callable[[Sequence[Contender]], Measured]
#: Gives a rival's entrants, of a stream and operands; raises the reason where it has none.
Rival = Callable[[Any, Any], list[Entrant]]


def field_of(
    always: Mapping[str, Rival], optional: Mapping[str, tuple[str, str, Rival]], names: Sequence[str]
) -> tuple[dict[str, Rival], dict[str, str]]:
    """(the rivals, by name; of those that were asked for, the version, or why they are absent).

    optional: by what the command line calls them: name, package, rival. An absent one stays in the field: every cell
    then names it with the reason.
    """
    field, told = dict(always), {}
    for asked in names:
        name, package, rival = optional[asked]
        field[name] = rival
        try:
            importlib.import_module(package)
            told[name] = _version(package)
        except Exception as error:
            told[name] = f"absent: {failure(error)}"
    return field, told


def _version(package: str) -> str:
    try:
        return version(packages_distributions().get(package, [package])[0])
    except PackageNotFoundError:
        return "unknown version"


def precompile(specs: Iterable[Any]) -> str:
    """Have the kernels of these specs in the cache, compiled on all cores; says how that went."""
    began, orders = time.monotonic(), {(spec.template, spec): None for spec in specs}
    refused: list[Any] = []
    compile_all(orders, detect(), usable_cores(), lambda spec, why: refused.append(spec) if why else None)
    told = f"{counted(len(orders), 'kernel')} compiled or found in {duration(time.monotonic() - began)}"
    return f"{told}, {len(refused)} refused by the compiler" if refused else told


def entered(stream: Any, operands: Any, field: Mapping[str, Rival]) -> tuple[list[Entrant], dict[str, str]]:
    """(the rivals' entrants, by rival why it has none)."""
    entrants: list[Entrant] = []
    refused: dict[str, str] = {}
    for name, rival in field.items():
        try:
            entrants += rival(stream, operands)
        except Exception as error:
            refused[name] = failure(error)
    return entrants, refused


def timing_method(stream: Any, replays: int, rest_s: float, seconds: float = 0.0) -> Method:
    """Turns, before each of which the GPU rests; or, of so many seconds for each contender, a long run at the power
    limit."""
    if seconds:
        return lambda contenders: sustained(stream, contenders, seconds * len(contenders))
    return partial(cold, stream, replays=replays, rest_s=rest_s)


def timed(
    run: Method, entrants: Sequence[Entrant], cell: Cell, refused: dict[str, str], required: Sequence[str]
) -> None:
    """Put microseconds by rival into the cell, of its faster entrant, and what this one is; and why a rival has none,
    which of those that are required is an error."""
    found = run([each.contender for each in entrants])
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
