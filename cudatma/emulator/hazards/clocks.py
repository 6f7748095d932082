"""Vector clocks: what a warp, or some of its lanes, has seen of all agents that access memory; memory orders.

Inside a cluster agents are numbered and a clock is one vector. What is known of other clusters, of fences and of flags
that were read but not acquired yet is rare: it lives in ``far``, which most clocks never get.
Source: PTX ISA, "Memory Consistency Model": causality order, release and acquire patterns, proxies;
"bar.warp.sync".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatma.emulator.ptx.types import LANES, SCOPES, Array

#: Key in Far.fenced of fence.mbarrier_init: what a relaxed barrier.cluster.arrive after it publishes about barriers.
INITS = -1


def scope_of(order: str) -> int:
    """Return the scope of a strong access. order: "relaxed.gpu", "volatile", "acquire.cta", ..."""
    return SCOPES.get(order.rpartition(".")[2], SCOPES["gpu"])


def strength_of(order: str) -> int:
    """Return 0 for a weak access, else 1 + its scope."""
    return 0 if not order or order == "nc" else 1 + scope_of(order)


def releases(order: str) -> bool:
    return order.startswith(("release", "acq_rel"))


def acquires(order: str) -> bool:
    return order.startswith(("acquire", "acq_rel"))


def _larger(one: Array | None, other: Array | None) -> Array | None:
    if one is None or other is None or one is other:
        return other if one is None else one
    result: Array = np.maximum(one, other)
    return result


def join_clocks(mine: dict[Any, Clock], theirs: dict[Any, Clock]) -> None:
    """Join each of their clocks into the one of mine with the same key."""
    for key, clock in theirs.items():
        known = mine.get(key)
        mine[key] = clock if known is None or known is clock else joined(known, clock)


class Far:
    """What goes beyond plain order inside a cluster; every vector in it is replaced, never changed.

    Attributes
    ----------
    performed
        Accesses that have been performed, though their writes need not be visible: known through an mbarrier whose
        arrive or wait has CTA scope, from another CTA. Orders a write after reads and after copies that have completed.
    proxy
        What a proxy fence has made visible to the asynchronous proxy in global memory.
    proxy_of
        The same in the shared memory of one CTA, by its rank; ``Clock.proxy`` holds what is visible in all of them.
    others
        By the number of another cluster: (order, vector like ``proxy``).
    fenced
        By scope, what a fence has prepared for a strong write to publish.
    maps
        By (address, scope), what an acquiring fence has made visible to reads of the tensor map at this address.
    seen
        By the scope that a fence needs, what relaxed reads have observed and no fence has acquired yet.
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
        self.performed = _larger(self.performed, other.performed)
        self.proxy = _larger(self.proxy, other.proxy)
        for rank, proxy in other.proxy_of.items():
            self.fence_proxy_of(rank, proxy)
        for number, (order, proxy) in other.others.items():
            self.learn(number, order, proxy)
        join_clocks(self.fenced, other.fenced)
        join_clocks(self.maps, other.maps)
        join_clocks(self.seen, other.seen)

    def fence_proxy_of(self, rank: int, order: Array) -> None:
        """Note that a proxy fence has made these accesses visible in the shared memory of one CTA."""
        known = self.proxy_of.get(rank)
        self.proxy_of[rank] = order if known is None else np.maximum(known, order)

    def learn(self, number: int, order: Array, proxy: Array) -> None:
        """Know at least this much of another cluster."""
        known = self.others.get(number)
        if known is not None:
            if known[0] is order and known[1] is proxy:
                return
            order, proxy = np.maximum(known[0], order), np.maximum(known[1], proxy)
        self.others[number] = order, proxy


class Clock:
    """What an agent has seen of every agent. order: of plain order; proxy: what a proxy fence has made visible to the
    asynchronous proxy in shared memory as well."""

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
        """A copy without what fences and relaxed reads have prepared: what a release makes known."""
        result = self.copy()
        if result.far is not None:
            result.far.fenced, result.far.maps, result.far.seen = {}, {}, {}
        return result

    def performed(self) -> Array:
        """Return which accesses have been performed: those that are ordered, and those in ``Far.performed``."""
        far = self.far
        if far is None or far.performed is None:
            return self.order
        result: Array = np.maximum(self.order, far.performed)
        return result

    def proxy_in(self, rank: int) -> Array:
        """Return which accesses the asynchronous proxy sees in the shared memory of the CTA with this rank."""
        own = self.far.proxy_of.get(rank) if self.far is not None else None
        if own is None:
            return self.proxy
        result: Array = np.maximum(self.proxy, own)
        return result

    def note(self, scope: int, number: int, clock: Clock, own: int) -> None:
        """Note what a relaxed read has observed, until a fence of this scope acquires it. number, own: as in absorb."""
        seen = self.beyond().seen
        noted = Clock(self.order.size) if scope not in seen else seen[scope].copy()
        noted.absorb(number, clock, own)
        seen[scope] = noted

    def beyond(self) -> Far:
        """``far``, made when it is first needed."""
        if self.far is None:
            self.far = Far()
        return self.far

    def absorb(self, number: int, clock: Clock, own: int) -> None:
        """Join what a warp of cluster ``number`` has released; ``own`` is the cluster of this clock."""
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
        """All that is ordered before now is visible to the asynchronous proxy in global memory."""
        far = self.beyond()
        far.proxy = self.order.copy()
        far.others = {number: (order, order) for number, (order, _) in far.others.items()}

    def of(self, who: Array, size: int, own: int, through_proxy: bool = False, performed: bool = False) -> Array:
        """Return the clock known of each agent.

        who: cluster number * size + agent. through_proxy: what the asynchronous proxy sees. performed: what has been
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


def joined(one: Clock, other: Clock) -> Clock:
    """A new clock that knows what both know."""
    result = one.copy()
    result.join(other)
    return result


class LaneClocks:
    """The clocks of a warp's lanes from the moment at which some have acquired more than the rest until they meet.

    meetings: the warp's count when they parted. parts: (lane bits, clock); lanes of no part know what all know.
    """

    __slots__ = ("meetings", "parts", "whole")

    def __init__(self, whole: Clock, meetings: int) -> None:
        self.whole, self.meetings = whole, meetings
        self.parts: list[tuple[int, Clock]] = []

    def learners(self, lanes: int, alive: int) -> list[Clock]:
        """The clocks that take what these lanes learn."""
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
        """What all of these lanes know."""
        found = [(bits, clock) for bits, clock in self.parts if bits & lanes]
        for bits, _ in found:
            lanes &= ~bits
        if lanes or not found:
            return self.whole
        if len(found) == 1:
            return found[0][1]
        result = found[0][1].copy()
        for _, clock in found[1:]:
            np.minimum(result.order, clock.order, out=result.order)
            np.minimum(result.proxy, clock.proxy, out=result.proxy)
        result.far = self.whole.far
        if any(clock.far is not None and clock.far.performed is not None for _, clock in found):
            result.far = Far() if result.far is None else result.far.copy()
            result.far.performed = np.minimum.reduce([clock.performed() for _, clock in found])
        return result

    def groups(self, lanes: int) -> list[tuple[int, Clock]]:
        """(lane bits, clock) of those of the lanes that know the same."""
        found = [(bits & lanes, clock) for bits, clock in self.parts if bits & lanes]
        for bits, _ in found:
            lanes &= ~bits
        return [*found, (lanes, self.whole)] if lanes else found

    def meet(self, lanes: int) -> None:
        """These lanes have met: each of them knows what any of them knew."""
        inside = [clock for bits, clock in self.parts if bits & lanes]
        if not inside:
            return
        together = self.whole.copy()
        for clock in inside:
            together.join(clock)
        rest = [(bits & ~lanes, clock) for bits, clock in self.parts if bits & ~lanes]
        self.parts = [*rest, (lanes, together)]

    def merge(self) -> Clock:
        """The lanes have met: each knows what any of them knew."""
        for _, clock in self.parts:
            self.whole.join(clock)
        return self.whole


_LANES = np.arange(LANES)


def refine(extra: dict[str, Any], meeting: set[int]) -> None:
    """Divide the groups of a launch where a meeting, of each of these sets of lanes, divides one.

    extra: the launch's; "groups" holds of each lane the lowest one of its group.
    """
    first = extra.get("groups")
    divided = np.zeros(LANES, np.int64) if first is None else first
    for bits in meeting:
        _, lowest, place = np.unique(2 * divided + (bits >> _LANES & 1), return_index=True, return_inverse=True)
        divided = lowest[place]
    if first is None or (divided != first).any():
        extra["groups"] = divided


class LaneGroups:
    """One warp's groups: its parts that meet without the other lanes. first: of each lane the lowest one of its group.

    The accesses of a group of lanes count as one agent's. A group is what every meeting so far took as a whole; it is
    known from the first meeting of a part of a warp on, to all warps and all later schedules of a launch.

    now: of each lane its group's clock; known: of each lane (row) how much of each other's clock it has met. epoch: as
    of LaneRaces.
    """

    __slots__ = ("epoch", "first", "known", "now")

    def __init__(self, first: Array, epoch: int) -> None:
        self.first, self.epoch = first, epoch
        self.now: Array = np.ones(LANES, np.int64)
        self.known: Array = np.zeros((LANES, LANES), np.int64)

    def catch_up(self, first: Array, epoch: int) -> bool:
        """True where the warp has met, or is divided anew, since the last call: its lanes know all so far."""
        if self.epoch == epoch and self.first is first:
            return False
        self.first, self.epoch = first, epoch
        self.known[:] = self.now
        self.now += 1
        return True

    def meet(self, meeting: set[int]) -> None:
        """The lanes of each set, as bits, have met: each of them knows what any of them knew."""
        for bits in meeting:
            lanes = np.flatnonzero(bits >> _LANES & 1)
            self.known[lanes] = self.known[lanes].max(axis=0)
            self.known[np.ix_(lanes, lanes)] = self.now[lanes]
            self.now[lanes] += 1

    def divide(self, lanes: Array) -> list[tuple[int, Array]]:
        """(the lowest lane, positions among these lanes) of each group that has some of them."""
        of = self.first[lanes]
        return [(lowest, of == lowest) for lowest in np.unique(of).tolist()]

    def publishable(self, lanes: Array, alone: bool) -> Array:
        """Of each lane's group, how much of its clock these lanes know. alone: one lane publishes what it has met."""
        found: Array = self.known[lanes].max(axis=0)
        if not alone:
            found = np.where(np.isin(self.first, self.first[lanes]), self.now, found)
        return found
