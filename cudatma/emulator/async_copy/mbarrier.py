"""mbarrier objects in shared memory: phases, pending arrivals, pending bytes.

A phase ends when its pending arrivals and its pending bytes (tx-count) are both zero. Source: PTX ISA, "mbarrier".
As on an H200, shared memory keeps what it held before mbarrier.init; the state comes there with mbarrier.inval.
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
#: A token holds the phase above the pending arrivals.
_TOKEN_SHIFT = 20


@dataclass(slots=True, eq=False)
class MBarrier:
    """One barrier. phase: how many phases have ended; tx: bytes still to come (negative: more came than was said)."""

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
        """Leave the state in shared memory, where a kernel that looks at the opaque bytes finds them."""
        state = BarrierBits(self.next_count, self.pending, self.tx, self.phase & 1)
        raw = encode(state).to_bytes(8, "little")
        self.block.shared.data[self.offset : self.offset + 8] = np.frombuffer(raw, np.uint8)

    @property
    def place(self) -> tuple[str, int, int]:
        """What distinguishes it from other mbarriers of its cluster."""
        return "mbarrier", self.block.rank, self.offset

    @property
    def name(self) -> str:
        """The barrier's shared address and CTA."""
        return f"mbarrier at {self.address:#x} of block {self.block.index}"

    @property
    def address(self) -> int:
        """The address in the shared memory of the CTA."""
        return self.offset + (self.block.shared_base & 0xFFFFFF)

    @property
    def state(self) -> str:
        """The phase and what is pending."""
        arrivals = f"{self.pending} of {self.count} arrivals"
        return f"phase {self.phase} (parity {self.phase & 1}), {arrivals} and {self.tx} bytes pending"

    def describe(self) -> str:
        return f"{self.name}: {self.state}"

    def missing_bytes(self) -> str:
        """What is wrong with its bytes, for messages."""
        return f"{self.tx} bytes never came" if self.tx > 0 else f"{-self.tx} bytes too many came"

    def arrive(self, count: int) -> None:
        self.pending -= count
        self.settle()

    def complete_tx(self, size: int) -> None:
        self.tx -= size
        self.settle()
        if self.tx < 0 and (self.pending == 0 or self.block.is_done):
            self.block.cluster.events.bytes_over(self)

    def settle(self) -> None:
        """End the phase where nothing is pending."""
        if self.pending or self.tx:
            return
        self.phase += 1
        self.pending = self.count = self.next_count
        self.arrived_by.clear()
        self.block.cluster.events.phase_ended(self)
        self.block.launch.scheduler.wake(self.waiters)


@dataclass(slots=True)
class BarrierWait:
    """A split that waits for a phase of an mbarrier of its own CTA. parity: -1 where a token named the phase."""

    barrier: MBarrier
    at: int
    parity: int
    may_time_out: bool = True

    def describe(self) -> str:
        asked = f"parity {self.parity}" if self.parity >= 0 else "a token's phase"
        return f"mbarrier at {self.barrier.address:#x} of its block: {self.barrier.state}; waited for: {asked}"


def _place(w: Warp, at: int, address: int, remote: bool) -> tuple[Block, int]:
    """Return (block, offset) of a barrier's address."""
    block, offsets = access.shared_offsets(w, at, np.array([address], np.uint64), 8, remote)
    return block, int(offsets[0])


def find(w: Warp, at: int, address: int, what: str, remote: bool = True) -> MBarrier:
    """Return the barrier at an address; report and trap if no barrier is initialised at this address.

    remote: whether the instruction reaches barriers of other CTAs, as its .shared::cluster form does.
    """
    block, offset = _place(w, at, address, remote)
    barrier: MBarrier | None = block.mbarriers.get(offset)
    if barrier is None:
        shown = address & ((1 << RANK_SHIFT) - 1)
        message = f"{what} on shared address {shown:#x}, where no mbarrier is initialised"
        kind = "barrier_misaligned" if address % 8 else "barrier_uninitialised"
        w.events.violation(kind, w, at, message, [("mbarrier", block.rank, offset)])
        access.trap(w, at, message)
    w.events.mbarrier_used(w, at, barrier, what)
    return barrier


def init(w: Warp, at: int, addresses: Array, count: Array, mask: Array | None) -> None:
    """mbarrier.init. Lanes that initialise one barrier alike, in one instruction, do it once."""
    doers: dict[tuple[int, int], int] = {}
    for lane in active_lanes(mask):
        key = int(addresses[lane]), int(count[lane])
        doers[key] = doers.get(key, 0) | 1 << lane
    for (address, number), lanes in doers.items():
        block, offset = _place(w, at, address, False)
        if address % 8:
            message = f"mbarrier.init at {address & 0xFFFFFF:#x}: 8 bytes aligned to 8"
            w.events.violation("barrier_misaligned", w, at, message)
            access.trap(w, at, f"mbarrier at {address:#x}: 8-byte alignment is needed")
        if not 1 <= number <= MAX_COUNT:
            access.trap(w, at, f"mbarrier.init with count {number}; 1..{MAX_COUNT} is allowed")
        old = block.mbarriers.get(offset)
        barrier = MBarrier(block, offset, number)
        w.events.mbarrier_init(w, at, barrier, old, lanes)
        block.mbarriers[offset] = barrier


def inval(w: Warp, at: int, addresses: Array, mask: Array | None) -> None:
    """mbarrier.inval: the state is written back, and the bytes are memory like any other."""
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
    """mbarrier.arrive, .arrive_drop and .arrive.expect_tx: return each lane's token, the state before its arrival.

    order: "release.cta" and the like. remote: as of find(). is_partial: .noComplete.
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
            _beyond_limit(w, at, barrier, "an arrival with count 0")
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
    if (most := max(size, barrier.tx)) > MAX_COUNT:
        _beyond_limit(w, at, barrier, f"{most} bytes are expected in one phase; at most {MAX_COUNT} are allowed")


def expect_tx(w: Warp, at: int, addresses: Array, size: Array, mask: Array | None, remote: bool) -> None:
    """mbarrier.expect_tx: more bytes to wait for, no arrival."""
    w.launch.scheduler.progress += 1
    for lane in active_lanes(mask):
        barrier = find(w, at, int(addresses[lane]), "mbarrier.expect_tx", remote)
        _expect(w, at, barrier, int(size[lane]))
        barrier.settle()


def complete_tx(w: Warp, at: int, addresses: Array, size: Array, mask: Array | None, remote: bool) -> None:
    """mbarrier.complete_tx: as if a copy of so many bytes had arrived."""
    w.launch.scheduler.progress += 1
    for lane in active_lanes(mask):
        barrier = find(w, at, int(addresses[lane]), "mbarrier.complete_tx", remote)
        barrier.complete_tx(int(size[lane]))
        if barrier.tx < -MAX_COUNT:
            _beyond_limit(w, at, barrier, f"{-barrier.tx} bytes came that were not expected; the limit is {MAX_COUNT}")


def wait(
    w: Warp, at: int, addresses: Array, phase: Array, by_parity: bool, suspends: bool, mask: Array | None, order: str
) -> Array | None:
    """test_wait, try_wait: return which lanes' phases have ended, or None where the split has to wait first.

    order: "acquire.cta" and the like. A try_wait times out when the schedule says so, or when nobody can end its phase.
    """
    split = w.split
    result = np.zeros(LANES, bool)
    lanes = active_lanes(mask)
    first: tuple[MBarrier, int] | None = None
    answers: dict[tuple[int, int], bool] = {}
    for lane in lanes:
        asked = int(phase[lane])
        key = (int(addresses[lane]), asked & 1 if by_parity else asked >> _TOKEN_SHIFT)
        if key not in answers:
            barrier = find(w, at, key[0], "a wait", False)
            done = (barrier.phase & 1) != key[1] if by_parity else barrier.phase > key[1]
            answers[key] = done
            if not by_parity and barrier.phase > key[1] + 1:
                text = f"a wait with a token of phase {key[1]}, which is neither the current nor the previous phase"
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
    """mbarrier.pending_count: the arrivals that were pending when the token was made."""
    low: Array = (state & np.uint64(MAX_COUNT)).astype(np.uint32)
    return low


RUNTIME["mbarrier"] = sys.modules[__name__]
