"""Configurations that take precedence over the cost model: pinned by the caller, or measured.

Measured exceptions are tuning entries of the user's file, then of the table that ships. Each file is read once per
process. An entry was measured for one problem. It also serves nearby values of M, by nearest(): the tile then cuts M
into the same number of tiles, and the work is the same. Where no entry of the same problem serves, one with the same
index fields (for Marlin K and N) does, adapted to the rest of the problem if its tile fits: the work is divided in the
same way.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, TargetError, TuneFileWarning, shown
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

#: The configuration that pinned() holds.
pinned_scope: ContextVar[Any] = ContextVar("pinned configuration", default=None)
#: With this number of tiles, one more changes little: entries serve up to twice their M.
_MANY_TILES = 8
#: An entry's M may be larger than the M that it serves by this factor.
_LARGER_M = 1.25


@contextlib.contextmanager
def pinned(spec: object) -> Iterator[None]:
    """Use this spec for every problem of its family inside the ``with`` block.

    The tuner launches each candidate this way, as a call would. Raises ArgumentTypeError. A choice for a problem that
    the spec does not fit raises ArgumentError.
    """
    if not isinstance(spec, KernelSpec):
        raise ArgumentTypeError("spec", type(spec).__name__, "a kernel's spec")
    token = pinned_scope.set(spec)
    try:
        yield
    finally:
        pinned_scope.reset(token)


def pinned_spec(family: Family[P, S], problem: P, gpu: Gpu) -> S | None:
    """Return what is pinned for the family; None if nothing is, or if the problem has a constraint.

    Raises ArgumentError or TargetError if the problem does not fit it.
    """
    spec = pinned_scope.get()
    if not isinstance(spec, family.config) or problem.constraint or spec.version not in family.kernels:
        return None
    given = problem.as_json()
    for name in family.problem_fields:
        if (got := getattr(spec, name)) != given[name]:
            raise ArgumentError(f"pinned spec: {name}", got, f"{given[name]}, the problem's", "pin another spec")
    spec.check(problem, get_target(gpu.target))
    return spec


def entry_points(family: Family[P, S], problem: P, gpu: Gpu) -> list[int]:
    """Return, sorted, the values of M at which another tuning entry may begin to serve a problem of this shape."""
    if problem.constraint or os.environ.get(FILE_VARIABLE) == NOTHING:
        return []
    raw = problem.as_json()
    index = tuple(raw[name] for name in family.index)
    entries = [entry for path, _ in _files(family) for entry in _entries(path, family, gpu, index)]
    measured = {entry.problem.m for entry in entries}
    points = {point for m in measured for point in (math.ceil(m / _LARGER_M), m, 2 * m)}
    # Among entries of other problems the one with the nearest M serves, so that another one begins half-way.
    points |= {half for a in measured for b in measured if a < b for half in (ceil_div(a + b, 2), (a + b) // 2 + 1)}
    for entry in entries:
        tiles = ceil_div(entry.problem.m, entry.spec.tile_m)
        points |= {1 + entry.spec.tile_m * count for count in (tiles - 1, tiles, _MANY_TILES - 1)}
    return sorted(points)


@dataclass(frozen=True, slots=True)
class Found:
    """An entry and the file that it comes from.

    shipped: the file is cudatma's own. exact: the entry differs from the problem in M alone; otherwise it was adapted.
    """

    entry: Entry[Any, Any]
    path: Path
    shipped: bool
    exact: bool = True


def lookup(family: Family[P, S], problem: P, gpu: Gpu) -> Found | None:
    """Return the tuning entry that serves a problem, the user's before a shipped one; None if none does.

    Damaged files raise nothing: a TuneFileWarning names each ignored part once per process.
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


def every_entry_spec(family: Family[P, S], problem: P, gpu: Gpu) -> Iterator[S]:
    """Yield the configurations of all tuning entries for the GPU, of any size, adapted to a problem."""
    if problem.constraint or os.environ.get(FILE_VARIABLE) == NOTHING:
        return
    target = get_target(gpu.target)
    for path, _ in _files(family):
        for index in _by_index(path, family, gpu):
            for entry in _entries(path, family, gpu, index):
                with contextlib.suppress(ArgumentError, TargetError):
                    spec = entry.spec.adapted(problem)
                    if spec is not None:
                        spec.check(problem, target)
                        yield spec


def _alike(entries: Sequence[Entry[Any, Any]], problem: Any, target: Target) -> Entry[Any, Any] | None:
    """Return an entry of another problem with the same index, with its spec adapted to this one."""
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
    """Return the entry that serves M, among entries that differ in M alone; None if none does.

    An entry serves M if its tile cuts its own M into the same number of tiles; an entry for a larger M only if that is
    at most a quarter larger, because the cost model cuts tiles to M. An entry of 8 tiles and more serves up to twice
    its M. The entry with the largest M that does not exceed M comes first, then the one with the smallest M above it.
    """
    serving = [entry for entry in entries if _serves(entry, m)]
    below = [entry for entry in serving if entry.problem.m <= m]
    if below:
        return max(below, key=lambda entry: entry.problem.m)
    return min(serving, key=lambda entry: entry.problem.m, default=None)


def _serves(entry: Entry[Any, Any], m: int) -> bool:
    measured = entry.problem.m
    here, there = ceil_div(m, entry.spec.tile_m), ceil_div(measured, entry.spec.tile_m)
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


def shipped(family: Family[Any, Any]) -> Path | None:
    """Return the table that ships with a family."""
    return family.table


@lru_cache(maxsize=16)
def _by_index(path: Path, family: Family[Any, Any], gpu: Gpu) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Return a file's entries by their index fields; _entries() parses the few that a problem needs."""
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
    """Return the usable entries of one index."""
    found, target = [], get_target(gpu.target)
    for raw in _by_index(path, family, gpu).get(index, []):
        try:
            found.append(parse_entry(raw, family, target))
        except (CudaTmaError, KeyError, TypeError, ValueError) as error:
            _warn(f"{path}: an entry is not used: {entry_sizes(raw, family)}: {entry_fault(error)}")
    return found


@lru_cache(maxsize=64)
def _warn(text: str) -> None:
    """Warn once per process."""
    warnings.warn(text, TuneFileWarning, stacklevel=2)


def forget() -> None:
    """Make the next choice read the files again."""
    for cached in (_by_index, _entries, _warn):
        cached.cache_clear()
