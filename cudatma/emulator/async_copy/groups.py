"""Bulk groups and cp.async groups: groups of asynchronous operations that a thread can wait for.

Source: PTX ISA, "cp.async.bulk.commit_group", "cp.async.bulk.wait_group", "cp.async.commit_group",
"cp.async.wait_group".
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np

from cudatma.emulator.machine.state import Split, Warp
from cudatma.emulator.ptx.types import Array, active_lanes, lane_bits
from cudatma.emulator.ptx.writer import RUNTIME
from cudatma.errors import counted


@dataclass(slots=True, eq=False)
class Group:
    """A group of operations that a thread waits for.

    ``reading`` counts the sources that have not been read, and ``writing`` counts the results that have not been
    written.
    """

    number: int
    reading: int = 0
    writing: int = 0
    waiters: list[Split] = field(default_factory=list)
    waited: int = 0
    issued_at: int = -1
    #: Lanes that have issued a cp.async in this group, as bits.
    lanes: int = 0
    #: Thread of a bulk group, or queue of a cp.async group (0 for the queue of the whole warp).
    owner: int = 0
    tokens: list[list[Group]] = field(default_factory=list)
    #: Whether this is the part of a group that an mbarrier arrival covers. The next commit closes the remaining part.
    is_part: bool = False

    def begin(self, lanes: Array) -> list[Group]:
        """Record that these lanes start a cp.async. Return the list of groups that must count its completion.

        If the lanes diverge later, the list grows.
        """
        self.writing += 1
        self.lanes |= int(np.bitwise_or.reduce(_BITS[lanes]))
        self.tokens = [token for token in self.tokens if token[0].writing]
        self.tokens.append([self])
        return self.tokens[-1]


@dataclass(slots=True, eq=False)
class Queue:
    """Groups of a thread (bulk) or of lanes that have committed the same groups (cp.async), in order.

    ``open`` contains the operations since the last commit. ``lanes`` (bits) is used only for cp.async.
    """

    open: Group = field(default_factory=lambda: Group(0))
    closed: list[Group] = field(default_factory=list)
    count: int = 0
    lanes: int = 0xFFFFFFFF
    owner: int = 0

    def commit(self) -> None:
        """Close the open group."""
        group = self.open
        group.number = self.count
        self.count += 1
        self.closed.append(group)
        self.open = Group(self.count, owner=self.owner)

    def seal(self) -> None:
        """Separate the copies that an arrival covers from later copies in the same group."""
        if self.open.issued_at >= 0:
            self.open.is_part = True
            self.commit()
            self.closed = [group for group in self.closed if group.writing or not group.is_part]

    def committed(self, newest: int) -> list[Group]:
        """Return the committed groups, with their parts, except the ``newest`` most recent ones."""
        ends = [place for place, group in enumerate(self.closed) if not group.is_part]
        last = len(ends) - newest
        return self.closed[: ends[last - 1] + 1] if last > 0 else []

    def split(self, lanes: int, owner: int) -> Queue:
        """Return a new queue for diverging lanes that contains the groups that were committed together."""
        mine, rest = self.open, Group(self.count, owner=self.owner)
        if not mine.lanes & lanes:
            mine, rest = rest, mine
        elif mine.lanes & ~lanes:
            rest.lanes, mine.lanes = mine.lanes & ~lanes, mine.lanes & lanes
            for token in [token for token in mine.tokens if mine in token]:
                token.append(rest)
            rest.writing, rest.tokens = mine.writing, list(mine.tokens)
        self.open, self.lanes = rest, self.lanes & ~lanes
        return Queue(mine, list(self.closed), self.count, lanes, owner)


@dataclass(slots=True)
class GroupWait:
    """A wait of a split for groups."""

    group: Group
    at: int
    what: str
    may_time_out: bool = False

    def describe(self) -> str:
        left = f"{counted(self.group.reading, 'read')} and {counted(self.group.writing, 'write')} pending"
        return f"{self.what}: group {self.group.number} has {left}"


def queue(w: Warp, lane: int) -> Queue:
    """Return the bulk groups of a thread."""
    queues: dict[int, Queue] = w.async_state.setdefault("bulk", {})
    own = queues.get(lane)
    if own is None:
        own = queues[lane] = Queue(Group(0, owner=lane), owner=lane)
    return own


def copy_queues(w: Warp, active: int, *, parts: bool = False) -> list[Queue]:
    """Return the cp.async queues of the active lanes.

    A warp has one queue until some of its lanes commit or wait separately. If ``parts`` is true, split queues so that
    the returned queues contain only active lanes.
    """
    queues: list[Queue] | None = w.async_state.get("cp")
    if queues is None:
        queues = w.async_state["cp"] = [Queue(lanes=lane_bits(w.alive))]
    result = []
    for part in list(queues):
        inside = part.lanes & active
        if parts and inside and inside != part.lanes:
            w.async_state["cp_owners"] = owner = w.async_state.get("cp_owners", 0) + 1
            part = part.split(inside, owner)
            queues.append(part)
        if inside:
            result.append(part)
    return result


def _reunite(w: Warp) -> None:
    """Merge the queues of a warp's lanes if no groups remain."""
    queues: list[Queue] = w.async_state["cp"]
    if len(queues) > 1 and not any(part.closed or part.open.tokens for part in queues):
        count = max(part.count for part in queues)
        w.async_state["cp"] = [Queue(Group(count), [], count, lane_bits(w.alive))]


_BITS: Array = np.left_shift(1, np.arange(32, dtype=np.int64))
ALL = 0xFFFFFFFF


def bits(mask: Array | None) -> int:
    """Return a lane mask as an integer."""
    return ALL if mask is None else lane_bits(mask)


def commit(w: Warp, kind: str, mask: Array | None) -> None:
    """Execute cp.async.bulk.commit_group or cp.async.commit_group for each active thread."""
    for part in _queues(w, kind, mask):
        part.commit()


def _queues(w: Warp, kind: str, mask: Array | None) -> list[Queue]:
    """Return the queues of the active threads.

    For cp.async, all lanes that have committed the same groups share a queue.
    """
    if kind == "bulk":
        return [queue(w, lane) for lane in active_lanes(mask)]
    return copy_queues(w, bits(mask), parts=True)


def wait(
    w: Warp, at: int, kind: str, newest: int, reads_only: bool, mask: Array | None, everything: bool = False
) -> bool:
    """Wait until at most ``newest`` groups are pending. Return whether the split must still wait.

    If ``everything`` is true (cp.async.wait_all), also wait for operations that are not yet in a group.
    """
    for part in _queues(w, kind, mask):
        if everything and part.open.issued_at >= 0:
            part.commit()
        waited = list(part.closed) if everything else part.committed(newest)
        for group in waited:
            if group.reading or (group.writing and not reads_only):
                group.waiters.append(w.split)
                name = "cp.async.bulk.wait_group" if kind == "bulk" else "cp.async.wait_group"
                w.launch.scheduler.block(w.split, GroupWait(group, at, name + (".read" if reads_only else "")))
                return True
        for group in waited:
            group.waited = max(group.waited, 1 if reads_only else 2)
        if waited:
            w.events.groups_waited(w, at, kind, waited, reads_only)
        if not reads_only:
            del part.closed[: len(waited)]
        else:
            part.closed[: len(waited)] = [g for g in waited if g.writing]
    if kind == "cp":
        _reunite(w)
    return False


def finish(w: Warp, group: Group, reads: int, writes: int) -> None:
    """Subtract completed operations from the pending operations of a group."""
    group.reading -= reads
    group.writing -= writes
    if group.waiters:
        w.launch.scheduler.wake(group.waiters)


RUNTIME["groups"] = sys.modules[__name__]
