"""Barriers and fences in the hazard layer: what each of them publishes, and to which agents.

Source: PTX ISA, "Memory Consistency Model" (causality order), "mbarrier", "membar, fence", "barrier.cluster".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.hazards.agents import lanes_now
from cudatma.emulator.hazards.checks import Checks, phase_name
from cudatma.emulator.hazards.clocks import INITS, Clock, joined
from cudatma.emulator.hazards.findings import Findings
from cudatma.emulator.hazards.global_watch import GlobalWatch
from cudatma.emulator.hazards.lifetimes import Lifetimes
from cudatma.emulator.hazards.memory_order import acquires, releases, scope_of
from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.machine.state import Cluster, NamedBarrier, Warp
from cudatma.emulator.ptx.types import SCOPES

_CTA, _CLUSTER = SCOPES["cta"], SCOPES["cluster"]


@dataclass(slots=True)
class Init:
    """An mbarrier.init: its place in the order of things, and which threads of the warp did it.

    barrier: held, so that no other one gets its id. agent, clock: order. own_agent, own_clock: the same for these
    threads' inits alone, whose entry in ``Clock.proxy`` says that a fence of theirs, or one ordered after them, covers
    it. epoch: the warp's, when it last met.
    """

    barrier: MBarrier
    agent: int
    clock: int
    at: int
    own_agent: int
    own_clock: int
    lanes: int
    epoch: int
    is_fenced: bool = False


class Released:
    """Clocks of what arrivals at an mbarrier have released, in all phases so far.

    near: by threads of its own CTA. remote: by threads of other CTAs, None before the first. The ``ended`` clocks are
    copies from the end of the last phase: waits acquire them.
    """

    __slots__ = ("near", "near_ended", "remote", "remote_ended")

    def __init__(self, size: int) -> None:
        self.near, self.near_ended = Clock(size), Clock(size)
        self.remote: Clock | None = None
        self.remote_ended: Clock | None = None


class BarrierEvents(Checks):
    """Clocks that travel through bar, barrier.cluster and mbarrier, and what fences add to them."""

    globals: GlobalWatch

    def __init__(self, launch: Launch, cluster: Cluster, findings: Findings) -> None:
        super().__init__(launch, cluster, findings)
        self._named: dict[int, Clock] = {}
        self._cluster_pending, self._cluster_done = Clock(self.size), Clock(self.size)
        self._barriers: dict[int, Released] = {}
        self._inits: dict[int, Init] = {}
        self.lifetimes = Lifetimes(self, findings)
        #: Of each warp, what its threads have initialised and not fenced yet.
        self._unfenced: dict[int, list[Init]] = {}

    # ---- barriers of a CTA and cluster

    def barrier_arrive(self, w: Warp, barrier: NamedBarrier) -> None:
        known = self._named.get(id(barrier))
        if known is None:
            known = self._named[id(barrier)] = Clock(self.size)
        known.join(self.published(w, False))

    def barrier_complete(self, barrier: NamedBarrier, warps: list[Warp]) -> None:
        known = self._named.pop(id(barrier), None)
        if known is not None:
            for warp in warps:
                self.clocks[warp.agent].join(known)

    def cluster_arrive(self, w: Warp, release: bool) -> None:
        """barrier.cluster.arrive; a relaxed one publishes what a fence of cluster scope before it covers."""
        if release:
            self._cluster_pending.join(self.published(w, False))
            return
        far = self.told(w).far
        for scope, clock in far.fenced.items() if far is not None else ():
            if scope >= _CLUSTER:
                self._cluster_pending.join(clock)
            elif scope == INITS:
                fenced = self._cluster_pending.beyond().fenced
                fenced[INITS] = joined(fenced[INITS], clock) if INITS in fenced else clock

    def cluster_complete(self) -> None:
        self._cluster_done = self._cluster_pending.copy()

    def cluster_acquire(self, w: Warp) -> None:
        for clock in self.learners(w):
            clock.join(self._cluster_done)
        self.acquired(w)

    # ---- mbarriers

    def _released(self, barrier: MBarrier) -> Released:
        known = self._barriers.get(id(barrier))
        if known is None:
            known = self._barriers[id(barrier)] = Released(self.size)
        return known

    def barrier_init(self, w: Warp, at: int, barrier: MBarrier, old: MBarrier | None, lanes: int) -> None:
        """lanes: the threads of the warp that initialise this barrier, as bits."""
        if old is not None:
            message = f"mbarrier.init of a live barrier: {old.describe()}"
            self.report("barrier_reinitialised", w, at, message, places=[old.place])
        shadow = self.shadows[barrier.block.rank]
        indices = shadow.granules(np.array([barrier.offset]), 8)
        shadow.is_barrier[indices] = False
        self._check_write(w, at, shadow, indices, self.known(w), False)
        shadow.is_barrier[indices] = True
        agent, clock = self.stamp(w, 1)
        shadow.written(indices, agent, clock, at, False)
        own = self.agent(("init", w.agent, lanes), "init")
        clocks = self.every_clock(w)
        now = int(clocks[0].order[own]) + 1
        for known in clocks:
            known.order[own] = now
        made = Init(barrier, agent, clock, at, own, now, lanes, self.epoch(w))
        self._inits[id(barrier)] = made
        self._unfenced.setdefault(w.agent, []).append(made)

    def barrier_inval(self, w: Warp, at: int, barrier: MBarrier) -> None:
        """Check that all uses of the barrier are known to be over; afterwards it is bytes like any other."""
        for use in self.lifetimes.invalidated(barrier, self.known(w)):
            message = f"mbarrier.inval of {barrier.name}, and nothing orders it after its use by {self.who(use.agent)}"
            self.report("barrier_uninitialised", w, at, message, places=[barrier.place])
        self.check_loads(barrier, f"{barrier.name} is invalidated", w, at)
        shadow = self.shadows[barrier.block.rank]
        indices = shadow.granules(np.array([barrier.offset]), 8)
        shadow.is_barrier[indices] = False
        shadow.written(indices, *self.stamp(w, 1), at, False)

    def barrier_used(self, w: Warp, at: int, barrier: MBarrier, what: str) -> None:
        """Check that a use of a barrier is ordered after its init, and note it for its end."""
        made = self._inits.get(id(barrier))
        known = self.known(w)
        self.lifetimes.used(w, at, barrier, what, known)
        if made is not None and made.clock > known.order[made.agent]:
            inits = known.far.fenced.get(INITS) if known.far is not None else None
            if inits is not None and made.clock <= inits.order[made.agent]:
                return
            self.report(
                "missing_init_sync",
                w,
                at,
                f"{what} on {barrier.name}, and nothing orders it after mbarrier.init by {self.who(made.agent)}",
                places=[barrier.place],
            )

    def _check_init_fence(self, w: Warp, at: int, barrier: MBarrier, clock: Clock) -> None:
        made = self._inits.get(id(barrier))
        if made is None or made.is_fenced or made.own_clock <= clock.proxy_in(barrier.block.rank)[made.own_agent]:
            return
        self.findings.add(
            "missing_init_fence",
            f"a copy completes on {barrier.name}, whose mbarrier.init here was not fenced for the asynchronous proxy",
            self.launch,
            self.launch.program,
            made.at,
            w,
            places=[barrier.place],
        )

    def arrivals_over(self, w: Warp, program: Program, at: int, barrier: MBarrier, number: int, expects: bool) -> None:
        """Report more arrivals by one instruction than are pending. program: the instruction's; expects: with bytes.

        The overflow is the root cause if the instruction exceeds the barrier's count, or if nothing was out of order
        before. A producer that does not wait for its slot arrives with the next phase's bytes before it copies.
        """
        is_derived = number <= barrier.count and (expects or self.bytes_follow or bool(self._astray))
        self.out_of_step(by_bytes=self.lacks_bytes(barrier))
        self.findings.add(
            "arrival_overflow",
            f"too many arrivals ({number} by one instruction): {barrier.describe()}",
            self.launch,
            program,
            at,
            w,
            places=[barrier.place],
            is_derived=is_derived,
        )

    def barrier_release(self, w: Warp, barrier: MBarrier, order: str, alone: bool) -> None:
        """Record what an arrival releases.

        A release reaches the threads in its scope. A fence before the arrival may release in its place, at the scope of
        the fence. In another CTA, a release of CTA scope makes known only that accesses have been performed.
        """
        released = self._released(barrier)
        is_near = barrier.block is w.block
        if is_near:
            target = released.near
        else:
            if released.remote is None:
                released.remote = Clock(self.size)
            target = released.remote
        if releases(order) and (is_near or scope_of(order) >= _CLUSTER):
            known = self.published(w, alone)
            if not is_near and known.far is not None:
                known.far.seen = {}
            target.join(known)
            return
        told = self.told(w)
        for scope, fenced in told.far.fenced.items() if told.far is not None else ():
            if scope >= (_CTA if is_near else _CLUSTER):
                target.join(fenced)
        if releases(order):
            self._perform(target, self.published(w, alone))

    def _perform(self, clock: Clock, known: Clock) -> None:
        """Note that what another clock knows has been performed."""
        clock.beyond().performed = np.maximum(clock.performed(), known.performed())

    def phase_ended(self, barrier: MBarrier) -> None:
        released = self._released(barrier)
        released.near.order[self.barrier_agent(barrier)] = barrier.phase
        released.near_ended = released.near.copy()
        if released.remote is not None:
            released.remote_ended = released.remote.copy()

    def barrier_acquire(self, w: Warp, barrier: MBarrier, order: str) -> None:
        """Make known what the arrivals of the phases that have ended released.

        Bytes that copies have completed are visible at any scope. A wait of cluster scope, or a fence of this scope
        after the wait, acquires what threads of other CTAs have released.
        """
        barrier.awaited = barrier.phase
        agent = self.barrier_agent(barrier)
        lanes = lanes_now(w)
        last, before, repeated = self._passes.get((w.agent, agent), (-1, 0, False))
        if last != barrier.phase:
            before, repeated = 0, barrier.phase == 0
        self._passes[w.agent, agent] = (barrier.phase, before | lanes, repeated or bool(before & lanes))
        released = self._released(barrier)
        remote, number = released.remote_ended, self.cluster.number
        for clock in self.learners(w):
            if acquires(order):
                clock.join(released.near_ended)
            else:
                clock.note(_CTA, number, released.near_ended, number)
            if remote is None:
                continue
            if acquires(order) and scope_of(order) >= _CLUSTER:
                clock.join(remote)
            else:
                clock.note(_CLUSTER, number, remote, number)
                if acquires(order):
                    self._perform(clock, remote)
        if acquires(order):
            self.acquired(w)

    def bytes_over(self, barrier: MBarrier) -> None:
        """More or fewer bytes came in a phase than expected, and no thread is left that could change it."""
        made = self._inits.get(id(barrier))
        asked = barrier.expected_by or barrier.expected_before
        owner, at = asked or (barrier.initialised_by, made.at if made is not None else -1)
        if owner is not None:
            self.findings.add(
                "byte_count",
                f"{barrier.missing_bytes()} at {barrier.describe()}",
                self.launch,
                self.launch.program,
                at,
                owner,
                places=[barrier.place],
                is_derived=self.bytes_follow,
            )

    def check_loads(self, barrier: MBarrier, what: str, w: Warp | None = None, at: int = -1) -> None:
        """The barrier is used no more: whether the copies that complete on it have landed is not known, unless
        some warp has waited for the last one. w, at: the warp and instruction that end it, if an instruction does.

        Where a wait on this barrier is known to be missing or to pass too early, this is a consequence and not
        reported.
        """
        if barrier.load_from is None or (not barrier.loads and barrier.loaded <= barrier.awaited):
            return
        if self.findings.has(barrier.place, "read_before_load", "wrong_parity", "byte_count"):
            return
        warp, program, issued = barrier.load_from
        phase = phase_name(barrier.block, barrier.offset, (barrier.phase if barrier.loads else barrier.loaded - 1))
        line = program.instruction(issued).line
        message = f"{what} while a copy may be in flight: nobody has waited for {phase}, issued at PTX line {line}"
        if w is not None:
            self.report("exit_with_pending_load", w, at, message)
        else:
            self.findings.add("exit_with_pending_load", message, self.launch, program, issued, warp)

    def check_bytes(self) -> None:
        """No warp can go on: phases that wait for bytes which no copy under way will bring."""
        coming = {id(operation.barrier) for operation in self._operations.values()}
        for block in self.cluster.blocks:
            for barrier in block.mbarriers.values():
                if barrier.pending == 0 and barrier.tx > 0 and id(barrier) not in coming:
                    self.bytes_over(barrier)

    # ---- fences

    def fence(self, w: Warp, at: int, kind: str) -> None:
        """membar and fence; kind: the opcode after its root."""
        if kind.startswith("proxy.async"):
            self._fence_proxy(w, kind)
        elif kind.startswith("mbarrier_init"):
            self._fence_inits(w)
            for clock in self.learners(w):
                clock.beyond().fenced[INITS] = clock.bare()
            self.advance(w)
        elif not kind.startswith("proxy"):
            self.globals.order.fence(w, kind)

    def _fence_proxy(self, w: Warp, kind: str) -> None:
        """fence.proxy.async of all memory, of global memory, or of the shared memory of this CTA or of the cluster."""
        is_shared = not kind.endswith("global")
        is_own = "shared::cta" in kind and self.has_remote_stores
        uncovered = self._fence_inits(w, self.epoch(w)) if is_shared else []
        for clock in self.learners(w):
            if is_shared:
                order = clock.order.copy()
                order[uncovered] = clock.proxy[uncovered]
                if is_own:
                    clock.beyond().fence_proxy_of(w.block.rank, order)
                else:
                    np.maximum(clock.proxy, order, out=clock.proxy)
            if "shared" not in kind:
                clock.fence_proxy_global()
        self.advance(w)

    def _fence_inits(self, w: Warp, epoch: int = -1) -> list[int]:
        """A fence covers what its own threads have initialised, and what was before the warp last met, at ``epoch``.

        Returns the agents of inits by threads of the warp that it does not cover.
        """
        lanes = lanes_now(w)
        left = []
        for made in self._unfenced.pop(w.agent, []):
            made.is_fenced = bool(made.lanes & lanes) or made.epoch < epoch
            if not made.is_fenced:
                left.append(made)
        if left:
            self._unfenced[w.agent] = left
        return [made.own_agent for made in left]
