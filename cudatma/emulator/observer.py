"""The hazard layer: told of every access, fence and barrier of a cluster, it keeps happens-before and reports what
breaks it.

Source: PTX ISA, "Memory Consistency Model" (causality order, proxies), "mbarrier", "Async proxy", "wgmma.fence".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudatma.emulator.findings import Findings, report_deadlock
from cudatma.emulator.groups import Group, Queue
from cudatma.emulator.machine import Warp
from cudatma.emulator.mbarrier import MBarrier
from cudatma.emulator.memory import RANK_SHIFT, SHARED_START
from cudatma.emulator.register_watch import RegisterWatch
from cudatma.emulator.shadow import Clock, Shadow, narrowest
from cudatma.emulator.types import Array
from cudatma.layout import Swizzle, required_alignment

if TYPE_CHECKING:
    from cudatma.emulator.cluster import Block, Cluster, NamedBarrier
    from cudatma.emulator.launch import Launch

_SPARE_AGENTS = 512
__all__ = ["Findings", "Observer", "report_deadlock"]


class AsyncWrite:
    """A copy into shared memory that is under way."""

    __slots__ = ("at", "indices", "number", "shadow", "warp", "what")

    def __init__(self, number: int, w: Warp, at: int, shadow: Shadow, indices: Array, what: str) -> None:
        self.number, self.warp, self.at, self.shadow, self.indices, self.what = number, w, at, shadow, indices, what


class Observer:
    """One cluster's hazard layer. clocks: of its warps, by agent."""

    def __init__(self, launch: Launch, cluster: Cluster, findings: Findings) -> None:
        self.launch, self.cluster, self.findings = launch, cluster, findings
        blocks = len(cluster.blocks)
        self.warps = blocks * (-(-launch.threads // 32))
        self.size = 3 * self.warps + launch.threads * blocks + _SPARE_AGENTS
        self.clocks = [Clock(self.size) for _ in range(self.warps)]
        for agent, clock in enumerate(self.clocks):
            clock.order[agent] = 1
        granule = launch.setup.extra.get("granule")
        if granule is None:
            names = launch.image._reachable(launch.program.function.name)
            granule = narrowest([launch.image.program(n) for n in names if launch.image.module.functions[n].is_defined])
            launch.setup.extra["granule"] = granule
        self.shadows = [Shadow(block.shared.size, granule) for block in cluster.blocks]
        self._agents: dict[Any, int] = {}
        self._agent_names: dict[int, str] = {}
        self._named: dict[int, Clock] = {}
        self._cluster_pending, self._cluster_done = Clock(self.size), Clock(self.size)
        self._operations: dict[int, AsyncWrite] = {}
        self._count = 0
        self._barriers: dict[int, tuple[Clock, Clock]] = {}
        self._inits: dict[int, list[Any]] = {}
        self._passes: dict[tuple[int, int], tuple[int, bool]] = {}
        self._edited_maps: set[int] = set()
        self._init_fenced: dict[int, int] = {}
        self.registers = RegisterWatch(self)

    # ---- agents

    def agent(self, key: Any, name: str) -> int:
        """The number of an agent that is no warp; made when it is first asked for."""
        found = self._agents.get(key)
        if found is None:
            found = 3 * self.warps + len(self._agents) % (self.size - 3 * self.warps)
            self._agents[key] = found
            self._agent_names[found] = name
        return found

    def barrier_agent(self, barrier: MBarrier) -> int:
        return self.agent(("barrier", barrier.block.rank, barrier.offset), "barrier")

    def wgmma_agent(self, w: Warp) -> int:
        return self.warps + w.agent

    def cp_agent(self, w: Warp) -> int:
        return 2 * self.warps + w.agent

    def kind_of(self, agent: int) -> str:
        """ "warp", "wgmma", "cp", "barrier" or "bulk"."""
        if agent < 3 * self.warps:
            return ("warp", "wgmma", "cp")[agent // self.warps]
        return self._agent_names[agent]

    def _who(self, agent: int) -> str:
        kind = self.kind_of(agent)
        if kind == "barrier":
            return "an asynchronous copy"
        if kind == "bulk":
            return "a bulk store"
        per = self.warps // len(self.cluster.blocks)
        number = agent % self.warps
        text = f"warp {number % per}" + (f" of block rank {number // per}" if len(self.cluster.blocks) > 1 else "")
        return {"warp": text, "wgmma": f"a wgmma of {text}", "cp": f"a cp.async of {text}"}[kind]

    def report(self, kind: str, w: Warp, at: int, message: str, **_: Any) -> bool:
        """Record a hazard at an instruction of the running function."""
        self.findings.add(kind, message, self.launch, w.split.frame.program, at, w)
        return True

    def _tell(self, kind: str, w: Warp, at: int, text: str, shadow: Shadow, place: int) -> None:
        """Record a hazard that concerns shared bytes, with who wrote them where."""
        address = place * shadow.granule + SHARED_START
        origin = int(shadow.writer_at[place])
        body = self.launch.program.function.body
        written = ""
        if 0 <= origin < len(body):
            source = self.launch.program.module.source_of(body[origin])
            written = f"; last written at PTX line {body[origin].line}" + (f" ({source})" if source else "")
        self.report(kind, w, at, f"{text} (shared address {address:#x}{written})")

    # ---- generic accesses

    def generic_read(self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str) -> None:
        """ld, ldmatrix and the like, before the read."""
        shadow = self.shadows[block.rank]
        indices = shadow.granules(offsets, size)
        clock = self.clocks[w.agent]
        if order:
            for place in set(indices.tolist()):
                known = shadow.sync_clocks.get(place)
                if known is not None:
                    clock.join(known)
            return
        self._check_read(w, at, shadow, indices, clock, False)
        shadow.row(w.agent)[indices] = clock.order[w.agent]

    def _check_read(self, w: Warp, at: int, shadow: Shadow, indices: Array, clock: Clock, proxy: bool) -> None:
        flying = shadow.in_flight[indices]
        if flying.any():
            place = int(indices[int((flying != 0).argmax())])
            self._early(w, at, shadow, place, self._operations.get(int(shadow.in_flight[place])))
            return
        writers = shadow.writer[indices]
        if int(writers.min()) < 0:
            place = int(indices[int((writers < 0).argmax())])
            if not shadow.is_barrier[place]:
                self._tell("uninitialised_shared", w, at, "bytes are read that nobody has written", shadow, place)
        late = shadow.unordered_writer(indices, clock, proxy)
        if late is None:
            return
        agent, place, is_proxy = late
        kind = self.kind_of(agent)
        if is_proxy:
            self._tell("missing_proxy_fence", w, at, f"the asynchronous proxy reads what {self._who(agent)} stored with no "
                       "proxy fence since", shadow, place)  # fmt: skip
        elif kind in ("barrier", "cp"):
            self._early(w, at, shadow, place, None)
        else:
            self._tell("data_race", w, at, f"{self._who(agent)} wrote these bytes and nothing orders this read after it",
                       shadow, place)  # fmt: skip

    def _early(self, w: Warp, at: int, shadow: Shadow, place: int, operation: AsyncWrite | None) -> None:
        """A read of bytes whose copy has not been waited for: which of the two usual mistakes it was."""
        repeated = any(flag for (agent, _), (_, flag) in self._passes.items() if agent == w.agent)
        kind = "wrong_parity" if repeated else "read_before_load"
        state = "is still under way" if operation is not None else "was not waited for"
        self._tell(kind, w, at, f"bytes are read whose copy {state}", shadow, place)

    def generic_write(self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str) -> None:
        """st, stmatrix and the like, before the write."""
        shadow = self.shadows[block.rank]
        indices = shadow.granules(offsets, size)
        clock = self.clocks[w.agent]
        if order:
            clock_copy = clock.copy()
            for place in set(indices.tolist()):
                shadow.sync_clocks.setdefault(place, Clock(self.size)).join(clock_copy)
        else:
            self._check_write(w, at, shadow, indices, clock, False)
        shadow.written(indices, w.agent, int(clock.order[w.agent]), at, False)
        shadow.mode[offsets // 16] = 0
        if order in ("release", "acq_rel"):
            clock.order[w.agent] += 1

    def _check_write(self, w: Warp, at: int, shadow: Shadow, indices: Array, clock: Clock, proxy: bool) -> None:
        if shadow.is_barrier[indices].any():
            place = int(indices[int(shadow.is_barrier[indices].argmax())])
            self._tell("barrier_overwritten", w, at, "a live mbarrier is overwritten", shadow, place)
        flying = shadow.in_flight[indices]
        if flying.any():
            place = int(indices[int((flying != 0).argmax())])
            self._tell("write_race", w, at, "bytes are written while a copy into them is under way", shadow, place)
            return
        late = shadow.unordered_writer(indices, clock, proxy)
        if late is not None:
            agent, place, is_proxy = late
            if is_proxy:
                self._tell("missing_proxy_fence", w, at, f"the asynchronous proxy overwrites what {self._who(agent)} stored "
                           "with no proxy fence since", shadow, place)  # fmt: skip
            else:
                writer = self.kind_of(agent)
                kind = "data_race" if writer == "warp" and not proxy else "write_race"
                text = f"{self._who(agent)} wrote these bytes and nothing orders this write after it"
                if writer == "barrier" and proxy:
                    kind, text = (
                        "overwritten_while_read",
                        f"{text}: the slot is refilled though nobody is known to have read it",
                    )
                self._tell(kind, w, at, text, shadow, place)
            return
        reader = shadow.unordered_reader(indices, clock)
        if reader is not None:
            agent, place = reader
            reader_kind = self.kind_of(agent)
            kind = "store_source_reused" if reader_kind == "bulk" else (
                "data_race" if reader_kind == "warp" and not proxy else "overwritten_while_read")  # fmt: skip
            self._tell(kind, w, at, f"{self._who(agent)} reads these bytes and nothing orders this write after it", shadow,
                       place)  # fmt: skip

    def atomic(self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str) -> None:
        """One lane's atomic operation: atomics do not race with each other."""
        shadow = self.shadows[block.rank]
        indices = shadow.granules(offsets, size)
        clock = self.clocks[w.agent]
        if not shadow.is_atomic[indices].all():
            self._check_read(w, at, shadow, indices, clock, False)
            self._check_write(w, at, shadow, indices, clock, False)
        for place in indices.tolist():
            known = shadow.sync_clocks.setdefault(place, Clock(self.size))
            clock.join(known)
            known.join(clock)
        shadow.written(indices, w.agent, int(clock.order[w.agent]), at, False)
        shadow.is_atomic[indices] = True

    def atomic_order(self, w: Warp, at: int, order: str) -> None:
        """An atomic's own order: what it publishes ends here."""
        if order in ("release", "acq_rel"):
            self.clocks[w.agent].order[w.agent] += 1

    # ---- asynchronous copies

    def async_write(
        self, w: Warp, at: int, block: Block, offsets: Array, size: int, what: str, barrier: MBarrier | None = None,
        generic: bool = False,
    ) -> AsyncWrite:  # fmt: skip
        """A copy into shared memory is issued; its bytes are nobody's until it has landed and was waited for."""
        shadow = self.shadows[block.rank]
        indices = shadow.granules(np.asarray(offsets), size)
        clock = self.clocks[w.agent]
        is_proxy = not generic and what != "cp.async"
        self._check_write(w, at, shadow, indices, clock, is_proxy)
        if barrier is not None and is_proxy:
            self._check_init_fence(w, at, barrier, clock)
        self._count += 1
        operation = AsyncWrite(self._count, w, at, shadow, indices, what)
        self._operations[self._count] = operation
        shadow.in_flight[indices] = self._count
        shadow.mode[np.asarray(offsets) // 16] = 0
        return operation

    def async_written(self, operation: AsyncWrite, barrier: MBarrier | None, group: Any) -> None:
        """The copy has landed: whoever waits for the barrier's phase, or the group, may look."""
        shadow, indices = operation.shadow, operation.indices
        self._operations.pop(operation.number, None)
        mine = indices[shadow.in_flight[indices] == operation.number]
        shadow.in_flight[mine] = 0
        is_proxy = operation.what not in ("cp.async", "st.async")
        if barrier is not None:
            agent, clock = self.barrier_agent(barrier), barrier.phase + 1
        elif group is not None:
            agent, clock = self.cp_agent(group[1]), group[2].number + 1
        else:
            return
        shadow.written(mine, agent, clock, operation.at, is_proxy)

    def async_read(self, w: Warp, at: int, block: Block, offsets: Array, owner: tuple[int, Group] | None) -> Any:
        """A bulk store (or copy to another block) is issued: its source must be complete and fenced."""
        shadow = self.shadows[block.rank]
        indices = shadow.granules(offsets, 16)
        self._check_read(w, at, shadow, indices, self.clocks[w.agent], True)
        if owner is not None:
            lane, group = owner
            agent = self.agent(("bulk", w.agent, lane), "bulk")
            shadow.row(agent)[indices] = group.number + 1
        return None

    def async_read_done(self, handle: Any) -> None:
        """The source was read: order comes from wait_group, not from here."""

    def swizzled(self, block: Block, offsets: Array, mode: Swizzle) -> None:
        """Remember under which swizzle 16-byte chunks were laid down."""
        self.shadows[block.rank].mode[offsets // 16] = int(mode) + 1

    def swizzled_destination(self, w: Warp, at: int, address: int, footprint: int, mode: Swizzle) -> None:
        """A swizzled box that covers a whole pattern begins on it."""
        repeat = required_alignment(mode)
        if int(mode) and footprint >= repeat and address % repeat:
            self.report("swizzle_alignment", w, at, f"a {mode.label}-swizzled box of {footprint} bytes goes to "
                        f"{address:#x}, which is no multiple of {repeat}")  # fmt: skip

    # ---- groups

    def group_committed(self, w: Warp, at: int, kind: str, lane: int, group: Group) -> None:
        """Groups are counted by their number alone."""

    def groups_waited(self, w: Warp, at: int, kind: str, lane: int, last: Group, reads_only: bool) -> None:
        clock = self.clocks[w.agent]
        agent = self.agent(("bulk", w.agent, lane), "bulk") if kind == "bulk" else self.cp_agent(w)
        clock.order[agent] = max(int(clock.order[agent]), last.number + 1)

    def cp_snapshot(self, w: Warp) -> Clock:
        """What a cp.async.mbarrier.arrive of this warp will publish."""
        clock = self.clocks[w.agent].copy()
        queues: dict[Any, Queue] = w.async_state.get("cp", {})
        found = queues.get(0)
        clock.order[self.cp_agent(w)] = (found.count if found else 0) + 1
        return clock

    def cp_arrived(self, w: Warp, barrier: MBarrier, snapshot: Clock) -> None:
        self._pending(barrier)[0].join(snapshot)

    # ---- barriers of a block and cluster

    def barrier_arrive(self, w: Warp, barrier: NamedBarrier) -> None:
        known = self._named.get(id(barrier))
        if known is None:
            known = self._named[id(barrier)] = Clock(self.size)
        clock = self.clocks[w.agent]
        known.join(clock)
        clock.order[w.agent] += 1

    def barrier_complete(self, barrier: NamedBarrier, warps: list[Warp]) -> None:
        known = self._named.pop(id(barrier), None)
        if known is not None:
            for warp in warps:
                self.clocks[warp.agent].join(known)

    def cluster_arrive(self, w: Warp, release: bool) -> None:
        clock = self.clocks[w.agent]
        if release:
            self._cluster_pending.join(clock)
            clock.order[w.agent] += 1

    def cluster_complete(self) -> None:
        self._cluster_done = self._cluster_pending.copy()

    def cluster_acquire(self, w: Warp) -> None:
        self.clocks[w.agent].join(self._cluster_done)

    # ---- mbarriers

    def _pending(self, barrier: MBarrier) -> tuple[Clock, Clock]:
        known = self._barriers.get(id(barrier))
        if known is None:
            known = self._barriers[id(barrier)] = (Clock(self.size), Clock(self.size))
        return known

    def barrier_init(self, w: Warp, at: int, barrier: MBarrier, old: MBarrier | None) -> None:
        if old is not None:
            self.report("barrier_reinitialised", w, at, f"mbarrier.init of a live barrier: {old.describe()}")
        shadow = self.shadows[barrier.block.rank]
        indices = shadow.granules(np.array([barrier.offset]), 8)
        shadow.is_barrier[indices] = False
        self._check_write(w, at, shadow, indices, self.clocks[w.agent], False)
        shadow.is_barrier[indices] = True
        clock = int(self.clocks[w.agent].order[w.agent])
        shadow.written(indices, w.agent, clock, at, False)
        self._inits[id(barrier)] = [w.agent, clock, barrier]

    def barrier_inval(self, w: Warp, at: int, barrier: MBarrier) -> None:
        shadow = self.shadows[barrier.block.rank]
        indices = shadow.granules(np.array([barrier.offset]), 8)
        shadow.is_barrier[indices] = False
        shadow.written(indices, w.agent, int(self.clocks[w.agent].order[w.agent]), at, False)

    def barrier_used(self, w: Warp, at: int, barrier: MBarrier, what: str) -> None:
        """Whoever uses a barrier must be ordered after its init."""
        made = self._inits.get(id(barrier))
        if made is not None and made[1] > self.clocks[w.agent].order[made[0]]:
            self.report("missing_init_sync", w, at, f"{what} on {barrier.name}, and nothing orders it after mbarrier.init by "
                        f"{self._who(made[0])}")  # fmt: skip

    def _check_init_fence(self, w: Warp, at: int, barrier: MBarrier, clock: Clock) -> None:
        made = self._inits.get(id(barrier))
        if made is None or made[1] <= clock.proxy[made[0]] or self._init_fenced.get(made[0], 0) >= made[1]:
            return
        self.report("missing_init_fence", w, at, f"a copy completes on {barrier.name}, whose mbarrier.init was not fenced for "
                    "the asynchronous proxy")  # fmt: skip

    def barrier_release(self, w: Warp, at: int, barrier: MBarrier, release: bool) -> None:
        if release:
            clock = self.clocks[w.agent]
            self._pending(barrier)[0].join(clock)
            clock.order[w.agent] += 1

    def phase_ended(self, barrier: MBarrier) -> None:
        pending, _ = self._pending(barrier)
        pending.order[self.barrier_agent(barrier)] = barrier.phase
        self._barriers[id(barrier)] = (pending, pending.copy())

    def bytes_over(self, barrier: MBarrier) -> None:
        """More bytes came in a phase than anybody expects, and nobody is left to expect more."""
        owner, at = barrier.expected_by or (barrier.initialised_by, -1)
        if owner is not None:
            self.findings.add("byte_count", f"{-barrier.tx} bytes too many came at {barrier.describe()}", self.launch,
                              self.launch.program, at, owner)  # fmt: skip

    def barrier_acquire(self, w: Warp, at: int, barrier: MBarrier, acquire: bool) -> None:
        agent = self.barrier_agent(barrier)
        clock = self.clocks[w.agent]
        last = self._passes.get((w.agent, agent))
        repeated = barrier.phase == 0 or (last is not None and last[0] == barrier.phase)
        self._passes[w.agent, agent] = (barrier.phase, repeated)
        if acquire:
            clock.join(self._pending(barrier)[1])
            clock.order[agent] = max(int(clock.order[agent]), barrier.phase)

    # ---- fences

    def fence(self, w: Warp, at: int, kind: str) -> None:
        clock = self.clocks[w.agent]
        if kind.startswith("proxy.async"):
            np.maximum(clock.proxy, clock.order, out=clock.proxy)
            self._init_fenced[w.agent] = int(clock.order[w.agent])
        elif kind.startswith("mbarrier_init"):
            self._init_fenced[w.agent] = int(clock.order[w.agent])
        elif kind.startswith("proxy.tensormap"):
            self._edited_maps.clear()

    def tensor_map_written(self, w: Warp, at: int, address: int) -> None:
        self._edited_maps.add(address)

    def tensor_map_released(self, w: Warp, at: int, address: int) -> None:
        self._edited_maps.add(address)

    def tensor_map_read(self, w: Warp, at: int, address: int) -> None:
        if address in self._edited_maps:
            self.report("tensor_map_fence", w, at, f"the tensor map at {address:#x} was edited and no "
                        "fence.proxy.tensormap::generic.acquire follows")  # fmt: skip

    # ---- wgmma

    def wgmma_read(self, w: Warp, at: int, offsets: Array, descriptor: Any) -> None:
        """A wgmma reads 16-byte chunks of its block's shared memory through the asynchronous proxy."""
        shadow = self.shadows[w.block.rank]
        indices = shadow.granules(offsets, 16)
        self._check_read(w, at, shadow, indices, self.clocks[w.agent], True)
        shadow.row(self.wgmma_agent(w))[indices] = self.registers.group_of(w) + 1
        laid = shadow.mode[offsets // 16]
        wrong = (laid != 0) & (laid != int(descriptor.mode) + 1)
        if wrong.any():
            found = Swizzle(int(laid[wrong][0]) - 1)
            self.report("swizzle_mismatch", w, at, f"a wgmma descriptor says {descriptor.mode.label}, the tensor map that "
                        f"filled these bytes {found.label}")  # fmt: skip
        repeat = required_alignment(descriptor.mode)
        if int(descriptor.mode) and (descriptor.start % repeat) >> 7 != descriptor.base_offset % (repeat >> 7):
            self.report("swizzle_alignment", w, at, f"a {descriptor.mode.label}-swizzled operand begins at "
                        f"{descriptor.start:#x}, base offset {descriptor.base_offset}")  # fmt: skip

    def wgmma_issued(self, w: Warp, at: int, from_registers: bool) -> None:
        self.registers.issued(w, at)

    def wgmma_fence(self, w: Warp, at: int) -> None:
        self.registers.fenced(w)

    def wgmma_commit(self, w: Warp, at: int) -> None:
        self.registers.committed(w)

    def wgmma_wait(self, w: Warp, at: int, newest: int) -> None:
        done = self.registers.waited(w, at, newest)
        clock = self.clocks[w.agent]
        clock.order[self.wgmma_agent(w)] = max(int(clock.order[self.wgmma_agent(w)]), done)

    # ---- ends

    def warp_ended(self, w: Warp) -> None:
        """Bulk stores that nobody has waited for, or committed, when the warp leaves."""
        queues: dict[int, Queue] = w.async_state.get("bulk", {})
        for found in queues.values():
            if found.open.issued_at >= 0:
                self._late_store("uncommitted_group", "bulk stores were never committed to a group", w, found.open)
            for group in found.closed:
                if group.waited == 0 and group.issued_at >= 0:
                    self._late_store("exit_with_pending_store", "the warp leaves without having waited for its bulk stores to "
                                     "read their source", w, group)  # fmt: skip
                    break

    def _late_store(self, kind: str, message: str, w: Warp, group: Group) -> None:
        self.findings.add(kind, message, self.launch, self.launch.program, group.issued_at, w)

    def cluster_ended(self) -> None:
        """Nothing is left to check when a cluster is done."""


LOW = (1 << RANK_SHIFT) - 1
