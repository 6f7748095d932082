"""Bulk groups and cp.async groups: what a thread has started and what it may wait for.

Source: PTX ISA, "cp.async.bulk.commit_group", "cp.async.bulk.wait_group", "cp.async.commit_group",
"cp.async.wait_group".
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cudatma.emulator.machine import Split, Warp
from cudatma.emulator.types import LANES, Array
from cudatma.emulator.writer import RUNTIME


@dataclass(slots=True, eq=False)
class Group:
    """Operations that are waited for together. reading: sources yet to be read; writing: results yet to be written."""

    number: int
    reading: int = 0
    writing: int = 0
    waiters: list[Split] = field(default_factory=list)
    waited: int = 0
    issued_at: int = -1


@dataclass(slots=True, eq=False)
class Queue:
    """The groups of one thread (bulk) or warp (cp.async), in order; ``open`` collects until the next commit."""

    open: Group = field(default_factory=lambda: Group(0))
    closed: list[Group] = field(default_factory=list)
    count: int = 0

    def commit(self) -> None:
        """Close the open group."""
        group = self.open
        group.number = self.count
        self.count += 1
        self.closed.append(group)
        self.open = Group(self.count)


@dataclass(slots=True)
class GroupWait:
    """A split that waits for groups."""

    group: Group
    at: int
    what: str
    may_time_out: bool = False

    def describe(self) -> str:
        left = f"{self.group.reading} reads and {self.group.writing} writes left"
        return f"{self.what}: group {self.group.number} has {left}"


def queue(w: Warp, kind: str, lane: int = 0) -> Queue:
    """The queue of a thread; cp.async is counted for the warp as a whole."""
    queues: dict[Any, Queue] = w.async_state.setdefault(kind, {})
    found = queues.get(lane)
    if found is None:
        found = queues[lane] = Queue()
    return found


def lanes(mask: Array | None) -> list[int]:
    return list(range(LANES)) if mask is None else np.flatnonzero(mask).tolist()


def commit(w: Warp, kind: str, mask: Array | None) -> None:
    """cp.async.bulk.commit_group for each active thread; cp.async.commit_group for the warp."""
    for lane in lanes(mask) if kind == "bulk" else [0]:
        queue(w, kind, lane).commit()


def wait(
    w: Warp, at: int, kind: str, newest: int, reads_only: bool, mask: Array | None, everything: bool = False
) -> bool:
    """Wait until at most ``newest`` groups are pending; True while the split has to wait.

    everything: cp.async.wait_all, which also waits for operations of no group yet.
    """
    for lane in lanes(mask) if kind == "bulk" else [0]:
        found = queue(w, kind, lane)
        if everything and (found.open.writing or found.open.reading):
            commit(w, kind, mask)
        waited = found.closed[: len(found.closed) - newest] if newest else found.closed
        for group in waited:
            if group.reading or (group.writing and not reads_only):
                group.waiters.append(w.split)
                name = "cp.async.bulk.wait_group" if kind == "bulk" else "cp.async.wait_group"
                w.launch.scheduler.block(w.split, GroupWait(group, at, name + (".read" if reads_only else "")))
                return True
        for group in waited:
            group.waited = max(group.waited, 1 if reads_only else 2)
        observer = w.block.cluster.observer
        if observer is not None and waited:
            observer.groups_waited(w, at, kind, lane, waited[-1], reads_only)
        if not reads_only:
            del found.closed[: len(waited)]
        else:
            found.closed[: len(waited)] = [g for g in waited if g.writing]
    return False


def done(w: Warp, group: Group, reads: int, writes: int) -> None:
    """A part of a group's work is finished."""
    group.reading -= reads
    group.writing -= writes
    if group.waiters:
        w.launch.scheduler.wake(group.waiters)


RUNTIME["groups"] = sys.modules[__name__]
