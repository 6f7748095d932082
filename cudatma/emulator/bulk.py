"""cp.async, cp.async.bulk and cp.reduce.async.bulk: copies without a tensor map.

Source: PTX ISA, "cp.async", "cp.async.bulk", "cp.reduce.async.bulk", "st.async", "red.async".
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from cudatma.emulator import access, atomics, groups
from cudatma.emulator.machine import Warp
from cudatma.emulator.mbarrier import MBarrier, find
from cudatma.emulator.memory import RANK_SHIFT, SHARED_WINDOW, Region
from cudatma.emulator.types import Array
from cudatma.emulator.writer import RUNTIME

CHUNK = 16


def strip(address: int) -> int:
    """A shared address from a generic one."""
    return address - SHARED_WINDOW if address >> 60 == 1 else address


def chunks_of(offset: int, size: int) -> Array:
    """Offsets of the 16-byte chunks of a run of bytes."""
    return np.arange(offset, offset + size, CHUNK, dtype=np.int64)


def shared_run(w: Warp, at: int, address: int, size: int, what: str) -> tuple[Any, int]:
    """(block, offset) of a run of shared bytes; traps where it leaves the memory."""
    vector = np.array([strip(address)], np.uint64)
    block, offsets = access.shared_offsets(w, at, vector, max(size, 1), True)
    return block, int(offsets[0])


def global_run(w: Warp, at: int, address: int, size: int) -> tuple[Region, int]:
    """(region, offset) of a run of global bytes."""
    region = access.global_region(w, at, np.array([address], np.uint64), size)
    if region is None:
        access.outside(w, at, address, size)
    return region, address - region.base


def check_run(w: Warp, at: int, size: int, *addresses: int) -> None:
    if size % CHUNK or any(a % CHUNK for a in addresses):
        shown = ", ".join(f"{strip(a):#x}" for a in addresses)
        access.trap(w, at, f"a bulk copy of {size} bytes at {shown}: sizes and addresses are multiples of 16")


def copy_async(w: Warp, at: int, to: Array, source: Array, size: int, take: Array | None, mask: Array | None) -> None:
    """cp.async: each lane copies ``size`` bytes (4, 8, 16), the first ``take`` of them from memory and zeros after."""
    active = np.asarray(groups.lanes(mask))
    if np.bitwise_or.reduce(to[active] | source[active]) & np.uint64(size - 1):
        access.trap(w, at, f"cp.async of {size} bytes from or to an address that is not a multiple of it")
    shared = np.array([strip(int(a)) for a in to[active].tolist()], np.uint64)
    block, offsets = access.shared_offsets(w, at, shared, size, False)
    addresses = source[active]
    counts = np.full(len(active), size) if take is None else np.minimum(take[active].astype(np.int64), size)
    group = groups.queue(w, "cp").open
    group.writing += 1
    group.issued_at = at
    observer = w.block.cluster.observer
    handle = None
    if observer is not None:
        handle = observer.async_write(w, at, block, offsets, size, "cp.async")
    regions = [
        global_run(w, at, int(a), int(n)) if n else None
        for a, n in zip(addresses.tolist(), counts.tolist(), strict=True)
    ]

    def complete() -> None:
        data = block.shared.data
        for offset, found, n in zip(offsets.tolist(), regions, counts.tolist(), strict=True):
            data[offset + n : offset + size] = 0
            if found is not None:
                data[offset : offset + n] = found[0].data[found[1] : found[1] + n]
        if observer is not None:
            observer.async_written(handle, None, ("cp", w, group))
        groups.done(w, group, 0, 1)

    w.launch.scheduler.submit(complete)


def arrive_after_copies(w: Warp, at: int, addresses: Array, mask: Array | None, counts_itself: bool) -> None:
    """cp.async.mbarrier.arrive{.noinc}: an arrival for each thread when its copies so far have landed."""
    lanes = groups.lanes(mask)
    found = groups.queue(w, "cp")
    waiting = [g for g in (*found.closed, found.open) if g.writing]
    observer = w.block.cluster.observer
    targets: dict[int, int] = {}
    for lane in lanes:
        targets[int(addresses[lane])] = targets.get(int(addresses[lane]), 0) + 1
    for address, count in targets.items():
        barrier = find(w, at, address, "cp.async.mbarrier.arrive")
        if not counts_itself:
            barrier.pending += count
        Arrival(w, at, barrier, count, waiting, observer).start()


class Arrival:
    """Arrivals at a barrier that happen when cp.async groups have landed."""

    def __init__(
        self, w: Warp, at: int, barrier: MBarrier, count: int, waiting: list[groups.Group], observer: Any
    ) -> None:
        self.w, self.at, self.barrier, self.count, self.waiting, self.observer = (
            w,
            at,
            barrier,
            count,
            waiting,
            observer,
        )
        self.snapshot = observer.cp_snapshot(w) if observer is not None else None

    def start(self) -> None:
        self.w.launch.scheduler.submit(self._try)

    def _try(self) -> None:
        if any(group.writing for group in self.waiting):
            self.w.launch.scheduler.pending.append(self._try)
            return
        if self.count > self.barrier.pending and self.observer is not None:
            self.observer.report(
                "arrival_overflow",
                self.w,
                self.at,
                f"{self.count} arrivals where {self.barrier.pending} are pending; {self.barrier.describe()}",
                barrier=self.barrier,
            )
        if self.observer is not None:
            self.observer.cp_arrived(self.w, self.barrier, self.snapshot)
        self.barrier.arrive(min(self.count, self.barrier.pending))


def load(w: Warp, at: int, to: int, source: int, size: int, bar: int, multicast: int | None, from_shared: bool) -> None:
    """cp.async.bulk into shared memory, completing on an mbarrier; from global or another block's shared memory."""
    check_run(w, at, size, to, source)
    to = strip(to)
    if from_shared:
        source_block, source_offset = shared_run(w, at, source, size, "source")
        origin = source_block.shared.data
    else:
        region, source_offset = global_run(w, at, source, size)
        origin = region.data
    if size == 0:
        return
    targets = targets_of(w, at, to, strip(bar), multicast)
    observer, trace = w.block.cluster.observer, w.launch.trace
    if from_shared and observer is not None:
        observer.async_read(w, at, source_block, chunks_of(source_offset, size), None)
    for address, barrier_address in targets:
        block, offset = shared_run(w, at, address, size, "destination")
        barrier = find(w, at, barrier_address, "cp.async.bulk")
        written = None
        if observer is not None:
            written = observer.async_write(w, at, block, chunks_of(offset, size), CHUNK, "cp.async.bulk", barrier)
        mark = trace.copy_begins(w, at, block, size) if trace is not None else None

        def complete(
            block: Any = block, offset: int = offset, barrier: Any = barrier, written: Any = written, mark: Any = mark
        ) -> None:
            if mark is not None:
                trace.copy_ends(mark)
            block.shared.data[offset : offset + size] = origin[source_offset : source_offset + size]
            if observer is not None:
                observer.async_written(written, barrier, None)
            barrier.complete_tx(size)

        w.launch.scheduler.submit(complete)


def targets_of(w: Warp, at: int, to: int, bar: int, multicast: int | None) -> list[tuple[int, int]]:
    """(destination, barrier) addresses: one pair, or one a block of a multicast at the same offsets."""
    if multicast is None:
        return [(to, bar)]
    low = (1 << RANK_SHIFT) - 1
    blocks = len(w.block.cluster.blocks)
    if multicast >> blocks:
        access.trap(w, at, f"multicast mask {multicast:#x} in a cluster of {blocks} blocks")
    ranks = [rank for rank in range(blocks) if multicast >> rank & 1]
    return [((to & low) | rank << RANK_SHIFT, (bar & low) | rank << RANK_SHIFT) for rank in ranks]


def store(w: Warp, at: int, lane: int, to: int, source: int, size: int, operation: str, kind: str) -> None:
    """cp.async.bulk and cp.reduce.async.bulk from shared to global memory, in the thread's bulk group."""
    check_run(w, at, size, to, source)
    block, offset = shared_run(w, at, source, size, "source")
    region, target = global_run(w, at, to, size)
    if not region.is_writable:
        access.trap(w, at, f"a bulk store into {region.name}, which is read-only")
    if size == 0:
        return
    group = groups.queue(w, "bulk", lane).open
    chunks = chunks_of(offset, size)

    def write(data: Array) -> None:
        place = region.data[target : target + size]
        reduce_into(place, data, operation, kind)

    store_later(w, at, lane, block, chunks, lambda: block.shared.data[offset : offset + size].copy(), write, group)


def store_later(
    w: Warp, at: int, lane: int, block: Any, chunks: Array, read: Any, write: Any, group: groups.Group
) -> None:
    """Submit the two halves of a store: reading shared memory, then writing global memory."""
    group.reading += 1
    group.writing += 1
    group.issued_at = at
    observer = w.block.cluster.observer
    if observer is not None:
        observer.async_read(w, at, block, chunks, (lane, group))
    scheduler = w.launch.scheduler

    def finish(data: Any) -> None:
        write(data)
        groups.done(w, group, 0, 1)

    def begin() -> None:
        data = read()
        groups.done(w, group, 1, 0)
        scheduler.submit(lambda: finish(data))

    scheduler.submit(begin)


_TYPES: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b32": np.uint32,
    "b64": np.uint64,
}


def reduce_into(place: Array, data: Array, operation: str, kind: str) -> None:
    """Copy or reduce a run of bytes into another."""
    if not operation:
        place[:] = data
        return
    dtype = np.dtype(_TYPES[kind])
    old = np.frombuffer(place.tobytes(), dtype)
    place[:] = atomics.apply(operation, old, data.view(dtype)).view(np.uint8)


RUNTIME["bulk"] = sys.modules[__name__]
