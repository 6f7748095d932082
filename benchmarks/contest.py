"""Functions to find competing libraries, time calls in turn, check results and compare times."""

from __future__ import annotations

import contextlib
import importlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from statistics import geometric_mean
from typing import Any, TypeVar

from benchmarks.harness import Contender, Method, cold, sustained
from benchmarks.report import Cell, Result, failure, ratio
from cudatma.build.prebuild import compile_all, usable_cores
from cudatma.errors import counted, duration
from cudatma.target import detect

AUTO = "auto"
#: Name of the fastest library in a cell.
BEST = "best"

Call = TypeVar("Call")


@dataclass(frozen=True, slots=True)
class Entrant:
    """A library's candidate kernel.

    ``detail`` is the candidate's algorithm, and ``out`` is the array that holds the result.
    """

    rival: str
    contender: Contender
    out: Any
    detail: str = ""


#: Function that returns a library's entrants for a stream and operands, or raises an error with the reason if the
#: library has no entrants.
Rival = Callable[[Any, Any], list[Entrant]]


# ---- Competing libraries ---------------------------------------------------------------------------------------------


def field_of(
    always: Mapping[str, Rival], optional: Mapping[str, tuple[str, str, Rival]], names: Sequence[str]
) -> tuple[dict[str, Rival], dict[str, str]]:
    """Return the libraries by name, and the version of each optional library or the reason why it is absent.

    ``optional`` maps each value of --rivals to name, package and library. An absent library remains in the result, so
    that every cell shows the reason.
    """
    field, versions = dict(always), {}
    for option in names:
        name, package, rival = optional[option]
        field[name] = rival
        try:
            importlib.import_module(package)
            versions[name] = _version(package)
        except Exception as error:
            versions[name] = f"absent: {failure(error)}"
    return field, versions


def _version(package: str) -> str:
    try:
        return version(packages_distributions().get(package, [package])[0])
    except PackageNotFoundError:
        return "unknown version"


def precompile(configs: Callable[[], Iterable[Any]]) -> str:
    """Compile the kernels of these configs on all cores, and return a report.

    If this compilation fails, each call compiles its own kernel.
    """
    began, refused = time.monotonic(), list[Any]()
    try:
        orders = {(config.template, config): None for config in configs()}
        compile_all(orders, detect(), usable_cores(), lambda config, why: refused.append(config) if why else None)
    except Exception as error:
        return f"no kernels precompiled: {failure(error)}"
    line = f"{counted(len(orders), 'kernel')} compiled or found in the cache in {duration(time.monotonic() - began)}"
    return f"{line}, {len(refused)} rejected by the compiler" if refused else line


def find_entrants(stream: Any, operands: Any, field: Mapping[str, Rival]) -> tuple[list[Entrant], dict[str, str]]:
    """Return the libraries' entrants, and the reason for each library that has no entrant."""
    entrants: list[Entrant] = []
    refused: dict[str, str] = {}
    for name, rival in field.items():
        try:
            entrants += rival(stream, operands)
        except Exception as error:
            refused[name] = failure(error)
    return entrants, refused


# ---- A cell ---------------------------------------------------------------------------------------------------------


def timing_method(stream: Any, replays: int, rest_s: float, seconds: float = 0.0) -> Method:
    """Return a method that times turns after idle periods or, if ``seconds`` is not 0, runs at the power limit."""
    if seconds:
        return lambda contenders: sustained(stream, contenders, seconds * len(contenders))
    return partial(cold, stream, replays=replays, rest_s=rest_s)


def add_times(
    method: Method, entrants: Sequence[Entrant], cell: Cell, refused: dict[str, str], required: Sequence[str]
) -> None:
    """Add the time and the detail of each library's fastest entrant to the cell.

    If a library has no time, the cell contains the reason. If a required contender has no time, this is an error.
    """
    timing = method([entrant.contender for entrant in entrants])
    us, details = dict[str, float](), dict[str, str]()
    for entrant in sorted(entrants, key=lambda entrant: timing.us(entrant.contender.name) or 0.0):
        time_us = timing.us(entrant.contender.name)
        if time_us is None:
            refused.setdefault(entrant.rival, timing.errors.get(entrant.contender.name, "not measured"))
        elif entrant.rival not in us:
            us[entrant.rival] = time_us
            if entrant.detail:
                details[entrant.rival] = entrant.detail
    cell["us"] = {name: us[name] for name in dict.fromkeys(entrant.rival for entrant in entrants) if name in us}
    cell["chosen"] = details
    absent = {name: why for name, why in refused.items() if name not in us}
    failed = [f"{name}: {absent.pop(name)}" for name in required if name in absent]
    if absent:
        cell["refused"] = absent
    if failed:
        cell["error"] = "; ".join(failed)


def chosen_results(cell: Cell, entrants: Sequence[Entrant]) -> dict[str, Any]:
    """Return the result of each library's chosen entrant. The entrants of a library share one array."""
    outs = {}
    for entrant in entrants:
        if entrant.rival in cell["us"] and entrant.detail == cell["chosen"].get(entrant.rival, ""):
            if entrant.detail:
                entrant.out.fill_(math.nan)
                entrant.contender.run(0)
            outs[entrant.rival] = entrant.out
    return outs


def add_errors(cell: Cell, errors: Mapping[str, tuple[float, float]], allowed: float) -> None:
    """Add each result's RMS and maximum error, relative to the RMS of the exact result, to the cell.

    The times of incorrect results are discarded.
    """
    cell["rms_error"], cell["largest_error"] = {}, {}
    for name, (rms, largest) in errors.items():
        if rms <= allowed:
            cell["rms_error"][name], cell["largest_error"][name] = rms, largest
        else:
            del cell["us"][name]
            wrong = f"{name}: wrong result, relative RMS error {rms:.2e}"
            cell["error"] = f"{cell['error']}; {wrong}" if cell.get("error") else wrong


def measure_calls(
    result: Result,
    calls: Sequence[Call],
    measure: Callable[[Call], Cell],
    facts: Callable[[Call], Cell],
    line: Callable[[Cell, str], str],
) -> None:
    """Add a cell for each call.

    ``facts`` returns the cell of a call that could not be measured. ``line`` returns a line for a cell, given the
    beginning of the line.
    """
    import torch

    for number, call in enumerate(calls, 1):
        try:
            cell = measure(call)
        except Exception as error:
            cell = {**facts(call), "us": {}, "error": failure(error)}
        with contextlib.suppress(Exception):  # After a trap, even freeing memory fails.
            torch.cuda.empty_cache()
        result.add(cell, line(cell, f"[{number}/{len(calls)}] {call}"))


# ---- Comparison -----------------------------------------------------------------------------------------------------


def times_as_fast(cell: Cell, rival: str, ours: str = AUTO) -> float | None:
    """Return the library's time divided by ours, or None if either was not measured."""
    us = cell.get("us", {})
    return ratio(us.get(rival) or None, us.get(ours))


def present(cells: Sequence[Cell], names: Iterable[str]) -> list[str]:
    """Return the names that have a time, or a reason for its absence, in at least one cell."""
    known = {name for cell in cells for part in ("us", "refused") for name in cell.get(part, {})}
    return [name for name in names if name in known]


def with_best(cell: Cell, rivals: Sequence[str]) -> Cell:
    """Return the cell with its fastest library as the additional contender BEST."""
    us = {name: cell["us"][name] for name in rivals if name in cell.get("us", {})}
    if not us:
        return cell
    best = min(us, key=lambda name: us[name])
    extended = {**cell, "us": {**cell["us"], BEST: us[best]}}
    for field in ("rms_error", "largest_error"):
        if best in cell.get(field, {}):
            extended[field] = {**cell[field], BEST: cell[field][best]}
    return extended


def summary_line(
    group: str, cells: Sequence[Cell], rival: str, place: Callable[[Cell], str], ours: str = AUTO
) -> list[str]:
    """Return a line with our speedup over a library in these cells and the ratio of errors, or an empty list.

    ``place`` returns the name of a cell.
    """
    measured_cells = [(times, cell) for cell in cells if (times := times_as_fast(cell, rival, ours)) is not None]
    if not measured_cells:
        return []
    minimum, where = min(measured_cells, key=lambda each: each[0])
    line = f"{group}: {ours} / {rival}: geometric mean {geometric_mean([times for times, _ in measured_cells]):.3f}, "
    line += f"least {minimum:.3f} at {place(where)}, {counted(len(measured_cells), 'cell')}"
    if missing := len(cells) - len(measured_cells):
        line += f" ({missing} more not measured)"
    pairs = [(cell.get("rms_error", {}).get(ours), cell.get("rms_error", {}).get(rival)) for _, cell in measured_cells]
    if errors := [part for pair in pairs if (part := ratio(*pair)) is not None]:
        line += f"; errors at most {max(errors):.2f} times those of {rival}"
    return [line]


def refusals(cell: Cell) -> str:
    """Return the end of a cell's line, with the contenders that were not measured and the reasons."""
    return "".join(f"; no {name}: {why}" for name, why in cell.get("refused", {}).items())
