"""The configurations that are worth measuring, best first as the cost model sees them. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Any

from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.candidates import ranked
from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.marlin.choose import candidates
from cudatma.kernels.marlin.problem import AnyMarlinSpec, LinearShape
from cudatma.kernels.workspace import has_room
from cudatma.target import Target, get_target

#: Part of a short list that goes to other tiles; the rest goes to variants of the two best.
_TILES = 2 / 3
#: What is predicted to take so much longer than the first is not worth a place.
_HOPELESS = 1.25


@dataclass(frozen=True, slots=True)
class Listed:
    """A configuration and its predicted cost."""

    spec: AnyMarlinSpec
    cost: Cost

    @property
    def label(self) -> str:
        """The kernel's entry, and what of the spec does not show in it: a name of its own for each of a problem's."""
        blocks = f" x{self.spec.blocks_per_sm}" if self.spec.blocks_per_sm > 1 else ""
        return f"{self.spec.entry}{blocks}"


def shortlist(layer: LinearShape, m: int, card: Gpu, limit: int) -> list[Listed]:
    """The cost model's choice (what is to be beaten), then up to ``limit`` - 1 others: the tiles next best, and
    variants of the two best."""
    tiles = [Listed(spec, cost) for spec, cost in islice(ranked(candidates(layer, m, card)), limit)]
    turns = zip_longest(*(variants(one.spec, layer, get_target(card.target)) for one in tiles[:2]))
    changed = (Listed(one, one.cost(m, layer.n, layer.k, card)) for turn in turns for one in turn if one is not None)
    most_tiles = max(1, round(limit * _TILES))
    kept: dict[str, Listed] = {}
    # Where there are too few variants, more tiles take their places.
    for one in (*tiles[:most_tiles], *changed, *tiles[most_tiles:]):
        if one.cost.us <= _HOPELESS * tiles[0].cost.us:
            kept.setdefault(one.label, one)
    return list(kept.values())[:limit]


def variants(spec: AnyMarlinSpec, layer: LinearShape, target: Target) -> Iterator[AnyMarlinSpec]:
    """The same tile, otherwise issued or with another ring; each fits the target."""
    return _changed(spec, spec.variants(layer.k), target)


def _changed(spec: AnyMarlinSpec, changes: Iterable[Mapping[str, Any]], target: Target) -> Iterator[AnyMarlinSpec]:
    for change in changes:
        with contextlib.suppress(ArgumentError, TargetError):
            changed: AnyMarlinSpec = replace(spec, **change)
            changed.check_target(target)
            fits = changed.smem_bytes <= target.smem_share_bytes(changed.blocks_per_sm)
            if changed != spec and fits and has_room(changed, changed.blocks_per_sm):
                yield changed
