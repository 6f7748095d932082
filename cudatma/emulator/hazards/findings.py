"""Collects hazards, each once, over all schedules of a launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from cudatma.emulator.errors import TrapError
from cudatma.emulator.hazards.report import Finding, Hazard, Place, by_cause
from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.machine.register_pool import RegisterWait
from cudatma.emulator.machine.scheduler import Deadlock
from cudatma.emulator.machine.state import Split, Warp
from cudatma.emulator.ptx.model import Instruction
from cudatma.errors import counted


class Found(Exception):  # noqa: N818 - it is no error
    """Ends a run at a hazard of a kind that was asked for."""


class Findings:
    """Hazards by kind and place, the source line where it is known; a second one at the same place only counts. The
    first of a kind in ``stop_at`` raises Found."""

    def __init__(self, kernel: str, stop_at: Iterable[str] = ()) -> None:
        self.kernel, self._stop_at = kernel, frozenset(stop_at)
        self._found: dict[tuple[str, str, Any], Finding] = {}
        self._warned: dict[tuple[str, str, Any], Finding] = {}
        #: (function, instruction) -> how many more reads of swizzled tiles there are to be looked at.
        self.reads_to_check: dict[tuple[str, int], int] = {}
        #: (function, instruction, matrix descriptor, operand) of the wgmmas whose descriptors have been looked at.
        self.descriptors: set[tuple[str, int, int, int]] = set()

    def add(
        self,
        kind: str,
        message: str,
        launch: Launch,
        program: Program,
        at: int,
        warp: Warp,
        *,
        places: Iterable[Place] = (),
        is_derived: bool = False,
        advice: str = "",
        is_warning: bool = False,
    ) -> None:
        """Record a hazard, or a warning, at an instruction.

        places, is_derived, advice: as in causes.Finding and report.Hazard.
        """
        found = self._warned if is_warning else self._found
        known = self._add(kind, message, launch, program, at, warp.block.index, warp.index, advice, found)
        known.touch(places, is_derived)
        if kind in self._stop_at and not is_warning:
            raise Found

    def _add(
        self,
        kind: str,
        message: str,
        launch: Launch,
        program: Program,
        at: int,
        block: tuple[int, int, int],
        warp: int,
        advice: str = "",
        found: dict[tuple[str, str, Any], Finding] | None = None,
    ) -> Finding:
        found = self._found if found is None else found
        instruction = program.instruction(at) if 0 <= at < len(program.function.body) else None
        key = (kind, program.function.name, _place(instruction, at))
        known = found.get(key)
        if known is not None:
            known.hazard = replace(known.hazard, count=known.hazard.count + 1)
            return known
        if launch.trace is not None and found is self._found:
            launch.trace.hazard(kind, block, warp)
        known = found[key] = Finding(
            Hazard(
                kind,
                message,
                self.kernel,
                instruction.line if instruction else 0,
                program.module.source_of(instruction) if instruction else "",
                instruction.text if instruction else "",
                block,
                warp,
                launch.scheduler.schedule,
                launch.scheduler.seed,
                advice=advice,
            )
        )
        return known

    def unsupported(self, program: Program, at: int, target: str, feature: str) -> None:
        """Record an instruction that the target lacks."""
        instruction = program.instruction(at)
        source = program.module.source_of(instruction)
        message = f"{target} has no {feature}"
        self._found["target", program.function.name, at] = Finding(
            Hazard("target", message, self.kernel, instruction.line, source, instruction.text, (0, 0, 0), 0, 0, 0)
        )

    def trapped(self, launch: Launch, error: TrapError) -> None:
        """Record that a schedule ended in a trap."""
        split, at = trapped_at(launch, error)
        self.add("trap", str(error), launch, split.frame.program, at, split.warp)

    def has(self, place: Place, *kinds: str) -> bool:
        """Whether a hazard of one of these kinds is known there, or at an unknown place."""
        known = (finding for key, finding in self._found.items() if key[0] in kinds)
        return any(not finding.places or place in finding.places for finding in known)

    def hazards(self) -> list[Hazard]:
        """All hazards: causes, with what follows from them."""
        return by_cause(list(self._found.values()))

    def warnings(self) -> list[Hazard]:
        """What may be meant as it is."""
        return [finding.hazard for finding in self._warned.values()]


def _place(instruction: Instruction | None, at: int) -> Any:
    """What tells one place from another: copies of a line in an unrolled loop are the same one."""
    if instruction is None or not instruction.source_line:
        return at
    return instruction.file, instruction.source_line, instruction.inlined_at


def trapped_at(launch: Launch, error: TrapError) -> tuple[Split, int]:
    """The split that trapped, and the index of its instruction."""
    split = launch.scheduler.running
    if split is None:
        raise error
    return split, error.at if error.at >= 0 else split.frame.program.flow.segments[split.pc].stop - 1


def _line_of(split: Split) -> str:
    wait = split.waits_for or split.last_poll
    program = split.frame.program
    at = getattr(wait, "at", program.flow.segments[split.pc].start)
    instruction = program.instruction(min(at, len(program.function.body) - 1))
    source = program.module.source_of(instruction)
    lanes = int(split.mask.sum())
    what = wait.describe() if wait is not None else "running"
    place = f"PTX line {instruction.line}" + (f" ({source})" if source else "")
    return f"block {split.warp.block.index} warp {split.warp.index} ({counted(lanes, 'lane')}) at {place}: {what}"


def report_deadlock(launch: Launch, deadlock: Deadlock, findings: Findings) -> None:
    """One hazard for the deadlock as a whole, and one for each barrier whose bytes do not add up."""
    blocked = sorted(deadlock.blocked, key=lambda split: (split.warp.block.index[::-1], split.warp.index))
    for observer in dict.fromkeys(split.warp.block.cluster.observer for split in blocked):
        if observer is not None:
            observer.stuck()
    shown = "\n    ".join(_line_of(split) for split in blocked[:16])
    more = f"\n    and {len(blocked) - 16} more" if len(blocked) > 16 else ""
    first = blocked[0]
    wait = first.waits_for or first.last_poll
    at = getattr(wait, "at", first.frame.program.flow.segments[first.pc].start)
    starved = next((split for split in blocked if isinstance(split.waits_for, RegisterWait)), None)
    if starved is not None:  # all other warps wait for these
        message = f"{starved.waits_for.arithmetic()}; it waits for ever:\n    {shown}{more}"
        program = starved.frame.program
        findings.add("register_pool", message, launch, program, starved.waits_for.at, starved.warp)
        return
    barriers = {}
    for split in blocked:
        barrier = getattr(split.waits_for or split.last_poll, "barrier", None)
        if barrier is not None and hasattr(barrier, "tx"):
            barriers[id(barrier)] = (barrier, split)
    for barrier, split in barriers.values():
        if barrier.pending == 0 and barrier.tx:
            owner, place = barrier.expected_by or (split.warp, getattr(split.waits_for, "at", at))
            findings.add(
                "byte_count",
                f"{barrier.missing_bytes()} at {barrier.describe()}",
                launch,
                owner.launch.program if owner.launch.program is not None else split.frame.program,
                place,
                owner,
                places=[barrier.place],
            )
    arrived = "".join(
        f"\n    arrived at {barrier.name} so far: {_arrivals(barrier.arrived_by)}" for barrier, _ in barriers.values()
    )
    message = f"no warp can run and nothing is under way:\n    {shown}{more}{arrived}"
    findings.add("deadlock", message, launch, first.frame.program, at, first.warp)


def _arrivals(arrived: set[tuple[int, int]]) -> str:
    warps = sorted({agent for agent, _ in arrived})
    return f"{len(arrived)} threads of warps {', '.join(map(str, warps))}" if arrived else "nobody"
