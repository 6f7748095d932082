"""Choose the configuration for a problem from a table of M intervals, and explain the choice.

A table is built when a shape is first needed: the cost model predicts the times of all configurations at all intervals,
a menu reduces them to a few kernels, and tuning entries (tuning.py) replace the choices for the values of M to which
they apply. Each M has its own cheapest tile, but every kernel must be compiled and loaded before its first launch. A
menu is therefore a small set of kernels that contains, for every M, a kernel that takes only slightly longer than the
cheapest one. A greedy set cover computes the menu.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Generic, cast

import numpy as np
from numpy.typing import NDArray

from cudatma.context import Cache, runtime
from cudatma.errors import ArgumentError, TargetError, duration
from cudatma.kernels.cost import Cost, cheapest_first
from cudatma.kernels.family import Family, P, S
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.tuning import FILE_VARIABLE, NOTHING, Match, entry_points, lookup, pinned_config, pinned_scope
from cudatma.target import Target, get_target

#: Step by which the allowed loss is increased while a menu exceeds its limit.
_GROWTH = 0.005
#: Allowed loss at M = 1, which is about the error of the cost model there.
_AT_ONE = 0.002
#: Set-cover weight of a kernel that few shapes share.
_SELDOM = 0.4


@dataclass(frozen=True, slots=True)
class _Range:
    """A range of M with its own menu.

    Attributes
    ----------
    last : int
        Largest M.
    limit : int
        Maximum number of kernels.
    at_powers : float
        Allowed loss at powers of two, relative to the cheapest configuration. Most batch sizes are powers of two. At
        M = 1, the allowed loss is _AT_ONE.
    loss : float
        Allowed loss at all other M.
    max_loss : float
        Maximum value to which ``loss`` is raised to meet the limit. If this loss is not enough, the menu exceeds the
        limit.
    """

    last: int
    limit: int
    at_powers: float
    loss: float
    max_loss: float


#: Ranges of M. Below 256, tiles follow M closely. Values of M above the last range also use its menu. Families whose
#: shapes share kernels accept larger losses, so that all shapes together need fewer kernels.
_RANGES = (_Range(255, 24, 0.005, 0.01, 0.03), _Range(8192, 8, 0.005, 0.01, 0.03))
_SHARED_RANGES = (_Range(255, 24, 0.01, 0.04, 0.05), _Range(8192, 8, 0.01, 0.06, 0.1))
LAST_M = _RANGES[-1].last
#: The first M of each range. No interval of M spans two ranges.
FIRST_MS = (1, *(one.last + 1 for one in _RANGES))


def menu(us: NDArray[np.float64], ms: NDArray[np.int64], shared: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return, for each M, the index of the cheapest configuration on the menu.

    Parameters
    ----------
    us : array of shape (configurations, len(ms))
        Predicted times in microseconds, inf where a configuration cannot run.
    ms : array of int64, sorted, starting with 1
        The first M of each interval.
    shared : array of bool, shape (configurations,)
        For each configuration, whether the menus of many shapes contain it.
    """
    chosen, has_power, first = np.zeros(len(ms), np.int64), _has_power(ms), 1
    for limits in _SHARED_RANGES if shared.any() else _RANGES:
        inside, served = (ms >= first) & (ms <= limits.last), ms >= first
        losses = np.where(ms == 1, _AT_ONE, np.where(has_power, limits.at_powers, np.inf))
        kernels = _smallest(us[:, inside], losses[inside], shared, limits)
        chosen[served] = kernels[us[np.ix_(kernels, served)].argmin(axis=0)]
        first = limits.last + 1
    return chosen


def _has_power(ms: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each interval that begins at ``ms`` contains a power of two."""
    after = np.append(ms[1:], ms[-1] + 1)
    return np.asarray(2 ** np.ceil(np.log2(ms)) < after)


def _smallest(
    us: NDArray[np.float64], losses: NDArray[np.float64], shared: NDArray[np.bool_], limits: _Range
) -> NDArray[np.int64]:
    """Return a menu with the smallest loss that its limit allows.

    ``losses`` holds the allowed loss at each M, or inf to use the allowed loss of the range. Shared kernels fill the
    remaining places, because other shapes need them anyway.
    """
    cheapest = us.min(axis=0)
    excess = (us / cheapest - 1)[:, np.isfinite(cheapest)]
    losses, loss = losses[np.isfinite(cheapest)], limits.loss
    while True:
        able = (excess <= np.where(np.isinf(losses), loss, losses)).astype(np.float32)
        rows = _cover(able, np.where(shared, 1, _SELDOM))
        if len(rows) <= limits.limit or loss + _GROWTH > limits.max_loss + 1e-9:
            break
        loss += _GROWTH
    while len(rows) < limits.limit:
        gains = np.maximum(0, excess[rows].min(axis=0) - excess).sum(axis=1) * shared
        if not gains.any():
            break
        rows.append(int(gains.argmax()))
    return np.sort(rows)


def _cover(able: NDArray[np.float32], weights: NDArray[np.float64]) -> list[int]:
    """Return row indices such that each column is 1 in at least one of these rows."""
    uncovered, rows = np.ones(able.shape[1], np.float32), []
    while uncovered.any():
        rows.append(int((able @ uncovered * weights).argmax()))
        uncovered *= 1 - able[rows[-1]]
    times_covered = able[rows].sum(axis=0)
    for row in list(rows):
        if (times_covered - able[row]).all():
            times_covered -= able[row]
            rows.remove(row)
    return rows


#: Maximum number of cached tables, about 20 KB each.
_MAX_TABLES = 1024
#: Largest M of a new table. The limit is doubled until the table covers a larger M.
_MIN_MAX_M = LAST_M
#: Each M up to _SINGLE has its own interval. An interval has _STEP values of M up to _FINE, and 2 * _STEP values up to
#: _MIN_MAX_M. Beyond that, the length of the intervals doubles with each doubling of M.
_SINGLE, _FINE, _STEP = 32, 2048, 8


@dataclass(frozen=True, slots=True)
class Choice:
    """The configuration for an interval of M and its tuning entry, if any."""

    config: Any
    match: Match | None = None


@dataclass(frozen=True, slots=True)
class ChoiceTable:
    """Choices for one shape and M from 1 to max_m. ``starts[i]`` is the first M for which ``choices[i]`` applies."""

    max_m: int
    starts: Sequence[int]
    choices: Sequence[Choice]

    def choice(self, m: int) -> Choice:
        """Return the choice for M rows. M must be at most ``max_m``."""
        return self.choices[bisect_right(self.starts, m) - 1]

    def at(self, m: int) -> Any:
        """Return the configuration for M rows. M must be at most ``max_m``."""
        return self.choices[bisect_right(self.starts, m) - 1].config

    def ms_up_to(self, m: int) -> list[int]:
        """Return values of M from 1 to m: at least one per interval and, up to 8192, one for each number of tiles.

        The number of rows of a tile is a multiple of 8.
        """
        starts = self.starts[: bisect_right(self.starts, m)]
        return sorted({*starts, *range(_STEP, min(m, _MIN_MAX_M), _STEP), m})

    def configs_up_to(self, m: int) -> list[Any]:
        """Return the distinct configurations for M from 1 to m."""
        return list(dict.fromkeys(choice.config for choice in self.choices[: bisect_right(self.starts, m)]))


class Tables(Cache[ChoiceTable]):
    """Cached tables of a Runtime, keyed by shape, GPU and the environment variable that names the tuning file."""

    #: forget() drops this cache.
    holds_choices = True

    def __init__(self) -> None:
        super().__init__(_MAX_TABLES)


def choose(family: Family[P, S], problem: P, gpu: Gpu, memo: dict[Any, Any], key: Any = "table") -> S:
    """Return the pinned configuration if there is one, otherwise the choice in the table for the problem's shape.

    ``memo`` stores the table under ``key``, so that all problems of this shape use the same table.
    """
    table: ChoiceTable | None = memo.get(key)
    if table is None or problem.m > table.max_m or pinned_scope.get() is not None:
        config = pinned_config(family, problem, gpu)
        if config is not None:
            return config
        if len(memo) >= _MAX_TABLES:
            memo.clear()
        table = memo[key] = choice_table(family, problem, gpu, problem.m)
    return cast("S", table.at(problem.m))


def choose_untuned(family: Family[P, S], problem: P, gpu: Gpu) -> S:
    """Return the configuration without tuning entries. The result is independent of devices and files."""
    return cast("S", _table(family, problem, gpu, problem.m, NOTHING).at(problem.m))


def choice_table(family: Family[P, S], problem: P, gpu: Gpu, max_m: int) -> ChoiceTable:
    """Return the table for the problem's shape, which covers at least ``max_m`` rows.

    Pinned configurations are ignored. Raises the errors of ``Family.times``, and ArgumentError if no kernel runs on the
    GPU's target.
    """
    return _table(family, problem, gpu, max_m, os.environ.get(FILE_VARIABLE))


def forget() -> None:
    """Discard all tables and plans, so that tuning files are read again."""
    parts = runtime().parts
    for key in [key for key, part in list(parts.items()) if getattr(part, "holds_choices", False)]:
        parts.pop(key, None)


def _table(family: Family[P, S], problem: P, gpu: Gpu, max_m: int, file: str | None) -> ChoiceTable:
    key = family.name, problem.fixed, gpu, file
    tables: Tables = runtime().part(Tables)
    table = tables.get(key)
    if table is None or table.max_m < max_m:
        shape = family.with_m(problem, 1) if family.shape is None else family.shape(problem)
        max_m = max(_MIN_MAX_M, 1 << (max_m - 1).bit_length())
        if file == NOTHING:
            table = _predicted(family, shape, gpu, max_m)
        else:
            table = _with_entries(family, shape, gpu, _table(family, shape, gpu, max_m, NOTHING))
        tables.put(key, table)
    return table


def _predicted(family: Family[P, S], shape: P, gpu: Gpu, max_m: int) -> ChoiceTable:
    """Return a table without tuning entries."""
    ms = _starts(max_m)
    if family.rule is not None:
        # Each interval uses the rule for its last M, because many thresholds are powers of two, which end intervals.
        lasts = [*(ms[1:] - 1).tolist(), max_m]
        configs_at = [family.rule(family.with_m(shape, m), gpu) for m in lasts]
        equal = {config: Choice(config) for config in configs_at}
        return _merged(max_m, ms.tolist(), [equal[config] for config in configs_at])
    times = family.times(shape, ms, gpu)
    if not times:
        raise ArgumentError("target", gpu.target, f"a target that supports the {family.name} kernels")
    configs = [config for config, _ in times]
    us = np.stack([us for _, us in times])
    choices = [Choice(config) for config in configs]
    chosen = menu(us, ms, np.array([family.is_shared(config) for config in configs]))
    return _merged(max_m, ms.tolist(), [choices[index] for index in chosen.tolist()])


def _with_entries(family: Family[P, S], shape: Any, gpu: Gpu, predicted: ChoiceTable) -> ChoiceTable:
    """Return the table in which tuning entries replace the predicted choices."""
    points = [point for point in entry_points(family, shape, gpu) if 1 <= point <= predicted.max_m]
    if not points:
        return predicted
    starts = sorted({*predicted.starts, *points})
    entries = (lookup(family, family.with_m(shape, start), gpu) for start in starts)
    choices = [
        predicted.choice(start) if match is None else Choice(match.entry.config, match)
        for start, match in zip(starts, entries, strict=True)
    ]
    return _merged(predicted.max_m, starts, choices)


def _merged(max_m: int, starts: Sequence[int], choices: Sequence[Choice]) -> ChoiceTable:
    """Return a table in which adjacent intervals have different choices."""
    kept = [0]
    for i in range(1, len(starts)):
        choice, previous = choices[i], choices[kept[-1]]
        if choice is not previous and choice != previous:
            kept.append(i)
    return ChoiceTable(max_m, [starts[i] for i in kept], [choices[i] for i in kept])


def _starts(max_m: int) -> NDArray[np.int64]:
    """Return the first M of each interval."""
    starts = {*FIRST_MS, *range(1, _SINGLE + 1), *range(_SINGLE + 1, _FINE, _STEP)}
    starts |= {*range(_FINE + 1, _MIN_MAX_M, 2 * _STEP)}
    last, step = _MIN_MAX_M, 4 * _STEP
    while last < max_m:
        starts |= {*range(last + 1, 2 * last, step)}
        last, step = 2 * last, 2 * step
    return np.array(sorted(starts))


#: Fraction of a shortlist that is used for different tiles. The other entries are variants of the two best tiles.
_TILES = 2 / 3
#: A configuration is not measured if its predicted time exceeds that of the first one by more than this factor.
_HOPELESS = 1.25


@dataclass(frozen=True, slots=True)
class Decision(Generic[S]):
    """A configuration, its source (``"pinned"``, ``"tuned"``, ``"shipped"``, ``"rule"``), and the reason as text."""

    config: S
    source: str
    why: str


def decide(family: Family[P, S], problem: P, gpu: Gpu) -> Decision[S]:
    """Return the configuration for a problem on a GPU, and the reason.

    A pinned configuration takes precedence over a tuning entry, and a tuning entry over the family's rule or the
    cheapest kernel on the menu. The user's tuning entries take precedence over shipped tuning entries. For a problem
    with a constraint, pinned configurations and tuning entries are ignored. The result stays the same until the process
    ends or calls forget().
    """
    if (config := pinned_config(family, problem, gpu)) is not None:
        return Decision(config, "pinned", "pinned by the caller")
    table = choice_table(family, problem, gpu, problem.m)
    choice = table.choice(problem.m)
    if (match := choice.match) is not None:
        entry, source = match.entry, "shipped" if match.shipped else "tuned"
        time, rule_time = duration(1e-6 * entry.us), duration(1e-6 * entry.rule_us)
        gain = f"{time}; the untuned choice took {rule_time}"
        shared = " and ".join(name.upper() for name in family.index)
        which = "this problem" if match.exact else f"one of this {shared} ({entry.problem.description})"
        return Decision(
            choice.config, source, f"{match.path} contains {which}, measured at M = {entry.problem.m}: {gain}"
        )
    us = choice.config.cost(problem, gpu).us
    count = len({other.config for other in table.choices if other.match is None})
    cheapest = f"the cheapest of {count} kernels for this shape" if count > 1 else "the only kernel for this shape"
    if family.rule is not None:
        cheapest = "measured thresholds"
    why = f"{cheapest}; the cost model predicts {duration(1e-6 * us)}"
    return Decision(choice.config, "rule", problem.constraint or why)


@dataclass(frozen=True, slots=True)
class Listed(Generic[S]):
    """A configuration, its predicted cost, and the configs of the kernels that it launches."""

    config: S
    cost: Cost
    kernels: tuple[Any, ...]

    @property
    def label(self) -> str:
        """Name of the kernel and CTAs per SM, which the name may omit, or name of a config with several kernels.

        Labels of a problem's configurations are unique.
        """
        if len(self.kernels) > 1:
            return self.config.entry
        (kernel,) = self.kernels
        return f"{kernel.entry} x{kernel.ctas_per_sm}" if kernel.ctas_per_sm > 1 else str(kernel.entry)


def shortlist(family: Family[P, S], problem: P, gpu: Gpu, limit: int) -> list[Listed[S]]:
    """Return up to ``limit`` configurations that are worth measuring.

    The untuned choice comes first, followed by the cheapest tiles and variants of the two best tiles.
    """

    target = get_target(gpu.target)

    def listed(config: S) -> Listed[S]:
        return Listed(config, config.cost(problem, gpu), family.launched(config).launches(problem, target))

    rule = choose_untuned(family, problem, gpu)
    cheapest = [config for config, _ in cheapest_first(family.times, problem, gpu)[:limit]]
    tiles = [listed(config) for config in dict.fromkeys([rule, *cheapest])]
    turns = zip_longest(*(variants(tile.config, problem, target) for tile in tiles[:2]))
    changed = (listed(config) for turn in turns for config in turn if config is not None)
    max_tiles = max(1, round(limit * _TILES))
    kept: dict[str, Listed[S]] = {}
    # If there are too few variants, fill up with tiles.
    for candidate in (*tiles[:max_tiles], *changed, *tiles[max_tiles:]):
        if candidate.cost.us <= _HOPELESS * tiles[0].cost.us:
            kept.setdefault(candidate.label, candidate)
    return list(kept.values())[:limit]


def variants(config: S, problem: P, target: Target) -> Iterator[S]:
    """Yield variants of a tile with other pipelines or rings that can run the problem on the target."""
    for change in config.variants(problem):
        with contextlib.suppress(ArgumentError, TargetError):
            changed: Any = replace(config, **change)  # type: ignore[type-var]
            if changed != config:
                changed.check(problem, target)
                yield changed
