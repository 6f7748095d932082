"""Views of hazards for pages, with marked source lines, the order of events, and names instead of addresses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cudatma.emulator.hazards.hazard import Hazard, opcode_of, placed
from cudatma.emulator.hazards.sources import Lines, Sources
from cudatma.emulator.hazards.variables import SharedVariables
from cudatma.emulator.machine.memory import SHARED_START
from cudatma.emulator.machine.protocols import Dim
from cudatma.emulator.trace.recording import Event, Recording
from cudatma.errors import counted

#: Number of lines that a page shows before and after a marked line of the source and of the PTX.
_AROUND, _PTX_AROUND = 4, 2
#: Maximum number of rows in the order of events.
_MAX_MOMENTS = 12
#: Matches the address and the earlier accesses at the end of a message, which the page shows separately.
_ADDRESS = re.compile(r" \((?:shared )?address 0x.*\)$", re.DOTALL)
_PLACE = re.compile(r"(PTX line \d+) \(([^()]*)\)")
#: Kinds of events that order threads.
_ORDERING = ("copy", "cp.async", "store", "wait", "acquire", "phase")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an excerpt. ``mark`` is "this", "other" or "". The (mark, text) notes appear below the line."""

    number: int
    text: str
    mark: str = ""
    notes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Lines of a file. None represents a gap."""

    file: str
    lines: tuple[Line | None, ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """A row in the order of events."""

    when: str
    who: str
    what: str
    place: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class HazardView:
    """View of a hazard for a page.

    ``headline`` is the first line of the message, and ``details`` contains the other lines. ``excerpts`` and ``ptx``
    are excerpts from the source and from the PTX. ``consequences`` contains the kind, place and count of each
    consequence.
    """

    hazard: Hazard
    headline: str
    details: list[str]
    advice: str
    cause: str
    consequences: list[tuple[str, str, str]]
    excerpts: list[Excerpt]
    ptx: list[Excerpt]
    moments: list[Moment]

    @property
    def count(self) -> str:
        """Text that states the number of occurrences and the number of CTAs, if greater than 1."""
        hazard = self.hazard
        total = hazard.count + sum(other.count for other in hazard.also)
        times = f"occurred {counted(total, 'time')}" if total > 1 else ""
        return ", ".join(filter(None, (times, f"in {counted(hazard.blocks, 'CTA')}" if hazard.blocks > 1 else "")))

    @property
    def again(self) -> str:
        """Options that reproduce the hazard."""
        return f"--seed {self.hazard.seed} --replay {self.hazard.schedule}"

    @property
    def who(self) -> str:
        return f"{_cta(self.hazard.block)}, warp {self.hazard.warp}"


def view(hazard: Hazard, sources: Sources, variables: SharedVariables, trace: Recording | None) -> HazardView:
    """Return the message, history and excerpts that a page shows for a hazard."""
    message = variables.named(_ADDRESS.sub("", hazard.message))
    message = _PLACE.sub(lambda match: _short(match[2], match[1], sources), message)
    headline, *details = (line.strip() for line in message.splitlines())
    history = _history(hazard, trace)
    marks = _marks(hazard, history)
    ptx = {"PTX": dict(enumerate(sources.ptx.splitlines(), 1))} if sources.ptx else {}
    in_source = []
    for _, source, mark, note in marks:
        place = sources.locate(source)
        if place is not None:
            in_source.append((*place, mark, note))
    in_ptx = [("PTX", line, mark, note) for line, _, mark, note in marks if line]
    return HazardView(
        hazard,
        _sentence(headline.rstrip(":")),
        details,
        _sentence(variables.named(hazard.advice)),
        _sentence(hazard.cause),
        [(c.kind, _short(c.source, c.place, sources), counted(c.count, "time")) for c in hazard.consequences],
        [replace(e, file=_path(e.file, sources)) for e in _excerpts(in_source, sources.lines, _AROUND)],
        _excerpts(in_ptx, ptx, _PTX_AROUND),
        _moments(hazard, history, variables, trace) if trace is not None and history else [],
    )


def _sentence(text: str) -> str:
    """Capitalize the first letter of a text, unless the text begins with an identifier or an opcode."""
    return text[:1].upper() + text[1:] if text.partition(" ")[0].rstrip(",").isalpha() else text


def _short(source: str, otherwise: str, sources: Sources) -> str:
    """Return the place in the user's source if it is known, otherwise ``otherwise``."""
    place = sources.locate(source)
    return f"{place[0]}:{place[1]}" if place else otherwise


def _path(file: str, sources: Sources) -> str:
    path = sources.paths.get(file, file)
    return file if path.startswith("/") else path


def _history(hazard: Hazard, trace: Recording | None) -> list[Event]:
    """Return the recorded accesses of a hazard. The last access is the one at which the hazard was found."""
    return [] if trace is None else trace.histories.get((hazard.kind, hazard.ptx_line), [])


# ---- source lines


def _marks(hazard: Hazard, history: list[Event]) -> list[tuple[int, str, str, str]]:
    """Return (PTX line, source, mark, note) for each access in a hazard."""
    is_one, earlier = len({event.block for event in history}) == 1, history[:-1]

    def note(line: int, what: str, instruction: str, events: list[Event]) -> str:
        for event in reversed(events):
            if event.kind == "access" and event.line == line:
                return f"step {event.begin}: {_who(event, with_cta=not is_one)} {event.name} {hazard.where}"
        return f"{what} ({opcode_of(instruction)})"

    this = "waits here" if hazard.kind == "deadlock" else f"here{': ' * bool(hazard.where)}{hazard.where}"
    return [
        (hazard.ptx_line, hazard.source, "this", note(hazard.ptx_line, this, hazard.instruction, history[-1:])),
        *(
            (o.ptx_line, o.source, "other", note(o.ptx_line, f"{o.verb} here", o.instruction, earlier))
            for o in hazard.others
        ),
        *((a.ptx_line, a.source, "this", f"also here ({opcode_of(a.instruction)})") for a in hazard.also),
    ]


def _excerpts(marked: Iterable[tuple[str, int, str, str]], files: Lines, around: int) -> list[Excerpt]:
    """Return one excerpt per file with the lines around each marked (file, line, mark, note)."""
    by_file: dict[str, dict[int, list[tuple[str, str]]]] = {}
    for file, number, mark, note in marked:
        by_file.setdefault(file, {}).setdefault(number, []).append((mark, note))
    result = []
    for file, marks in by_file.items():
        texts = files.get(file, {})
        shown = sorted({n for number in marks for n in range(number - around, number + around + 1) if n in texts})
        lines: list[Line | None] = []
        for before, number in zip([None, *shown], shown, strict=False):
            if before is not None and number > before + 1:
                lines.append(None)
            notes = sorted(marks.get(number, []), key=lambda note: note[0] == "this")
            lines.append(Line(number, texts[number].expandtabs(4), notes[-1][0] if notes else "", tuple(notes)))
        if lines:
            result.append(Excerpt(file, tuple(lines)))
    return result


# ---- the order of events


def _moments(hazard: Hazard, history: list[Event], variables: SharedVariables, trace: Recording) -> list[Moment]:
    """Return the rows for the accesses of a hazard and for the events that order their threads."""
    *earlier, last = history
    mbarriers = {(hazard.block, place[2]) for place in hazard.places if place[0] == "mbarrier"}
    waits = [e for e in trace.events if e.kind == "wait" and e.end is None]
    stuck = [e for e in waits if hazard.kind == "deadlock" or (e.block, e.barrier) in mbarriers]
    related = _related(earlier, last, stuck, mbarriers, trace)
    copies = {_key(event): event for event in related if event.kind == "copy"}
    marked = [copies.get(_key(event), event) for event in earlier]
    alike: dict[tuple[object, ...], list[Event]] = {}
    for event in stuck:
        alike.setdefault((event.block, event.barrier, event.phase, event.line), []).append(event)
    room = max(4, _MAX_MOMENTS - len(marked) - len(alike))
    others = [event for event in related if event not in marked and _key(event) != _key(last)]
    shown = [*marked, *others[-room:], *(same[0] for same in alike.values())]
    more = {id(same[0]): f" and {len(same) - 1} more" for same in alike.values() if len(same) > 1}
    moments = []
    if len(others) > room:
        moments.append(Moment("", "", f"{counted(len(others) - room, 'earlier event')} not shown", ""))
    for event in sorted(shown, key=lambda event: (_when(event), event.kind != "access")):
        mark = "other" if event in marked else ""
        moments.append(_moment(event, hazard, variables, mark, more.get(id(event), "")))
    return [*moments, _moment(copies.get(_key(last), last), hazard, variables, "this")]


def _related(
    earlier: list[Event], last: Event, stuck: list[Event], mbarriers: set[tuple[Dim, int]], trace: Recording
) -> list[Event]:
    """Return the events between the accesses of a hazard that order their threads.

    If there are no earlier accesses, return the events on the hazard's mbarriers.
    """
    begin = min((event.begin for event in earlier), default=0)
    recent = [e for e in trace.events if e.kind in _ORDERING and begin <= _when(e) <= last.begin]
    recent = [e for e in recent if e.kind != "wait" or e.end is not None]
    warps = {_issuer(event) for event in (*earlier, last, *stuck)}
    if mbarriers and not earlier:
        warps = set()
    else:
        mbarriers = mbarriers | {
            (e.block, e.barrier) for e in (*recent, *stuck) if _issuer(e) in warps and e.barrier >= 0
        }
    # A wait that has returned is also recorded as an "acquire".
    passed = {(e.block, e.warp, e.barrier, e.phase) for e in recent if e.kind == "acquire"}
    return [
        event
        for event in recent
        if (_issuer(event) in warps or (event.block, event.barrier) in mbarriers)
        and not (event.kind == "wait" and (event.block, event.warp, event.barrier, event.phase) in passed)
    ]


def _key(event: Event) -> tuple[object, ...]:
    """Return a key that is the same for an instruction's own access and for the copy that the instruction issues."""
    return _issuer(event), event.line, event.begin


def _when(event: Event) -> int:
    return event.end if event.kind == "phase" and event.end is not None else event.begin


def _issuer(event: Event) -> tuple[Dim, int | None]:
    return event.issuer or (event.block, event.warp)


def _moment(event: Event, hazard: Hazard, variables: SharedVariables, mark: str, more: str = "") -> Moment:
    what = event.name
    barrier = event.barrier + SHARED_START
    name = variables.barrier(barrier) or f"{barrier:#x}"
    name = f"the mbarrier at {name}" if name.startswith(("byte ", "0x")) else name
    if event.kind == "hazard":
        what = "no thread can continue" if event.name == "deadlock" else f"{event.name} is found"
    elif event.kind == "access":
        what = f"{event.name} {hazard.where or 'memory'}"
    elif event.kind == "phase":
        what = f"phase {event.phase} of {name} ends"
    elif event.kind == "acquire":
        ended = f"for phase {event.phase} of" if event.phase >= 0 else "on"
        what = f"passes the wait {ended} {name}" + (
            " immediately, before any phase has ended" if event.phase < 0 else ""
        )
    elif event.kind == "wait" and event.barrier >= 0:
        what = f"waits for phase {event.phase} of {name}" + (", forever" if event.end is None else "")
    elif event.kind == "wait":
        what = event.name.partition(" (")[0]
    elif event.kind == "copy":
        into = variables.byte(event.offset + SHARED_START).removeprefix("byte 0 of ")
        what = f"issues a copy of {event.name}" + (f" into {into}" if into else "") + f" on {name}"
    elif event.kind in ("cp.async", "store"):
        what = f"issues {'a store of ' if event.kind == 'store' else 'a '}{event.name}"
    return Moment(str(_when(event)), _who(event) + more, what, _place(event), mark)


def _who(event: Event, with_cta: bool = True) -> str:
    block, warp = _issuer(event)
    parts = [_cta(block)] if with_cta else []
    parts += [f"warp {warp}"] if warp is not None else []
    return ", ".join(parts + ([f"lane {event.lane}"] if event.lane >= 0 else []))


def _place(event: Event) -> str:
    if not event.line:
        return ""
    return event.source.rpartition(", inlined at ")[2] or placed(event.line, "")


def _cta(block: Dim) -> str:
    return f"CTA ({', '.join(map(str, block))})"
