"""Which finding is the cause of which: the order of a report, and what it folds.

One mistake has several effects: a slot that is read without a wait is released too early, refilled while it is
read, and in the end two sides wait for each other. A cause comes first; what follows from it in the same bytes or
at the same mbarrier is listed under it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from cudatma.emulator.hazards.report import Hazard

#: What a finding concerns: ("bytes", CTA rank, first, last) of shared memory, or ("mbarrier", CTA rank, offset).
Place = tuple[str, int, int] | tuple[str, int, int, int]
#: Places kept of one finding.
_MOST_PLACES = 64

#: Kinds that break what everything else rests on, in this order, then those that break a protocol.
_SETUP = (
    "target",
    "barrier_misaligned",
    "missing_init_sync",
    "barrier_uninitialised",
    "barrier_reinitialised",
    "barrier_overwritten",
    "missing_init_fence",
)
_PROTOCOL = (
    "byte_count",
    "uncommitted_group",
    "wgmma_uncommitted",
    "wgmma_missing_fence",
    "barrier_count",
    "divergent_barrier",
    "divergent_warp",
    "register_pool",
)
#: Kinds that come to light where two sides are out of step already, then those in which a kernel ends for that.
_LATE = ("lane_race", "write_race", "arrival_overflow", "uninitialised_shared", "block_gone")
_LAST = ("exit_with_pending_store", "exit_with_pending_load", "deadlock", "trap")
_TIERS: dict[str, float] = {kind: tier for tier, kinds in ((1, _PROTOCOL), (3, _LATE), (4, _LAST)) for kind in kinds}
_TIERS |= {kind: number / len(_SETUP) for number, kind in enumerate(_SETUP)}
_ORDERING = 2

_EARLY_READS = {"read_before_load", "wrong_parity"}
_SLOTS = _EARLY_READS | {"uninitialised_shared", "overwritten_while_read", "write_race", "data_race", "lane_race"}
#: Kinds that follow from any wrong use of a pipeline: they are related to whatever came before.
_STUCK = {"deadlock", "arrival_overflow", "exit_with_pending_load", "trap"}
_PIPELINE = _SLOTS | _STUCK
#: Kinds -> the kinds that may follow from any of them.
_FOLLOWS: tuple[tuple[tuple[str, ...], set[str]], ...] = (
    (("missing_init_sync", "barrier_uninitialised"), {"byte_count", *_SETUP, *_PIPELINE}),
    (("barrier_reinitialised", "barrier_overwritten"), {"byte_count", *_PIPELINE}),
    (("byte_count", "barrier_count", "divergent_barrier", *_EARLY_READS), _PIPELINE),
    (("overwritten_while_read", "write_race"), _PIPELINE),
    (("uncommitted_group",), {"store_source_reused", "exit_with_pending_store", "read_before_store"}),
    (("wgmma_uncommitted",), {"wgmma_registers", "overwritten_while_read"}),
    (("divergent_warp",), {"lane_race", *_STUCK}),
    (("data_race",), {"store_source_reused", *_SLOTS}),
    (("lane_race",), {"uninitialised_shared"}),
    (("out_of_bounds", "barrier_misaligned", "target"), {"trap"}),
)
FOLLOWS = {cause: kinds for causes, kinds in _FOLLOWS for cause in causes}


@dataclass(slots=True, eq=False)
class Finding:
    """A hazard as it is collected. places: what it concerns. is_derived: whether each time something came before it."""

    hazard: Hazard
    places: set[Place] = field(default_factory=set)
    is_derived: bool = True

    def touch(self, places: Iterable[Place], is_derived: bool) -> None:
        """It was found here, too."""
        if len(self.places) < _MOST_PLACES:
            self.places.update(places)
        self.is_derived = self.is_derived and is_derived

    @property
    def tier(self) -> float:
        kind = self.hazard.kind
        if kind in ("write_race", "overwritten_while_read"):
            return _TIERS["write_race"] if self.is_derived else _ORDERING
        return _TIERS.get(kind, _ORDERING)


def by_cause(findings: list[Finding]) -> list[Hazard]:
    """Causes first, each with what follows from it. findings: in the order in which they were found."""
    first = {id(finding): float(number) for number, finding in enumerate(findings)}
    for finding in findings:
        if finding.hazard.kind == "overwritten_while_read" and finding.tier == _ORDERING:
            # A slot that is refilled too early is also read without a wait; but a thread that reads a slot before it is
            # filled at all does not wait, and what it releases then is refilled.
            early = [f for f in findings if f.hazard.kind in _EARLY_READS and _meet(f.places, finding.places)]
            empty = [f for f in findings if f.hazard.kind == "uninitialised_shared"]
            if any(_meet(read.places, unfilled.places) for read in early for unfilled in empty):
                first[id(finding)] = len(findings)
                continue
            first[id(finding)] = min([first[id(finding)], *(first[id(f)] - 0.5 for f in early)])
    causes: list[tuple[Finding, set[Place], list[Hazard]]] = []
    for finding in sorted(findings, key=lambda f: (f.tier, first[id(f)])):
        kind = finding.hazard.kind
        for cause, places, consequences in causes:
            if kind == cause.hazard.kind or kind not in FOLLOWS.get(cause.hazard.kind, ()):
                continue
            if kind in _STUCK or not places or not finding.places or _meet(finding.places, places):
                places |= finding.places
                consequences.append(finding.hazard)
                break
        else:
            causes.append((finding, set(finding.places), []))
    return [replace(cause.hazard, consequences=tuple(consequences)) for cause, _, consequences in causes]


def _meet(some: set[Place], others: set[Place]) -> bool:
    """Whether findings share an mbarrier, or bytes."""
    if not some.isdisjoint(others):
        return True
    return any(
        a[:2] == b[:2] and a[2] <= b[-1] and b[2] <= a[-1]
        for a in some
        if a[0] == "bytes"
        for b in others
        if b[0] == "bytes"
    )
