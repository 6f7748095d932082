"""Convert a trace to Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open.

Each CTA is a process, and each warp and each mbarrier is a thread. Copies and stores in flight are asynchronous events.
Arrows connect the instruction that issues a copy to the phase that the copy completes, and a phase to the warps that
waited for it. A counter shows how many stages are in flight and full. One step is one microsecond. A warp executes step
n from n - 1 to n, and the effects occur at n.

Source: "Recording Event Format" (Google, 2016).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cudatma.emulator.machine.memory import SHARED_START
from cudatma.emulator.trace.recording import Event, Recording
from cudatma.emulator.trace.stages import BlockView, views

#: Thread number of the first mbarrier of a CTA. Warps are numbered from 1.
BARRIER_THREADS = 1001
#: Minimum duration of a slice in microseconds. Slices that start in the same step have this duration, because slices of
#: a thread must not overlap.
_SLIVER = 1e-3


@dataclass(slots=True)
class Slice:
    """A bar in the row of a thread. Times are in microseconds."""

    event: Event
    name: str
    begin: float
    end: float
    tid: int

    @property
    def inside(self) -> float:
        """Time just before the end of the slice, where an arrow can be attached."""
        return round(self.end - _SLIVER / 2, 6)


def chrome_trace(trace: Recording) -> str:
    """Return the trace as JSON text."""
    out: list[dict[str, Any]] = []
    for pid, view in enumerate(views(trace), 1):
        out += _Process(view, pid).events()
    out.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    about = {"kernel": trace.kernel, "schedule": trace.schedule, "seed": trace.seed, "time unit": "1 us is one step"}
    return json.dumps({"traceEvents": out, "displayTimeUnit": "ns", "otherData": about})


class _Process:
    """A CTA. Identifiers of copies and arrows include the number of the CTA so that they are unique in the file."""

    def __init__(self, view: BlockView, pid: int) -> None:
        self.view, self.pid = view, pid
        self._count = 0

    def _id(self) -> str:
        self._count += 1
        return f"{self.pid:x}.{self._count:x}"

    def events(self) -> list[dict[str, Any]]:
        """Return all trace events of the CTA in no particular order."""
        phases = self._phases()
        out = [*self._names(phases), *self._counters(), *self._marks()]
        waits: list[Slice] = []
        for warp in self.view.warps:
            slices = self._warp_slices(warp)
            waits += [piece for piece in slices if piece.event.kind == "wait"]
            out += [self._slice(piece) for piece in slices]
            for piece in slices:
                if piece.event.kind in ("copy", "cp.async", "store"):
                    out += self._in_flight(piece, phases)
        out += [self._slice(piece) for piece in phases.values()]
        for wait in waits:
            phase = phases.get((wait.event.barrier, wait.event.phase))
            if phase is not None:
                out += self._arrow(phase, wait, "releases")
        return out

    # ---- slices

    def _warp_slices(self, warp: int) -> list[Slice]:
        """Return the bars of a warp: issued copies, waits and tensor-core instructions."""
        slices: list[Slice] = []

        def add(event: Event, name: str, begin: float, end: float) -> None:
            slices.append(Slice(event, name, begin, end, 1 + warp))

        for kind in ("copy", "cp.async", "store"):
            for event in self.view.of_warp(warp, kind):
                add(event, f"issue {self._what(event)}", event.begin - 1.0, event.begin)
        for event in self.view.of_warp(warp, "wait"):
            add(event, f"wait {self._barrier_name(event)}".rstrip(), event.begin, self._end(event))
        for event in self.view.products(warp):
            stage = self.view.stage_of_products(event)
            suffix = "" if stage is None else f", stage {stage.label}"
            add(event, f"{event.count} {event.kind}{suffix}", event.begin - 1.0, self._end(event) - 1.0)
        return _separate(slices)

    def _phases(self) -> dict[tuple[int, int], Slice]:
        """Return the slice of each (mbarrier, phase). Each mbarrier has a separate thread."""
        result: dict[tuple[int, int], Slice] = {}
        phases = [event for event in self.view.events if event.kind == "phase"]
        for number, barrier in enumerate(sorted({event.barrier for event in phases})):
            tid = BARRIER_THREADS + number
            own = [event for event in phases if event.barrier == barrier]
            for piece in _separate([Slice(event, event.name, event.begin, self._end(event), tid) for event in own]):
                result[barrier, piece.event.phase] = piece
        return result

    def _slice(self, piece: Slice) -> dict[str, Any]:
        return {
            "name": piece.name,
            "cat": piece.event.kind,
            "ph": "X",
            "ts": piece.begin,
            "dur": round(piece.end - piece.begin, 6),
            "pid": self.pid,
            "tid": piece.tid,
            "args": _arguments(piece.event),
        }

    # ---- copies, arrows, counters

    def _in_flight(self, piece: Slice, phases: dict[tuple[int, int], Slice]) -> list[dict[str, Any]]:
        """Return the events of a copy or store from issue to completion, and the arrow to the completed phase."""
        event = piece.event
        by = "" if event.kind == "cp.async" else "TMA "
        name = f"{by}{'stores' if event.kind == 'store' else self._what(event)}"
        common = {"name": name, "cat": f"{by}{event.kind}", "id": self._id(), "pid": self.pid, "tid": piece.tid}
        end = max(self._end(event), piece.end)
        out = [
            {**common, "ph": "b", "ts": piece.begin, "args": _arguments(event)},
            {**common, "ph": "e", "ts": round(end, 6), "args": {}},
        ]
        phase = phases.get((event.barrier, event.phase)) if event.block == self.view.block else None
        if phase is not None:
            out += self._arrow(piece, phase, "completes")
        return out

    def _arrow(self, cause: Slice, effect: Slice, name: str) -> list[dict[str, Any]]:
        """Return an arrow between the ends of two slices, or [] if shortening has reversed their order."""
        if effect.inside < cause.inside:
            return []
        common = {"name": name, "cat": "flow", "id": self._id(), "pid": self.pid}
        return [
            {**common, "ph": "s", "ts": cause.inside, "tid": cause.tid},
            {**common, "ph": "f", "bp": "e", "ts": effect.inside, "tid": effect.tid},
        ]

    def _counters(self) -> list[dict[str, Any]]:
        """Return the number of stages in flight and the number of full stages at each change."""
        changes: dict[int, list[int]] = {}
        for stage in self.view.stages:
            for fill in stage.fills:
                changes.setdefault(fill.begin, [0, 0])[0] += 1
                if fill.full is not None:
                    at_full = changes.setdefault(fill.full, [0, 0])
                    at_full[0] -= 1
                    at_full[1] += 1
                    if fill.freed is not None:
                        changes.setdefault(fill.freed, [0, 0])[1] -= 1
        out: list[dict[str, Any]] = []
        flying = full = 0
        for step in sorted(changes):
            flying, full = flying + changes[step][0], full + changes[step][1]
            value = {"in flight": flying, "full": full}
            out.append({"name": "stages", "ph": "C", "ts": float(step), "pid": self.pid, "tid": 0, "args": value})
        return out

    def _marks(self) -> list[dict[str, Any]]:
        """Return each hazard as an instant event of its warp."""
        return [
            {
                "name": event.name,
                "cat": "hazard",
                "ph": "i",
                "s": "p",
                "ts": float(event.begin),
                "pid": self.pid,
                "tid": 1 + (event.warp or 0),
                "args": {},
            }
            for event in self.view.events
            if event.kind == "hazard"
        ]

    # ---- names

    def _names(self, phases: dict[tuple[int, int], Slice]) -> list[dict[str, Any]]:
        out = [self._name("process", 0, f"block {', '.join(map(str, self.view.block))}", self.pid)]
        for warp in self.view.warps:
            role = self.view.role(warp)
            out.append(self._name("thread", 1 + warp, f"warp {warp}" + (f": {role}" if role else ""), 1 + warp))
        for barrier, tid in sorted({(barrier, piece.tid) for (barrier, _), piece in phases.items()}):
            name = f"mbarrier {barrier + SHARED_START:#x}"
            for known, what in ((self.view.stage_of_full, "full"), (self.view.stage_of_empty, "empty")):
                if barrier in known:
                    name = f"{what} {known[barrier].label} ({name})"
            out.append(self._name("thread", tid, name, tid))
        return [event for pair in out for event in pair]

    def _name(self, what: str, tid: int, name: str, order: int) -> tuple[dict[str, Any], dict[str, Any]]:
        common = {"ph": "M", "pid": self.pid, "tid": tid}
        return (
            {**common, "name": f"{what}_name", "args": {"name": name}},
            {**common, "name": f"{what}_sort_index", "args": {"sort_index": order}},
        )

    def _what(self, event: Event) -> str:
        """Return the name of the stage that a copy or store accesses, or the kind of the event."""
        stage = self.view.stage_of_full.get(event.barrier) if event.block == self.view.block else None
        return event.kind if stage is None else f"stage {stage.label}"

    def _barrier_name(self, event: Event) -> str:
        for known, what in ((self.view.stage_of_full, "full"), (self.view.stage_of_empty, "empty")):
            if event.barrier in known:
                return f"{what} {known[event.barrier].label}"
        return "" if event.barrier < 0 else f"mbarrier {event.barrier + SHARED_START:#x}"

    def _end(self, event: Event) -> float:
        return float(self.view.last + 1 if event.end is None else max(event.end, event.begin))


def _separate(slices: list[Slice]) -> list[Slice]:
    """Sort the slices of a thread and shorten them so that they do not overlap. Each lasts at least _SLIVER."""
    slices = sorted(slices, key=lambda piece: (piece.begin, piece.end))
    last = 0.0
    for piece, following in zip(slices, [*slices[1:], None], strict=False):
        piece.begin = round(max(piece.begin, last), 6)
        end = piece.end if following is None else min(piece.end, following.begin)
        piece.end = last = round(max(end, piece.begin + _SLIVER), 6)
    return slices


def _arguments(event: Event) -> dict[str, Any]:
    """Return the details that are displayed when an event is selected."""
    out: dict[str, Any] = {}
    if event.kind == "wait":
        out["waits for"] = event.name
    if event.size_bytes:
        out |= {"bytes": event.size_bytes, "shared address": f"{event.offset + SHARED_START:#x}"}
    if event.barrier >= 0:
        out |= {"mbarrier": f"{event.barrier + SHARED_START:#x}", "phase": event.phase, "parity": event.phase & 1}
    if event.line:
        out["PTX line"] = event.line
    if event.source:
        out["source"] = event.source
    return out
