"""The pipeline of one run as Chrome trace JSON (opens in Perfetto) and as an SVG picture.

Time is the scheduler's step counter. Rows: one a warp (its waits and wgmmas), one a block for TMA in flight, one for
each barrier's phases.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from cudatma.emulator.machine import Split, Warp
    from cudatma.emulator.mbarrier import MBarrier

#: More events than this are dropped; a trace is for looking at.
MAX_EVENTS = 200_000
_COLOURS = {
    "copy": "#3b82c4",
    "wait": "#d9822b",
    "phase": "#8f6bb3",
    "wgmma": "#3c9d5d",
    "mma": "#3c9d5d",
    "store": "#2aa198",
}


@dataclass(slots=True)
class Event:
    """One bar of the picture. end: None while it is open; kind: a key of the colours."""

    row: tuple[str, str]
    name: str
    kind: str
    begin: int
    end: int | None = None


class Trace:
    """Hand one to launch(trace=...); it keeps the events of the last schedule that ran."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._open_waits: dict[int, Event] = {}
        self._clock: Any = None
        self._phase_begin: dict[tuple[str, str], int] = {}

    def begin(self, launch: Any) -> None:
        """A schedule starts: forget the one before."""
        self.events.clear()
        self._open_waits.clear()
        self._phase_begin.clear()
        self._clock = launch.scheduler

    @property
    def _now(self) -> int:
        return int(self._clock.steps) if self._clock is not None else 0

    def _add(self, event: Event) -> Event:
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
        return event

    def copy_begins(self, w: Warp, at: int, block: Any, size: int) -> Event:
        """An asynchronous copy is issued."""
        line = w.split.frame.program.instruction(at).line
        row = (f"block {block.index}", "TMA")
        return self._add(Event(row, f"{size} bytes (PTX line {line})", "copy", self._now))

    def copy_ends(self, event: Event) -> None:
        event.end = self._now

    def phase(self, barrier: MBarrier) -> None:
        """A barrier's phase ended."""
        row = (f"block {barrier.block.index}", f"mbarrier {barrier.offset + 0x400:#x}")
        begin = self._phase_begin.get(row, 0)
        self._add(Event(row, f"phase {barrier.phase - 1}", "phase", begin, self._now))
        self._phase_begin[row] = self._now

    def instant(self, w: Warp, at: int, name: str) -> None:
        """Something of a warp that takes one step."""
        row = (f"block {w.block.index}", f"warp {w.index}")
        self._add(Event(row, name, name, self._now, self._now + 1))

    def blocked(self, split: Split, reason: Any) -> None:
        """A split begins to wait."""
        row = (f"block {split.warp.block.index}", f"warp {split.warp.index}")
        name = reason.describe() if reason is not None else "waits"
        self._open_waits[id(split)] = self._add(Event(row, name, "wait", self._now))

    def woken(self, split: Split) -> None:
        event = self._open_waits.pop(id(split), None)
        if event is not None:
            event.end = self._now

    # ---- output

    def _closed(self) -> list[Event]:
        last = max([e.end or e.begin for e in self.events], default=0) + 1
        return [
            Event(e.row, e.name, e.kind, e.begin, last if e.end is None else max(e.end, e.begin + 1))
            for e in self.events
        ]

    def to_json(self) -> str:
        """Chrome's trace format: one complete event a bar, processes are blocks, threads are rows."""
        processes: dict[str, int] = {}
        threads: dict[tuple[str, str], int] = {}
        out: list[dict[str, Any]] = []
        for event in self._closed():
            pid = processes.setdefault(event.row[0], len(processes) + 1)
            tid = threads.setdefault(event.row, len(threads) + 1)
            duration = (event.end or event.begin) - event.begin
            out.append(
                {
                    "name": event.name,
                    "cat": event.kind,
                    "ph": "X",
                    "ts": event.begin,
                    "dur": duration,
                    "pid": pid,
                    "tid": tid,
                }
            )
        for name, pid in processes.items():
            out.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        for (block, name), tid in threads.items():
            row = {"name": "thread_name", "ph": "M", "pid": processes[block], "tid": tid, "args": {"name": name}}
            out.append(row)
        return json.dumps({"traceEvents": out, "displayTimeUnit": "ns"})

    def to_svg(self, width: int = 1200, blocks: int = 1) -> str:
        """A picture of the first blocks: one row a warp, TMA and barrier; a bar's title tells what it is."""
        events = self._closed()
        shown = list(dict.fromkeys(e.row[0] for e in events))[:blocks]
        events = [e for e in events if e.row[0] in shown]
        rows = sorted({e.row for e in events}, key=lambda r: (shown.index(r[0]), not r[1].startswith("TMA"), r[1]))
        last = max([e.end or 0 for e in events], default=1)
        left, height = 150, 22
        scale = (width - left - 10) / max(1, last)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height * (len(rows) + 2)}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height * (len(rows) + 2)}" fill="#ffffff"/>',
        ]
        legend = (("copy", "TMA in flight"), ("wait", "waits"), ("phase", "barrier phase"), ("wgmma", "MMA"))
        for number, (kind, text) in enumerate(legend):
            x = left + 140 * number
            parts.append(
                f'<rect x="{x}" y="5" width="12" height="12" fill="{_COLOURS[kind]}"/>'
                f'<text x="{x + 18}" y="15">{text}</text>'
            )
        for number, row in enumerate(rows):
            y = height * (number + 1) + 4
            parts.append(f'<text x="4" y="{y + 14}">{escape(row[1])}</text>')
            for event in events:
                if event.row == row:
                    left_edge = left + event.begin * scale
                    wide = max(1.0, ((event.end or event.begin) - event.begin) * scale)
                    parts.append(
                        f'<rect x="{left_edge:.1f}" y="{y}" width="{wide:.1f}" height="{height - 6}" '
                        f'fill="{_COLOURS.get(event.kind, "#777777")}" stroke="#ffffff" stroke-width="0.5">'
                        f"<title>{escape(event.name)}</title></rect>"
                    )
        parts.append("</svg>")
        return "\n".join(parts)
