"""What breaks happens-before: the checks that every access to shared memory goes through.

Source: PTX ISA, "Memory Consistency Model": causality order, proxies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.hazards.agents import Agents
from cudatma.emulator.hazards.clocks import Clock
from cudatma.emulator.hazards.findings import Findings
from cudatma.emulator.hazards.lane_races import LaneRaces
from cudatma.emulator.hazards.report import Place
from cudatma.emulator.hazards.shadow import REDUCED, AsyncWrite, Awaited, Shadow, narrowest
from cudatma.emulator.machine.memory import SHARED_START
from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.machine.state import Block, Cluster, Warp
from cudatma.emulator.ptx.types import Array

#: Kinds of accesses out of order, after which the bytes of an mbarrier need not add up.
_OUT_OF_ORDER = {"overwritten_while_read", "write_race", "store_source_reused", "data_race", "global_race", "lane_race"}
#: Reads of unwritten bytes that are remembered in case a copy into them is issued later.
_MOST_UNWRITTEN = 256
#: The calls that are missing where a copy was not waited for, or a slot is refilled too early.
COPY_WAIT = "cp.async.wait_group by the threads that copied, then a barrier of those that read (__syncthreads)"
#: The same where the asynchronous proxy reads: a wgmma, or a bulk store.
PROXY_COPY_WAIT = (
    "cp.async.wait_group, then fence.proxy.async, by the threads that copied, then a barrier of those that read "
    "(__syncthreads)"
)
#: The same where the copies end on an mbarrier.
_COPY_ARRIVALS = (
    "a wait for the mbarrier of cp.async.mbarrier.arrive by those that read; mbarrier.init counts every thread that "
    "arrives there with .noinc"
)
PROXY_FENCE = "fence.proxy.async by the threads that stored, then a barrier before the wgmma or the copy"
_ARRIVALS = (
    "before the copy a wait for the arrivals of all who read the slot (mbarrier.try_wait.parity in a loop on its empty "
    "mbarrier; a pipeline's producer_acquire)"
)
_AFTER_WGMMA = "after wgmma.wait_group in the warps that read"
#: The same where a slot is refilled and no thread is known to have waited for its contents.
LAP_WAIT = f"{_ARRIVALS}, or a reader's wait for the copy before (consumer_wait) ahead of its arrival"
#: The same where the source of a copy between CTAs is written.
COPY_MESSAGE = (
    "before the write, have a thread of the destination CTA wait for the copy's mbarrier and arrive on one of this "
    "CTA, and wait for that; or use barrier.cluster"
)
#: The same where the arrive or the wait between two CTAs has CTA scope.
CLUSTER_SCOPE = (
    "cluster scope at both ends of the hand-over: mbarrier.arrive.release.cluster by the writer and "
    "mbarrier.try_wait.acquire.cluster by the reader (without a scope they have that of one CTA)"
)


def _refill_advice(is_copy: bool, reader: str) -> str:
    """Name the synchronization that belongs between a read and the write that refills the bytes."""
    if is_copy and reader == "wgmma":
        return f"{_ARRIVALS}, which arrive {_AFTER_WGMMA}; or __syncthreads {_AFTER_WGMMA} and before the copy"
    if is_copy:
        return f"{_ARRIVALS}, or __syncthreads between the last read and the copy"
    return (
        f"before the store a barrier of the warps that read and those that store, {_AFTER_WGMMA}: __syncthreads, "
        "bar.sync, or an mbarrier on which the readers arrive"
    )


def phase_name(block: Block, offset: int, phase: int) -> str:
    """A barrier's phase, for messages."""
    address = offset + SHARED_START
    return f"phase {phase} (parity {phase & 1}) of the mbarrier at {address:#x} of block {block.index}"


def phase_of(block: Block, offset: int, phase: int) -> Awaited:
    """A barrier's phase, and the call that waits for it."""
    name = phase_name(block, offset, phase)
    call = "mbarrier.try_wait.parity in a loop (mbarrier_wait_parity; a pipeline's consumer_wait)"
    advice = f"before the read a wait for {name}: {call}"
    return Awaited(name, advice, (("mbarrier", block.rank, offset),))


class Checks(Agents):
    """The shadows of one cluster's shared memories, and the rules for reads and writes."""

    def __init__(self, launch: Launch, cluster: Cluster, findings: Findings) -> None:
        super().__init__(launch, cluster)
        self.findings, self._body = findings, launch.program.function.body
        self.lanes = LaneRaces(self, cluster.number, self.tell)
        granule = launch.setup.extra.get("granule")
        if granule is None:
            names = launch.image.reachable(launch.program.function.name)
            granule = narrowest([launch.image.program(n) for n in names if launch.image.module.functions[n].is_defined])
            launch.setup.extra["granule"] = granule
        self.shadows = [Shadow(block.shared.size, granule) for block in cluster.blocks]
        if launch.reserved_bytes:
            for shadow in self.shadows:
                shadow.writer[launch.reserved_start // granule :] = 0  # the system's part is initialised
        self._copies = self.is_copy(np.arange(self.size))
        self.has_peers = len(cluster.blocks) > 1
        #: Whether a thread has stored into another CTA's shared memory: fences of shared::cta do not cover that.
        self.has_remote_stores = False
        self._operations: dict[int, AsyncWrite] = {}
        self._count = 0
        #: (warp, barrier) -> the last phase that its wait passed, by which lanes, whether they knew it already.
        self._passes: dict[tuple[int, int], tuple[int, int, bool]] = {}
        #: Warps that have read what they had to wait for: what goes wrong with their slots afterwards follows from it.
        self._astray: set[int] = set()
        #: Whether an access out of order brought threads out of step first, or (False) bytes that do not add up.
        self._order_broke: bool | None = None
        #: (warp, program, instruction, shadow, granules, kind) of reads of unwritten bytes.
        self._unwritten: list[tuple[Warp, Program, int, Shadow, Array, str]] = []

    def out_of_step(self, *, by_bytes: bool) -> None:
        """Note what brings threads out of step: bytes of an mbarrier that do not add up, or an access out of order."""
        if self._order_broke is None:
            self._order_broke = not by_bytes

    def lacks_bytes(self, barrier: MBarrier) -> bool:
        """Return whether a phase waits only for bytes that no copy in flight will deliver."""
        return barrier.pending == 0 and barrier.tx > 0 and not barrier.loads and not self.has_peers

    @property
    def bytes_follow(self) -> bool:
        """Whether bytes that do not add up follow from an access out of order."""
        return bool(self._order_broke)

    def report(self, kind: str, w: Warp, at: int, message: str, **more: Any) -> bool:
        """Record a hazard at an instruction of the running function. more: as of Findings.add."""
        if kind in _OUT_OF_ORDER and not more.get("is_derived"):
            self.out_of_step(by_bytes=False)
        self.findings.add(kind, message, self.launch, w.split.frame.program, at, w, **more)
        return True

    def written_at(self, origin: int) -> str:
        """The position of the last write, for messages."""
        return self._placed("last written at", origin)

    def read_at(self, origin: int) -> str:
        """The position and the opcode of a read, for messages."""
        place = self._placed("read at", origin)
        return f"{place} by `{self._body[origin].opcode}`" if place else ""

    def _placed(self, what: str, origin: int) -> str:
        """The position of an instruction of the kernel; nothing for one of a called function."""
        if not 0 <= origin < len(self._body):
            return ""
        instruction = self._body[origin]
        source = self.launch.program.module.source_of(instruction)
        return f"; {what} PTX line {instruction.line}" + (f" ({source})" if source else "")

    def tell(
        self,
        kind: str,
        w: Warp,
        at: int,
        text: str,
        shadow: Shadow,
        place: int,
        indices: Array,
        read_at: int = -1,
        **more: Any,
    ) -> None:
        """Record a hazard that concerns shared bytes, with their last writer. indices: all that is accessed.

        read_at: the read that a write is not ordered after.
        """
        address = place * shadow.granule + SHARED_START
        others = self.read_at(read_at) + self.written_at(int(shadow.writer_at[place]))
        more["places"] = [self._bytes(shadow, indices), *more.get("places", ())]
        self.report(kind, w, at, f"{text} (shared address {address:#x}{others})", **more)

    def _bytes(self, shadow: Shadow, indices: Array) -> Place:
        return "bytes", self.shadows.index(shadow), int(indices.min()), int(indices.max())

    def _check_read(
        self, w: Warp, at: int, shadow: Shadow, indices: Array, clock: Clock, proxy: bool, strong: int = 0
    ) -> None:
        """Report a read of bytes whose writer is not ordered before it.

        strong: 1 + the scope of a volatile, relaxed or acquiring read, which does not race with threads in its scope.
        """
        flying = shadow.in_flight[indices]
        if np.count_nonzero(flying):
            place = int(indices[int((flying != 0).argmax())])
            operation = self._operations.get(int(shadow.in_flight[place]))
            awaited = operation.awaited if operation is not None else Awaited()
            barrier = operation.barrier if operation is not None else None
            if operation is not None and barrier is not None and barrier.phase > operation.phase:
                self.out_of_step(by_bytes=True)
            self._early(w, at, shadow, place, indices, "is still under way", awaited, proxy)
            return
        writers = shadow.writer[indices]
        if np.count_nonzero(writers < 0):
            place = int(indices[int((writers < 0).argmax())])
            if not shadow.is_barrier[place]:
                text = "bytes are read that nobody has written"
                self.tell("uninitialised_shared", w, at, text, shadow, place, indices)
                self._read_unwritten(w, at, shadow, indices)
        if strong:
            indices = indices[self.is_copy(writers) | self.narrow_writers(w, shadow, indices, strong)]
        late = shadow.unordered_writer(indices, clock.order, self._fenced(shadow, clock) if proxy else None)
        if late is None:
            return
        agent, place, is_proxy = late
        kind = self.kind_of(agent)
        if is_proxy:
            text = f"the asynchronous proxy reads what {self.who(agent)} stored with no proxy fence since"
            self.tell("missing_proxy_fence", w, at, text, shadow, place, indices, advice=PROXY_FENCE)
        elif kind in ("barrier", "cp"):
            awaited = self._awaited(agent, int(shadow.writer_clock[place]))
            self._early(w, at, shadow, place, indices, "was not waited for", awaited, proxy)
        else:
            self.tell(
                "data_race",
                w,
                at,
                f"{self.who(agent)} wrote these bytes and nothing orders this read after it",
                shadow,
                place,
                indices,
                advice=CLUSTER_SCOPE if shadow.writer_clock[place] <= clock.performed()[agent] else "",
            )

    def _awaited(self, agent: int, clock: int) -> Awaited:
        """What a read of a landed copy had to wait for."""
        key = next((key for key, number in self._agents.items() if number == agent), None)
        if key is None or key[0] != "barrier":
            return Awaited(f"cp.async group {clock - 1}", COPY_WAIT)
        return phase_of(self.cluster.blocks[key[1]], key[2], clock - 1)

    def _early(
        self, w: Warp, at: int, shadow: Shadow, place: int, indices: Array, state: str, awaited: Awaited, proxy: bool
    ) -> None:
        """A read of bytes whose copy has not been waited for: which of the two usual mistakes it was."""
        self._astray.add(w.agent)
        barriers = [self.cluster.blocks[place[1]].mbarriers.get(place[2]) for place in awaited.places]
        self.out_of_step(by_bytes=any(b is not None and (b.tx < 0 or self.lacks_bytes(b)) for b in barriers))
        ends = f": it ends {awaited.name}" if awaited.name else ""
        text = f"bytes are read whose copy {state}{ends}"
        advice = awaited.advice
        if advice is COPY_WAIT and any(i.opcode.startswith("cp.async.mbarrier") for i in self._body):
            text, advice = f"bytes are read whose copy {state}: it ends on an mbarrier", _COPY_ARRIVALS
        elif advice is COPY_WAIT and proxy:
            advice = PROXY_COPY_WAIT
        self.tell(self._early_kind(w), w, at, text, shadow, place, indices, places=awaited.places, advice=advice)

    def _early_kind(self, w: Warp) -> str:
        repeated = any(flag for (agent, _), (_, _, flag) in self._passes.items() if agent == w.agent)
        return "wrong_parity" if repeated else "read_before_load"

    def _read_unwritten(self, w: Warp, at: int, shadow: Shadow, indices: Array) -> None:
        """Note a read of unwritten bytes: perhaps the copy that fills them is yet to be issued."""
        self._astray.add(w.agent)
        if len(self._unwritten) < _MOST_UNWRITTEN:
            self._unwritten.append((w, w.split.frame.program, at, shadow, indices, self._early_kind(w)))

    def _read_before_issue(self, shadow: Shadow, indices: Array, agent: int, awaited: Awaited) -> bool:
        """A copy is issued into bytes that an agent has read before: True where it read them when they were empty."""
        found = False
        for w, program, at, where, read, kind in self._unwritten:
            if where is shadow and w.agent == agent % self.warps and np.isin(indices, read).any():
                text = f"bytes are read before the copy that fills them is issued: it ends {awaited.name}"
                places = [self._bytes(shadow, indices), *awaited.places]
                self.findings.add(kind, text, self.launch, program, at, w, places=places, advice=awaited.advice)
                found = True
        return found

    def _check_write(
        self,
        w: Warp,
        at: int,
        shadow: Shadow,
        indices: Array,
        clock: Clock,
        proxy: bool,
        same: Callable[[], bool] | None = None,
        is_copy: bool = False,
        strong: int = 0,
        awaited: Awaited | None = None,
    ) -> None:
        """Report a write that is not ordered after the last writer of the bytes, or after their readers.

        same: whether the bytes are what they are to become; plain writers of one value do not race. proxy: through the
        asynchronous proxy. is_copy: an asynchronous operation. strong: 1 + the scope of a volatile, relaxed or
        releasing store, which does not race with threads in its scope, or of an asynchronous reduction, which does not
        race with reductions and strong accesses through its proxy. awaited: what a copy ends.
        """
        if np.count_nonzero(shadow.is_barrier[indices]):
            place = int(indices[int(shadow.is_barrier[indices].argmax())])
            self.tell("barrier_overwritten", w, at, "a live mbarrier is overwritten", shadow, place, indices)
        flying = shadow.in_flight[indices]
        if np.count_nonzero(flying):
            place = int(indices[int((flying != 0).argmax())])
            text = "bytes are written while a copy into them is under way"
            self.tell("write_race", w, at, text, shadow, place, indices, is_derived=bool(self._astray))
            return
        seen = indices
        if strong:
            races = self.is_copy(shadow.writer[indices]) | self.narrow_writers(w, shadow, indices, strong) | proxy
            if is_copy:
                races |= shadow.strength[indices] == 0
            seen = indices[races & ~self.reduced(shadow, indices, proxy)]
        fenced = self._fenced(shadow, clock) if proxy else None
        late = shadow.unordered_writer(seen, self._performed_copies(clock), fenced)
        if late is not None and self.kind_of(late[0]) == "warp" and same is not None and same():
            late = None
        if late is not None:
            agent, place, is_proxy = late
            if is_proxy:
                self.tell(
                    "missing_proxy_fence",
                    w,
                    at,
                    f"the asynchronous proxy overwrites what {self.who(agent)} stored with no proxy fence since",
                    shadow,
                    place,
                    indices,
                )
            else:
                writer = self.kind_of(agent)
                kind = "data_race" if writer == "warp" and not (proxy or is_copy) else "write_race"
                text = f"{self.who(agent)} wrote these bytes and nothing orders this write after it"
                advice = ""
                if writer == "barrier" and proxy and self._follows_issue(shadow, place, clock):
                    kind, advice = "overwritten_while_read", LAP_WAIT
                    text += ": the slot is refilled though nobody is known to have read it"
                self.tell(kind, w, at, text, shadow, place, indices, is_derived=bool(self._astray), advice=advice)
            return
        reader = shadow.unordered_reader(indices, clock, proxy or is_copy)
        if reader is not None and (is_copy or not strong or self.kind_of(reader[0]) != "warp"):
            agent, place, read_at = reader
            if (
                awaited is not None
                and shadow.writer[place] < 0
                and self._read_before_issue(shadow, indices, agent, awaited)
            ):
                return
            reader_kind = self.kind_of(agent)
            kind = "overwritten_while_read"
            advice = _refill_advice(is_copy or proxy, reader_kind)
            if reader_kind == "bulk":
                kind, advice = "store_source_reused", ""
            elif reader_kind == "barrier":
                kind, advice = "store_source_reused", COPY_MESSAGE
            elif reader_kind == "warp" and not (proxy or is_copy):
                kind, advice = "data_race", ""
            text = f"{self.who(agent)} reads these bytes and nothing orders this write after it"
            astray = self._is_astray(agent, awaited)
            self.tell(kind, w, at, text, shadow, place, indices, read_at, is_derived=astray, advice=advice)

    def reduced(self, shadow: Shadow, indices: Array, proxy: bool) -> Array:
        """Return granules last written by a reduction through this proxy: reductions are relaxed operations."""
        result: Array = (shadow.strength[indices] == REDUCED) & (shadow.is_async[indices] == proxy)
        return result

    def narrow_writers(self, w: Warp, shadow: Shadow, indices: Array, strength: int) -> Array:
        """Return granules last written by another CTA, where either access has only CTA scope."""
        if not self.has_peers:
            return np.zeros(len(indices), bool)
        writers = shadow.writer[indices]
        is_foreign = (writers >= 0) & (writers % self.warps // w.block.warp_count != w.block.rank)
        is_narrow = (shadow.strength[indices] == 1) | (strength == 1)
        result: Array = is_foreign & is_narrow & ~self.is_copy(writers)
        return result

    def _performed_copies(self, clock: Clock) -> Array:
        """Return what is ordered before now, and of copies what has been waited for."""
        if clock.far is None or clock.far.performed is None:
            return clock.order
        result: Array = np.where(self._copies, clock.performed(), clock.order)
        return result

    def _fenced(self, shadow: Shadow, clock: Clock) -> Array:
        """Return what is visible to the asynchronous proxy in a CTA's shared memory."""
        return clock.proxy if clock.far is None else clock.proxy_in(self.shadows.index(shadow))

    def _follows_issue(self, shadow: Shadow, place: int, clock: Clock) -> bool:
        """Whether a copy is ordered after the issue of the one that wrote these bytes, though not after its landing."""
        copies = shadow.issuers.get((int(shadow.writer[place]), int(shadow.writer_clock[place])), [])
        return all(now <= clock.order[agent] for first, last, agent, now in copies if first <= place <= last)

    def _is_astray(self, agent: int, awaited: Awaited | None) -> bool:
        """Whether a reader has read too early before, or waits for phases of the copy's mbarrier that it knows."""
        if not self.is_own(agent):
            return False
        warp = agent % self.warps
        barriers = (
            [self._agents.get(("barrier", *place[1:])) for place in awaited.places] if awaited is not None else []
        )
        repeats = any(self._passes.get((warp, b), (0, 0, False))[2] for b in barriers if b is not None)
        return repeats or warp in self._astray
