"""Which configuration serves a problem: a pinned one, else a measured exception, else the cheapest candidate; and which
are worth measuring."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Any, Generic

from cudatma.errors import ArgumentError, ArgumentTypeError, TargetError, counted
from cudatma.kernels.cost import Cost, ranked
from cudatma.kernels.family import Family, KernelSpec, P, S
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.tuning import lookup
from cudatma.target import Target, get_target

#: What pinned() holds.
pinned_scope: ContextVar[Any] = ContextVar("pinned configuration", default=None)
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
            gain = f"{entry.us:.4g} us, where the cost model's choice took {entry.rule_us:.4g}"
            shared = " and ".join(name.upper() for name in family.index)
            which = "this problem" if found.exact else f"one of this {shared} ({entry.problem.description})"
            return Decision(entry.spec, source, f"{found.path} has {which}, measured at M = {entry.problem.m}: {gain}")
    spec, cost, considered = cheapest_of(family, problem, gpu)
    why = f"the cheapest of {counted(considered, 'candidate')} by the cost model, {cost.us:.4g} us"
    return Decision(spec, "rule", problem.constraint or why)


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
