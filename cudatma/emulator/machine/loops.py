"""Detect infinite loops, in which warps return to an earlier state, and find the source lines in a loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.retries import state_of
from cudatma.emulator.machine.state import Split, Warp
from cudatma.emulator.ptx.model import Instruction

#: Limits of a recording: the maximum number of visits of a split to its first place, and the maximum number of steps.
_MAX_COMPARED, _MAX_STEPS = 100, 200_000
#: Maximum number of lines in the description of a loop.
_MAX_LINES = 6
_READS = ("ld", "ldu", "atom", "mbarrier")


@dataclass(frozen=True, slots=True)
class Loop:
    """Instructions that a warp repeats.

    ``at`` is the first instruction that reads memory, or the first instruction if none reads memory.
    """

    program: Program
    instructions: tuple[tuple[int, Instruction], ...]

    @property
    def reads(self) -> tuple[tuple[int, Instruction], ...]:
        return tuple((at, i) for at, i in self.instructions if i.parts[0] in _READS)

    @property
    def at(self) -> int:
        return (self.reads or self.instructions)[0][0]

    def describe(self) -> str:
        """Return the source lines of the loop, or its PTX lines if the source is unknown."""
        sources: dict[str, set[int]] = {}
        for _, instruction in self.instructions:
            file, _, line = self.program.module.source_of(instruction).partition(",")[0].rpartition(":")
            if file:
                sources.setdefault(file, set()).add(int(line))
        places = [f"{file}:{_ranges(lines)}" for file, lines in sources.items()]
        return ", ".join(places) or f"PTX lines {_ranges({i.line for _, i in self.instructions})}"


def is_plain(instruction: Instruction) -> bool:
    """Return whether an instruction is a weak load."""
    root, *rest = instruction.parts
    return root in ("ld", "ldu") and not {"volatile", "relaxed", "acquire", "mmio"} & set(rest)


def _ranges(lines: set[int]) -> str:
    """Format line numbers as "3-5, 9"."""
    ends: list[list[int]] = []
    for line in sorted(lines):
        if ends and line == ends[-1][1] + 1:
            ends[-1][1] = line
        else:
            ends.append([line, line])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ends[:_MAX_LINES]]
    return ", ".join(shown) + (", ..." if len(ends) > _MAX_LINES else "")


def _state_of(split: Split) -> tuple[int, bool]:
    """Return the state of a split. A split visits a barrier twice: when it arrives, and after it has been released."""
    return state_of(split), split.token is None


class Recorder:
    """Recorder of the segments that the warps of a launch execute."""

    def __init__(self, ready: Iterable[Split], blocked: Iterable[Split]) -> None:
        """Start a recording of the given splits, which are ready or blocked.

        Later states of a ready split are compared with its current state. A blocked split is compared only after its
        release.
        """
        #: Maps each place to the number of visits in each state. A split's first visit is counted when the
        #: split continues, and its second visit when the split returns.
        self._states: dict[tuple[Warp, int], dict[tuple[int, bool], int]] = {}
        self._compared: dict[tuple[Warp, int], int] = {}
        self._blocked = set(blocked)
        for split in ready:
            self._expect(split)
        self._visits: dict[Warp, dict[tuple[Program, int], int]] = {}
        self._steps = 0

    def _expect(self, split: Split) -> None:
        """Record that a split must return to its current state."""
        place = split.warp, split.pc
        self._states.setdefault(place, {})[_state_of(split)] = 0
        self._compared.setdefault(place, 0)

    def segment_begins(self, split: Split, pc: int) -> None:
        """Record that a split starts a segment."""
        self._steps += 1
        visits = self._visits.setdefault(split.warp, {})
        place = split.frame.program, pc
        visits[place] = visits.get(place, 0) + 1
        if split in self._blocked:
            self._blocked.remove(split)
            self._expect(split)
        states = self._states.get((split.warp, pc))
        if states is not None and self._compared[split.warp, pc] < _MAX_COMPARED:
            self._compared[split.warp, pc] += 1
            state = _state_of(split)
            if state in states:
                states[state] += 1

    @property
    def is_cycle(self) -> bool:
        """Return whether all splits have returned to their first states."""
        return all(count > 1 for states in self._states.values() for count in states.values())

    @property
    def has_failed(self) -> bool:
        """Return whether any split does not return to its first state."""
        return self._steps > _MAX_STEPS or any(
            count >= _MAX_COMPARED and min(self._states[place].values()) < 2 for place, count in self._compared.items()
        )

    def loop(self, warp: Warp) -> Loop | None:
        """Return the instructions that a warp has executed more than once, or None if there are none."""
        visits = [place for place, count in self._visits.get(warp, {}).items() if count > 1]
        if not visits:
            return None
        program = max(visits, key=lambda place: sum(other[0] is place[0] for other in visits))[0]
        instructions: list[tuple[int, Instruction]] = []
        for pc in sorted(pc for other, pc in visits if other is program):
            segment = program.flow.segments[pc]
            instructions += [(at, program.instruction(at)) for at in range(segment.start, segment.stop)]
        return Loop(program, tuple(instructions)) if instructions else None

    def warps(self) -> list[Warp]:
        """Return the warps that have executed an instruction more than once."""
        return [warp for warp in self._visits if self.loop(warp) is not None]
