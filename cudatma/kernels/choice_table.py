"""The configuration for each M of a shape, as a table of intervals.

A shape's table is built when it is first needed: the cost model predicts the times of all configurations at all
intervals, ``menu`` reduces them to a few kernels, and tuning entries replace what they serve.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cudatma.context import Cache, runtime
from cudatma.errors import ArgumentError
from cudatma.kernels import overrides
from cudatma.kernels.family import Family, P, S
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.menu import FIRST_MS, LAST_M, menu
from cudatma.kernels.overrides import Found, entry_points, lookup, pinned_scope, pinned_spec
from cudatma.kernels.tuning_file import FILE_VARIABLE, NOTHING

#: Tables that a process keeps: one takes some 20 KB.
_MAX_TABLES = 1024
#: M of the first tables; a larger M doubles it.
_MIN_MAX_M = LAST_M
#: Each M up to _SINGLE has an interval of its own. Intervals have _STEP values of M up to _FINE and 2 * _STEP up to
#: _MIN_MAX_M; beyond, their length doubles with each doubling of M.
_SINGLE, _FINE, _STEP = 32, 2048, 8


@dataclass(frozen=True, slots=True)
class Choice:
    """The configuration for an interval of M, and the tuning entry that it comes from, if any."""

    spec: Any
    found: Found | None = None


@dataclass(frozen=True, slots=True)
class ChoiceTable:
    """The choices of a shape for M = 1 to max_m; ``starts[i]`` is the first M of ``choices[i]``."""

    max_m: int
    starts: Sequence[int]
    choices: Sequence[Choice]

    def choice(self, m: int) -> Choice:
        """Return the choice for M rows, at most ``max_m``."""
        return self.choices[bisect_right(self.starts, m) - 1]

    def at(self, m: int) -> Any:
        """Return the configuration for M rows, at most ``max_m``."""
        return self.choices[bisect_right(self.starts, m) - 1].spec

    def ms_up_to(self, m: int) -> list[int]:
        """Return values of M from 1 to m, one at least for each interval and, up to 8192, each number of tiles.

        Tiles have multiples of 8 rows.
        """
        starts = self.starts[: bisect_right(self.starts, m)]
        return sorted({*starts, *range(_STEP, min(m, _MIN_MAX_M), _STEP), m})

    def specs_up_to(self, m: int) -> list[Any]:
        """Return the configurations that M from 1 to m use, each once."""
        return list(dict.fromkeys(one.spec for one in self.choices[: bisect_right(self.starts, m)]))


class Tables(Cache[ChoiceTable]):
    """Tables by shape, GPU and the variable that names the tuning file, a part of the Runtime."""

    def __init__(self) -> None:
        super().__init__(_MAX_TABLES)


def choose(family: Family[P, S], problem: P, gpu: Gpu, memo: dict[Any, Any], key: Any = "table") -> S:
    """Return the pinned configuration, or else the one in the table of the problem's shape.

    ``memo`` keeps the table under a key, for all problems of the shape.
    """
    table: ChoiceTable | None = memo.get(key)
    if table is None or problem.m > table.max_m or pinned_scope.get() is not None:
        spec = pinned_spec(family, problem, gpu)
        if spec is not None:
            return spec
        if len(memo) >= _MAX_TABLES:
            memo.clear()
        table = memo[key] = choice_table(family, problem, gpu, problem.m)
    return cast("S", table.at(problem.m))


def choose_by_cost(family: Family[P, S], problem: P, gpu: Gpu) -> S:
    """Return the configuration by the cost model alone. Deterministic; looks at no device and no file."""
    return cast("S", _table(family, problem, gpu, problem.m, NOTHING).at(problem.m))


def choice_table(family: Family[P, S], problem: P, gpu: Gpu, max_m: int) -> ChoiceTable:
    """Return the table of the problem's shape, which covers ``max_m`` and more. Ignores what is pinned.

    Raises what ``Family.times`` raises, and ArgumentError if no kernel runs on the GPU's target.
    """
    return _table(family, problem, gpu, max_m, os.environ.get(FILE_VARIABLE))


def forget() -> None:
    """Drop all tables and the plans that were made with them, and read the tuning files again."""
    overrides.forget()
    parts = runtime().parts
    parts.pop(Tables, None)
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
    """Build a table from the cost model alone."""
    ms = _starts(max_m)
    found = family.times(shape, ms, gpu)
    if not found:
        raise ArgumentError("target", gpu.target, f"a target that runs one of the {family.name} kernels")
    specs = [spec for spec, _ in found]
    us = np.stack([us for _, us in found])
    choices = [Choice(spec) for spec in specs]
    chosen = menu(us, ms, np.array([family.is_shared(spec) for spec in specs]))
    return _merged(max_m, ms.tolist(), [choices[index] for index in chosen.tolist()])


def _with_entries(family: Family[P, S], shape: Any, gpu: Gpu, predicted: ChoiceTable) -> ChoiceTable:
    """Return the table with tuning entries in place of the predicted choices that they serve."""
    points = [point for point in entry_points(family, shape, gpu) if 1 <= point <= predicted.max_m]
    if not points:
        return predicted
    starts = sorted({*predicted.starts, *points})
    entries = (lookup(family, family.with_m(shape, start), gpu) for start in starts)
    choices = [
        predicted.choice(start) if found is None else Choice(found.entry.spec, found)
        for start, found in zip(starts, entries, strict=True)
    ]
    return _merged(predicted.max_m, starts, choices)


def _merged(max_m: int, starts: Sequence[int], choices: Sequence[Choice]) -> ChoiceTable:
    """Return a table in which no two neighbours are the same choice."""
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
