"""Which kernel serves a problem, with which configuration: a tuning entry, else the cheapest of all candidates.

Reads downwards: decide() for marlin_gemm, then the candidates of every kernel, ranked by the one cost model (cost.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.errors import ArgumentError, counted
from cudatma.kernels.candidates import Candidate, ranked
from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.marlin.invariant import choose_invariant
from cudatma.kernels.marlin.mma_sync_candidates import mma_sync_candidates
from cudatma.kernels.marlin.problem import AnyMarlinSpec, LinearShape
from cudatma.kernels.marlin.skinny_candidates import skinny_candidates
from cudatma.kernels.marlin.wgmma_candidates import wgmma_candidates
from cudatma.kernels.tuning import lookup, pinned_scope
from cudatma.target import get_target


@dataclass(frozen=True, slots=True)
class Decision:
    """A configuration, where it comes from (``"pinned"``, ``"tuned"``, ``"shipped"``, ``"rule"``), and why, in words.

    divide: whether CTAs may share tiles, each a part of K.
    """

    spec: AnyMarlinSpec
    source: str
    why: str
    divide: bool = True


def decide(layer: LinearShape, m: int, card: Gpu, *, batch_invariant: bool = False) -> Decision:
    """The configuration for M rows of x on a GPU, and the reason; the same for as long as a process lives.

    For batch invariance what invariant.py allows. Else what the tuner pins; else a tuning entry of the user's file or
    of the table that ships; else the cheapest candidate.
    """
    if batch_invariant:
        why = "batch invariance: one order of additions, whatever M is"
        return Decision(choose_invariant(layer, m, card), "rule", why, divide=False)
    if (pinned := pinned_scope.get()) is not None:
        return Decision(pinned, "pinned", "pinned by the caller")
    if (found := lookup(layer, m, card)) is not None:
        entry, source = found.entry, "shipped" if found.shipped else "tuned"
        gain = f"{entry.us:.4g} us, where the cost model's choice took {entry.rule_us:.4g}"
        which = "this layer" if found.exact else f"a layer of this K and N ({entry.layer})"
        return Decision(entry.spec, source, f"{found.path} has {which}, measured at M = {entry.m}: {gain}")
    spec, cost, considered = _cheapest(layer, m, card)
    why = f"the cheapest of {counted(considered, 'candidate')} by the cost model, {cost.us:.4g} us"
    return Decision(spec, "rule", why)


def choose_by_cost(layer: LinearShape, m: int, card: Gpu) -> AnyMarlinSpec:
    """The cheapest candidate. Deterministic; looks at no device and no file."""
    return _cheapest(layer, m, card)[0]


def candidates(layer: LinearShape, m: int, card: Gpu) -> list[Candidate[AnyMarlinSpec]]:
    """Those of every kernel, in no order."""
    found: list[Candidate[AnyMarlinSpec]] = [*skinny_candidates(layer, m, card), *wgmma_candidates(layer, m, card)]
    if not get_target(card.target).has_wgmma:  # where wgmma is, mma.sync is slower at every M
        found += mma_sync_candidates(layer, m, card)
    return found


def _cheapest(layer: LinearShape, m: int, card: Gpu) -> tuple[AnyMarlinSpec, Cost, int]:
    listed = candidates(layer, m, card)
    for spec, cost in ranked(listed):
        return spec, cost, len(listed)
    raise ArgumentError("target", card.target, "a target whose shared memory holds a ring of one of the kernels")
