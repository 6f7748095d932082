"""Record the events of a schedule: copies in flight, waits, mbarrier phases and tensor-core instructions.

A Recording is the first observer of each cluster, so that an access is recorded before a check reports it. Times are
the scheduler's steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.emulator.async_copy.groups import Group
from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.hazards.hazard import Hazard
from cudatma.emulator.machine.events import Copy, Observer, Same
from cudatma.emulator.machine.memory import SHARED_WINDOW, Region
from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.protocols import Dim, Launch
from cudatma.emulator.machine.state import Block, Split, Warp
from cudatma.emulator.ptx.types import Array, lane_bits

#: Kinds of copies that are recorded. Other kinds, such as st.async, transfer too few bytes.
_COPIES = ("cp.async", "cp.async.bulk", "cp.async.bulk.tensor")
#: Maximum number of events. Further events are dropped.
MAX_EVENTS = 200_000
#: Number of recent accesses that are searched for the accesses of a hazard.
_MAX_ACCESSES = 20_000


@dataclass(slots=True, eq=False)
class Event:
    """An interval in a schedule. Times are in steps.

    Attributes
    ----------
    kind
        "copy" (into shared memory, on an mbarrier), "cp.async" (a group of ``count`` instructions), "store" (from
        shared memory), "wait", "acquire" (a wait that returned), "phase" (of an mbarrier), "mma" or "wgmma" (``count``
        consecutive instructions), "access" (an access of a hazard), "hazard", or "warp" (its lifetime).
    block
        CTA of the event. For a copy, this is the destination CTA.
    end
        Last step, or None if the schedule ended before the event did.
    barrier, phase
        Shared-memory offset of the mbarrier, or -1 if there is none, and the number of its completed phases.
    offset, size_bytes
        Range of shared memory.
    issuer
        The (block, warp) that issued a copy.
    tensor_map
        Address of the tensor map, or 0 if there is none.
    lane
        Lane of an access, or -1 if it is unknown.
    """

    kind: str
    name: str
    block: Dim
    warp: int | None
    begin: int
    end: int | None = None
    barrier: int = -1
    phase: int = 0
    offset: int = 0
    size_bytes: int = 0
    line: int = 0
    source: str = ""
    count: int = 1
    issuer: tuple[Dim, int] | None = None
    tensor_map: int = 0
    lane: int = -1


@dataclass(slots=True)
class _Accessed:
    """An access to memory. Lane or piece ``i`` accesses ``size`` bytes from ``base + offsets[i]``."""

    verb: str
    step: int
    block: Dim
    warp: int
    program: Program
    at: int
    lanes: int
    base: int
    offsets: Array
    size: int

    def covers(self, address: int) -> bool:
        first = address - self.base
        return bool(np.any((self.offsets <= first) & (first < self.offsets + self.size)))

    def lane(self, address: int) -> int:
        """Return the first lane that accesses an address, or -1 if the pieces do not correspond to lanes."""
        active = [lane for lane in range(32) if self.lanes >> lane & 1]
        if len(active) == 1:
            return active[0]
        if self.offsets.shape != (len(active),):
            return -1
        first = address - self.base
        return active[int(np.argmax((self.offsets <= first) & (first < self.offsets + self.size)))]


class Recording(Observer):
    """Observer that records the events of the last schedule, or of the first schedule with a hazard.

    `kernel`, `schedule` and `seed` identify the run, `steps` is its length, and `events` are in the order in which they
    began.
    """

    def __init__(self) -> None:
        self.kernel, self.schedule, self.seed = "", 0, 0
        self.events: list[Event] = []
        self.dropped = 0
        self._clock: Any = None
        self._steps = 0
        self._waits: dict[Split, Event] = {}
        self._products: dict[Warp, Event] = {}
        self._groups: dict[Group, Event] = {}
        self._copies: dict[Copy, Event] = {}
        self._lives: dict[Warp, Event] = {}
        self._phase_begin: dict[tuple[Dim, int], int] = {}
        self._accesses: deque[_Accessed] = deque(maxlen=_MAX_ACCESSES)
        #: Maps (kind, PTX line) of each hazard to the accesses in its report and the hazard itself, in order.
        self.histories: dict[tuple[str, int], list[Event]] = {}

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return int(self._clock.steps) if self._clock is not None else self._steps

    def begin(self, launch: Launch) -> None:
        """Start recording a schedule and discard the previous one."""
        self.kernel, self._clock = launch.program.function.name, launch.scheduler
        self.schedule, self.seed = launch.scheduler.schedule, launch.scheduler.seed
        self.dropped = 0
        for collection in (
            *(self.events, self._waits, self._products, self._groups, self._copies, self._lives, self._phase_begin),
            *(self._accesses, self.histories),
        ):
            collection.clear()

    def end(self) -> None:
        """Drop references to everything except the events, so that the trace does not keep memory alive."""
        self._steps, self._clock = self.steps, None
        for collection in (self._waits, self._products, self._groups, self._copies, self._lives, self._accesses):
            collection.clear()

    def _add(self, event: Event) -> Event:
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
        else:
            self.dropped += 1
        return event

    def _at(self, kind: str, name: str, w: Warp, at: int) -> Event:
        """Add an event at an instruction of a warp."""
        program = w.split.frame.program
        instruction = program.instruction(at)
        event = Event(kind, name, w.block.index, w.index, self.steps, line=instruction.line)
        event.source = program.module.source_of(instruction)
        return self._add(event)

    # ---- copies

    def copy_issued(self, copy: Copy) -> None:
        self._access("issues a copy to", copy.w, copy.at, _base_of(copy.block), copy.offsets, copy.size)
        if copy.what in _COPIES:
            self._copies[copy] = self._group(copy) if copy.group is not None else self._copy(copy)

    def _copy(self, copy: Copy) -> Event:
        if copy.box is not None:
            first, size = copy.destination, copy.box.expected_bytes
        else:
            first, size = int(copy.offsets[0]), copy.offsets.size * copy.size
        event = self._at("copy", f"{size} bytes", copy.w, copy.at)
        event.issuer, event.block = (copy.w.block.index, copy.w.index), copy.block.index
        event.offset, event.size_bytes = first, size
        event.barrier, event.phase, event.tensor_map = copy.barrier.offset, copy.phase, copy.map_address
        return event

    def _group(self, copy: Copy) -> Event:
        """Return the event for the group of a cp.async."""
        event = self._groups.get(copy.group)
        if event is None:
            event = self._groups[copy.group] = self._at("cp.async", "cp.async group", copy.w, copy.at)
            event.issuer, event.offset = (copy.w.block.index, copy.w.index), int(copy.offsets.min())
            event.count = 0
        event.count += 1
        event.size_bytes += copy.offsets.size * copy.size
        return event

    def store_issued(self, store: Copy) -> None:
        size = store.offsets.size * store.size
        event = self._copies[store] = self._at("store", f"{size} bytes", store.w, store.at)
        event.issuer, event.offset = (store.w.block.index, store.w.index), int(store.offsets.min())
        event.size_bytes = size

    def copy_landed(self, copy: Copy) -> None:
        """End the event of a copy. The event of a group ends with the last of its copies."""
        event = self._copies.pop(copy, None)
        if event is not None:
            event.end = self.steps

    def store_landed(self, store: Copy) -> None:
        self.copy_landed(store)

    # ---- barriers, tensor-core instructions, waits

    def phase_ended(self, barrier: MBarrier) -> None:
        key = (barrier.block.index, barrier.offset)
        name, begin = f"phase {barrier.phase - 1}", self._phase_begin.get(key, 0)
        event = Event("phase", name, key[0], None, begin, self.steps, barrier.offset, barrier.phase - 1)
        self._phase_begin[key] = self.steps
        self._add(event)

    def mma_computed(self, w: Warp, at: int, name: str, addends: tuple[Array, ...]) -> None:
        """Record a tensor-core instruction. Consecutive instructions without a wait in between form one event."""
        event = self._products.get(w)
        if event is None or event.kind != name:
            event = self._products[w] = self._at(name, name, w, at)
            event.count = 0
        event.count += 1
        event.end = self.steps + 1

    def mbarrier_acquired(self, w: Warp, at: int, barrier: MBarrier, order: str) -> None:
        """Record that a wait for the previous phase has returned."""
        self.woken(w.split)
        self._products.pop(w, None)
        event = self._at("acquire", "passes", w, at)
        event.end, event.barrier, event.phase = event.begin, barrier.offset, barrier.phase - 1

    def blocked(self, split: Split, reason: Any) -> None:
        """Record the start of a wait unless the split repeats a wait that has timed out."""
        w, barrier = split.warp, getattr(reason, "barrier", None)
        self._products.pop(w, None)
        offset = int(getattr(barrier, "offset", -1))
        before = self._waits.get(split)
        if before is not None and before.end is None and (before.barrier, before.line) == (offset, self._line(split)):
            return
        event = self._at("wait", reason.describe() if reason is not None else "waits", w, getattr(reason, "at", 0))
        if barrier is not None and offset >= 0:
            event.barrier, event.phase = offset, int(barrier.phase)
        self._waits[split] = event

    def _line(self, split: Split) -> int:
        at = getattr(split.waits_for, "at", 0)
        return int(split.frame.program.instruction(at).line)

    def woken(self, split: Split) -> None:
        event = self._waits.pop(split, None)
        if event is not None:
            event.end = self.steps

    def warp_started(self, w: Warp) -> None:
        self._lives[w] = self._add(Event("warp", f"warp {w.index}", w.block.index, w.index, self.steps))

    def warp_ended(self, w: Warp) -> None:
        if w in self._lives:
            self._lives[w].end = self.steps

    # ---- accesses and hazards

    def _access(self, verb: str, w: Warp, at: int, base: int, offsets: Array, size: int) -> None:
        lanes = lane_bits(w.split.mask if w.guard is None else w.split.mask & w.guard)
        program = w.split.frame.program
        self._accesses.append(
            _Accessed(verb, self.steps, w.block.index, w.index, program, at, lanes, base, offsets, size)
        )

    def shared_read(
        self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str, together: bool
    ) -> None:
        self._access("reads", w, at, _base_of(block), offsets, size)

    def shared_write(
        self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str, together: bool, same: Same
    ) -> None:
        self._access("writes", w, at, _base_of(block), offsets, size)

    def shared_atomic(self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str) -> None:
        self._access("updates", w, at, _base_of(block), offsets, size)

    def shared_source(self, w: Warp, at: int, block: Block, offsets: Array, end: Any) -> None:
        self._access("issues a copy from", w, at, _base_of(block), offsets, 16)

    def wgmma_operand(
        self, w: Warp, at: int, position: int, bits: int, offsets: Array, shape: tuple[int, int, bool], group: int
    ) -> None:
        self._access("reads", w, at, _base_of(w.block), offsets, 16)

    def global_read(self, w: Warp, at: int, region: Region, offsets: Array, size: int, order: str) -> None:
        self._access("reads", w, at, region.base, offsets, size)

    def global_write(self, w: Warp, at: int, region: Region, offsets: Array, size: int, order: str, same: Same) -> None:
        self._access("writes", w, at, region.base, offsets, size)

    def bulk_target(self, w: Warp, at: int, region: Region, offsets: Array, group: Any, is_reduction: bool) -> None:
        self._access("issues a copy to", w, at, region.base, offsets, 16)

    def tensor_target(
        self, w: Warp, at: int, box: Any, written: Array, operation: str, group: Any, is_repeat: bool
    ) -> None:
        self._access("issues a copy to", w, at, box.spec.address, box.gmem[written], 16)

    def hazard_found(self, hazard: Hazard, w: Warp) -> None:
        """Record a hazard and its recent accesses."""
        here = self._latest(hazard.ptx_line, hazard.address, w)
        earlier = [
            # The same instruction may have made an earlier access, for example in the previous iteration of a loop.
            self._latest(other.ptx_line, hazard.address, before=here.begin)
            if here is not None and other.ptx_line == hazard.ptx_line and hazard.kind != "lane_race"
            else self._latest(other.ptx_line, hazard.address)
            for other in hazard.others
        ]
        event = Event("hazard", hazard.kind, w.block.index, w.index, self.steps, self.steps)
        event.line, event.source = hazard.ptx_line, hazard.source
        if here is not None:
            event.begin, event.lane = here.begin, here.lane
        history = sorted((other for other in earlier if other is not None), key=lambda other: other.begin)
        self.histories[hazard.kind, hazard.ptx_line] = [*history, here or event]
        self._add(event)

    def _latest(self, line: int, address: int | None, w: Warp | None = None, before: int | None = None) -> Event | None:
        """Return the last access to an address by a PTX line, optionally only by one warp and before a given step."""
        for access in reversed(self._accesses):
            instruction = access.program.instruction(access.at)
            if before is not None and access.step >= before:
                continue
            if instruction.line != line or (w is not None and (access.block, access.warp) != (w.block.index, w.index)):
                continue
            if address is None or access.covers(address):
                event = Event("access", access.verb, access.block, access.warp, access.step, access.step)
                event.line, event.source = line, access.program.module.source_of(instruction)
                event.lane = -1 if address is None else access.lane(address)
                return event
        return None


def _base_of(block: Block) -> int:
    """Return the generic address of a CTA's shared memory."""
    return SHARED_WINDOW | block.shared_base
