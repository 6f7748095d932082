"""Detect races in shared memory: accesses that are not ordered after a write, read or copy of the same bytes.

Source: PTX ISA, "Memory Consistency Model": causality order, proxies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.hazards.agents import Agents, lanes_now
from cudatma.emulator.hazards.clocks import Clock, strength_of
from cudatma.emulator.hazards.findings import Reporter
from cudatma.emulator.hazards.hazard import Place
from cudatma.emulator.hazards.shared_memory import REDUCED, Shadow, SharedMemory, uses_proxy
from cudatma.emulator.machine.events import Copy, Observer, Same, never
from cudatma.emulator.machine.memory import SHARED_START
from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.state import Block, Cluster, Warp
from cudatma.emulator.ptx.types import Array

#: Maximum number of recorded reads of unwritten bytes. A copy to these bytes may be issued later.
_MAX_UNWRITTEN = 256
#: Advice for a read without a wait for a cp.async.
COPY_WAIT = "cp.async.wait_group by the threads that copied, then a barrier with the threads that read (__syncthreads)"
#: Advice for a read through the async proxy (by a wgmma or a bulk store) without a wait for a cp.async.
PROXY_COPY_WAIT = (
    "cp.async.wait_group, then fence.proxy.async, by the threads that copied, then a barrier with the threads that "
    "read (__syncthreads)"
)
#: Advice for a read without a wait if the copies complete on an mbarrier.
_COPY_ARRIVALS = (
    "a wait on the mbarrier of cp.async.mbarrier.arrive by the threads that read; the count of mbarrier.init must "
    "include every thread that arrives with .noinc"
)
PROXY_FENCE = "fence.proxy.async by the threads that stored, then a barrier before the wgmma or the copy"
_ARRIVALS = (
    "before the copy, a wait for the arrivals of all readers of the slot (mbarrier.try_wait.parity in a loop on its "
    "empty mbarrier; a pipeline's producer_acquire)"
)
_AFTER_WGMMA = "after wgmma.wait_group in the warps that read"
#: Advice for the refill of a slot if no thread is known to have waited for the contents of the slot.
LAP_WAIT = f"{_ARRIVALS}; or, in each reader, a consumer_wait for the previous copy before the reader arrives"
#: Advice for a write to the source of a copy between CTAs.
COPY_MESSAGE = (
    "before the write, a wait for the arrival of a thread of the destination CTA that has waited on the copy's "
    "mbarrier; or barrier.cluster"
)
#: Advice for an arrive or a wait of CTA scope between two CTAs.
CLUSTER_SCOPE = (
    "cluster scope on both sides: mbarrier.arrive.release.cluster by the writer and "
    "mbarrier.try_wait.acquire.cluster by the reader (the default scope is one CTA)"
)


@dataclass(frozen=True, slots=True)
class Awaited:
    """Phase or group that a copy completes. ``advice`` states the call that must precede reads of the bytes."""

    name: str = ""
    advice: str = ""
    places: tuple[Place, ...] = ()


def _refill_advice(is_copy: bool, reader: str) -> str:
    """Return the missing synchronization between a read and the write that refills the bytes."""
    if is_copy and reader == "wgmma":
        return f"{_ARRIVALS}, which must come {_AFTER_WGMMA}; or __syncthreads {_AFTER_WGMMA} and before the copy"
    if is_copy:
        return f"{_ARRIVALS}, or __syncthreads between the last read and the copy"
    return (
        f"before the store, a barrier between the warps that read and those that store, {_AFTER_WGMMA}: __syncthreads, "
        "bar.sync, or an mbarrier on which the readers arrive"
    )


def phase_name(block: Block, offset: int, phase: int) -> str:
    """Return the name of an mbarrier phase for messages."""
    address = offset + SHARED_START
    return f"phase {phase} (parity {phase & 1}) of the mbarrier at {address:#x} of block {block.index}"


def _phase_of(block: Block, offset: int, phase: int) -> Awaited:
    """Return the phase of an mbarrier that a copy completes, with the call that waits for this phase."""
    name = phase_name(block, offset, phase)
    call = "mbarrier.try_wait.parity in a loop (mbarrier_wait_parity; a pipeline's consumer_wait)"
    advice = f"before the read, a wait for {name}: {call}"
    return Awaited(name, advice, (("mbarrier", block.rank, offset),))


def _end_of(copy: Copy) -> Awaited:
    """Return the phase or group that a copy completes."""
    if copy.barrier is None:
        return Awaited("a cp.async group", COPY_WAIT)
    return _phase_of(copy.barrier.block, copy.barrier.offset, copy.phase)


class SharedRaces(Observer):
    """Hazard check that compares each access to shared memory with the shadow and the clock of its threads."""

    def __init__(self, cluster: Cluster, agents: Agents, memory: SharedMemory, reporter: Reporter) -> None:
        self._cluster, self._agents, self._memory, self._reporter = cluster, agents, memory, reporter
        self._copies = agents.is_copy(np.arange(agents.size))
        #: Maps (warp, barrier) to the last phase for which a wait has returned, the lanes that waited, and whether a
        #: lane waited twice for this phase.
        self._passes: dict[tuple[int, int], tuple[int, int, bool]] = {}
        #: Warps that have read bytes without the required wait. Later hazards in the same slots are consequences.
        self._astray: set[int] = set()
        #: Reads of unwritten bytes as (warp, program, instruction, shadow, granules, kind).
        self._unwritten: list[tuple[Warp, Program, int, Shadow, Array, str]] = []

    @property
    def is_astray(self) -> bool:
        """Whether any warp has read bytes without the required wait."""
        return bool(self._astray)

    def lacks_bytes(self, barrier: MBarrier) -> bool:
        """Return whether a phase waits only for bytes that no copy in flight will transfer."""
        memory = self._memory
        return barrier.pending == 0 and barrier.tx > 0 and not memory.is_filling(barrier) and not memory.has_peers

    def mbarrier_acquired(self, w: Warp, at: int, barrier: MBarrier, order: str) -> None:
        """Record the phase of a wait that has returned. A second wait in the same phase has the wrong parity."""
        agent, lanes = self._agents.barrier_agent(barrier), lanes_now(w)
        last, before, repeated = self._passes.get((w.agent, agent), (-1, 0, False))
        if last != barrier.phase:
            before, repeated = 0, barrier.phase == 0
        self._passes[w.agent, agent] = (barrier.phase, before | lanes, repeated or bool(before & lanes))

    # ---- reads

    def check_read(
        self, w: Warp, at: int, shadow: Shadow, indices: Array, clock: Clock, proxy: bool, strong: int = 0
    ) -> None:
        """Report a read of unwritten bytes, or of bytes whose write is not ordered before the read.

        ``proxy`` is true if the read uses the async proxy. ``strong`` is 0 for a weak read, and 1 + the scope for a
        volatile, relaxed or acquiring read. A strong read does not race with strong writes by threads in its scope.
        """
        fenced = clock.proxy_in(shadow.rank) if proxy else None
        if shadow.unordered_writer(indices, clock.order, fenced) is None:
            return
        flying = shadow.in_flight[indices]
        if np.count_nonzero(flying):
            place = int(indices[int((flying != 0).argmax())])
            copy = self._memory.flights[int(shadow.in_flight[place])].copy
            if copy.barrier is not None and copy.barrier.phase > copy.phase:
                self._reporter.out_of_step(by_bytes=True)
            text = "these bytes are read while a copy to them is in flight"
            self._early(w, at, shadow, place, indices, text, _end_of(copy), proxy, copy)
            return
        writers = shadow.writer[indices]
        if np.count_nonzero(writers < 0):
            place = int(indices[int((writers < 0).argmax())])
            if not shadow.is_barrier[place]:
                text = "these bytes are read before they are written"
                self._reporter.report_bytes("uninitialized_shared", w, at, text, shadow, place, indices)
                self._read_unwritten(w, at, shadow, indices)
        if strong:
            races = self._agents.is_copy(writers) | self._narrow_writers(w, shadow, indices, strong)
            indices, writers = indices[races], writers[races]
        late = shadow.unordered_writer(indices[writers >= 0], clock.order, fenced)
        if late is None:
            return
        agent, place, is_proxy = late
        kind = self._agents.kind_of(agent)
        if is_proxy:
            who = self._agents.who(agent)
            text = f"the async proxy reads bytes that {who} stored, without a proxy fence in between"
            self._reporter.report_bytes("missing_proxy_fence", w, at, text, shadow, place, indices, advice=PROXY_FENCE)
        elif kind in ("barrier", "cp"):
            awaited = self._awaited(agent, int(shadow.writer_clock[place]))
            text = "these bytes are read without a wait for the copy to them"
            self._early(w, at, shadow, place, indices, text, awaited, proxy)
        else:
            self._reporter.report_bytes(
                "data_race",
                w,
                at,
                f"{self._agents.who(agent)} wrote these bytes, but this read does not wait for the write",
                shadow,
                place,
                indices,
                advice=CLUSTER_SCOPE if shadow.writer_clock[place] <= clock.performed()[agent] else "",
            )

    def _awaited(self, agent: int, clock: int) -> Awaited:
        """Return the phase or group for which a read should have waited, given the agent and clock of the copy."""
        key = self._agents.key_of(agent)
        if key is None or key[0] != "barrier":
            return Awaited(f"cp.async group {clock - 1}", COPY_WAIT)
        return _phase_of(self._cluster.blocks[key[1]], key[2], clock - 1)

    def _early(
        self,
        w: Warp,
        at: int,
        shadow: Shadow,
        place: int,
        indices: Array,
        text: str,
        awaited: Awaited,
        proxy: bool,
        copy: Copy | None = None,
    ) -> None:
        """Report a read that does not wait for the copy that writes the bytes."""
        self._astray.add(w.agent)
        barriers = [self._cluster.blocks[place[1]].mbarriers.get(place[2]) for place in awaited.places]
        by_bytes = any(b is not None and (b.tx < 0 or self.lacks_bytes(b)) for b in barriers)
        self._reporter.out_of_step(by_bytes=by_bytes)
        end, advice = awaited.name, awaited.advice
        if advice is COPY_WAIT and any(i.opcode.startswith("cp.async.mbarrier") for i in self._reporter.body):
            end, advice = "on an mbarrier", _COPY_ARRIVALS
        elif advice is COPY_WAIT and proxy:
            advice = PROXY_COPY_WAIT
        if end:
            text += f"; the copy completes {end}"
        self._reporter.report_bytes(
            self._early_kind(w), w, at, text, shadow, place, indices, copy=copy, places=awaited.places, advice=advice
        )

    def _early_kind(self, w: Warp) -> str:
        """Return "wrong_parity" if a wait of the warp has returned twice in a phase, otherwise "read_before_load"."""
        repeated = any(flag for (agent, _), (_, _, flag) in self._passes.items() if agent == w.agent)
        return "wrong_parity" if repeated else "read_before_load"

    def _read_unwritten(self, w: Warp, at: int, shadow: Shadow, indices: Array) -> None:
        """Record a read of unwritten bytes, because the copy to these bytes may be issued later."""
        self._astray.add(w.agent)
        if len(self._unwritten) < _MAX_UNWRITTEN:
            self._unwritten.append((w, w.split.frame.program, at, shadow, indices, self._early_kind(w)))

    def _read_before_issue(self, shadow: Shadow, indices: Array, agent: int, awaited: Awaited) -> bool:
        """Report earlier reads by ``agent`` of bytes whose copy is issued now. Return whether any were reported."""
        has_read = False
        for w, program, at, where, read, kind in self._unwritten:
            if where is shadow and w.agent == agent % self._agents.warps and np.isin(indices, read).any():
                text = f"these bytes are read before the copy to them is issued; the copy completes {awaited.name}"
                places = [shadow.bytes_of(indices), *awaited.places]
                self._reporter.findings.add(kind, text, program, at, w, places=places, advice=awaited.advice)
                has_read = True
        return has_read

    # ---- writes

    def check_write(
        self,
        w: Warp,
        at: int,
        shadow: Shadow,
        indices: Array,
        clock: Clock,
        same: Same = never,
        copy: Copy | None = None,
        strong: int = 0,
    ) -> None:
        """Report a write that is not ordered after the last write of the bytes or after their reads.

        Parameters
        ----------
        same
            Function that returns whether the write leaves the bytes unchanged. Ordinary writes of equal values do not
            race.
        copy
            Asynchronous operation that writes, or None for an ordinary write.
        strong
            0 for a weak write, 1 + the scope for a strong write. A volatile, relaxed or releasing store does not race
            with strong accesses by threads in its scope. An asynchronous reduction does not race with reductions and
            strong accesses through the same proxy.
        """
        if np.count_nonzero(shadow.is_barrier[indices]):
            place = int(indices[int(shadow.is_barrier[indices].argmax())])
            self._reporter.report_bytes(
                "barrier_overwritten", w, at, "a live mbarrier is overwritten", shadow, place, indices
            )
        proxy = copy is not None and uses_proxy(copy)
        fenced = clock.proxy_in(shadow.rank) if proxy else None
        late = shadow.unordered_writer(indices, self._performed_copies(clock), fenced)
        if late is None or not self._races_with_writer(w, at, shadow, indices, clock, same, copy, strong):
            self._check_readers(w, at, shadow, indices, clock, copy, strong)

    def _races_with_writer(
        self,
        w: Warp,
        at: int,
        shadow: Shadow,
        indices: Array,
        clock: Clock,
        same: Same,
        copy: Copy | None,
        strong: int,
    ) -> bool:
        """Report a write that is not ordered after the last write of the bytes. Return whether it was reported."""
        is_copy, proxy = copy is not None, copy is not None and uses_proxy(copy)
        flying = shadow.in_flight[indices]
        if np.count_nonzero(flying):
            place = int(indices[int((flying != 0).argmax())])
            text = "these bytes are written while a copy to them is in flight"
            flying_copy = self._memory.flights[int(shadow.in_flight[place])].copy
            self._reporter.report_bytes(
                "write_race", w, at, text, shadow, place, indices, copy=flying_copy, is_derived=bool(self._astray)
            )
            return True
        writers = shadow.writer[indices]
        races = writers >= 0
        if strong:
            unsafe = self._agents.is_copy(writers) | proxy | self._narrow_writers(w, shadow, indices, strong)
            if is_copy:
                unsafe |= shadow.strength[indices] == 0
            races &= unsafe & ~_reduced(shadow, indices, proxy)
        if not np.count_nonzero(races):
            return False
        fenced = clock.proxy_in(shadow.rank) if proxy else None
        late = shadow.unordered_writer(indices[races], self._performed_copies(clock), fenced)
        if late is None or (self._agents.kind_of(late[0]) == "warp" and same()):
            return False
        agent, place, is_proxy = late
        who = self._agents.who(agent)
        if is_proxy:
            text = f"the async proxy overwrites bytes that {who} stored, without a proxy fence in between"
            self._reporter.report_bytes("missing_proxy_fence", w, at, text, shadow, place, indices)
            return True
        writer = self._agents.kind_of(agent)
        kind = "data_race" if writer == "warp" and not is_copy else "write_race"
        access = "copy" if is_copy else "write"
        text = f"{who} wrote these bytes, and this {access} overwrites them without waiting for the earlier write"
        advice = ""
        if writer == "barrier" and proxy and self._follows_issue(shadow, place, clock):
            kind, advice = "overwritten_while_read", LAP_WAIT
            text = (
                f"this {access} overwrites bytes that {who} wrote, before any reader is known to have waited for them"
            )
        self._reporter.report_bytes(
            kind, w, at, text, shadow, place, indices, is_derived=bool(self._astray), advice=advice
        )
        return True

    def _check_readers(
        self, w: Warp, at: int, shadow: Shadow, indices: Array, clock: Clock, copy: Copy | None, strong: int
    ) -> None:
        """Report a write that is not ordered after a read of the bytes."""
        is_copy = copy is not None
        reader = shadow.unordered_reader(indices, clock, is_copy)
        if reader is None or (strong and not is_copy and self._agents.kind_of(reader[0]) == "warp"):
            return
        agent, place, read_at = reader
        is_first = copy is not None and shadow.writer[place] < 0
        if copy is not None and is_first and self._read_before_issue(shadow, indices, agent, _end_of(copy)):
            return
        reader_kind = self._agents.kind_of(agent)
        kind = "overwritten_while_read"
        advice = _refill_advice(is_copy, reader_kind)
        if reader_kind == "bulk":
            kind, advice = "store_source_reused", ""
        elif reader_kind == "barrier":
            kind, advice = "store_source_reused", COPY_MESSAGE
        elif reader_kind == "warp" and not is_copy:
            kind, advice = "data_race", ""
        access = "copy" if is_copy else "write"
        text = f"{self._agents.who(agent)} reads these bytes, and this {access} does not wait for the read"
        astray = self._is_astray(agent, copy)
        self._reporter.report_bytes(
            kind, w, at, text, shadow, place, indices, read_at, is_derived=astray, advice=advice
        )

    def check_atomic(self, w: Warp, at: int, shadow: Shadow, indices: Array, order: str) -> None:
        """Check an atomic operation by one lane, which does not race with atomics and strong stores in its scope."""
        strength = strength_of(order)
        is_relaxed = (shadow.strength[indices] > 0) | (_reduced(shadow, indices, False) & (strength > 1))
        if not is_relaxed.all() or self._narrow_writers(w, shadow, indices, strength).any():
            clock = self._agents.known(w)
            self.check_read(w, at, shadow, indices, clock, False)
            self.check_write(w, at, shadow, indices, clock)

    def check_copy(self, copy: Copy, shadow: Shadow, indices: Array) -> None:
        """Check the write of a copy when the copy is issued."""
        agents, strong = self._agents, strength_of(copy.scope)
        parts = agents.knowers(copy.w, indices) if copy.what == "cp.async" else [(agents.known(copy.w), indices)]
        for clock, part in parts:
            self.check_write(copy.w, copy.at, shadow, part, clock, copy=copy, strong=strong)

    def _narrow_writers(self, w: Warp, shadow: Shadow, indices: Array, strength: int) -> Array:
        """Return a mask of the granules that another CTA wrote last, if the scope of either access is only a CTA."""
        if not self._memory.has_peers:
            return np.zeros(len(indices), bool)
        writers = shadow.writer[indices]
        is_foreign = (writers >= 0) & (writers % self._agents.warps // w.block.warp_count != w.block.rank)
        is_narrow = (shadow.strength[indices] == 1) | (strength == 1)
        result: Array = is_foreign & is_narrow & ~self._agents.is_copy(writers)
        return result

    def _performed_copies(self, clock: Clock) -> Array:
        """Return the clock of accesses that have been performed: ordered accesses, and completed copies."""
        if clock.far is None or clock.far.performed is None:
            return clock.order
        result: Array = np.where(self._copies, clock.performed(), clock.order)
        return result

    def _follows_issue(self, shadow: Shadow, place: int, clock: Clock) -> bool:
        """Return whether a copy is ordered after the issue of the last copy to these bytes.

        The caller has already determined that the copy is not ordered after the completion of that copy.
        """
        copies = shadow.issuers.get((int(shadow.writer[place]), int(shadow.writer_clock[place])), [])
        return all(now <= clock.order[agent] for first, last, agent, now in copies if first <= place <= last)

    def _is_astray(self, agent: int, copy: Copy | None) -> bool:
        """Return whether a reader has read too early or has waited twice for a phase of the copy's mbarrier."""
        if not self._agents.is_own(agent):
            return False
        warp = agent % self._agents.warps
        repeats = False
        if copy is not None and copy.barrier is not None:
            repeats = self._passes.get((warp, self._agents.barrier_agent(copy.barrier)), (0, 0, False))[2]
        return repeats or warp in self._astray


def _reduced(shadow: Shadow, indices: Array, proxy: bool) -> Array:
    """Return a mask of the granules that a reduction through this proxy, a relaxed operation, wrote last."""
    result: Array = (shadow.strength[indices] == REDUCED) & (shadow.is_async[indices] == proxy)
    return result
