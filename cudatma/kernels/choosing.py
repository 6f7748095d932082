"""Which configuration serves a problem and why, and which are worth measuring."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Generic

from cudatma.errors import ArgumentError, TargetError, counted, duration
from cudatma.kernels.choice_table import choice_table, choose_by_cost
from cudatma.kernels.cost import Cost, cheapest_first
from cudatma.kernels.family import Family, P, S
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.overrides import pinned as pinned
from cudatma.kernels.overrides import pinned_scope as pinned_scope
from cudatma.kernels.overrides import pinned_spec
from cudatma.target import Target, get_target

#: Part of a short list that different tiles take; the rest are variants of the two best.
_TILES = 2 / 3
#: A configuration whose predicted time is more than so many times the first's is not measured.
_HOPELESS = 1.25


@dataclass(frozen=True, slots=True)
class Decision(Generic[S]):
    """A configuration; where it comes from (``"pinned"``, ``"tuned"``, ``"shipped"``, ``"rule"``); why, in words."""

    spec: S
    source: str
    why: str


def decide(family: Family[P, S], problem: P, gpu: Gpu) -> Decision[S]:
    """Return the configuration for a problem on a GPU, and the reason; the same for as long as a process lives.

    What is pinned comes first; then a tuning entry of the user's file or of the table that ships; then the cheapest
    kernel of the shape's menu. Only the menu serves a problem with a constraint.
    """
    if (spec := pinned_spec(family, problem, gpu)) is not None:
        return Decision(spec, "pinned", "pinned by the caller")
    table = choice_table(family, problem, gpu, problem.m)
    choice = table.choice(problem.m)
    if (found := choice.found) is not None:
        entry, source = found.entry, "shipped" if found.shipped else "tuned"
        took, rule_took = duration(1e-6 * entry.us), duration(1e-6 * entry.rule_us)
        gain = f"{took}, where the cost model's choice took {rule_took}"
        shared = " and ".join(name.upper() for name in family.index)
        which = "this problem" if found.exact else f"one of this {shared} ({entry.problem.description})"
        return Decision(choice.spec, source, f"{found.path} has {which}, measured at M = {entry.problem.m}: {gain}")
    us = choice.spec.cost(problem, gpu).us
    kernels = counted(len({one.spec for one in table.choices if one.found is None}), "kernel")
    why = f"the cheapest by the cost model, {duration(1e-6 * us)}, of the {kernels} that serve this shape"
    return Decision(choice.spec, "rule", problem.constraint or why)


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
    """Return up to ``limit`` configurations that are worth measuring.

    The cost model's choice, which is to be beaten, comes first. Then come the cheapest tiles, and variants of the two
    best.
    """
    rule = choose_by_cost(family, problem, gpu)
    cheapest = [spec for spec, _ in cheapest_first(family.times, problem, gpu)[:limit]]
    tiles = [Listed(spec, spec.cost(problem, gpu)) for spec in dict.fromkeys([rule, *cheapest])]
    turns = zip_longest(*(variants(one.spec, problem, get_target(gpu.target)) for one in tiles[:2]))
    changed = (Listed(one, one.cost(problem, gpu)) for turn in turns for one in turn if one is not None)
    max_tiles = max(1, round(limit * _TILES))
    kept: dict[str, Listed[S]] = {}
    # Where there are too few variants, more tiles take their places.
    for one in (*tiles[:max_tiles], *changed, *tiles[max_tiles:]):
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
