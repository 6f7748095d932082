"""Tuning entries at a first call: the user's file, then the table that ships, each read once a process.

An entry was measured for one layer at one M. It serves other sizes of the same layer (K, N, group size, zero points,
dtype) by nearest(): the same tile then cuts M into as many tiles, so that the work is the same. Where none of a layer's
own serves, one of the same K and N does with the layer's type, groups and zero points, as far as that fits: the work is
divided alike.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from cudatma.errors import ArgumentError, CudaTmaError, TargetError, TuneFileWarning, shown
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.marlin.problem import AnyMarlinSpec, LinearShape
from cudatma.kernels.schedule import ceil_div
from cudatma.kernels.tuning_file import FILE_VARIABLE, NOTHING, Entry, entries_for, parse_entry, user_file
from cudatma.target import Target, get_target

SHIPPED = Path(__file__).parent / "marlin" / "tuned.json"
#: From so many tiles of M on, one more or fewer changes little: entries serve up to twice their M.
_MANY_TILES = 8
#: How many times as large an entry's M may be as the one it serves.
_LARGER_M = 1.25
#: What pinned() holds.
pinned_scope: ContextVar[AnyMarlinSpec | None] = ContextVar("pinned configuration of a Marlin GEMM", default=None)


@dataclass(frozen=True, slots=True)
class Found:
    """An entry, and the file that it comes from. shipped: whether that is cudatma's own. exact: whether the entry is
    the layer's own; else one of the same K and N, in another type or other groups, was measured."""

    entry: Entry
    path: Path
    shipped: bool
    exact: bool = True


@contextlib.contextmanager
def pinned(spec: AnyMarlinSpec) -> Iterator[None]:
    """Inside, every choice of this thread is this one: the tuner runs each candidate as a GEMM would run it."""
    token = pinned_scope.set(spec)
    try:
        yield
    finally:
        pinned_scope.reset(token)


def lookup(layer: LinearShape, m: int, card: Gpu) -> Found | None:
    """The tuning entry that serves M rows, the user's before a shipped one; None where there is none.

    Never raises for what files hold: a TuneFileWarning says, once a process, what is ignored.
    """
    if os.environ.get(FILE_VARIABLE) == NOTHING:
        return None
    files = [(_entries(path, card, layer.k, layer.n), path, shipped) for path, shipped in _files()]
    for entries, path, shipped in files:
        if (entry := nearest([one for one in entries if one.layer == layer], m)) is not None:
            return Found(entry, path, shipped)
    for entries, path, shipped in files:
        if (alike := _alike(entries, layer, m, get_target(card.target))) is not None:
            return Found(alike, path, shipped, exact=False)
    return None


def _alike(entries: Sequence[Entry], layer: LinearShape, m: int, target: Target) -> Entry | None:
    """An entry of another layer of the same K and N, its spec with this one's type, groups and zero points."""
    by_layer = {one.layer: [other for other in entries if other.layer == one.layer] for one in entries}
    found = (nearest(of, m) for of in by_layer.values())
    for entry in sorted((one for one in found if one), key=lambda one: (abs(one.m - m), repr(one.layer))):
        with contextlib.suppress(ArgumentError, TargetError):
            spec: AnyMarlinSpec | None = entry.spec.with_weights(layer.dtype, layer.group_size, layer.has_zeros)
            if spec is None:
                continue
            spec.check_target(target)
            if spec.smem_bytes <= target.smem_share_bytes(spec.blocks_per_sm):
                return replace(entry, spec=spec)
    return None


def nearest(entries: Sequence[Entry], m: int) -> Entry | None:
    """Of one layer's entries the one for M: that with the largest M up to it that serves, else that with the smallest
    above.

    An entry serves where its tile cuts both M into as many tiles; one for a larger M only if that is at most a quarter
    larger: the cost model cuts tiles to M. From 8 tiles on, any up to twice its M.
    """
    serving = [entry for entry in entries if _serves(entry, m)]
    below = [entry for entry in serving if entry.m <= m]
    return max(below, key=lambda entry: entry.m) if below else min(serving, key=lambda entry: entry.m, default=None)


def _serves(entry: Entry, m: int) -> bool:
    here, there = ceil_div(m, entry.spec.block_m), ceil_div(entry.m, entry.spec.block_m)
    if here == there:
        return entry.m <= _LARGER_M * m
    return min(here, there) >= _MANY_TILES and entry.m <= m < 2 * entry.m


def _files() -> list[tuple[Path, bool]]:
    try:
        path = user_file()
    except ArgumentError as error:
        _warn(str(error))
        path = None
    return ([] if path is None else [(path, False)]) + [(SHIPPED, True)]


@lru_cache(maxsize=8)
def _by_shape(path: Path, card: Gpu) -> dict[tuple[Any, Any], list[dict[str, Any]]]:
    """A file's entries by (K, N), not yet parsed: a first call looks at one layer's."""
    try:
        raws = entries_for(path, card)
    except (OSError, ValueError) as error:
        _warn(f"{path}: not used: {error}")
        return {}
    found: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for raw in raws:
        k, n = raw.get("k"), raw.get("n")
        if type(k) is int and type(n) is int:
            found.setdefault((k, n), []).append(raw)
        else:
            _warn(f"{path}: an entry is not used: k {shown(k)}, n {shown(n)}: its sizes must be integers")
    return found


@lru_cache(maxsize=256)
def _entries(path: Path, card: Gpu, k: int, n: int) -> list[Entry]:
    """The usable entries of one K and N; read once."""
    found, target = [], get_target(card.target)
    for raw in _by_shape(path, card).get((k, n), []):
        try:
            found.append(parse_entry(raw, target))
        except (CudaTmaError, KeyError, TypeError, ValueError) as error:
            what = f"missing {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            _warn(f"{path}: an entry is not used: k {k}, n {n}, m {shown(raw.get('m'))}: {what}")
    return found


@lru_cache(maxsize=64)
def _warn(text: str) -> None:
    """Once a process."""
    warnings.warn(text, TuneFileWarning, stacklevel=2)


def forget() -> None:
    """Read the files anew at the next look: after tuning, and in tests."""
    for cached in (_by_shape, _entries, _warn):
        cached.cache_clear()
