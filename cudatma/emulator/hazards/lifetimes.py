"""Check that no CTA exits, and no mbarrier is invalidated, while still in use.

A CTA's shared memory ends with its last thread. What another CTA does there has to be ordered before one of its threads
exits. This is judged by what the threads know when they exit, so that it does not depend on who came first.

Source: PTX ISA, "Memory Consistency Model" (causality order), "cp.async.bulk", "mbarrier.inval"; CUDA C++ Programming
Guide, "Distributed Shared Memory".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.hazards.agents import Agents, Stamp
from cudatma.emulator.hazards.clocks import Clock
from cudatma.emulator.hazards.findings import Findings
from cudatma.emulator.hazards.report import Place
from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.state import Block, Warp
from cudatma.emulator.ptx.types import Array

_SYNC = (
    "after the access (after a wait for its mbarrier, if it is a copy) barrier.cluster.arrive and .wait by all threads "
    "of the cluster (cluster.sync()), or an arrival on an mbarrier of block {block}, which waits for it before it exits"
)


@dataclass(slots=True)
class Use:
    """An access to shared memory or to an mbarrier in it.

    A thread that knows ``clock`` of ``agent`` is ordered after the access. place: the bytes or the mbarrier. barrier,
    phase: an arrival or a copy is over when this phase has ended.
    """

    agent: int
    clock: int
    warp: Warp
    program: Program
    at: int
    what: str
    place: Place
    barrier: MBarrier | None = None
    phase: int = 0

    @property
    def is_copy(self) -> bool:
        return self.barrier is not None and not self.what.startswith("mbarrier.")

    def is_known(self, performed: Array) -> bool:
        """Whether a thread that knows these accesses, or one of the barrier's CTA, knows that the use is over."""
        return self.clock <= performed[self.agent] or (self.barrier is not None and self.barrier.awaited > self.phase)


class Lifetimes:
    """Uses of each CTA's shared memory by other CTAs, and of each mbarrier by anyone, the latest one of each agent."""

    def __init__(self, agents: Agents, findings: Findings) -> None:
        self._agents, self._findings = agents, findings
        self._accesses: dict[tuple[int, int], Use] = {}
        self._uses: dict[int, dict[tuple[int, str], Use]] = {}

    def accessed(self, w: Warp, at: int, block: Block, place: Place, stamps: Iterable[Stamp], what: str) -> None:
        """Note an access of a warp to another CTA's shared memory, or a copy that reads it.

        stamps: as Agents.stamps gives them.
        """
        for agent, clock, _ in stamps:
            use = Use(agent, clock, w, w.split.frame.program, at, what, place)
            if block.is_done:
                self._report(use, block)
            self._accesses[block.rank, agent] = use

    def used(self, w: Warp, at: int, barrier: MBarrier, what: str, clock: Clock) -> None:
        """Note that a warp uses an mbarrier. clock: what it knows."""
        agent, program = self._agents.leader_agent(w), w.split.frame.program
        now, is_wait = int(clock.order[agent]), what == "a wait"
        use = Use(agent, now, w, program, at, what, barrier.place, None if is_wait else barrier, barrier.phase)
        if barrier.block.is_done:
            self._report(use, barrier.block)
        self._uses.setdefault(id(barrier), {})[agent, "" if is_wait else what] = use

    def invalidated(self, barrier: MBarrier, clock: Clock) -> Iterator[Use]:
        """Yield the uses of an mbarrier that a thread with this clock does not know to be over."""
        for use in self._uses.pop(id(barrier), {}).values():
            if not use.is_known(clock.performed()):
                yield use

    def ended(self, block: Block) -> None:
        """Report the uses by other CTAs that no thread of a CTA knew to be over when the last one exited.

        Copies into the CTA are left to BarrierEvents.check_loads.
        """
        clocks = [clock for warp in block.warps for clock in self._agents.every_clock(warp)]
        known = np.maximum.reduce([clock.performed() for clock in clocks])
        uses = [use for (rank, _), use in self._accesses.items() if rank == block.rank]
        for barrier in block.mbarriers.values():
            uses += [use for use in self._uses.get(id(barrier), {}).values() if use.warp.block is not block]
        for use in uses:
            if not use.is_copy and not use.is_known(known):
                self._report(use, block)

    def _report(self, use: Use, block: Block) -> None:
        message = f"nothing orders {use.what} before the end of block {block.index}, whose shared memory it uses"
        self._findings.add(
            "block_gone",
            message,
            self._agents.launch,
            use.program,
            use.at,
            use.warp,
            places=[use.place],
            advice=_SYNC.format(block=block.index),
        )
