"""Vector clocks, which contain the accesses that happen before the current instruction of a warp or some of its lanes.

Agents are numbered within each cluster, and a clock is a vector with one entry per agent. ``Clock.far`` contains state
that most clocks do not need: clocks of other clusters, fences, and flags that were read but not acquired.

Source: PTX ISA, "Memory Consistency Model": causality order, release and acquire patterns, proxies; "bar.warp.sync".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatma.emulator.ptx.types import LANES, SCOPES, Array

#: Key of fence.mbarrier_init in Far.fenced. A relaxed barrier.cluster.arrive after the fence publishes the clock with
#: this key.
INITS = -1


def scope_of(order: str) -> int:
    """Return the scope of a strong access from its order, such as "relaxed.gpu", "volatile" or "acquire.cta"."""
    return SCOPES.get(order.rpartition(".")[2], SCOPES["gpu"])


def strength_of(order: str) -> int:
    """Return 0 for a weak access, and 1 + its scope for a strong access."""
    return 0 if not order or order == "nc" else 1 + scope_of(order)


def releases(order: str) -> bool:
    return order.startswith(("release", "acq_rel"))


def acquires(order: str) -> bool:
    return order.startswith(("acquire", "acq_rel"))


def _maximum(left: Array | None, right: Array | None) -> Array | None:
    if left is None or right is None or left is right:
        return right if left is None else left
    result: Array = np.maximum(left, right)
    return result


def join_clocks(mine: dict[Any, Clock], theirs: dict[Any, Clock]) -> None:
    """Join each clock of ``theirs`` into the clock of ``mine`` with the same key."""
    for key, clock in theirs.items():
        known = mine.get(key)
        mine[key] = clock if known is None or known is clock else joined(known, clock)


class Far:
    """Extension of a clock beyond the happens-before order inside a cluster.

    Vectors in this object are replaced but never modified.

    Attributes
    ----------
    performed
        Accesses that have been performed, but whose writes might not be visible yet. A thread of another CTA obtains
        this clock through an mbarrier whose arrive or wait has CTA scope. The clock orders a write after reads and
        completed copies.
    proxy
        Accesses that a proxy fence has made visible to the async proxy in global memory.
    proxy_of
        Maps a CTA rank to accesses that a proxy fence has made visible to the async proxy in this CTA's shared memory.
        ``Clock.proxy`` contains the accesses that are visible in the shared memory of all CTAs.
    others
        Maps the number of another cluster to its (order, proxy) vectors, where ``proxy`` is defined as above.
    fenced
        Maps a scope to accesses that a fence has prepared for publication by a strong write.
    maps
        Maps (address, scope) to accesses that an acquiring fence has made visible to reads of a tensor map.
    seen
        Maps the scope of the required fence to accesses that relaxed reads have observed but no fence has acquired.
    """

    __slots__ = ("fenced", "maps", "others", "performed", "proxy", "proxy_of", "seen")

    def __init__(self) -> None:
        self.performed: Array | None = None
        self.proxy: Array | None = None
        self.proxy_of: dict[int, Array] = {}
        self.others: dict[int, tuple[Array, Array]] = {}
        self.fenced: dict[int, Clock] = {}
        self.maps: dict[tuple[int, int], Clock] = {}
        self.seen: dict[int, Clock] = {}

    def copy(self) -> Far:
        result = Far()
        result.performed, result.proxy = self.performed, self.proxy
        result.proxy_of, result.others = dict(self.proxy_of), dict(self.others)
        result.fenced, result.maps, result.seen = dict(self.fenced), dict(self.maps), dict(self.seen)
        return result

    def join(self, other: Far) -> None:
        self.performed = _maximum(self.performed, other.performed)
        self.proxy = _maximum(self.proxy, other.proxy)
        for rank, proxy in other.proxy_of.items():
            self.fence_proxy_of(rank, proxy)
        for number, (order, proxy) in other.others.items():
            self.learn(number, order, proxy)
        join_clocks(self.fenced, other.fenced)
        join_clocks(self.maps, other.maps)
        join_clocks(self.seen, other.seen)

    def fence_proxy_of(self, rank: int, order: Array) -> None:
        """Record that a proxy fence has made these accesses visible in the shared memory of a CTA."""
        known = self.proxy_of.get(rank)
        self.proxy_of[rank] = order if known is None else np.maximum(known, order)

    def learn(self, number: int, order: Array, proxy: Array) -> None:
        """Join newly ordered accesses into the clock of another cluster."""
        known = self.others.get(number)
        if known is not None:
            if known[0] is order and known[1] is proxy:
                return
            order, proxy = np.maximum(known[0], order), np.maximum(known[1], proxy)
        self.others[number] = order, proxy


class Clock:
    """Accesses, by any agent, that happen before the current instruction.

    ``order`` contains all these accesses. ``proxy`` contains the shared-memory accesses that a proxy fence has also
    made visible to the async proxy.
    """

    __slots__ = ("far", "order", "proxy")

    def __init__(self, size: int) -> None:
        self.order: Array = np.zeros(size, np.int32)
        self.proxy: Array = np.zeros(size, np.int32)
        self.far: Far | None = None

    def join(self, other: Clock) -> None:
        np.maximum(self.order, other.order, out=self.order)
        np.maximum(self.proxy, other.proxy, out=self.proxy)
        if other.far is not None:
            self.beyond().join(other.far)

    def copy(self) -> Clock:
        result = Clock(0)
        result.order, result.proxy = self.order.copy(), self.proxy.copy()
        if self.far is not None:
            result.far = self.far.copy()
        return result

    def bare(self) -> Clock:
        """Return a copy for a release to publish, without the state of pending fences and relaxed reads."""
        result = self.copy()
        if result.far is not None:
            result.far.fenced, result.far.maps, result.far.seen = {}, {}, {}
        return result

    def performed(self) -> Array:
        """Return the accesses that have been performed: those in ``order`` and in ``Far.performed``."""
        far = self.far
        if far is None or far.performed is None:
            return self.order
        result: Array = np.maximum(self.order, far.performed)
        return result

    def proxy_in(self, rank: int) -> Array:
        """Return the accesses that are visible to the async proxy in the shared memory of the CTA with this rank."""
        own = self.far.proxy_of.get(rank) if self.far is not None else None
        if own is None:
            return self.proxy
        result: Array = np.maximum(self.proxy, own)
        return result

    def note(self, scope: int, number: int, clock: Clock, own: int) -> None:
        """Store the clock observed by a relaxed read until a fence of this scope acquires it.

        ``number`` and ``own`` have the same meaning as in absorb().
        """
        seen = self.beyond().seen
        noted = Clock(self.order.size) if scope not in seen else seen[scope].copy()
        noted.absorb(number, clock, own)
        seen[scope] = noted

    def beyond(self) -> Far:
        """Return ``far``. The first call creates it."""
        if self.far is None:
            self.far = Far()
        return self.far

    def absorb(self, number: int, clock: Clock, own: int) -> None:
        """Join a clock that a warp of cluster ``number`` has released. ``own`` is the cluster of this clock."""
        if number == own:
            self.join(clock)
            return
        far = clock.far
        proxy = None if far is None else far.proxy
        mine = self.beyond()
        mine.learn(number, clock.order, np.zeros_like(clock.order) if proxy is None else proxy)
        for other, (order, fenced) in far.others.items() if far is not None else ():
            if other != own:
                mine.learn(other, order, fenced)
                continue
            np.maximum(self.order, order, out=self.order)
            mine.proxy = fenced if mine.proxy is None else np.maximum(mine.proxy, fenced)

    def fence_proxy_global(self) -> None:
        """Make all ordered accesses visible to the async proxy in global memory."""
        far = self.beyond()
        far.proxy = self.order.copy()
        far.others = {number: (order, order) for number, (order, _) in far.others.items()}

    def of(self, who: Array, size: int, own: int, through_proxy: bool = False, performed: bool = False) -> Array:
        """Return the clock of each agent in ``who``.

        ``who`` is cluster number * size + agent. If ``through_proxy`` is true, the result contains only accesses that
        are visible to the async proxy. If ``performed`` is true, the result contains all accesses that have been
        performed.
        """
        number, agent = np.divmod(who, size)
        far = self.far
        near: Array | None = self.performed() if performed else self.order
        if through_proxy:
            near = far.proxy if far is not None else None
        result: Array = np.zeros(who.shape, np.int32) if near is None else near[agent]
        foreign = number != own
        if foreign.any():
            result[foreign] = 0
            for other, pair in far.others.items() if far is not None else ():
                here = number == other
                result[here] = pair[through_proxy][agent[here]]
        return result


def joined(clock: Clock, other: Clock) -> Clock:
    """Return a new clock that includes the accesses of both clocks."""
    result = clock.copy()
    result.join(other)
    return result


class LaneClocks:
    """Clocks of a warp's lanes while some lanes have acquired more accesses than others.

    These clocks exist from an acquire by some lanes until all lanes synchronize. ``meetings`` is the number of the
    warp's synchronizations before the acquire. ``parts`` contains (lane bits, clock) pairs. All other lanes have the
    clock ``whole``.
    """

    __slots__ = ("meetings", "parts", "whole")

    def __init__(self, whole: Clock, meetings: int) -> None:
        self.whole, self.meetings = whole, meetings
        self.parts: list[tuple[int, Clock]] = []

    def learners(self, lanes: int, alive: int) -> list[Clock]:
        """Return the clocks to update when these lanes acquire."""
        if lanes & alive == alive:
            return [self.whole, *(clock for _, clock in self.parts)]
        kept: list[tuple[int, Clock]] = []
        result: list[Clock] = []
        rest = lanes
        for bits, clock in self.parts:
            inside = bits & lanes
            rest &= ~bits
            if inside and inside != bits:
                kept.append((bits & ~lanes, clock))
                clock = clock.copy()
            kept.append((inside or bits, clock))
            if inside:
                result.append(clock)
        if rest:
            result.append(self.whole.copy())
            kept.append((rest, result[-1]))
        self.parts = kept
        return result

    def known(self, lanes: int) -> Clock:
        """Return the clock of the accesses that happen before the instruction in all of these lanes."""
        parts = [(bits, clock) for bits, clock in self.parts if bits & lanes]
        for bits, _ in parts:
            lanes &= ~bits
        if lanes or not parts:
            return self.whole
        if len(parts) == 1:
            return parts[0][1]
        result = parts[0][1].copy()
        for _, clock in parts[1:]:
            np.minimum(result.order, clock.order, out=result.order)
            np.minimum(result.proxy, clock.proxy, out=result.proxy)
        result.far = self.whole.far
        if any(clock.far is not None and clock.far.performed is not None for _, clock in parts):
            result.far = Far() if result.far is None else result.far.copy()
            result.far.performed = np.minimum.reduce([clock.performed() for _, clock in parts])
        return result

    def groups(self, lanes: int) -> list[tuple[int, Clock]]:
        """Divide the lanes by their clocks, and return (lane bits, clock) pairs."""
        groups = [(bits & lanes, clock) for bits, clock in self.parts if bits & lanes]
        for bits, _ in groups:
            lanes &= ~bits
        return [*groups, (lanes, self.whole)] if lanes else groups

    def meet(self, lanes: int) -> None:
        """Synchronize these lanes. Each lane acquires all accesses that any of them has acquired."""
        inside = [clock for bits, clock in self.parts if bits & lanes]
        if not inside:
            return
        together = self.whole.copy()
        for clock in inside:
            together.join(clock)
        rest = [(bits & ~lanes, clock) for bits, clock in self.parts if bits & ~lanes]
        self.parts = [*rest, (lanes, together)]

    def merge(self) -> Clock:
        """Synchronize all lanes and return the warp's clock."""
        for _, clock in self.parts:
            self.whole.join(clock)
        return self.whole


_LANES = np.arange(LANES)


def refine(extra: dict[str, Any], meeting: set[int]) -> None:
    """Refine the groups of a launch so that each set of synchronized lanes consists of whole groups.

    ``extra["groups"]`` contains the lowest lane of each lane's group.
    """
    first = extra.get("groups")
    divided = np.zeros(LANES, np.int64) if first is None else first
    for bits in meeting:
        _, lowest, place = np.unique(2 * divided + (bits >> _LANES & 1), return_index=True, return_inverse=True)
        divided = lowest[place]
    if first is None or (divided != first).any():
        extra["groups"] = divided


class LaneGroups:
    """Groups of a warp's lanes such that each synchronization so far included all or none of a group's lanes.

    All accesses by a group count as accesses by one agent. After the first partial synchronization of any warp, groups
    exist for all warps and in all later schedules of the launch.

    Attributes
    ----------
    first
        Lowest lane of each lane's group.
    now
        Clock of each lane's group.
    known
        For each lane (row), the clock of each other lane with which it has synchronized.
    epoch
        Return value of Agents.epoch() at the last update.
    """

    __slots__ = ("epoch", "first", "known", "now")

    def __init__(self, first: Array, epoch: int) -> None:
        self.first, self.epoch = first, epoch
        self.now: Array = np.ones(LANES, np.int64)
        self.known: Array = np.zeros((LANES, LANES), np.int64)

    def catch_up(self, first: Array, epoch: int) -> bool:
        """Update the groups. Return whether the warp has synchronized or was divided again since the last call."""
        if self.epoch == epoch and self.first is first:
            return False
        self.first, self.epoch = first, epoch
        self.known[:] = self.now
        self.now += 1
        return True

    def meet(self, meeting: set[int]) -> None:
        """Synchronize the lanes of each set, where each set is a bit mask."""
        for bits in meeting:
            lanes = np.flatnonzero(bits >> _LANES & 1)
            self.known[lanes] = self.known[lanes].max(axis=0)
            self.known[np.ix_(lanes, lanes)] = self.now[lanes]
            self.now[lanes] += 1

    def divide(self, lanes: Array) -> list[tuple[int, Array]]:
        """Return the lowest lane of each group that contains any of these lanes, and the lanes' positions."""
        of = self.first[lanes]
        return [(lowest, of == lowest) for lowest in np.unique(of).tolist()]

    def publishable(self, lanes: Array, alone: bool) -> Array:
        """Return the part of each group's clock that these lanes publish. ``alone`` is true if one lane releases."""
        clocks: Array = self.known[lanes].max(axis=0)
        if not alone:
            clocks = np.where(np.isin(self.first, self.first[lanes]), self.now, clocks)
        return clocks
