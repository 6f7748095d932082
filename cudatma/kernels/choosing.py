"""Which configuration serves a problem: a pinned one, else a measured exception, else the cheapest candidate; and which
are worth measuring.

The exceptions are tuning entries, of the user's file, then of the table that ships, each read once a process. An entry
was measured for one problem. It also serves nearby values of M, by nearest(): the tile then cuts M into as many tiles,
and the work is the same. Where no entry of the same problem serves, one with the same index fields (for Marlin K and N)
does, adapted to the rest of the problem if its tile fits: the work is divided in the same way.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Generic

from cudatma.errors import (
    ArgumentError,
    ArgumentTypeError,
    CudaTmaError,
    TargetError,
    TuneFileWarning,
    counted,
    duration,
    shown,
)
from cudatma.kernels.cost import Cost, ranked
from cudatma.kernels.family import Family, KernelSpec, P, S
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.schedule import ceil_div
from cudatma.kernels.tuning_file import (
    FILE_VARIABLE,
    NOTHING,
    Entry,
    entries_for,
    entry_fault,
    entry_sizes,
    parse_entry,
    user_file,
)
from cudatma.target import Target, get_target

#: What pinned() holds.
pinned_scope: ContextVar[Any] = ContextVar("pinned configuration", default=None)
#: Part of a short list that different tiles take; the rest are variants of the two best.
_TILES = 2 / 3
#: A configuration whose predicted time is more than so many times the first's is not measured.
_HOPELESS = 1.25
#: From so many tiles of M on, one more or fewer changes little: entries serve up to twice their M.
_MANY_TILES = 8
#: Most that an entry's M may be, as a multiple of the M that it serves.
_LARGER_M = 1.25


@dataclass(frozen=True, slots=True)
class Decision(Generic[S]):
    """A configuration; where it comes from (``"pinned"``, ``"tuned"``, ``"shipped"``, ``"rule"``); why, in words."""

    spec: S
    source: str
    why: str


@contextlib.contextmanager
def pinned(spec: object) -> Iterator[None]:
    """Inside, every choice of this thread for the spec's family is this one: the tuner launches each candidate as a
    call would. Raises ArgumentTypeError; a choice for a problem that it does not fit, ArgumentError."""
    if not isinstance(spec, KernelSpec):
        raise ArgumentTypeError("spec", type(spec).__name__, "a kernel's spec")
    token = pinned_scope.set(spec)
    try:
        yield
    finally:
        pinned_scope.reset(token)


def decide(family: Family[P, S], problem: P, gpu: Gpu) -> Decision[S]:
    """The configuration for a problem on a GPU, and the reason; the same for as long as a process lives.

    A problem with a constraint gets the cheapest candidate. Else what is pinned; else a tuning entry of the user's file
    or of the table that ships; else the cheapest candidate.
    """
    if not problem.constraint:
        spec = pinned_scope.get()
        if spec is not None and type(spec) in family.kernels.values():
            _check_pinned(family, spec, problem, gpu)
            return Decision(spec, "pinned", "pinned by the caller")
        if (found := lookup(family, problem, gpu)) is not None:
            entry, source = found.entry, "shipped" if found.shipped else "tuned"
            took, rule_took = duration(1e-6 * entry.us), duration(1e-6 * entry.rule_us)
            gain = f"{took}, where the cost model's choice took {rule_took}"
            shared = " and ".join(name.upper() for name in family.index)
            which = "this problem" if found.exact else f"one of this {shared} ({entry.problem.description})"
            return Decision(entry.spec, source, f"{found.path} has {which}, measured at M = {entry.problem.m}: {gain}")
    spec, cost, considered = cheapest_of(family, problem, gpu)
    why = f"the cheapest of {counted(considered, 'candidate')} by the cost model, {duration(1e-6 * cost.us)}"
    return Decision(spec, "rule", problem.constraint or why)


def interval_start(family: Family[P, S], problem: P, gpu: Gpu) -> int:
    """Return the first M of the interval around a problem's M in which the choice is the same."""
    at_one: Any = replace(problem, m=1)  # type: ignore[type-var]
    points = _entry_points(family, at_one, gpu, os.environ.get(FILE_VARIABLE))
    below = bisect_right(points, problem.m)
    return max(family.interval(problem.m), points[below - 1] if below else 1)


@lru_cache(maxsize=256)
def _entry_points(family: Family[Any, Any], problem: Any, gpu: Gpu, file: str | None) -> list[int]:
    """Return, sorted, the values of M at which another tuning entry may begin to serve a problem of this shape."""
    if file == NOTHING:
        return []
    raw = problem.as_json()
    index = tuple(raw[name] for name in family.index)
    measured = {entry.problem.m for path, _ in _files(family) for entry in _entries(path, family, gpu, index)}
    points = {point for m in measured for point in (math.ceil(m / _LARGER_M), m, 2 * m)}
    # Among entries of other problems the one with the nearest M serves, so that another one begins half-way.
    points |= {half for a in measured for b in measured if a < b for half in (ceil_div(a + b, 2), (a + b) // 2 + 1)}
    return sorted(points)


def _check_pinned(family: Family[P, S], spec: S, problem: P, gpu: Gpu) -> None:
    wanted = problem.as_json()
    for name in family.spec_fields:
        if (got := getattr(spec, name)) != wanted[name]:
            raise ArgumentError(f"pinned spec: {name}", got, f"{wanted[name]}, the problem's", "pin another spec")
    spec.check(problem, get_target(gpu.target))


def cheapest_of(family: Family[P, S], problem: P, gpu: Gpu) -> tuple[S, Cost, int]:
    """(the cheapest candidate, its cost, how many there are). Deterministic; looks at no device and no file.

    Raises ArgumentError where none fits the target.
    """
    listed = family.candidates(problem, gpu)
    for spec, cost in ranked(listed):
        return spec, cost, len(listed)
    raise ArgumentError("target", gpu.target, f"a target that runs one of the {family.name} kernels")


@dataclass(frozen=True, slots=True)
class Listed(Generic[S]):
    """A configuration and its predicted cost."""

    spec: S
    cost: Cost

    @property
    def label(self) -> str:
        """The kernel's entry, and the field that it does not show: unique among a problem's configurations."""
        ctas = f" x{self.spec.blocks_per_sm}" if self.spec.blocks_per_sm > 1 else ""
        return f"{self.spec.entry}{ctas}"


def shortlist(family: Family[P, S], problem: P, gpu: Gpu, limit: int) -> list[Listed[S]]:
    """The cost model's choice, which is to be beaten, then up to ``limit`` - 1 more: the next best tiles, and
    variants of the two best."""
    tiles = [Listed(spec, cost) for spec, cost in islice(ranked(family.candidates(problem, gpu)), limit)]
    turns = zip_longest(*(variants(one.spec, problem, get_target(gpu.target)) for one in tiles[:2]))
    changed = (Listed(one, one.cost(problem, gpu)) for turn in turns for one in turn if one is not None)
    most_tiles = max(1, round(limit * _TILES))
    kept: dict[str, Listed[S]] = {}
    # Where there are too few variants, more tiles take their places.
    for one in (*tiles[:most_tiles], *changed, *tiles[most_tiles:]):
        if one.cost.us <= _HOPELESS * tiles[0].cost.us:
            kept.setdefault(one.label, one)
    return list(kept.values())[:limit]


def variants(spec: S, problem: P, target: Target) -> Iterator[S]:
    """The same tile with other pipelines or rings; each can run the problem on the target."""
    for change in spec.variants(problem):
        with contextlib.suppress(ArgumentError, TargetError):
            changed: Any = replace(spec, **change)  # type: ignore[type-var]
            if changed != spec:
                changed.check(problem, target)
                yield changed


@dataclass(frozen=True, slots=True)
class Found:
    """An entry, and the file that it comes from. shipped: whether that is cudatma's own. exact: whether the entry is
    the problem's own but for M; else it was adapted."""

    entry: Entry[Any, Any]
    path: Path
    shipped: bool
    exact: bool = True


def lookup(family: Family[P, S], problem: P, gpu: Gpu) -> Found | None:
    """The tuning entry that serves a problem, the user's before a shipped one; None where there is none.

    Never raises for what files hold: a TuneFileWarning says, once a process, what is ignored.
    """
    if os.environ.get(FILE_VARIABLE) == NOTHING:
        return None
    raw = problem.as_json()
    index = tuple(raw[name] for name in family.index)
    files = [(_entries(path, family, gpu, index), path, shipped) for path, shipped in _files(family)]
    for entries, path, shipped in files:
        if (entry := nearest([one for one in entries if one.problem.fixed == problem.fixed], problem.m)) is not None:
            return Found(entry, path, shipped)
    for entries, path, shipped in files:
        if (alike := _alike(entries, problem, get_target(gpu.target))) is not None:
            return Found(alike, path, shipped, exact=False)
    return None


def _alike(entries: Sequence[Entry[Any, Any]], problem: Any, target: Target) -> Entry[Any, Any] | None:
    """An entry of another problem with the same index, its spec adapted to this one."""
    by_fixed = {
        one.problem.fixed: [same for same in entries if same.problem.fixed == one.problem.fixed] for one in entries
    }
    found = (nearest(of, problem.m) for of in by_fixed.values())
    for entry in sorted(
        (one for one in found if one), key=lambda one: (abs(one.problem.m - problem.m), repr(one.problem.fixed))
    ):
        with contextlib.suppress(ArgumentError, TargetError):
            spec = entry.spec.adapted(problem)
            if spec is not None:
                spec.check(problem, target)
                return replace(entry, spec=spec)
    return None


def nearest(entries: Sequence[Entry[Any, Any]], m: int) -> Entry[Any, Any] | None:
    """The entry for M among entries that differ in M alone: of those that serve, the one with the largest M up to it,
    else the one with the smallest above.

    An entry serves where its tile cuts both M into as many tiles; one for a larger M only if that is at most a quarter
    larger: the cost model cuts tiles to M. From 8 tiles on, any up to twice its M.
    """
    serving = [entry for entry in entries if _serves(entry, m)]
    below = [entry for entry in serving if entry.problem.m <= m]
    if below:
        return max(below, key=lambda entry: entry.problem.m)
    return min(serving, key=lambda entry: entry.problem.m, default=None)


def _serves(entry: Entry[Any, Any], m: int) -> bool:
    measured = entry.problem.m
    here, there = ceil_div(m, entry.spec.block_m), ceil_div(measured, entry.spec.block_m)
    if here == there:
        return bool(measured <= _LARGER_M * m)
    return bool(min(here, there) >= _MANY_TILES and measured <= m < 2 * measured)


def _files(family: Family[Any, Any]) -> list[tuple[Path, bool]]:
    try:
        path = user_file()
    except ArgumentError as error:
        _warn(str(error))
        path = None
    table = shipped(family)
    return ([] if path is None else [(path, False)]) + ([] if table is None else [(table, True)])


def tuning_files(family: Family[Any, Any]) -> list[Path]:
    """Return the files whose entries may serve a family: the user's, then the table that ships."""
    return [path for path, _ in _files(family)]


def shipped(family: Family[Any, Any]) -> Path | None:
    """The table that ships with a family."""
    return family.table


@lru_cache(maxsize=16)
def _by_index(path: Path, family: Family[Any, Any], gpu: Gpu) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """A file's entries by their index fields, not yet parsed: a first call looks at one problem's."""
    try:
        raws = entries_for(path, family, gpu)
    except (OSError, ValueError) as error:
        _warn(f"{path}: not used: {error}")
        return {}
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for raw in raws:
        index = tuple(raw.get(name) for name in family.index)
        if all(type(size) is int for size in index):
            found.setdefault(index, []).append(raw)
        else:
            sizes = ", ".join(f"{name} {shown(size)}" for name, size in zip(family.index, index, strict=True))
            _warn(f"{path}: an entry is not used: {sizes}: its sizes must be integers")
    return found


@lru_cache(maxsize=256)
def _entries(path: Path, family: Family[Any, Any], gpu: Gpu, index: tuple[Any, ...]) -> list[Entry[Any, Any]]:
    """The usable entries of one index; read once."""
    found, target = [], get_target(gpu.target)
    for raw in _by_index(path, family, gpu).get(index, []):
        try:
            found.append(parse_entry(raw, family, target))
        except (CudaTmaError, KeyError, TypeError, ValueError) as error:
            _warn(f"{path}: an entry is not used: {entry_sizes(raw, family)}: {entry_fault(error)}")
    return found


@lru_cache(maxsize=64)
def _warn(text: str) -> None:
    """Once a process."""
    warnings.warn(text, TuneFileWarning, stacklevel=2)


def forget() -> None:
    """Read the files again at the next look: after tuning, and in tests."""
    for cached in (_by_index, _entries, _entry_points, _warn):
        cached.cache_clear()
