"""Collect the hazards of a launch in all schedules, and report deadlocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.errors import TrapError
from cudatma.emulator.hazards.hazard import Access, Finding, Hazard, Place, by_cause
from cudatma.emulator.hazards.shared_memory import Shadow
from cudatma.emulator.hazards.sources import Sources
from cudatma.emulator.hazards.variables import SharedVariables
from cudatma.emulator.machine.access import FlagWait
from cudatma.emulator.machine.events import Copy, Observer
from cudatma.emulator.machine.loops import Loop, is_plain
from cudatma.emulator.machine.memory import RANK_SHIFT, SHARED_START, SHARED_WINDOW
from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.protocols import Dim, Launch
from cudatma.emulator.machine.register_pool import RegisterWait
from cudatma.emulator.machine.scheduler import Deadlock
from cudatma.emulator.machine.state import Split, Warp
from cudatma.emulator.machine.sync import NamedWait
from cudatma.emulator.ptx.model import Instruction
from cudatma.emulator.ptx.types import Array
from cudatma.errors import counted

#: Maps the kind, the function and the place of the instruction to the finding.
_Table = dict[tuple[str, str, Any], Finding]


class StopRun(Exception):  # noqa: N818 - not an error
    """Exception that ends a schedule at the first hazard of a kind in ``stop_at``."""


#: Kinds of unordered accesses, which can cause a wrong byte count of an mbarrier.
_OUT_OF_ORDER = {"overwritten_while_read", "write_race", "store_source_reused", "data_race", "global_race", "lane_race"}


class Findings:
    """Hazards and warnings of a launch.

    Occurrences of a kind at the same source line are counted as one hazard. The first hazard of a kind in ``stop_at``
    raises StopRun.
    """

    def __init__(
        self,
        kernel: str,
        stop_at: Iterable[str] = (),
        sources: Sources | None = None,
        variables: SharedVariables | None = None,
    ) -> None:
        self.kernel, self._stop_at, self._sources = kernel, frozenset(stop_at), sources or Sources()
        self.variables = variables or SharedVariables()
        self._hazards: _Table = {}
        self._warnings: _Table = {}
        #: Maps (function, instruction) to the remaining number of reads of swizzled tiles to examine.
        self.reads_to_check: dict[tuple[str, int], int] = {}
        #: The wgmma operands that swizzles.Swizzles has examined.
        self.operands: set[tuple[str, int, int, int, int]] = set()

    def add(
        self,
        kind: str,
        message: str,
        program: Program,
        at: int,
        warp: Warp,
        *,
        places: Iterable[Place] = (),
        is_derived: bool = False,
        advice: str = "",
        blocks: Iterable[Dim] = (),
        is_warning: bool = False,
        cause: str = "",
        others: Iterable[Access] = (),
        where: str = "",
        address: int | None = None,
    ) -> None:
        """Record a hazard or a warning at an instruction.

        Parameters
        ----------
        places, is_derived, advice, others, where, address
            See hazard.Finding and hazard.Hazard.
        blocks
            CTAs that the hazard affects in addition to the warp's CTA.
        cause
            Cause, if it differs from the usual cause of this kind.
        """
        table = self._warnings if is_warning else self._hazards
        known = self._known(kind, program, at, table)
        if known is None:
            more = {"advice": advice, "others": tuple(others), "where": where, "address": address}
            known = self._add(kind, message, program, at, warp, table, more)
        known.hazard = replace(known.hazard, known_cause=cause)
        known.touch(places, is_derived)
        known.blocks.update(blocks, (warp.block.index,))
        if kind in self._stop_at and not is_warning:
            raise StopRun

    def _known(self, kind: str, program: Program, at: int, table: _Table) -> Finding | None:
        """Count an occurrence of a known finding and return the finding. Return None for a new finding."""
        known = table.get((kind, program.function.name, _place(_instruction(program, at), at)))
        if known is not None:
            known.hazard = replace(known.hazard, count=known.hazard.count + 1)
        return known

    def _add(
        self, kind: str, message: str, program: Program, at: int, warp: Warp, table: _Table, more: dict[str, Any]
    ) -> Finding:
        instruction = _instruction(program, at)
        source = program.module.source_of(instruction) if instruction else ""
        message, more["advice"] = map(self.variables.named, (message, more["advice"]))
        known = table[kind, program.function.name, _place(instruction, at)] = Finding(
            Hazard(
                kind,
                message,
                self.kernel,
                instruction.line if instruction else 0,
                source,
                instruction.text if instruction else "",
                warp.block.index,
                warp.index,
                warp.launch.scheduler.schedule,
                warp.launch.scheduler.seed,
                source_text=self._sources.text(source),
                **more,
            )
        )
        if table is self._hazards:
            warp.events.hazard_found(known.hazard, warp)
        return known

    def unsupported(self, program: Program, at: int, target: str, feature: str) -> None:
        """Record an instruction that the target does not support."""
        instruction = program.instruction(at)
        source = program.module.source_of(instruction)
        message = f"{target} does not support {feature}"
        self._hazards["target", program.function.name, at] = Finding(
            Hazard("target", message, self.kernel, instruction.line, source, instruction.text, (0, 0, 0), 0, 0, 0)
        )

    def trapped(self, launch: Launch, error: TrapError) -> None:
        """Record that a schedule ended in a trap."""
        split, at = trapped_at(launch, error)
        self.add("trap", str(error), split.frame.program, at, split.warp)

    def has(self, place: Place, *kinds: str) -> bool:
        """Return whether a hazard of one of these kinds has been recorded at this place, or without a place."""
        known = (finding for key, finding in self._hazards.items() if key[0] in kinds)
        return any(not finding.places or place in finding.places for finding in known)

    def hazards(self) -> list[Hazard]:
        """Return all causes with their consequences."""
        return by_cause(list(self._hazards.values()))

    def warnings(self) -> list[Hazard]:
        """Return the warnings about suspicious code that may be intended."""
        return [finding.result() for finding in self._warnings.values()]


class Reporter(Observer):
    """Observer that reports the hazards of a cluster and determines which are consequences of others."""

    def __init__(self, launch: Launch, findings: Findings) -> None:
        self.launch, self.findings, self.body = launch, findings, launch.program.function.body
        #: True if an unordered access first put threads out of step, False if a wrong byte count did, otherwise None.
        self._order_broke: bool | None = None

    def violation(self, kind: str, w: Warp, at: int, message: str, places: Sequence[Place] = ()) -> None:
        self.report(kind, w, at, message, places=places)

    def warning(self, kind: str, w: Warp, at: int, message: str) -> None:
        self.report(kind, w, at, message, is_warning=True)

    def report(self, kind: str, w: Warp, at: int, message: str, **more: Any) -> None:
        """Record a hazard at an instruction of the running function. ``more`` contains arguments of Findings.add."""
        if kind in _OUT_OF_ORDER and not more.get("is_derived"):
            self.out_of_step(by_bytes=False)
        self.findings.add(kind, message, w.split.frame.program, at, w, **more)

    def report_bytes(
        self,
        kind: str,
        w: Warp,
        at: int,
        text: str,
        shadow: Shadow,
        place: int,
        indices: Array,
        read_at: int = -1,
        copy: Copy | None = None,
        **more: Any,
    ) -> None:
        """Record a hazard in shared memory at granule ``place``, with the last writer.

        ``indices`` contains all granules of the access. ``read_at`` is the earlier read that is not ordered before the
        write.
        """
        address = place * shadow.granule + SHARED_START
        copied_at = copy.at if copy is not None and copy.program is self.launch.program else -1
        others = self.earlier(read_at, int(shadow.writer_at[place]), copied_at)
        where = self.findings.variables.byte(address)
        shown = "; ".join([f"shared address {address:#x}" + (f", {where}" if where else ""), *map(str, others)])
        more["places"] = [shadow.bytes_of(indices), *more.get("places", ())]
        generic = SHARED_WINDOW | shadow.rank << RANK_SHIFT | address
        self.report(kind, w, at, f"{text} ({shown})", others=others, where=where, address=generic, **more)

    def earlier(self, read_at: int, written_at: int, copied_at: int = -1) -> list[Access]:
        """Return the copy, the read and the last write at these indices of instructions, without invalid indices."""
        accesses = []
        for verb, at in (("copied", copied_at), ("read", read_at), ("last written", written_at)):
            if 0 <= at < len(self.body):
                instruction = self.body[at]
                source = self.launch.program.module.source_of(instruction)
                accesses.append(Access(verb, instruction.line, source, instruction.text))
        return accesses

    def out_of_step(self, *, by_bytes: bool) -> None:
        """Record whether a wrong byte count or an unordered access first put threads out of step."""
        if self._order_broke is None:
            self._order_broke = not by_bytes

    @property
    def bytes_follow(self) -> bool:
        """Whether a wrong byte count is a consequence of an unordered access."""
        return bool(self._order_broke)


def _instruction(program: Program, at: int) -> Instruction | None:
    return program.instruction(at) if 0 <= at < len(program.function.body) else None


def _place(instruction: Instruction | None, at: int) -> Any:
    """Return a key for the position of an instruction. Copies of a source line in an unrolled loop share a key."""
    if instruction is None or not instruction.source_line:
        return at
    return instruction.file, instruction.source_line, instruction.inlined_at


def trapped_at(launch: Launch, error: TrapError) -> tuple[Split, int]:
    """Return the split that trapped and the index of its instruction."""
    split = launch.scheduler.running
    if split is None:
        raise error
    return split, error.at if error.at >= 0 else split.frame.program.flow.segments[split.pc].stop - 1


def _wait(split: Split) -> Any:
    return split.waits_for or (split.last_poll if split.polls else None)


def _cause(waits: list[Any]) -> str:
    """Return the cause of a deadlock without mbarriers, or "" if it is unknown."""
    if any(hasattr(getattr(wait, "barrier", None), "tx") for wait in waits):
        return ""
    if None in waits:
        return "the condition that ends the loop never becomes true"
    if any(isinstance(wait, NamedWait) for wait in waits):
        return "too few threads reach the barrier, because its thread count is wrong or a branch skips it"
    if any(isinstance(wait, FlagWait) for wait in waits):
        return "no thread sets the flag, or the thread that should set it also waits"
    return ""


def _loop(split: Split, deadlock: Deadlock) -> tuple[Loop | None, FlagWait | None]:
    """Return the infinite loop of a split (or None) and the flag that its CTA polls in the loop (or None)."""
    loop = deadlock.loops.loop(split.warp) if deadlock.loops is not None else None
    if loop is None or (split.waits_for is not None and split.waits_for.at not in dict(loop.instructions)):
        return None, None
    reads = dict(loop.reads)
    polls = (warp.last_poll for warp in (split.warp, *split.warp.block.warps))
    return loop, next((poll for poll in polls if poll is not None and poll.at in reads), None)


def _position(split: Split, deadlock: Deadlock) -> tuple[Program, int, str]:
    """Return the program and the instruction at which a split waits or loops, and a description."""
    wait = _wait(split)
    loop, poll = _loop(split, deadlock)
    program = split.frame.program
    if loop is None:
        at = getattr(wait, "at", program.flow.segments[split.pc].start)
        return program, min(at, len(program.function.body) - 1), wait.describe() if wait is not None else "running"
    what = f"an infinite loop through {loop.describe()}"
    if poll is not None:
        return loop.program, poll.at, f"{what} {poll.describe()}"
    if not loop.reads:
        what += " does not read memory; use volatile or ld.acquire, because compilers hoist an ordinary load of a flag"
    else:
        what += " reads a value that does not change"
        synchronizes = any(i.parts[0] in ("bar", "barrier") for _, i in loop.instructions)
        if any(is_plain(i) for _, i in loop.reads) and not synchronizes:
            what += "; use ld.acquire, because an ordinary load may never observe writes by other threads"
    return loop.program, loop.at, what


def lines_of(deadlock: Deadlock) -> list[str]:
    """Return lines that describe where splits wait. Splits with the same description share a line."""
    alike: dict[tuple[str, str], list[Split]] = {}
    for split in sorted(deadlock.blocked, key=lambda split: (split.warp.block.index[::-1], split.warp.index)):
        program, at, what = _position(split, deadlock)
        instruction = program.instruction(at)
        source = program.module.source_of(instruction)
        place = f"PTX line {instruction.line}" + (f" ({source})" if source else "")
        alike.setdefault((place, what), []).append(split)
    lines = []
    for (place, what), splits in alike.items():
        first, blocks = splits[0], {id(split.warp.block) for split in splits}
        who = f"block {first.warp.block.index} warp {first.warp.index} ({counted(int(first.mask.sum()), 'lane')})"
        if len(splits) > 1:
            who += f" and {len(splits) - 1} more" + (f" in {len(blocks)} blocks" if len(blocks) > 1 else "")
        lines.append(f"{who} at {place}: {what}")
    return lines


def report_deadlock(deadlock: Deadlock, findings: Findings) -> None:
    """Report a hazard for the deadlock, and a hazard for each mbarrier whose byte count is wrong."""
    blocked = sorted(deadlock.blocked, key=lambda split: (split.warp.block.index[::-1], split.warp.index))
    for cluster in dict.fromkeys(split.warp.block.cluster for split in blocked):
        cluster.events.deadlocked()
    lines = lines_of(deadlock)
    shown = "\n    ".join(lines[:16])
    more = f"\n    and {len(lines) - 16} more" if len(lines) > 16 else ""
    first = next((split for split in blocked if split.waits_for is None), blocked[0])
    program, at, _ = _position(first, deadlock)
    blocks = {split.warp.block.index for split in blocked}
    starved = next((split for split in blocked if isinstance(split.waits_for, RegisterWait)), None)
    if starved is not None:  # All other warps wait for these warps.
        message = f"{starved.waits_for.arithmetic()}, so the warp waits forever:\n    {shown}{more}"
        program = starved.frame.program
        findings.add("register_pool", message, program, starved.waits_for.at, starved.warp, blocks=blocks)
        return
    waits = [split.waits_for or split.last_poll for split in blocked]
    barriers = {id(wait.barrier): wait.barrier for wait in waits if hasattr(getattr(wait, "barrier", None), "tx")}
    for barrier in barriers.values():
        if barrier.pending == 0 and barrier.tx:
            barrier.block.cluster.events.bytes_over(barrier)
    named: dict[tuple[int, str], list[str]] = {}
    for barrier in barriers.values():
        named.setdefault((barrier.offset, _arrivals(barrier)), []).append(barrier.name)
    arrived = "".join(
        f"\n    arrived at {names[0]}{f' and in {len(names) - 1} more' if len(names) > 1 else ''} so far: {what}"
        for (_, what), names in named.items()
    )
    loops = [_loop(split, deadlock) for split in blocked]
    waits = [_wait(split) if loop is None else poll for split, (loop, poll) in zip(blocked, loops, strict=True)]
    is_loop = any(loop for loop, _ in loops) or not any(waits)
    what = "infinite loop that no other warp can end" if is_loop else "no warp can proceed and no copy is in flight"
    message = f"{what}:\n    {shown}{more}{arrived}"
    others = _waits_of(deadlock, (program, at))
    findings.add("deadlock", message, program, at, first.warp, blocks=blocks, cause=_cause(waits), others=others)


def _waits_of(deadlock: Deadlock, without: tuple[Program, int]) -> list[Access]:
    """Return the instructions at which splits wait, except the instruction at ``without``."""
    positions = dict.fromkeys(_position(split, deadlock)[:2] for split in deadlock.blocked)
    waits = []
    for program, at in positions:
        if (program, at) != without:
            instruction = program.instruction(at)
            waits.append(Access("waits", instruction.line, program.module.source_of(instruction), instruction.text))
    return waits


def _arrivals(barrier: MBarrier) -> str:
    """Return text that states which warps have arrived on an mbarrier in the current phase."""
    arrived = barrier.arrived_by
    warps = sorted({agent for agent, _ in arrived})
    named = f"warp{'s' * (len(warps) > 1)} {', '.join(map(str, warps))}"
    return f"{counted(len(arrived), 'thread')} of {named}" if arrived else "none"
