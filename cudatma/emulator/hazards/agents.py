"""Agents that access memory in a cluster, and the clocks of each warp and its lanes.

An agent is a warp, one kind of a warp's accesses, or the mbarrier or group of a copy. A clock contains the number of
accesses by each agent that happen before the current instruction.

Source: PTX ISA, "Memory Consistency Model": causality order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatma.emulator.async_copy.groups import Group
from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.hazards.clocks import Clock, LaneClocks, LaneGroups, joined, refine, releases
from cudatma.emulator.machine.events import Observer
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.machine.state import Cluster, Warp
from cudatma.emulator.ptx.types import LANES, Array, lane_bits

_SPARE_AGENTS = 512
#: Number of agents per warp. The agents are the warp, its wgmmas, its cp.asyncs, its single lanes, and its strong
#: writes to global memory. If a kernel synchronizes parts of a warp, each lane is an additional agent.
_OWN_AGENTS = 5
#: Agent and clock of a part of an access, and the indices of this part's granules within the access.
Stamp = tuple[int, int, Array | slice]


def lanes_now(w: Warp) -> int:
    """Return the lanes that execute the current instruction, as a bit mask."""
    return lane_bits(w.split.mask if w.guard is None else w.split.mask & w.guard)


def used_granules(w: Warp, at: int, indices: Array, lanes: int, size: int) -> Array:
    """Return the granules of a load that contain bytes used by the kernel (`.pragma "used_bytes_mask"`)."""
    mask = w.split.frame.program.function.used_bytes.get(at)
    if mask is None:
        return indices
    count = len(indices) // lanes
    each = max(1, size // count)
    is_used = [bool(mask >> each * k & (1 << each) - 1) for k in range(count)]
    result: Array = indices.reshape(lanes, count)[:, is_used].reshape(-1)
    return result


def only_lane(w: Warp) -> int:
    """Return the index of the only lane that executes the instruction, or -1 if several lanes execute it."""
    bits = lanes_now(w)
    return bits.bit_length() - 1 if bits & (bits - 1) == 0 else -1


class Agents(Observer):
    """Agents and clocks of a cluster, shared by all checks.

    ``clocks`` contains, for each warp, the clock that its lanes share.
    """

    def __init__(self, launch: Launch, cluster: Cluster) -> None:
        self.launch, self.cluster = launch, cluster
        blocks = len(cluster.blocks)
        self.warps = blocks * (-(-launch.threads // LANES))
        has_groups, extra = launch.image.splits_warps(launch.program.function.name), launch.setup.extra
        if has_groups and extra.get("track_all"):
            extra.setdefault("groups", np.arange(LANES))  # A replay has no earlier schedule that determines the groups.
        self._own: int = self.warps * (_OWN_AGENTS + LANES * has_groups)
        self.size = self._own + 2 * launch.threads * blocks + _SPARE_AGENTS
        self.clocks = [Clock(self.size) for _ in range(self.warps)]
        for agent, clock in enumerate(self.clocks):
            clock.order[[agent, 3 * self.warps + agent]] = 1
        self._parted: dict[int, LaneClocks] = {}
        self._groups: dict[int, LaneGroups] = {}
        self._agents: dict[Any, int] = {}
        self._agent_names: dict[int, str] = {}
        self._met: dict[int, int] = {}
        self._acquired: dict[int, int] = {}
        self._unmet_from: dict[int, int] = {}

    # ---- agents

    def agent(self, key: Any, name: str) -> int:
        """Return the number of an agent that is not a warp. The first call for a key creates the agent."""
        agent = self._agents.get(key)
        if agent is None:
            agent = self._own + len(self._agents) % (self.size - self._own)
            self._agents[key] = agent
            self._agent_names[agent] = name
        return agent

    def key_of(self, agent: int) -> Any:
        """Return the key of an agent, or None if the agent is a warp."""
        return next((key for key, number in self._agents.items() if number == agent), None)

    def barrier_agent(self, barrier: MBarrier) -> int:
        return self.agent(("barrier", barrier.block.rank, barrier.offset), "barrier")

    def wgmma_agent(self, w: Warp) -> int:
        return self.warps + w.agent

    def cp_agent(self, w: Warp) -> int:
        return 2 * self.warps + w.agent

    def leader_agent(self, w: Warp) -> int:
        """Return the agent for accesses by single lanes and by warp-wide instructions."""
        return 3 * self.warps + w.agent

    # ---- clocks that a wait for a copy acquires

    def store_until(self, w: Warp, group: Group) -> tuple[int, int]:
        """Return the agent and clock that wait_group acquires for the writes of a bulk group."""
        return self.agent(("bulk writes", w.agent, group.owner), "bulk"), group.number + 1

    def read_until(self, w: Warp, group: Group) -> tuple[int, int]:
        """Return the agent and clock that wait_group.read acquires for the reads of a bulk group."""
        return self.agent(("bulk", w.agent, group.owner), "bulk"), group.number + 1

    def copies_until(self, w: Warp, group: Group) -> tuple[int, int]:
        """Return the agent and clock that a wait for a cp.async group acquires."""
        agent = self.agent(("cp", w.agent, group.owner), "cp") if group.owner else self.cp_agent(w)
        return agent, group.number + 1

    def load_until(self, barrier: MBarrier) -> tuple[int, int]:
        """Return the agent and clock that a wait for the current phase of an mbarrier acquires."""
        return self.barrier_agent(barrier), barrier.phase + 1

    def flag_agent(self, w: Warp) -> int:
        """Return the agent of a warp's strong writes to global memory.

        This agent is separate because a thread can acquire a published flag without the warp's other accesses.
        """
        return 4 * self.warps + w.agent

    def of_warp(self, w: Warp) -> range:
        """Return all agents of a warp, including those of its lanes and its asynchronous operations."""
        return range(w.agent, self._own, self.warps)

    def is_own(self, agent: int) -> bool:
        """Return whether an agent is a warp or one kind of a warp's accesses."""
        return agent < self._own

    def is_copy(self, agents: Array) -> Array:
        """Return a mask of the agents that are copies, identified by an mbarrier or a group."""
        result: Array = (agents >= self._own) | (agents // self.warps == 2)
        return result

    def advance(self, w: Warp) -> None:
        """Advance the warp's clock so that later accesses differ from those that the warp has published."""
        own = [w.agent, self.leader_agent(w)]
        for clock in self.every_clock(w):
            clock.order[own] += 1
        groups = self.groups(w)
        if groups is not None:
            groups.now += 1
            self._stamp_groups(w, groups)

    def every_clock(self, w: Warp) -> list[Clock]:
        """Return the clock that all lanes of a warp share, and the clocks of lanes that have acquired more accesses."""
        parted = self._parted.get(w.agent)
        if parted is None:
            return [self.clocks[w.agent]]
        return [self.clocks[w.agent], *(clock for _, clock in parted.parts)]

    # ---- groups of lanes

    def groups(self, w: Warp) -> LaneGroups | None:
        """Return the groups of a warp's lanes, or None if no part of a warp has synchronized separately."""
        first = self.launch.setup.extra.get("groups")
        if first is None:
            return None
        epoch = self.epoch(w)
        groups = self._groups.get(w.agent)
        if groups is None:
            groups = self._groups[w.agent] = LaneGroups(first, epoch)
            self._stamp_groups(w, groups)
        elif groups.catch_up(first, epoch):
            self._stamp_groups(w, groups)
        return groups

    def _stamp_groups(self, w: Warp, groups: LaneGroups) -> None:
        for clock in self.every_clock(w):
            clock.order[self._group_agents(w)] = groups.now

    def _group_agents(self, w: Warp) -> slice:
        return slice(_OWN_AGENTS * self.warps + w.agent, self._own, self.warps)

    def count_acquire(self, w: Warp) -> None:
        """Count an acquire by a lane. Its earlier accesses are not compared with later accesses by other lanes."""
        self._acquired[w.agent] = self._acquired.get(w.agent, 0) + 1

    def epoch(self, w: Warp) -> int:
        """Return a counter that increases when the lanes of a warp synchronize or acquire."""
        return 1 + w.meetings + self._acquired.get(w.agent, 0)

    # ---- clocks of the lanes of a warp

    def known(self, w: Warp) -> Clock:
        """Return the clock of the accesses that happen before the instruction in all executing lanes.

        The checks compare accesses with this clock.
        """
        parted = self._parted.get(w.agent)
        if parted is None:
            return self.clocks[w.agent]
        if parted.meetings != w.meetings:
            del self._parted[w.agent]
            return parted.merge()
        return parted.known(lanes_now(w))

    def known_by_any(self, w: Warp) -> Clock:
        """Return the clock of the accesses that happen before the instruction in any executing lane.

        An arrival publishes this clock.
        """
        known = self.known(w)
        parted = self._parted.get(w.agent)
        for _, clock in parted.groups(lanes_now(w)) if parted is not None else ():
            if clock is not known:
                known = joined(known, clock)
        return known

    def knowers(self, w: Warp, indices: Array) -> list[tuple[Clock, Array]]:
        """Return (clock, granules) pairs that group the granules of an access by the clock of the accessing lane."""
        known = self.known(w)
        parted = self._parted.get(w.agent)
        groups = parted.groups(lanes_now(w)) if parted is not None else ()
        if parted is None or len(groups) < 2:
            return [(known, indices)]
        lanes = np.flatnonzero([lanes_now(w) >> lane & 1 for lane in range(32)])
        each = lanes.repeat(len(indices) // len(lanes))
        if len(each) != len(indices):
            return [(known, indices)]
        return [(clock, indices[(bits >> each & 1).astype(bool)]) for bits, clock in groups]

    def learners(self, w: Warp) -> list[Clock]:
        """Return the clocks to update when the executing lanes acquire.

        The other lanes acquire the same accesses when the warp synchronizes.
        """
        parted = self._parted.get(w.agent)
        if parted is not None and parted.meetings != w.meetings:
            del self._parted[w.agent]
            parted.merge()
            parted = None
        if parted is None:
            if w.split.is_full and w.guard is None:
                return [self.clocks[w.agent]]
            lanes, alive = lanes_now(w), lane_bits(w.alive)
            if lanes & alive == alive:
                return [self.clocks[w.agent]]
            parted = self._parted[w.agent] = LaneClocks(self.clocks[w.agent], w.meetings)
            return parted.learners(lanes, alive)
        return parted.learners(lanes_now(w), lane_bits(w.alive))

    def atomic(self, w: Warp, at: int, addresses: Array, space: str, size: int, order: str, returns: bool) -> None:
        """Advance the clock at a releasing atomic operation, which publishes all earlier accesses."""
        if releases(order):
            self.advance(w)

    def lanes_met(self, w: Warp, groups: set[int]) -> None:
        """Synchronize each group. Its lanes acquire all accesses that any lane of the group has acquired."""
        parted = self._parted.get(w.agent)
        if parted is not None and parted.meetings == w.meetings:
            for bits in groups:
                parted.meet(bits)
        refine(self.launch.setup.extra, groups)
        known = self.groups(w)
        if known is not None:
            known.meet(groups)
            self._stamp_groups(w, known)

    def stamp(self, w: Warp, lanes: int, together: bool = False) -> tuple[int, int]:
        """Return the agent and clock of an access by ``lanes`` lanes.

        A release by a single lane publishes accesses by several independent lanes only after these lanes have
        synchronized. The release always publishes accesses by one lane or one warp-wide instruction (``together``).
        """
        clock = self.clocks[w.agent]
        if lanes == 1 or together:
            agent = self.leader_agent(w)
            return agent, int(clock.order[agent])
        meetings = w.meetings + w.part_meetings
        if self._met.get(w.agent) != meetings:
            self._met[w.agent] = meetings
            self.advance(w)
            self._unmet_from[w.agent] = int(clock.order[w.agent])
        return w.agent, int(clock.order[w.agent])

    def stamps(self, w: Warp, indices: Array, lanes: int, together: bool = False) -> list[Stamp]:
        """Return the agent, clock and positions of each group of lanes that participates in an access."""
        groups = self.groups(w) if lanes > 1 and not together else None
        if groups is not None:
            here = np.flatnonzero(w.split.mask if w.guard is None else w.split.mask & w.guard)
            if len(here) == lanes:  # Otherwise, the lanes access several buffers or CTAs.
                each = len(indices) // lanes
                agents, now = range(self.size)[self._group_agents(w)], groups.now.tolist()
                return [(agents[k], now[k], part.repeat(each)) for k, part in groups.divide(here)]
        return [(*self.stamp(w, lanes, together), slice(None))]

    def published(self, w: Warp, alone: bool) -> Clock:
        """Return the clock that a release publishes, and advance the warp's clock.

        ``alone`` is true if only one lane releases.
        """
        known = self.without_unmet(w, self.known_by_any(w).copy(), alone)
        self.advance(w)
        return known

    def without_unmet(self, w: Warp, known: Clock, alone: bool) -> Clock:
        """Remove from ``known`` the accesses that a release by a single lane (``alone``) does not publish.

        The lanes of these accesses have not synchronized since the access.
        """
        if alone and self._met.get(w.agent) == w.meetings + w.part_meetings:
            limit = self._unmet_from[w.agent] - 1
            known.order[w.agent] = min(int(known.order[w.agent]), limit)
            known.proxy[w.agent] = min(int(known.proxy[w.agent]), limit)
        groups = self.groups(w)
        if groups is not None:
            here = w.split.mask if w.guard is None else w.split.mask & w.guard
            agents, limits = self._group_agents(w), groups.publishable(here, alone)
            np.minimum(known.order[agents], limits, out=known.order[agents])
            np.minimum(known.proxy[agents], limits, out=known.proxy[agents])
        return known

    def kind_of(self, agent: int) -> str:
        """Return the kind of an agent: "warp", "wgmma", "cp", "barrier" or "bulk"."""
        if self.is_own(agent):
            return {1: "wgmma", 2: "cp"}.get(agent // self.warps, "warp")
        return self._agent_names[agent]

    def who(self, agent: int) -> str:
        """Return the name of an agent for messages."""
        kind = self.kind_of(agent)
        if not self.is_own(agent):
            return {"bulk": "a bulk store", "cp": "a cp.async of some lanes"}.get(kind, "an asynchronous copy")
        per = self.warps // len(self.cluster.blocks)
        number = agent % self.warps
        text = f"warp {number % per}" + (f" of block rank {number // per}" if len(self.cluster.blocks) > 1 else "")
        return {"warp": text, "wgmma": f"a wgmma of {text}", "cp": f"a cp.async of {text}"}[kind]
