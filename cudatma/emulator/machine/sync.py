"""Barriers of CTAs (bar), clusters (barrier.cluster) and warps (bar.warp.sync).

Source: PTX ISA, "bar, barrier", "barrier.cluster", "bar.warp.sync".
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from cudatma.emulator.errors import TrapError
from cudatma.emulator.machine.state import Block, Cluster, NamedBarrier, Warp
from cudatma.emulator.ptx.types import LANES, Array, lane_bits
from cudatma.emulator.ptx.writer import RUNTIME, runtime


@dataclass(slots=True)
class NamedWait:
    """A split's wait at bar.sync."""

    barrier: NamedBarrier
    at: int
    may_time_out: bool = False

    def describe(self) -> str:
        expected = "all threads" if self.barrier.expected is None else f"{self.barrier.expected} threads"
        return f"bar.sync {self.barrier.number} ({self.barrier.arrived} of {expected} have arrived)"


@dataclass(slots=True)
class ClusterWait:
    """A split's wait at barrier.cluster.wait."""

    cluster: Cluster
    at: int
    may_time_out: bool = False

    def describe(self) -> str:
        return f"barrier.cluster.wait ({len(self.cluster.barrier.arrived)} warps have arrived)"


def executing(w: Warp) -> Array:
    """Return the lanes that execute the current instruction, which are the split's lanes whose guard is true."""
    return w.split.mask if w.guard is None else w.split.mask & w.guard


def _arrive(w: Warp, at: int, number: Array, count: Array | None, aligned: bool) -> NamedBarrier:
    """Count the arrival of the running split on a named barrier."""
    here = executing(w)
    lane = int(here.argmax())
    index = int(number[lane])
    if index > 15:
        raise TrapError(f"the barrier number must be from 0 to 15, got {index}")
    barrier = w.block.barriers[index]
    w.meetings += 1
    if aligned and not (here == w.alive).all():
        message = f"bar.sync {index} is executed only by {_lanes(here)}, not by the other lanes of the warp"
        w.events.violation("divergent_barrier", w, at, message)
    w.events.barrier_arrived(w, barrier)
    # PTX ISA: "the arrival count is incremented by the warp size, not the number of active threads in the warp."
    threads = int((w.alive if aligned else here).sum())
    expected = None if count is None else int(count[lane])
    if expected is not None and expected % LANES:
        raise TrapError(f"the thread count of bar.sync {index} must be a multiple of 32, got {expected}")
    others = barrier.expected if barrier.arrived else None
    if expected is not None and others is not None and expected != others:
        message = (
            f"barrier {index} expects {expected} threads here, but {others} threads in other warps of the same phase"
        )
        w.events.violation("barrier_count", w, at, message)
    if expected is not None:
        barrier.expected = expected
        threads = LANES if aligned else threads
    barrier.arrived += threads
    return barrier


def _lanes(mask: Array) -> str:
    count = int(mask.sum())
    return f"lane {int(mask.argmax())}" if count == 1 else f"{count} lanes"


def complete_named(block: Block, barrier: NamedBarrier) -> bool:
    """Release the waiters of a named barrier if all threads have arrived. Return whether the barrier is complete."""
    expected = block.live_threads if barrier.expected is None else barrier.expected
    if barrier.arrived < expected or barrier.arrived == 0:
        return False
    barrier.arrived, barrier.expected = 0, None
    block.cluster.events.barrier_completed(barrier, [split.warp for split in barrier.waiters])
    results = _reduced(barrier)
    for split in barrier.waiters:
        split.token = results if results is not None else True
    scheduler = block.launch.scheduler
    if results is None:
        scheduler.synchronize(barrier.waiters)
    else:
        scheduler.wake(barrier.waiters)
    return True


def _reduced(barrier: NamedBarrier) -> tuple[int, bool, bool] | None:
    """Return the popc, AND and OR reductions over all threads, or None if no thread has executed bar.red."""
    if not barrier.reductions:
        return None
    votes = np.concatenate([predicate[mask] for _, mask, predicate in barrier.reductions])
    barrier.reductions.clear()
    return int(votes.sum()), bool(votes.all()), bool(votes.any())


def named_sync(w: Warp, at: int, number: Array, count: Array | None, aligned: bool) -> bool:
    """Execute bar.sync and return whether the split must wait. A split released by a barrier has a token."""
    split = w.split
    if split.token is not None:
        split.token = None
        return False
    barrier = _arrive(w, at, number, count, aligned)
    barrier.waiters.append(split)
    w.launch.scheduler.block(split, NamedWait(barrier, at))
    complete_named(w.block, barrier)
    return True


def named_arrive(w: Warp, at: int, number: Array, count: Array | None, aligned: bool) -> None:
    """Execute bar.arrive, which does not wait."""
    complete_named(w.block, _arrive(w, at, number, count, aligned))


def named_reduce(
    w: Warp, at: int, number: Array, count: Array | None, predicate: Array, kind: str, aligned: bool
) -> Array | None:
    """Execute bar.red and return the reduction over all threads, or None while the split must wait."""
    split = w.split
    if split.token is not None:
        total, every, some = split.token
        split.token = None
        if kind == "popc":
            return np.full(LANES, total, np.uint32)
        return np.full(LANES, every if kind == "and" else some)
    barrier = _arrive(w, at, number, count, aligned)
    barrier.reductions.append((split, executing(w), predicate))
    barrier.waiters.append(split)
    w.launch.scheduler.block(split, NamedWait(barrier, at))
    complete_named(w.block, barrier)
    return None


#: A member mask, and the lanes that execute an instruction with this mask.
Group = tuple[int, Array]


def groups_of(members: Array, here: Array) -> list[Group]:
    """Group the executing lanes by their member masks."""
    first = int(members[here.argmax()])
    if (members[here] == first).all():
        return [(first, here)]
    return [(bits, here & (members == bits)) for bits in np.unique(members[here]).tolist()]


def meet(w: Warp, at: int, what: str, groups: list[Group]) -> None:
    """Synchronize the lanes of each member mask.

    Report a mask that omits executing lanes or includes live lanes that do not execute the instruction. PTX ISA,
    "shfl.sync": the behavior is undefined if the executing thread is not in the membermask.
    """
    alive = lane_bits(w.alive)
    named = {bits & alive for bits, _ in groups}
    if alive in named:
        w.meetings += 1
    else:
        w.part_meetings += 1
        w.events.lanes_met(w, named)
    for bits, lanes in groups:
        here = lane_bits(lanes)
        if outside := here & ~bits:
            message = f"lanes {outside:#x} execute {what}, but its member mask does not include them"
            w.events.violation("divergent_warp", w, at, message)
        if missing := bits & alive & ~here:
            message = f"{what} includes lanes {missing:#x} in its mask {bits:#x}, but they do not execute it"
            w.events.violation("divergent_warp", w, at, message)


@runtime
def all_meet(w: Warp, at: int, what: str, members: Array) -> tuple[Array, ...]:
    """Return the groups of lanes that synchronize when a full warp executes an instruction with a member mask."""
    groups = groups_of(members, w.split.mask)
    meet(w, at, what, groups)
    return tuple(lanes for _, lanes in groups)


@runtime
def check_whole_warp(w: Warp, at: int, mask: Array | None, what: str) -> None:
    """Report an .aligned instruction that only some threads of the warp (``mask``) execute.

    The behavior of MMAs, matrix loads and matrix stores is also undefined if a thread of the warp has exited.
    """
    here = w.split.mask if mask is None else mask
    if here.all():
        return
    missing = lane_bits(w.alive & ~here)
    exited = np.arange(LANES * w.index, LANES * (w.index + 1)) < w.block.threads
    exited &= ~w.alive
    if missing:
        message = f"all threads of a warp must execute {what}, but lanes {missing:#x} do not"
    elif what.startswith(("mma", "wmma", "ldmatrix", "stmatrix", "movmatrix")) and exited.any():
        message = f"all threads of a warp must execute {what}, but lanes {lane_bits(exited):#x} have exited"
    else:
        return
    w.events.violation("divergent_warp", w, at, message)


def cluster_arrive(w: Warp, at: int, release: bool) -> None:
    cluster = w.block.cluster
    arrived = cluster.barrier.arrived
    here, phases = executing(w), _cluster_phases(w)
    twice = here & (phases >= 0)
    arrived[w.agent] = arrived.get(w.agent, 0) + int((here & (phases < cluster.barrier.phase)).sum())
    if twice.any():
        message = f"{_lanes(twice)} of the warp arrived twice without barrier.cluster.wait in between"
        w.events.violation("arrival_overflow", w, at, message)
    w.events.cluster_arrived(w, release)
    phases[here] = cluster.barrier.phase
    complete_cluster(cluster)


def _cluster_phases(w: Warp) -> Array:
    """Return, for each lane, the phase of the cluster barrier at which it has arrived but not waited, or -1."""
    phases: Array = w.async_state.setdefault("cluster_phases", np.full(LANES, -1, np.int64))
    return phases


def complete_cluster(cluster: Cluster) -> None:
    """Complete the phase of the cluster barrier if all live threads have arrived."""
    barrier = cluster.barrier
    if not barrier.arrived or any(len(block.warps) < block.warp_count for block in cluster.blocks):
        return
    for block in cluster.blocks:
        for warp in block.warps:
            if barrier.arrived.get(warp.agent, 0) < int(warp.alive.sum()):
                return
    barrier.arrived.clear()
    barrier.phase += 1
    cluster.events.cluster_completed()
    cluster.launch.scheduler.synchronize(barrier.waiters)


def cluster_wait(w: Warp, at: int, acquire: bool) -> bool:
    """Execute barrier.cluster.wait and return whether the split must wait."""
    cluster = w.block.cluster
    here, phases = executing(w), _cluster_phases(w)
    if (phases[here] < 0).any():
        raise TrapError("barrier.cluster.wait is executed before barrier.cluster.arrive")
    if cluster.barrier.phase > phases[here].max():
        phases[here] = -1
        w.events.cluster_waited(w)
        return False
    cluster.barrier.waiters.append(w.split)
    cluster.launch.scheduler.block(w.split, ClusterWait(cluster, at))
    return True


def complete_barriers(block: Block) -> None:
    """Complete barriers whose missing threads have all exited."""
    for barrier in block.barriers:
        if barrier.waiters:
            complete_named(block, barrier)
    complete_cluster(block.cluster)


def grid_wait(w: Warp) -> None:
    """Execute griddepcontrol.wait. The previous grid has already finished, and its writes are visible."""
    w.events.grid_waited(w)


RUNTIME["sync"] = sys.modules[__name__]
