"""The configurations that are worth measuring, best first as the cost model sees them. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Any, Generic

from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.candidates import ranked
from cudatma.kernels.cost import Cost
from cudatma.kernels.family import Family, P, S
from cudatma.kernels.gpu import Gpu
from cudatma.target import Target, get_target

#: Part of a short list that different tiles take; the rest are variants of the two best.
_TILES = 2 / 3
#: A configuration whose predicted time is more than so many times the first's is not measured.
_HOPELESS = 1.25


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
