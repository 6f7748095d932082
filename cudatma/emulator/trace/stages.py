"""Analysis of the pipeline stages in a trace, including the steps at which each slot is filled and free again.

A stage is an mbarrier on which copies complete. Stages that are filled through the same tensor map or by the same
instruction form a ring. The slot of a stage is full when a phase of this mbarrier ends. It is free again when a phase
of the empty barrier ends, for which the producer waits before it refills the slot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field

from cudatma.emulator.machine.protocols import Dim
from cudatma.emulator.trace.recording import Event, Recording

#: Maps each kind of event to the role of a warp with such events.
_ROLES = {
    "copy": "producer",
    "cp.async": "producer",
    "mma": "consumer",
    "wgmma": "consumer",
    "store": "stores",
}


@dataclass(slots=True)
class Fill:
    """One use of a slot. ``lap`` is the phase of the full barrier.

    The first copy is issued at ``begin``, all copies have completed at ``full``, and the slot may be refilled at
    ``freed``. None means that the event had not occurred when the schedule ended.
    """

    lap: int
    begin: int
    copies: list[Event]
    full: int | None = None
    freed: int | None = None


@dataclass(slots=True)
class Stage:
    """A slot of a ring.

    ``number`` is the index among all stages of the CTA. ``label`` includes the letter of the ring if there are several
    rings. ``barrier`` is the shared-memory offset of the full barrier. ``empty`` is the offset of the empty barrier, or
    None.
    """

    number: int
    label: str
    barrier: int
    empty: int | None = None
    fills: list[Fill] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Work:
    """Interval in which a warp works on a stage, with its tensor-core instructions (``products``)."""

    stage: Stage
    begin: int
    end: int
    products: list[Event]


class BlockView:
    """Events of a CTA, grouped by warp, mbarrier and stage.

    Attributes
    ----------
    issued
        Copies that warps of this CTA issued to other CTAs of the cluster.
    votes
        Number of times that each full barrier was used together with each empty barrier.
    last
        Last step of the schedule.
    rings
        Stages of each ring.
    """

    def __init__(
        self, block: Dim, events: list[Event], issued: list[Event], votes: Counter[tuple[int, int]], last: int
    ) -> None:
        self.block, self.events, self.last = block, events, last
        self._ends: dict[int, dict[int, int]] = {}
        self._of_warp: dict[tuple[int, str], list[Event]] = {}
        for event in (*events, *issued):
            if event.kind == "phase" and event.barrier >= 0 and event.end is not None:
                self._ends.setdefault(event.barrier, {})[event.phase] = event.end
            place, warp = event.issuer or (block, event.warp)
            if place == block and warp is not None:
                self._of_warp.setdefault((warp, event.kind), []).append(event)
        copies = [event for event in events if event.kind == "copy"]
        barriers = sorted({event.barrier for event in copies if event.barrier >= 0})
        stages = {barrier: Stage(number, str(number), barrier) for number, barrier in enumerate(barriers)}
        self.stages = list(stages.values())
        self.rings = [[stages[barrier] for barrier in ring] for ring in _rings(copies)]
        if len(self.rings) > 1:
            for letter, ring in enumerate(self.rings):
                for number, stage in enumerate(ring):
                    stage.label = _letter(letter) + (str(number) if len(ring) > 1 else "")
        self.stage_of_full = {stage.barrier: stage for stage in self.stages}
        self._pair(votes)
        self.stage_of_empty = {stage.empty: stage for stage in self.stages if stage.empty is not None}
        for stage in self.stages:
            stage.fills = self._fills(stage, [copy for copy in copies if copy.barrier == stage.barrier])

    def _pair(self, votes: Counter[tuple[int, int]]) -> None:
        """Assign to each full barrier the empty barrier that occurred with it most often."""
        used: set[int] = set()
        for (full, empty), _ in sorted(votes.items(), key=lambda item: (-item[1], item[0])):
            stage = self.stage_of_full[full]
            if stage.empty is None and empty not in used and empty not in self.stage_of_full:
                stage.empty = empty
                used.add(empty)

    def phase_ends(self, barrier: int) -> dict[int, int]:
        """Map each completed phase of an mbarrier to the step in which it ended."""
        return self._ends.get(barrier, {})

    def _fills(self, stage: Stage, copies: list[Event]) -> list[Fill]:
        full = self.phase_ends(stage.barrier)
        by_lap: dict[int, list[Event]] = {}
        for copy in copies:
            by_lap.setdefault(copy.phase, []).append(copy)
        fills = [
            Fill(lap, min(copy.begin for copy in landing), landing, full.get(lap))
            for lap, landing in sorted(by_lap.items())
        ]
        ends = sorted(self.phase_ends(stage.empty).values()) if stage.empty is not None else []
        for fill, following in zip(fills, [*fills[1:], None], strict=False):
            refilled = following.begin if following is not None else None
            freed = next((step for step in ends if fill.full is not None and step >= fill.full), None)
            fill.freed = refilled if freed is None or (refilled is not None and refilled < freed) else freed
        return fills

    # ---- warps

    @property
    def warps(self) -> list[int]:
        """Warps of the CTA: producers first, then all others, each in ascending order."""
        numbers = {warp for warp, _ in self._of_warp}
        return sorted(numbers, key=lambda number: ("producer" not in self.role(number), number))

    def of_warp(self, warp: int, kind: str) -> list[Event]:
        """Return the events of one kind of a warp."""
        return self._of_warp.get((warp, kind), [])

    def role(self, warp: int) -> str:
        """Return "producer", "consumer", "stores" or a combination of these roles, based on the events of a warp."""
        return ", ".join(dict.fromkeys(name for kind, name in _ROLES.items() if self.of_warp(warp, kind)))

    def products(self, warp: int) -> list[Event]:
        """Return the tensor-core instructions of a warp."""
        return sorted(self.of_warp(warp, "mma") + self.of_warp(warp, "wgmma"), key=lambda event: event.begin)

    def works(self, warp: int) -> list[Work]:
        """Return the intervals in which a warp works on stages.

        Each interval begins at a wait for a full stage, and ends at the next wait or, if there is none, when the slot
        is freed or its last tensor-core instruction has completed.
        """
        passed = self.of_warp(warp, "acquire")
        turns = sorted({event.begin for event in passed} | {event.begin for event in self.of_warp(warp, "wait")})
        products = self.products(warp)
        result = []
        for event in passed:
            stage = self.stage_of_full.get(event.barrier)
            fill = next((f for f in stage.fills if f.lap == event.phase), None) if stage is not None else None
            if stage is None or fill is None:
                continue
            following = turns[bisect_right(turns, event.begin) :][:1]
            mine = [p for p in products if event.begin <= p.begin and (not following or p.begin < following[0])]
            until = [p.end or self.last for p in mine] + [self.last if fill.freed is None else fill.freed]
            result.append(Work(stage, event.begin, following[0] if following else max(until), mine))
        return result

    def stage_of_products(self, event: Event) -> Stage | None:
        """Return the stage on which the instructions work, which is the last stage for which the warp has waited."""
        passed = self.of_warp(event.warp or 0, "acquire")
        for other in reversed(passed[: bisect_right([e.begin for e in passed], event.begin)]):
            if other.barrier in self.stage_of_full:
                return self.stage_of_full[other.barrier]
        return None

    def stage_of_store(self, event: Event) -> Stage | None:
        """Return the stage whose slot a store reads."""
        for stage in self.stages:
            for copy in stage.fills[0].copies if stage.fills else ():
                if copy.offset <= event.offset < copy.offset + max(copy.size_bytes, 1):
                    return stage
        return None


def _rings(copies: list[Event]) -> list[list[int]]:
    """Return the full barriers of each ring, whose stages have the same tensor map or the same copy instruction."""
    rings: list[tuple[set[int], set[tuple[str, int]]]] = []
    for copy in copies:
        barriers, fillers = {copy.barrier}, {("line", copy.line)}
        if copy.tensor_map:
            fillers.add(("map", copy.tensor_map))
        apart = []
        for ring in rings:
            if copy.barrier in ring[0] or fillers & ring[1]:
                barriers, fillers = barriers | ring[0], fillers | ring[1]
            else:
                apart.append(ring)
        rings = [*apart, (barriers, fillers)]
    return sorted(sorted(barriers) for barriers, _ in rings)


def _letter(number: int) -> str:
    """Return the label of a ring: A, B, ..., Z, AA, AB, ..."""
    return ("" if number < 26 else _letter(number // 26 - 1)) + chr(ord("A") + number % 26)


def views(trace: Recording, limit: int | None = None) -> list[BlockView]:
    """Return at most ``limit`` CTAs of a trace in order of appearance.

    CTAs that issue copies come first, starting with the CTA of the first hazard.
    """
    events: dict[Dim, list[Event]] = {}
    issued: dict[Dim, list[Event]] = {}
    votes: dict[Dim, Counter[tuple[int, int]]] = {}
    waited: dict[tuple[Dim, int | None], tuple[int, int]] = {}
    for event in trace.events:
        events.setdefault(event.block, []).append(event)
        if event.issuer is not None and event.issuer[0] != event.block:
            issued.setdefault(event.issuer[0], []).append(event)
        if event.kind == "acquire" and event.barrier >= 0:
            waited[event.block, event.warp] = event.barrier, -1
        elif event.kind == "copy" and event.issuer in waited and event.barrier >= 0:
            # The last wait of a producer before it fills a slot, in one CTA or several (multicast), is the wait for
            # that slot.
            empty, fills = waited[event.issuer]
            if fills in (-1, event.barrier):
                waited[event.issuer] = empty, event.barrier
                votes.setdefault(event.block, Counter())[event.barrier, empty] += 1
    copying = {event.block for event in trace.events if event.kind in ("copy", "cp.async")}
    hazard = next((event.block for event in trace.events if event.kind == "hazard"), None)
    chosen = sorted(events, key=lambda block: (block not in copying, block != hazard))[:limit]
    return [
        BlockView(block, events[block], issued.get(block, []), votes.get(block, Counter()), trace.steps)
        for block in chosen
    ]
