"""Tables of TMA, mbarrier and tensor-core instructions with their source lines, and of loops with their waits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cudatma.review.flow import natural_loops, states_before
from cudatma.review.sass import SCOREBOARDS, Code, Place, Step, class_of

_MBARRIER = ("SYNCS", "ARRIVES")
_MBARRIER_WAIT = "SYNCS.PHASECHK"
#: Instructions that wait, and the event for which they wait.
_WAITS = {
    _MBARRIER_WAIT: "mbarrier",
    "WARPGROUP.DEPBAR": "wgmma groups",
    "BAR": "CTA barrier",
    "DEPBAR": "cp.async or bulk groups",
    "UTMADEPBAR": "bulk groups",
    "UCGABAR_WAIT": "cluster barrier",
    "ACQBULK": "previous kernel",
    "MEMBAR": "memory fence",
    "FENCE": "proxy fence",
    "WARPSYNC": "warp barrier",
    "NANOSLEEP": "sleep",
}
#: Maximum number of instructions in a loop that only repeats an mbarrier wait.
_SPIN_INSTRUCTIONS = 12

#: Maximum number of places in the text of shown_places().
_SHOWN_CALLS = 6

_PTX_KINDS = (
    ("TMA", re.compile(r"cp\.async\.bulk|cp\.reduce\.async\.bulk|prefetch\.tensormap|tensormap\.replace")),
    ("mbarrier", re.compile(r"mbarrier\.|cp\.async\.mbarrier")),
    ("tensor core", re.compile(r"wgmma\.|mma\.|wmma\.|tcgen05\.")),
)
_PTX_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_PTX_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+")
_PTX_CALLER = re.compile(r"inlined_at\s+(\d+)\s+(\d+)")
_PTX_OPCODE = re.compile(r"\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)")
_PTX_FUNCTION = re.compile(r"\.(?:entry|func)\b")
#: End of a PTX statement. Directives such as .loc end with the line.
_PTX_END = re.compile(r"[;{}\n]")


@dataclass(frozen=True, slots=True)
class Row:
    """Instructions of one kind with the same opcode and place.

    Attributes
    ----------
    kind : {"TMA", "mbarrier", "tensor core"}
        Kind of the instructions.
    opcode : str
        SASS opcode with modifiers, or the PTX opcode if there is no SASS.
    count : int
        Number of instructions.
    places : tuple of Place
        File and line, followed by the places of the calls through which the instruction was inlined. Empty without
        line information.
    """

    kind: str
    opcode: str
    count: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop.

    Attributes
    ----------
    first, last : int
        Lowest and highest address of the instructions, in bytes.
    depth : int
        Number of loops that contain this loop.
    instructions : int
        Number of instructions, including inner loops.
    is_spin : bool
        Whether the loop only repeats an mbarrier wait.
    places : tuple of Place
        Place of the first instruction, as in Row.
    waits : dict of str to int
        Number of instructions that wait, by event. Inner loops count only if they spin.
    classes : dict of str to int
        Number of TMA, tensor-core, shared, global and local instructions, including inner loops.
    """

    first: int
    last: int
    depth: int
    instructions: int
    is_spin: bool
    places: tuple[Place, ...]
    waits: dict[str, int]
    classes: dict[str, int]


def shown_places(places: tuple[Place, ...], file: str = "") -> str:
    """Return places as text, innermost first, without the name of ``file``: ``"ring.cuh:12 < gemm.cu:40 < 71"``."""
    words = []
    for place in places:
        words.append(str(place[1]) if place[0] == file else f"{place[0]}:{place[1]}")
        file = place[0]
    return " < ".join(words if len(words) <= _SHOWN_CALLS else [*words[: _SHOWN_CALLS - 2], "...", words[-1]])


def sass_rows(code: Code) -> tuple[Row, ...]:
    """Return the table of a function's TMA, mbarrier and tensor-core instructions, in order of address."""
    return _rows((_row_kind(step.mnemonic), step.opcode, step.places) for step in code.steps)


def _row_kind(mnemonic: str) -> str:
    if mnemonic in _MBARRIER:
        return "mbarrier"
    if mnemonic.startswith("UTC"):
        return "tensor core"
    kind = class_of(mnemonic)
    return kind if kind in ("TMA", "tensor core") else ""


def ptx_rows(ptx: str, entry: str) -> tuple[Row, ...]:
    """Return the table of the instructions in a kernel's PTX, in order of the text."""
    files = {number: name.rsplit("/", 1)[-1] for number, name in _PTX_FILE.findall(ptx)}
    return _rows(_ptx_instructions(ptx, entry, files))


def ptx_function(ptx: str, entry: str) -> str:
    """Return the text of a kernel, from its name to the next function, without comments."""
    match = re.search(rf"\.entry\s+{re.escape(entry)}(?![\w$%])", ptx)
    if match is None:
        return ""
    following = _PTX_FUNCTION.search(ptx, match.end())
    return re.sub(r"//[^\n]*", "", ptx[match.end() : following.start() if following else len(ptx)])


def _ptx_instructions(ptx: str, entry: str, files: Mapping[str, str]) -> Iterator[tuple[str, str, tuple[Place, ...]]]:
    places: tuple[Place, ...] = ()
    for text in _PTX_END.split(ptx_function(ptx, entry)):
        if loc := _PTX_LOC.search(text):
            called = [loc, *([caller] if (caller := _PTX_CALLER.search(text)) else [])]
            places = tuple((files.get(each[1], "?"), int(each[2])) for each in called)
        elif opcode := _PTX_OPCODE.match(text):
            kind = next((name for name, pattern in _PTX_KINDS if pattern.match(opcode[1])), "")
            yield kind, opcode[1], places


def _rows(instructions: Iterable[tuple[str, str, tuple[Place, ...]]]) -> tuple[Row, ...]:
    counts = Counter(instruction for instruction in instructions if instruction[0])
    order = {"TMA": 0, "mbarrier": 1, "tensor core": 2}
    rows = [Row(kind, opcode, count, places) for (kind, opcode, places), count in counts.items()]
    return tuple(sorted(rows, key=lambda row: order[row.kind]))


#: Instructions that may hold each scoreboard, and whether they hold it until their operands are read.
Holders = tuple[frozenset[tuple[str, bool]], ...]


def _issue(step: Step, holders: Holders) -> Holders:
    after = list(holders)
    for number in range(SCOREBOARDS):
        if step.waits >> number & 1:
            after[number] = frozenset()
    for scoreboard, is_read in ((step.write_scoreboard, False), (step.read_scoreboard, True)):
        if scoreboard is not None and scoreboard < SCOREBOARDS and step.predicate != "!PT":
            after[scoreboard] |= {(step.mnemonic, is_read)}
    return tuple(after)


def _merge(left: Holders, right: Holders) -> Holders:
    return tuple(a | b for a, b in zip(left, right, strict=True))


def _waits(step: Step, holders: Holders) -> set[str]:
    """Return the events for which a step waits."""
    opcode = step.opcode
    named = next((event for name, event in _WAITS.items() if opcode == name or opcode.startswith(f"{name}.")), "")
    waits = {named} if named and not opcode.startswith("BAR.ARV") else set()
    for number in range(SCOREBOARDS):
        if step.waits >> number & 1:
            for mnemonic, is_read in holders[number]:
                if mnemonic not in _MBARRIER:
                    waits.add(f"operands of {mnemonic}" if is_read else mnemonic)
    return waits


def loops_of(code: Code) -> tuple[Loop, ...]:
    """Return the loops of a function by address, outer loops first."""
    bodies = natural_loops(code)
    if not bodies:
        return ()
    nothing: Holders = (frozenset(),) * SCOREBOARDS
    holders = states_before(code, nothing, _issue, _merge)
    spins = [_is_spin([code.steps[index] for index in body]) for body in bodies]
    loops = []
    for body, is_spin in zip(bodies, spins, strict=True):
        inner: set[int] = set()
        for other, spins_itself in zip(bodies, spins, strict=True):
            if other < body and not spins_itself:
                inner |= other
        waits = Counter(event for index in body - inner for event in _waits(code.steps[index], holders[index]))
        steps = [code.steps[index] for index in sorted(body)]
        kinds = Counter(class_of(step.mnemonic) for step in steps)
        shown = {name: kinds[name] for name in ("TMA", "tensor core", "shared", "global", "local") if kinds[name]}
        loops.append(
            Loop(
                first=steps[0].address,
                last=steps[-1].address,
                depth=sum(body < other for other in bodies),
                instructions=sum(step.mnemonic != "NOP" for step in steps),
                is_spin=is_spin,
                places=steps[0].places,
                waits=dict(sorted(waits.items(), key=lambda item: (-item[1], item[0]))),
                classes=shown,
            )
        )
    return tuple(loops)


def _is_spin(steps: list[Step]) -> bool:
    """Return whether a loop only repeats mbarrier waits."""
    others = {"TMA", "tensor core", "shared", "global", "local"}
    is_small = len(steps) <= _SPIN_INSTRUCTIONS and not any(class_of(step.mnemonic) in others for step in steps)
    return is_small and any(step.opcode.startswith(_MBARRIER_WAIT) for step in steps)
