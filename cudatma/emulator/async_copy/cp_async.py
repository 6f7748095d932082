"""Execute cp.async, which copies 4 to 16 bytes per thread and completes in groups or on an mbarrier.

Source: PTX ISA, "cp.async", "cp.async.commit_group", "cp.async.wait_group", "cp.async.mbarrier.arrive".
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from cudatma.emulator.async_copy import groups
from cudatma.emulator.async_copy.bulk import global_run
from cudatma.emulator.async_copy.mbarrier import MBarrier, find
from cudatma.emulator.machine import access
from cudatma.emulator.machine.events import Copy
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import Array, active_lanes
from cudatma.emulator.ptx.writer import RUNTIME


def copy(w: Warp, at: int, to: Array, source: Array, size: int, take: Array | None, mask: Array | None) -> None:
    """Copy ``take`` bytes in each lane, and fill up to ``size`` (4, 8 or 16) bytes with zeros."""
    active = np.asarray(active_lanes(mask))
    if np.bitwise_or.reduce(to[active] | source[active]) & np.uint64(size - 1):
        access.trap(w, at, f"the addresses of a cp.async of {size} bytes must be multiples of {size}")
    for part in groups.copy_queues(w, groups.bits(mask)):
        lanes = active if part.lanes == groups.ALL else active[(part.lanes >> active & 1).astype(bool)]
        counts = np.full(len(lanes), size) if take is None else np.minimum(take[lanes].astype(np.int64), size)
        _copy_lanes(w, at, to[lanes], source[lanes], size, counts, part.open, lanes)


def _copy_lanes(
    w: Warp, at: int, to: Array, source: Array, size: int, counts: Array, group: groups.Group, lanes: Array
) -> None:
    """Start the copies of lanes that share a queue of groups."""
    block, offsets = access.shared_offsets(w, at, to, size, False)
    token = group.begin(lanes)
    group.issued_at = at
    started = Copy(w, at, "cp.async", block, offsets, size, group=group, lanes=lanes)
    w.events.copy_issued(started)
    w.events.cp_async_source(w, at, source, counts, group)
    move = _mover(w, at, block.shared.data, offsets, source, size, counts)

    def complete() -> None:
        move()
        w.events.copy_landed(started)
        for part in token:
            groups.finish(w, part, 0, 1)

    w.launch.scheduler.submit(complete)


def _mover(
    w: Warp, at: int, data: Array, offsets: Array, source: Array, size: int, counts: Array
) -> Callable[[], None]:
    """Check the addresses, and return a function that copies the bytes later."""
    whole = access.global_region(w, at, source, size) if int(counts.min()) == size else None
    if whole is not None:
        steps = np.arange(size, dtype=np.int64)
        begins = (source - np.uint64(whole.base)).view(np.int64)

        def move_all() -> None:
            data[offsets[:, None] + steps] = whole.data[begins[:, None] + steps]

        return move_all
    regions = [
        global_run(w, at, int(a), int(n)) if n else None for a, n in zip(source.tolist(), counts.tolist(), strict=True)
    ]

    def move_each() -> None:
        for offset, run, n in zip(offsets.tolist(), regions, counts.tolist(), strict=True):
            data[offset + n : offset + size] = 0
            if run is not None:
                data[offset : offset + n] = run[0].data[run[1] : run[1] + n]

    return move_each


def arrive(w: Warp, at: int, addresses: Array, mask: Array | None, counts_itself: bool) -> None:
    """Execute cp.async.mbarrier.arrive{.noinc}. Each thread arrives after its own earlier copies have completed."""
    active = groups.bits(mask)
    queues = groups.copy_queues(w, active)
    for part in queues:
        lanes = part.lanes & active
        waiting = [g for g in (*part.closed, part.open) if g.writing and g.lanes & lanes]
        targets: dict[int, int] = {}
        for lane in range(lanes.bit_length()):
            if lanes >> lane & 1:
                targets[int(addresses[lane])] = targets.get(int(addresses[lane]), 0) + 1
        for address, count in targets.items():
            barrier = find(w, at, address, "cp.async.mbarrier.arrive", False)
            if not counts_itself:
                barrier.pending += count
            _arrive_later(w, at, barrier, count, waiting)
    for part in queues:
        part.seal()


def _arrive_later(w: Warp, at: int, barrier: MBarrier, count: int, waiting: list[groups.Group]) -> None:
    """Submit arrivals on an mbarrier that take effect after the cp.async groups have completed."""
    scheduler, program = w.launch.scheduler, w.split.frame.program

    def attempt() -> None:
        if any(group.writing for group in waiting):
            scheduler.pending.append(attempt)
            return
        if count > barrier.pending:
            w.events.arrivals_over(w, program, at, barrier, count, False)
        w.events.cp_arrived(attempt, barrier)
        barrier.arrive(min(count, barrier.pending))

    w.events.cp_arrival_issued(w, attempt)
    scheduler.submit(attempt)


RUNTIME["cp_async"] = sys.modules[__name__]
