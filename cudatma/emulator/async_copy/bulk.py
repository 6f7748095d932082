"""Execute cp.async.bulk and cp.reduce.async.bulk, which copy without a tensor map.

Source: PTX ISA, "cp.async.bulk", "cp.reduce.async.bulk", "st.async", "red.async".
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from cudatma.emulator.async_copy import groups, tensor_values
from cudatma.emulator.async_copy.mbarrier import find
from cudatma.emulator.machine import access
from cudatma.emulator.machine.events import Copy
from cudatma.emulator.machine.memory import RANK_SHIFT, Region
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import Array
from cudatma.emulator.ptx.writer import RUNTIME

CHUNK = 16


def chunks_of(offset: int, size: int) -> Array:
    """Return the offsets of the 16-byte chunks of a byte range."""
    return np.arange(offset, offset + size, CHUNK, dtype=np.int64)


def shared_run(w: Warp, at: int, address: int, size: int, what: str) -> tuple[Any, int]:
    """Return the CTA and offset of a range of shared memory. Trap if the range exceeds the memory."""
    vector = np.array([address], np.uint64)
    block, offsets = access.shared_offsets(w, at, vector, max(size, 1), True)
    return block, int(offsets[0])


def global_run(w: Warp, at: int, address: int, size: int) -> tuple[Region, int]:
    """Return the region and offset of a range of global memory."""
    region = access.global_region(w, at, np.array([address], np.uint64), size)
    if region is None:
        access.outside(w, at, address, size)
    return region, address - region.base


def check_run(w: Warp, at: int, size: int, *addresses: int) -> int:
    """Return the number of bytes that a bulk copy transfers. Trap on misaligned addresses.

    The hardware transfers whole 16-byte chunks (measured).
    """
    if any(a % CHUNK for a in addresses):
        shown = ", ".join(f"{a:#x}" for a in addresses)
        message = f"the addresses of a bulk copy must be multiples of {CHUNK}, got {size} bytes at {shown}"
        access.trap(w, at, message, "MISALIGNED_ADDRESS")
    moved = size // CHUNK * CHUNK
    if moved != size:
        message = (
            f"the size of a bulk copy must be a multiple of {CHUNK}, got {size} (the copy transfers {moved} bytes)"
        )
        w.events.violation("byte_count", w, at, message)
    return moved


def check_cluster(w: Warp, at: int, what: str) -> None:
    """Trap if the launch has no cluster dimensions, as an H200 does (measured). A cluster of one CTA is sufficient.

    The restriction applies to st.async and to bulk copies between shared memories.
    """
    if not w.launch.setup.extra.get("names_cluster", True):
        access.trap(w, at, f"{what} requires a launch with a cluster; use at least __cluster_dims__(1, 1, 1)")


def load(w: Warp, at: int, to: int, source: int, size: int, bar: int, multicast: int | None, from_shared: bool) -> None:
    """Execute cp.async.bulk from global memory, or from another CTA's shared memory, to shared memory."""
    size = check_run(w, at, size, to, source)
    if from_shared:
        check_cluster(w, at, "a bulk copy between shared memories")
        source_block, source_offset = shared_run(w, at, source, size, "source")
        origin = source_block.shared.data
    else:
        region, source_offset = global_run(w, at, source, size)
        origin = region.data
    if size == 0:
        return
    source_chunks = chunks_of(source_offset, size)
    for address, barrier_address in targets_of(w, at, to, bar, multicast):
        block, offset = shared_run(w, at, address, size, "destination")
        barrier = find(w, at, barrier_address, "cp.async.bulk")
        if from_shared:
            w.events.shared_source(w, at, source_block, source_chunks, barrier)
        else:
            w.events.global_source(w, at, region, source_chunks, barrier)
        chunks = chunks_of(offset, size)
        copy = Copy(w, at, "cp.async.bulk", block, chunks, CHUNK, barrier)
        w.events.copy_issued(copy)

        def complete(copy: Copy = copy, offset: int = offset) -> None:
            copy.block.shared.data[offset : offset + size] = origin[source_offset : source_offset + size]
            w.events.copy_landed(copy)
            copy.barrier.complete_tx(size)

        w.launch.scheduler.submit(complete)


def targets_of(w: Warp, at: int, to: int, bar: int, multicast: int | None) -> list[tuple[int, int]]:
    """Return the (destination, mbarrier) addresses of a load, one pair per destination CTA, at equal offsets."""
    if (to | bar) >> 60:
        to, bar = access.as_shared(w, at, to), access.as_shared(w, at, bar)
    if multicast is None:
        return [(to, bar)]
    low = (1 << RANK_SHIFT) - 1
    blocks = len(w.block.cluster.blocks)
    if multicast >> blocks:
        access.trap(w, at, f"multicast mask {multicast:#x} selects CTAs outside the cluster of {blocks} CTAs")
    ranks = [rank for rank in range(blocks) if multicast >> rank & 1]
    return [((to & low) | rank << RANK_SHIFT, (bar & low) | rank << RANK_SHIFT) for rank in ranks]


def store(w: Warp, at: int, lane: int, to: int, source: int, size: int, operation: str, kind: str) -> None:
    """Execute cp.async.bulk or cp.reduce.async.bulk from shared to global memory as part of the thread's bulk group."""
    size = check_run(w, at, size, to, source)
    block, offset = shared_run(w, at, source, size, "source")
    region, target = global_run(w, at, to, size)
    if not region.is_writable:
        access.trap(w, at, f"a bulk store must not write {region.name}, which is read-only")
    if size == 0:
        return
    group = groups.queue(w, lane).open
    chunks = chunks_of(offset, size)

    def write(data: Array) -> None:
        place = region.data[target : target + size]
        reduce_into(place, data, operation, kind)

    if operation or is_first(w, (at, to, source, size)):
        w.events.bulk_target(w, at, region, chunks_of(target, size), group, bool(operation))
    store_later(w, at, block, chunks, lambda: block.shared.data[offset : offset + size].copy(), write, group)


def is_first(w: Warp, store: tuple[int, ...]) -> bool:
    """Return whether no lower lane issues the same store in this execution of the instruction."""
    issued = (*store, w.launch.scheduler.steps)
    last, w.async_state["stored"] = w.async_state.get("stored"), issued
    return last != issued


def store_later(w: Warp, at: int, block: Any, chunks: Array, read: Any, write: Any, group: groups.Group) -> None:
    """Submit both parts of a store: the read of shared memory, then the write to global memory."""
    group.reading += 1
    group.writing += 1
    group.issued_at = at
    w.events.shared_source(w, at, block, chunks, group)
    scheduler = w.launch.scheduler
    stored = Copy(w, at, "store", block, chunks, CHUNK, group=group)
    w.events.store_issued(stored)

    def finish(data: Any) -> None:
        write(data)
        w.events.store_landed(stored)
        groups.finish(w, group, 0, 1)

    def begin() -> None:
        data = read()
        groups.finish(w, group, 1, 0)
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
    """Copy or reduce ``data`` into the bytes of ``place``."""
    if not operation:
        place[:] = data
        return
    dtype = np.dtype(_TYPES[kind])
    old = np.frombuffer(place.tobytes(), dtype)
    place[:] = tensor_values.combine(operation, old, data.view(dtype)).view(np.uint8)


RUNTIME["bulk"] = sys.modules[__name__]
