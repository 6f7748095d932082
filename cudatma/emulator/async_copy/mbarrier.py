"""mbarrier objects in shared memory, with their phases, pending arrivals and pending bytes.

A phase ends when its pending arrivals and its pending bytes (tx-count) are both zero. As on an H200, mbarrier.init does
not change shared memory, and mbarrier.inval writes the state to it.

Source: PTX ISA, "mbarrier".
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np

from cudatma.emulator.machine import access
from cudatma.emulator.machine.memory import RANK_SHIFT
from cudatma.emulator.machine.state import Block, Split, Warp
from cudatma.emulator.ptx.types import LANES, Array, active_lanes
from cudatma.emulator.ptx.writer import RUNTIME, runtime
from cudatma.mbarrier_bits import BarrierBits, encode

MAX_COUNT = (1 << 20) - 1
#: A token contains the number of pending arrivals in its low bits, and the phase in the bits above.
_TOKEN_SHIFT = 20


@dataclass(slots=True, eq=False)
class MBarrier:
    """An mbarrier.

    ``phase`` is the number of completed phases. ``tx`` is the number of pending bytes, negative if more bytes have
    arrived than expected.
    """

    block: Block
    offset: int
    count: int
    pending: int = 0
    tx: int = 0
    phase: int = 0
    next_count: int = 0
    waiters: list[Split] = field(default_factory=list)
    arrived_by: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pending = self.next_count = self.count

    def write_back(self) -> None:
        """Write the opaque state to shared memory, where kernels may read it."""
        state = BarrierBits(self.next_count, self.pending, self.tx, self.phase & 1)
        raw = encode(state).to_bytes(8, "little")
        self.block.shared.data[self.offset : self.offset + 8] = np.frombuffer(raw, np.uint8)

    @property
    def place(self) -> tuple[str, int, int]:
        """Key that identifies the mbarrier in its cluster."""
        return "mbarrier", self.block.rank, self.offset

    @property
    def name(self) -> str:
        """Shared address and CTA of the mbarrier as text for messages."""
        return f"the mbarrier at {self.address:#x} of block {self.block.index}"

    @property
    def address(self) -> int:
        """Address of the mbarrier in the CTA's shared memory."""
        return self.offset + (self.block.shared_base & 0xFFFFFF)

    @property
    def state(self) -> str:
        """Phase, pending arrivals and pending bytes as text for messages."""
        arrivals = f"{self.pending} of {self.count} arrivals"
        return f"phase {self.phase} (parity {self.phase & 1}), {arrivals} and {self.tx} bytes pending"

    def describe(self) -> str:
        return f"{self.name}: {self.state}"

    def missing_bytes(self) -> str:
        """Return a description of the wrong byte count for messages."""
        return f"{self.tx} bytes never arrived" if self.tx > 0 else f"{-self.tx} bytes arrived that were not expected"

    def arrive(self, count: int) -> None:
        self.pending -= count
        self.settle()

    def complete_tx(self, size: int) -> None:
        self.tx -= size
        self.settle()
        if self.tx < 0 and (self.pending == 0 or self.block.is_done):
            self.block.cluster.events.bytes_over(self)

    def settle(self) -> None:
        """End the phase if no arrivals and no bytes are pending."""
        if self.pending or self.tx:
            return
        self.phase += 1
        self.pending = self.count = self.next_count
        self.arrived_by.clear()
        self.block.cluster.events.phase_ended(self)
        self.block.launch.scheduler.wake(self.waiters)


@dataclass(slots=True)
class BarrierWait:
    """A wait of a split for a phase of an mbarrier in its own CTA. ``parity`` is -1 if a token specifies the phase."""

    barrier: MBarrier
    at: int
    parity: int
    may_time_out: bool = True

    def describe(self) -> str:
        phase = f"parity {self.parity}" if self.parity >= 0 else "the phase of a token"
        return f"mbarrier at {self.barrier.address:#x} of its block: {self.barrier.state}; waits for {phase}"


def _place(w: Warp, at: int, address: int, remote: bool) -> tuple[Block, int]:
    """Return the CTA and offset of an mbarrier's address."""
    block, offsets = access.shared_offsets(w, at, np.array([address], np.uint64), 8, remote)
    return block, int(offsets[0])


def find(w: Warp, at: int, address: int, what: str, remote: bool = True) -> MBarrier:
    """Return the mbarrier at an address. If there is none, report a hazard and trap.

    ``remote`` is true if the instruction can access mbarriers in other CTAs, like the .shared::cluster form.
    """
    block, offset = _place(w, at, address, remote)
    barrier: MBarrier | None = block.mbarriers.get(offset)
    if barrier is None:
        shown = address & ((1 << RANK_SHIFT) - 1)
        message = f"{what} uses shared address {shown:#x}, at which no mbarrier is initialized"
        kind = "barrier_misaligned" if address % 8 else "barrier_uninitialized"
        w.events.violation(kind, w, at, message, [("mbarrier", block.rank, offset)])
        access.trap(w, at, message)
    w.events.mbarrier_used(w, at, barrier, what)
    return barrier


def init(w: Warp, at: int, addresses: Array, count: Array, mask: Array | None) -> None:
    """Execute mbarrier.init.

    If several lanes initialize an mbarrier with equal counts in one instruction, the mbarrier is initialized once.
    """
    lanes_of: dict[tuple[int, int], int] = {}
    for lane in active_lanes(mask):
        key = int(addresses[lane]), int(count[lane])
        lanes_of[key] = lanes_of.get(key, 0) | 1 << lane
    for (address, number), lanes in lanes_of.items():
        block, offset = _place(w, at, address, False)
        if address % 8:
            message = f"mbarrier.init requires an 8-byte aligned address, got {address & 0xFFFFFF:#x}"
            w.events.violation("barrier_misaligned", w, at, message)
            access.trap(w, at, f"an mbarrier must be 8-byte aligned, got {address:#x}")
        if not 1 <= number <= MAX_COUNT:
            access.trap(w, at, f"the count of mbarrier.init must be from 1 to {MAX_COUNT}, got {number}")
        old = block.mbarriers.get(offset)
        barrier = MBarrier(block, offset, number)
        w.events.mbarrier_init(w, at, barrier, old, lanes)
        block.mbarriers[offset] = barrier


def inval(w: Warp, at: int, addresses: Array, mask: Array | None) -> None:
    """Execute mbarrier.inval, which writes back the state. Afterward, the bytes are ordinary memory."""
    for lane in active_lanes(mask):
        barrier = find(w, at, int(addresses[lane]), "mbarrier.inval", False)
        w.events.mbarrier_inval(w, at, barrier)
        barrier.write_back()
        del barrier.block.mbarriers[barrier.offset]


def arrive(
    w: Warp,
    at: int,
    addresses: Array,
    count: Array | None,
    expect: Array | None,
    mask: Array | None,
    *,
    drop: bool,
    order: str,
    remote: bool,
    is_partial: bool,
) -> Array:
    """Execute mbarrier.arrive, .arrive_drop or .arrive.expect_tx, and return each lane's token.

    A token contains the state before the lane's arrival. ``order`` is, for example, "release.cta". ``remote`` has
    the same meaning as in find(). ``is_partial`` is true for .noComplete.
    """
    token = np.zeros(LANES, np.uint64)
    w.launch.scheduler.progress += 1
    lanes = active_lanes(mask)
    alone = len(lanes) == 1 and int(w.alive.sum()) > 1
    numbers = dict.fromkeys(lanes, 1) if count is None else {lane: int(count[lane]) for lane in lanes}
    arriving: dict[int, list[int]] = {}
    for lane in lanes:
        arriving.setdefault(int(addresses[lane]), []).append(lane)
    for address, group in arriving.items():
        barrier = find(w, at, address, "mbarrier.arrive", remote)
        total = sum(numbers[lane] for lane in group)
        if total > barrier.pending:
            w.events.arrivals_over(w, w.split.frame.program, at, barrier, total, expect is not None)
        w.events.mbarrier_arrived(w, barrier, order, alone)
        if min(numbers[lane] for lane in group) < 1:
            _beyond_limit(w, at, barrier, "an arrival has count 0")
        for lane in group:
            token[lane] = barrier.phase << _TOKEN_SHIFT | barrier.pending
            phase = barrier.phase
            if expect is not None:
                _expect(w, at, barrier, int(expect[lane]))
            number = min(numbers[lane], barrier.pending)
            barrier.arrived_by.add((w.agent, lane))
            if drop:
                barrier.next_count -= number
            barrier.arrive(number)
            if is_partial and barrier.phase != phase:
                _beyond_limit(w, at, barrier, "an arrival with .noComplete ends the phase")
    return token


def _beyond_limit(w: Warp, at: int, barrier: MBarrier, text: str) -> None:
    w.events.violation("barrier_limit", w, at, f"{text}; {barrier.describe()}", [barrier.place])


def _expect(w: Warp, at: int, barrier: MBarrier, size: int) -> None:
    barrier.tx += size
    w.events.bytes_expected(w, at, barrier)
    if (expected := max(size, barrier.tx)) > MAX_COUNT:
        _beyond_limit(w, at, barrier, f"a phase can expect at most {MAX_COUNT} bytes, got {expected}")


def expect_tx(w: Warp, at: int, addresses: Array, size: Array, mask: Array | None, remote: bool) -> None:
    """Execute mbarrier.expect_tx, which increases the expected bytes without an arrival."""
    w.launch.scheduler.progress += 1
    for lane in active_lanes(mask):
        barrier = find(w, at, int(addresses[lane]), "mbarrier.expect_tx", remote)
        _expect(w, at, barrier, int(size[lane]))
        barrier.settle()


def complete_tx(w: Warp, at: int, addresses: Array, size: Array, mask: Array | None, remote: bool) -> None:
    """Execute mbarrier.complete_tx, which counts bytes as if a copy had transferred them."""
    w.launch.scheduler.progress += 1
    for lane in active_lanes(mask):
        barrier = find(w, at, int(addresses[lane]), "mbarrier.complete_tx", remote)
        barrier.complete_tx(int(size[lane]))
        if barrier.tx < -MAX_COUNT:
            _beyond_limit(w, at, barrier, f"at most {MAX_COUNT} unexpected bytes can arrive, got {-barrier.tx}")


def wait(
    w: Warp, at: int, addresses: Array, phase: Array, by_parity: bool, suspends: bool, mask: Array | None, order: str
) -> Array | None:
    """Execute test_wait or try_wait. Return the lanes whose phases have ended, or None if the split must wait.

    ``order`` is, for example, "acquire.cta". A try_wait times out if the schedule selects a timeout, or if no
    operation can end the phase.
    """
    split = w.split
    result = np.zeros(LANES, bool)
    lanes = active_lanes(mask)
    first: tuple[MBarrier, int] | None = None
    answers: dict[tuple[int, int], bool] = {}
    for lane in lanes:
        operand = int(phase[lane])
        key = (int(addresses[lane]), operand & 1 if by_parity else operand >> _TOKEN_SHIFT)
        if key not in answers:
            barrier = find(w, at, key[0], "a wait", False)
            done = (barrier.phase & 1) != key[1] if by_parity else barrier.phase > key[1]
            answers[key] = done
            if not by_parity and barrier.phase > key[1] + 1:
                text = f"a wait uses a token of phase {key[1]}, which is neither the current nor the previous phase"
                _beyond_limit(w, at, barrier, text)
            if done:
                w.events.mbarrier_acquired(w, at, barrier, order)
            elif first is None:
                first = barrier, key[1] if by_parity else -1
        result[lane] = answers[key]
    if first is None or result.any():
        split.timed_out = False
        split.polls = 0
        return result
    barrier, parity = first
    if split.timed_out:
        split.timed_out = False
        return result
    if suspends and not w.launch.scheduler.retries.times_out(split, at):
        barrier.waiters.append(split)
        w.launch.scheduler.block(split, BarrierWait(barrier, at, parity))
        return None
    split.token = None
    split.last_poll = BarrierWait(barrier, at, parity)
    w.launch.scheduler.poll(split)
    return result


@runtime
def pending_count(state: Array) -> Array:
    """Return the number of arrivals that were pending when the token was created."""
    low: Array = (state & np.uint64(MAX_COUNT)).astype(np.uint32)
    return low


RUNTIME["mbarrier"] = sys.modules[__name__]
