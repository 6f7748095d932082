"""Execute st.async, red.async, reductions between the shared memories of a cluster, and fences.

Source: PTX ISA, "st.async", "red.async", "cp.reduce.async.bulk", "membar, fence".
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np

from cudatma.emulator.async_copy import bulk
from cudatma.emulator.async_copy.mbarrier import MBarrier, find
from cudatma.emulator.machine import access
from cudatma.emulator.machine.events import Copy
from cudatma.emulator.machine.state import Block, Warp
from cudatma.emulator.ptx.types import NUMPY, Array, active_lanes
from cudatma.emulator.ptx.writer import RUNTIME


def _submit_write(
    w: Warp, at: int, block: Any, offset: int, size: int, barrier: MBarrier, action: Any, scope: str = ""
) -> None:
    """Submit a write of a few bytes that completes on an mbarrier. ``scope`` is as in Copy."""
    copy = Copy(w, at, "st.async", block, np.array([offset]), size, barrier, scope=scope)
    w.events.copy_issued(copy)

    def complete() -> None:
        action(block.shared.data[offset : offset + size])
        w.events.copy_landed(copy)
        barrier.complete_tx(size)

    w.launch.scheduler.submit(complete)


def _check_places(w: Warp, at: int, what: str, block: Block, barrier: MBarrier) -> None:
    """Report a destination and an mbarrier that are not both in one CTA other than the executing thread's CTA.

    The behavior is undefined in PTX. If both are in the thread's own CTA, an H200 executes the write, so the emulator
    only warns.
    """
    if w.block is not block is barrier.block:
        return
    message = (
        f"{what} by block {w.block.index} writes to block {block.index} and completes on an mbarrier of block "
        f"{barrier.block.index}; the destination and the mbarrier must both be in one other CTA of the cluster"
    )
    notify = w.events.warning if block is barrier.block else w.events.violation
    notify("out_of_bounds", w, at, message)


def store(w: Warp, at: int, to: Array, code: str, values: tuple[Array, ...], bar: Array, mask: Array | None) -> None:
    """Execute st.async, which stores one vector of elements per lane."""
    bulk.check_cluster(w, at, "st.async")
    access.check_aligned(w, at, access.lanes_of(to, mask), len(values) * NUMPY[code].itemsize)
    for lane in active_lanes(mask):
        data = np.array([value[lane] for value in values], NUMPY[code]).view(np.uint8)
        block, offset = bulk.shared_run(w, at, int(to[lane]), data.size, "destination")
        barrier = find(w, at, int(bar[lane]), "st.async")
        _check_places(w, at, "st.async", block, barrier)

        def write(place: Array, data: Array = data) -> None:
            place[:] = data

        _submit_write(w, at, block, offset, data.size, barrier, write)


def reduce(
    w: Warp, at: int, to: Array, operation: str, kind: str, value: Array, bar: Array, mask: Array | None
) -> None:
    """Execute red.async, which reduces one element per lane."""
    access.check_aligned(w, at, access.lanes_of(to, mask), value.itemsize)
    for lane in active_lanes(mask):
        data = value[lane : lane + 1].view(np.uint8)
        block, offset = bulk.shared_run(w, at, int(to[lane]), data.size, "destination")
        barrier = find(w, at, int(bar[lane]), "red.async")
        _check_places(w, at, "red.async", block, barrier)

        def write(place: Array, data: Array = data) -> None:
            bulk.reduce_into(place, data, operation, kind)

        _submit_write(w, at, block, offset, data.size, barrier, write, "relaxed.cluster")


def reduce_shared(w: Warp, at: int, to: int, source: int, size: int, bar: int, operation: str, kind: str) -> None:
    """Execute cp.reduce.async.bulk between the shared memories of a cluster."""
    size = bulk.check_run(w, at, size, to, source)
    bulk.check_cluster(w, at, "a bulk reduction between shared memories")
    origin, source_offset = bulk.shared_run(w, at, source, size, "source")
    block, offset = bulk.shared_run(w, at, to, size, "destination")
    barrier = find(w, at, bar, "cp.reduce.async.bulk")
    w.events.shared_source(w, at, origin, bulk.chunks_of(source_offset, size), barrier)
    chunks, what = bulk.chunks_of(offset, size), "cp.reduce.async.bulk"
    copy = Copy(w, at, what, block, chunks, bulk.CHUNK, barrier, scope="relaxed.gpu")
    w.events.copy_issued(copy)

    def complete() -> None:
        data = origin.shared.data[source_offset : source_offset + size].copy()
        bulk.reduce_into(block.shared.data[offset : offset + size], data, operation, kind)
        w.events.copy_landed(copy)
        barrier.complete_tx(size)

    w.launch.scheduler.submit(complete)


def fill(w: Warp, at: int, to: Array, size: Array, mask: Array | None) -> None:
    """Execute st.bulk, which stores zeros to shared memory. The size must be a multiple of 8 bytes."""
    for lane in active_lanes(mask):
        count = int(size[lane])
        if count % 8 or int(to[lane]) % 8:
            access.trap(w, at, f"the size and address of st.bulk must be multiples of 8, got {count} bytes")
        if not count:
            continue
        block, offset = bulk.shared_run(w, at, int(to[lane]), count, "destination")
        same = partial(_is_zero, block.shared.data[offset : offset + count])
        w.events.shared_write(w, at, block, np.arange(offset, offset + count, 8), 8, "", False, same)
        block.shared.data[offset : offset + count] = 0


def _is_zero(data: Array) -> bool:
    return not data.any()


RESPONSE_BYTES = 16


def try_cancel(w: Warp, at: int, to: Array, bar: Array, mask: Array | None, everywhere: bool) -> None:
    """Execute clusterlaunchcontrol.try_cancel, which cancels a cluster that has not started.

    The 16-byte result in the shared memory of the CTA, or of all CTAs of the cluster, contains the index of the
    canceled cluster's first CTA and a flag that is nonzero if a cluster was canceled.
    """
    access.check_aligned(w, at, access.lanes_of(to, mask), RESPONSE_BYTES)
    for lane in active_lanes(mask):
        origin = w.launch.take_cluster()
        answer = np.array([*(origin or (0, 0, 0)), origin is not None], np.uint32).view(np.uint8)
        ranks = (1 << len(w.block.cluster.blocks)) - 1 if everywhere else None
        for address, barrier_address in bulk.targets_of(w, at, int(to[lane]), int(bar[lane]), ranks):
            block, offset = bulk.shared_run(w, at, address, RESPONSE_BYTES, "destination")
            barrier = find(w, at, barrier_address, "clusterlaunchcontrol.try_cancel")

            def write(place: Array, answer: Array = answer) -> None:
                place[:] = answer

            _submit_write(w, at, block, offset, RESPONSE_BYTES, barrier, write)


def fence(w: Warp, at: int, kind: str) -> None:
    """Notify observers of a fence. The machine itself does not reorder accesses."""
    w.events.fence(w, at, kind)


def fence_map(w: Warp, at: int, addresses: Array, scope: int, mask: Array | None) -> None:
    """Execute fence.proxy.tensormap::generic.acquire for the tensor maps at the lanes' addresses."""
    w.events.map_fence(w, {int(addresses[lane]) for lane in active_lanes(mask)}, scope)


RUNTIME["remote"] = sys.modules[__name__]
