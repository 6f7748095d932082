"""Tuned configurations at a first call: the user's file, then a table that ships, each file read once a process.

A cell was measured for one layer at one number of tokens. It serves others of the same layer (K, N, group size, zero
points, dtype) by nearest(): the same tile then has the same number of tokens' tiles, so that the work is the same.
Where none of a layer's own serves, one of the same K and N does with the layer's type, groups and zero points, as far
as that fits: the work is divided alike.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from cudatma import context
from cudatma.errors import ArgumentError, CudaTmaError, TargetError, TuneFileWarning
from cudatma.kernels.marlin.card import Card, card_of
from cudatma.kernels.marlin.layer import AnyMarlinSpec, Choice, Layer
from cudatma.kernels.marlin.problem import ceil_div
from cudatma.kernels.marlin.spec import MarlinSpec
from cudatma.kernels.marlin.tune_file import FILE_VARIABLE, NOTHING, Cell, read_cells, user_file
from cudatma.target import Target, get_target

SHIPPED = Path(__file__).with_name("tuned")
#: From so many tiles of tokens on, one more or fewer changes little: cells serve up to twice their tokens.
_MANY_TILES = 8
#: How many times as many tokens a cell may have as it serves.
_MORE_TOKENS = 1.25
#: What pinned() holds for the calling thread.
pinned_scope: ContextVar[Choice[AnyMarlinSpec] | None] = ContextVar("pinned choice of a Marlin GEMM", default=None)


@dataclass(frozen=True, slots=True)
class Found:
    """A cell, and the file that it comes from. shipped: whether that is one of cudatma's own. exact: whether the cell
    is the layer's own; else one of the same K and N, in another type or other groups, was measured."""

    cell: Cell
    path: Path
    shipped: bool
    exact: bool = True


@contextlib.contextmanager
def pinned(choice: Choice[AnyMarlinSpec]) -> Iterator[None]:
    """Inside, every choice() of this thread is this one: the tuner runs each candidate as a GEMM would run it."""
    token = pinned_scope.set(choice)
    try:
        yield
    finally:
        pinned_scope.reset(token)


def lookup(layer: Layer, m: int, target: Target, multiprocessors: int, card: Card | None = None) -> Found | None:
    """The tuned cell that serves ``m`` tokens, the user's before a shipped one; None where there is none.

    card: None is the card of this machine that has this target and so many multiprocessors; where there is none, or
    several that differ in their clocks, nothing is tuned. Never raises for what files hold: a TuneFileWarning says,
    once a process, what is ignored.
    """
    if os.environ.get(FILE_VARIABLE) == NOTHING:
        return None
    known = _card_here(target.name, multiprocessors) if card is None else card
    if known is None:
        return None
    files = [(_cells(path, known, shipped), path, shipped) for path, shipped in _files(layer.k, layer.n)]
    for cells, path, shipped in files:
        if (cell := nearest(cells.get(layer, ()), m)) is not None:
            return Found(cell, path, shipped)
    for cells, path, shipped in files:
        if (alike := _alike(cells, layer, m, target)) is not None:
            return Found(alike, path, shipped, exact=False)
    return None


def _alike(cells: Mapping[Layer, Sequence[Cell]], layer: Layer, m: int, target: Target) -> Cell | None:
    """A cell of another layer of the same K and N, its choice with this one's type, groups and zero points."""
    found = (nearest(of, m) for other, of in cells.items() if (other.k, other.n) == (layer.k, layer.n))
    for cell in sorted((one for one in found if one), key=lambda one: (abs(one.m - m), repr(one.layer))):
        if isinstance(cell.choice.spec, MarlinSpec):  # its ways to scale go with the groups
            continue
        with contextlib.suppress(ArgumentError, TargetError):
            spec: AnyMarlinSpec = replace(
                cell.choice.spec, dtype=layer.dtype, group_size=layer.group_size, has_zeros=layer.has_zeros
            )
            spec.check_target(target)
            if spec.smem_bytes <= target.smem_share_bytes(cell.choice.blocks_per_sm):
                return replace(cell, choice=replace(cell.choice, spec=spec))
    return None


def nearest(cells: Sequence[Cell], m: int) -> Cell | None:
    """Of one layer's cells the one for ``m`` tokens: that with the most tokens up to m that serves, else that with the
    fewest above.

    A cell serves where its tile cuts both numbers of tokens into as many tiles; one for more tokens only if it has
    at most a quarter more: the rules cut their tiles to the number of tokens. From 8 tiles on, any up to twice its
    tokens.
    """
    serving = [cell for cell in cells if _serves(cell, m)]
    below = [cell for cell in serving if cell.m <= m]
    return max(below, key=lambda cell: cell.m) if below else min(serving, key=lambda cell: cell.m, default=None)


def _serves(cell: Cell, m: int) -> bool:
    block_m = cell.choice.spec.block_m
    here, there = ceil_div(m, block_m), ceil_div(cell.m, block_m)
    if here == there:
        return cell.m <= _MORE_TOKENS * m
    return min(here, there) >= _MANY_TILES and cell.m <= m < 2 * cell.m


def shipped_file(table: str, k: int, n: int) -> Path:
    """Of a table that ships (``"h200"``) the file of one (K, N), alone: a first call reads no other."""
    return SHIPPED / table / f"{k}x{n}.json"


def _files(k: int, n: int) -> list[tuple[Path, bool]]:
    try:
        path = user_file()
    except ArgumentError as error:
        _warn(str(error))
        path = None
    return ([] if path is None else [(path, False)]) + [(one, True) for one in _shipped(k, n)]


@lru_cache(maxsize=256)
def _shipped(k: int, n: int) -> list[Path]:
    return sorted(SHIPPED.glob(shipped_file("*", k, n).relative_to(SHIPPED).as_posix()))


@lru_cache(maxsize=256)
def _cells(path: Path, card: Card, shipped: bool) -> dict[Layer, list[Cell]]:
    """The cells of a file by layer; read once."""
    cells, problems = read_cells(path, card, get_target(card.target), shipped=shipped)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        _warn(f"{path}: not used: {problems[0]}{more}")
    by_layer: dict[Layer, list[Cell]] = {}
    for cell in cells:
        by_layer.setdefault(cell.layer, []).append(cell)
    return by_layer


@lru_cache(maxsize=64)
def _warn(text: str) -> None:
    """Once a process."""
    warnings.warn(text, TuneFileWarning, stacklevel=2)


@lru_cache(maxsize=16)
def _card_here(target: str, multiprocessors: int) -> Card | None:
    found = set()
    try:
        driver = context.initialise()
        for device in range(int(driver.cuDeviceGetCount()[1])):
            with contextlib.suppress(CudaTmaError):  # a card that no target serves
                found.add(card_of(device))
    except (CudaTmaError, ImportError):
        return None
    fitting = [card for card in found if (card.target, card.multiprocessors) == (target, multiprocessors)]
    return fitting[0] if len({(card.clock_class_mhz, card.memory_clock_mhz) for card in fitting}) == 1 else None


def forget() -> None:
    """Read the files anew at the next look: after tuning, and in tests."""
    for cached in (_cells, _shipped, _warn, _card_here):
        cached.cache_clear()
