"""Divergence and reconvergence of a warp's lanes, function calls, and the end of threads.

Lanes diverge at a branch and reconverge at its immediate post-dominator. A compiler may also let diverged lanes reach
the same bar.sync or mma before they reconverge. The first lanes then wait at this instruction for the other lanes,
unless the other lanes cannot arrive.

An instruction with a member mask synchronizes the lanes in the mask. The lanes may execute different
instructions if these have the same qualifiers and the same mask.

Source: PTX ISA, "shfl.sync", "vote.sync", "match.sync", "redux.sync" ("wait until all non-exited threads corresponding
to membermask have executed" it "with the same qualifiers and same membermask value"), "bar.warp.sync", "bar", "mma"
(.aligned).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudatma.emulator.errors import EmulatorError, TrapError
from cudatma.emulator.machine import sync
from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.state import NOBODY, SWITCH, Frame, Join, Split, Warp
from cudatma.emulator.ptx.types import Array, lane_bits, lane_mask
from cudatma.emulator.ptx.writer import runtime


@dataclass(slots=True)
class Wait:
    """A wait of a split for other lanes of its warp.

    ``members`` is the (32,) mask of the lanes that must participate. Lanes can synchronize if their instructions have
    the same ``key``. ``value`` contains each lane's contribution.
    """

    split: Split
    at: int
    members: Array
    key: tuple[object, ...]
    value: Array | None = None

    @property
    def may_time_out(self) -> bool:
        """Return whether the wait may time out.

        If lanes have left a join early, this split must wait for the polling lanes.
        """
        return not self.split.warp.has_left_joins

    @property
    def is_joint(self) -> bool:
        return self.may_time_out

    @property
    def missing(self) -> Array:
        """Return the live lanes of the mask that have not arrived."""
        lanes: Array = self.members & self.split.warp.alive & ~self.split.mask
        return lanes

    def describe(self) -> str:
        return f"lanes {lane_bits(self.missing):#x} of its warp"


def release_hopeless(w: Warp) -> None:
    """Release splits that wait for lanes that have exited or wait at a join."""
    for wait in list(w.waiting):
        if not may_come(w, wait):
            w.waiting.remove(wait)
            w.launch.scheduler.wake([wait.split])


def may_come(w: Warp, wait: Wait) -> bool:
    """Return whether all missing lanes can still arrive.

    A lane cannot arrive if it is parked at a join or waits for lanes of this split.
    """
    missing = wait.missing
    coming = np.zeros_like(missing)
    for other in w.splits:
        if other is not wait.split:
            there = other.waits_for
            stuck = isinstance(there, Wait) and there.key != wait.key and (there.missing & wait.split.mask).any()
            if not stuck:
                coming |= other.mask
    return bool(missing.any()) and not (missing & ~coming).any()


MAX_CALLS = 256


@runtime
def diverge(w: Warp, taken: Array, target: int, following: int, meet: int) -> int:
    """Split the running lanes. The lanes in ``taken`` continue at ``target``, and the others at ``following``.

    The lanes reconverge at ``meet``.
    """
    split = w.split
    join = _join_at(w, split, meet)
    others = split.mask & ~taken
    for mask, pc in ((taken, target), (others, following)):
        _place(w, Split(w, pc, mask, split.frame, join))
    remove(w, split)
    return SWITCH


def _join_at(w: Warp, split: Split, meet: int) -> Join | None:
    """Return the join of two new splits that replace a split."""
    join = split.join
    if join is not None and join.at == meet and join.frame is split.frame:
        join.missing += 1
        return join
    if meet == -1 and split.frame.caller is None:
        if join is not None:
            join.missing += 1
        return join
    return Join(meet, split.frame, join, 2)


def _place(w: Warp, split: Split) -> None:
    """Add a new split to the warp. If the split starts at its join, it arrives immediately."""
    w.splits.append(split)
    join = split.join
    if join is not None and split.pc == join.at and split.frame is join.frame:
        arrive(w, split)
    else:
        w.launch.scheduler.add(split)


def remove(w: Warp, split: Split) -> None:
    w.splits.remove(split)
    w.launch.scheduler.drop(split)


def arrive(w: Warp, split: Split) -> None:
    join = split.join
    if join is None:
        raise EmulatorError("internal error: a split without a join arrived at a join")
    remove(w, split)
    join.mask = join.mask | split.mask
    count_down(w, join)
    if w.waiting:
        release_hopeless(w)


def count_down(w: Warp, join: Join) -> None:
    """Decrement the number of splits and inner joins that a join waits for, and resume execution when none remain."""
    join.missing -= 1
    if join.missing:
        return
    mask = join.mask & w.alive
    if mask.any():
        _resume(w, join, mask)
    elif join.parent is not None:
        count_down(w, join.parent)


def _resume(w: Warp, join: Join, lanes: Array) -> None:
    """Continue with the lanes that have arrived at a join."""
    frame, pc = join.frame, join.at
    if pc == -1:
        caller = frame.caller
        if caller is None:
            raise EmulatorError("internal error: a warp split has a join point at the end of the kernel")
        pc, frame = frame.return_to, caller
    _place(w, Split(w, pc, lanes, frame, join.parent))


def _release(w: Warp, lanes: Array) -> Array:
    """Release parked lanes from their joins if other lanes wait for them. Return the released lanes.

    Lanes may leave a join early because the lanes of a warp run independently. Joins improve only efficiency.
    Correctness does not depend on joins.
    """
    released = np.zeros_like(lanes)
    joins = {id(join): join for split in w.splits for join in _ancestors(split.join)}
    for join in joins.values():
        parked = join.mask & w.alive
        if (parked & lanes).any():
            join.mask = join.mask & ~parked
            released |= parked
            if join.parent is not None:
                join.parent.missing += 1
            _resume(w, join, parked)
    return released


def release_parked(w: Warp) -> bool:
    """Release all lanes that are parked at joins. Return whether any lanes were released."""
    released = bool(_release(w, w.alive).any())
    w.has_left_joins = w.has_left_joins or released
    return released


@runtime
def leave(w: Warp, mask: Array | None) -> int:
    """Return from a function in the running split, or only in the lanes of ``mask``."""
    split = w.split
    if split.frame.caller is None:
        return quit(w, mask)
    lanes = split.mask if mask is None else split.mask & mask
    rest = split.mask & ~lanes
    join = split.join
    if join is None or join.at != -1:
        raise EmulatorError("internal error: a return has no matching call")
    if rest.any():
        join.mask = join.mask | lanes
        split.mask, split.is_full = rest, False
    else:
        arrive(w, split)
    return SWITCH


@runtime
def quit(w: Warp, mask: Array | None) -> int:
    """Exit the kernel in the running split, or only in the lanes of ``mask``."""
    split = w.split
    lanes = split.mask if mask is None else split.mask & mask
    rest = split.mask & ~lanes
    w.alive = w.alive & ~lanes
    w.block.live_threads -= int(np.count_nonzero(lanes))
    if np.count_nonzero(rest):
        split.mask, split.is_full = rest, False
        if w.waiting:
            release_hopeless(w)
        sync.complete_barriers(w.block)
        return SWITCH
    remove(w, split)
    if split.join is not None:
        count_down(w, split.join)
    if w.waiting:
        release_hopeless(w)
    if w.alive.any():
        sync.complete_barriers(w.block)
    else:
        _end_warp(w)
    return SWITCH


def _end_warp(w: Warp) -> None:
    """Update the CTA and the cluster after the last lane of a warp has exited."""
    block = w.block
    block.live_warps -= 1
    if block.is_done:
        if block.cluster.is_done:
            w.events.cluster_ended()
        w.events.block_ended(block)
    w.events.warp_ended(w)
    sync.complete_barriers(block)
    if block.is_done:
        w.launch.block_ended(block)


@runtime
def call(w: Warp, program: Program, arguments: list[str], results: list[str], return_to: int) -> int:
    """Call a .func in the running split. ``arguments`` and ``results`` are names of .param variables of the caller."""
    split = w.split
    caller = split.frame
    depth, walk = 0, caller
    while walk.caller is not None:
        depth, walk = depth + 1, walk.caller
    if depth >= MAX_CALLS:
        raise TrapError(f"the call stack is exhausted because calls are nested more than {MAX_CALLS} levels deep")
    base = max(caller.local_base + caller.program.local_bytes, w.stack_top)
    frame = Frame(program, caller, return_to, base)
    w.reserve_local(frame.local_base + program.local_bytes)
    for formal, actual in zip(program.function.params, arguments, strict=True):
        frame.params[formal.name] = w.param_buffer(caller, actual, formal.size_bytes)
    for formal, actual in zip(program.function.returns, results, strict=True):
        frame.params[formal.name] = w.param_buffer(caller, actual, formal.size_bytes)
    remove(w, split)
    _place(w, Split(w, 0, split.mask, frame, Join(-1, frame, split.join, 1)))
    return SWITCH


@runtime
def meet(w: Warp, at: int) -> int:
    """Synchronize the lanes of a warp for an instruction that all of them must execute.

    Return 0 to continue, BLOCK to wait, or SWITCH if the running split has gained lanes and restarts the segment. Also
    return 0 if the missing lanes cannot arrive. The instruction then reports a hazard.
    """
    split = w.split
    if split.token is not None:  # The barrier has released this split.
        return 0
    for other in list(w.waiting):
        if other.key[0] != "all" and (other.missing & split.mask).any():  # These lanes will not arrive.
            other.split.timed_out = True
            w.waiting.remove(other)
            w.launch.scheduler.wake([other.split])
    held = _hold(w, Wait(split, at, w.alive, ("all", split.pc, id(split.frame))))
    return 0 if isinstance(held, list) else held


#: Values of all lanes that have synchronized at an instruction with a member mask, and the groups in which they
#: synchronized.
Met = tuple[Array | None, tuple[Array, ...]]


@runtime
def gather(w: Warp, at: int, what: str, members: Array, value: Array | None, following: int) -> int | Met:
    """Synchronize the lanes in a member mask. Each lane may execute a different instruction of the same kind.

    Return an int if the running split must wait or has changed. ``following`` is the segment after the instruction.
    """
    split = w.split
    met: Met | None = split.token
    if met is not None:  # The last lane to arrive has released this split.
        split.token = None
        return met
    groups = sync.groups_of(members, split.mask)
    if all((lanes | ~lane_mask(bits) | ~w.alive).all() for bits, lanes in groups):
        _complete_meeting(w, at, what, groups, [split])
        return value, tuple(lanes for _, lanes in groups)
    if len(groups) > 1:
        return diverge(w, groups[0][1], split.pc, split.pc, following)
    mask = groups[0][0]
    held = _hold(w, Wait(split, at, lane_mask(mask), (what, mask), value))
    if not isinstance(held, list):
        return held
    lanes = split.mask
    for other in held:
        lanes = lanes | other.split.mask
        if value is not None and other.value is not None:
            value = np.where(other.split.mask, other.value, value)
    _complete_meeting(w, at, what, [(mask, lanes)], [split, *(other.split for other in held)])
    met = value, (lanes,)
    for other in held:
        other.split.token = met
    w.launch.scheduler.wake([other.split for other in held])
    return met


def _complete_meeting(w: Warp, at: int, what: str, groups: list[sync.Group], splits: list[Split]) -> None:
    """Complete the synchronization of splits, and report lanes that exited without executing the instruction."""
    sync.meet(w, at, what, groups)
    for split in splits:
        if (split.released & ~w.alive).any():
            message = f"the mask of {what} includes lanes that exit without executing it, while other lanes wait"
            w.events.violation("divergent_warp", w, at, message)
        split.released = NOBODY


def _hold(w: Warp, wait: Wait) -> int | list[Wait]:
    """Make the running split wait for the missing lanes.

    Return a scheduler code if the split blocks or was merged, otherwise the waits to release.
    """
    split = wait.split
    w.waiting[:] = [known for known in w.waiting if known.split is not split]
    partners = [known for known in w.waiting if known.key == wait.key and (known.split.mask & wait.missing).any()]
    here = [known.split for known in partners if known.split.pc == split.pc and known.split.frame is split.frame]
    for other in here:
        _absorb(w, split, other)
    if here:
        return SWITCH
    timed_out, split.timed_out = split.timed_out, False
    missing = wait.missing
    for known in partners:
        missing = missing & ~known.split.mask
    if missing.any() and not timed_out:
        while wait.key[0] != "all" and not may_come(w, wait) and (released := _release(w, missing)).any():
            split.released = split.released | (released & missing)
        if may_come(w, wait):
            w.waiting.append(wait)
            return w.launch.scheduler.block(split, wait)
    w.waiting[:] = [known for known in w.waiting if known not in partners]
    return partners


def _absorb(w: Warp, split: Split, other: Split) -> None:
    """Merge two splits at the same place.

    The merged split continues to the innermost join that both splits would have reached.
    """
    w.waiting[:] = [wait for wait in w.waiting if wait.split is not other]
    remove(w, other)
    split.widen(other.mask)
    above = _ancestors(split.join)
    common = next((join for join in _ancestors(other.join) if any(join is known for known in above)), None)
    left = [join for join in (split.join, other.join) if join is not None and join is not common]
    if common is not None:
        common.missing += len(left) - 1
    split.join = common
    for join in left:
        count_down(w, join)


def _ancestors(join: Join | None) -> list[Join]:
    ancestors: list[Join] = []
    while join is not None:
        ancestors.append(join)
        join = join.parent
    return ancestors
