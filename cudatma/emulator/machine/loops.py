"""Detect endless loops: warps that return to an earlier state, and the lines they execute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.retries import state_of
from cudatma.emulator.machine.state import Split, Warp
from cudatma.emulator.ptx.model import Instruction

#: Visits of a split to its first place, and steps of all splits, after which a recording has failed.
_MAX_COMPARED, _MAX_STEPS = 100, 200_000
#: Lines of a loop that are named.
_MAX_LINES = 6
_READS = ("ld", "ldu", "atom", "mbarrier")


@dataclass(frozen=True, slots=True)
class Loop:
    """Instructions that a warp executes repeatedly. at: the first one that reads memory, else the first one."""

    program: Program
    instructions: tuple[tuple[int, Instruction], ...]

    @property
    def reads(self) -> tuple[tuple[int, Instruction], ...]:
        return tuple((at, i) for at, i in self.instructions if i.parts[0] in _READS)

    @property
    def at(self) -> int:
        return (self.reads or self.instructions)[0][0]

    def describe(self) -> str:
        """Name the loop's lines, of the source where they are known."""
        sources: dict[str, set[int]] = {}
        for _, instruction in self.instructions:
            file, _, line = self.program.module.source_of(instruction).partition(",")[0].rpartition(":")
            if file:
                sources.setdefault(file, set()).add(int(line))
        places = [f"{file}:{_ranges(lines)}" for file, lines in sources.items()]
        return ", ".join(places) or f"PTX lines {_ranges({i.line for _, i in self.instructions})}"


def is_plain(instruction: Instruction) -> bool:
    """Whether an instruction is a weak load, which need not see what other threads write."""
    root, *rest = instruction.parts
    return root in ("ld", "ldu") and not {"volatile", "relaxed", "acquire", "mmio"} & set(rest)


def _ranges(lines: set[int]) -> str:
    """Line numbers as "3-5, 9"."""
    ends: list[list[int]] = []
    for line in sorted(lines):
        if ends and line == ends[-1][1] + 1:
            ends[-1][1] = line
        else:
            ends.append([line, line])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ends[:_MAX_LINES]]
    return ", ".join(shown) + (", ..." if len(ends) > _MAX_LINES else "")


class Recorder:
    """Records for a while which segments the warps of a launch run."""

    def __init__(self, splits: Iterable[Split]) -> None:
        """splits: compared with their present states, to find out whether they return to them."""
        #: Place -> state -> number of visits: the first when the split goes on, the second when it returns.
        self._states: dict[tuple[Warp, int], dict[int, int]] = {}
        for split in splits:
            self._states.setdefault((split.warp, split.pc), {})[state_of(split)] = 0
        self._compared = dict.fromkeys(self._states, 0)
        self._visits: dict[Warp, dict[tuple[Program, int], int]] = {}
        self._steps = 0

    def segment_begins(self, split: Split, pc: int) -> None:
        """Note that a split begins a segment."""
        self._steps += 1
        visits = self._visits.setdefault(split.warp, {})
        place = split.frame.program, pc
        visits[place] = visits.get(place, 0) + 1
        states = self._states.get((split.warp, pc))
        if states is not None and self._compared[split.warp, pc] < _MAX_COMPARED:
            self._compared[split.warp, pc] += 1
            state = state_of(split)
            if state in states:
                states[state] += 1

    @property
    def is_cycle(self) -> bool:
        """Whether all splits have returned to their first states."""
        return all(count > 1 for states in self._states.values() for count in states.values())

    @property
    def has_failed(self) -> bool:
        """Whether a split does not return to its first state."""
        return self._steps > _MAX_STEPS or any(
            count >= _MAX_COMPARED and min(self._states[place].values()) < 2 for place, count in self._compared.items()
        )

    def loop(self, warp: Warp) -> Loop | None:
        """Return the instructions that a warp has executed more than once, or None."""
        visits = [place for place, count in self._visits.get(warp, {}).items() if count > 1]
        if not visits:
            return None
        program = max(visits, key=lambda place: sum(other[0] is place[0] for other in visits))[0]
        found: list[tuple[int, Instruction]] = []
        for pc in sorted(pc for other, pc in visits if other is program):
            segment = program.flow.segments[pc]
            found += [(at, program.instruction(at)) for at in range(segment.start, segment.stop)]
        return Loop(program, tuple(found)) if found else None

    def warps(self) -> list[Warp]:
        """The warps that have executed something more than once."""
        return [warp for warp in self._visits if self.loop(warp) is not None]
