"""The agents that access memory in a cluster, and the clocks of each warp and of its lanes.

An agent is a warp, one kind of its accesses, or a copy's mbarrier or group. A clock holds, for each agent, how many of
its accesses are ordered before now.

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
#: Agents of each warp: itself, its wgmmas, its cp.asyncs, its single lanes, its strong writes to global memory; where
#: parts of a warp meet, its groups of lanes, too.
_OWN_AGENTS = 5
#: (agent, clock, positions among the granules) of an access, or a part of one.
Stamp = tuple[int, int, Array | slice]


def lanes_now(w: Warp) -> int:
    """Return the lanes that execute the running instruction, as bits."""
    return lane_bits(w.split.mask if w.guard is None else w.split.mask & w.guard)


def used(w: Warp, at: int, indices: Array, lanes: int, size: int) -> Array:
    """Return the granules of a load by several lanes that hold used bytes (`.pragma "used_bytes_mask"`)."""
    mask = w.split.frame.program.function.used_bytes.get(at)
    if mask is None:
        return indices
    count = len(indices) // lanes
    each = max(1, size // count)
    wanted = [bool(mask >> each * k & (1 << each) - 1) for k in range(count)]
    found: Array = indices.reshape(lanes, count)[:, wanted].reshape(-1)
    return found


def only_lane(w: Warp) -> int:
    """Return the lane that executes the instruction alone, -1 if several do."""
    bits = lanes_now(w)
    return bits.bit_length() - 1 if bits & (bits - 1) == 0 else -1


class Agents(Observer):
    """Numbers and clocks of one cluster, which every check shares. clocks: what all lanes of each warp know."""

    def __init__(self, launch: Launch, cluster: Cluster) -> None:
        self.launch, self.cluster = launch, cluster
        blocks = len(cluster.blocks)
        self.warps = blocks * (-(-launch.threads // LANES))
        has_groups, extra = launch.image.splits_warps(launch.program.function.name), launch.setup.extra
        if has_groups and extra.get("track_all"):
            extra.setdefault("groups", np.arange(LANES))  # no schedule before a replay has found the groups
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
        """Return the number of an agent that is no warp; the first call creates the agent."""
        found = self._agents.get(key)
        if found is None:
            found = self._own + len(self._agents) % (self.size - self._own)
            self._agents[key] = found
            self._agent_names[found] = name
        return found

    def key_of(self, agent: int) -> Any:
        """Return the key of an agent that is no warp, else None."""
        return next((key for key, number in self._agents.items() if number == agent), None)

    def barrier_agent(self, barrier: MBarrier) -> int:
        return self.agent(("barrier", barrier.block.rank, barrier.offset), "barrier")

    def wgmma_agent(self, w: Warp) -> int:
        return self.warps + w.agent

    def cp_agent(self, w: Warp) -> int:
        return 2 * self.warps + w.agent

    def leader_agent(self, w: Warp) -> int:
        """Return the agent of what single lanes of a warp do, and of what all do in one instruction."""
        return 3 * self.warps + w.agent

    # ---- what waiting for a copy makes known: (agent, clock)

    def store_until(self, w: Warp, group: Group) -> tuple[int, int]:
        """Return what wait_group makes known for the writes of a group of bulk stores."""
        return self.agent(("bulk writes", w.agent, group.owner), "bulk"), group.number + 1

    def read_until(self, w: Warp, group: Group) -> tuple[int, int]:
        """Return what wait_group.read makes known for their reads."""
        return self.agent(("bulk", w.agent, group.owner), "bulk"), group.number + 1

    def copies_until(self, w: Warp, group: Group) -> tuple[int, int]:
        """Return what a wait for a cp.async group makes known."""
        agent = self.agent(("cp", w.agent, group.owner), "cp") if group.owner else self.cp_agent(w)
        return agent, group.number + 1

    def load_until(self, barrier: MBarrier) -> tuple[int, int]:
        """Return what a wait for an mbarrier's running phase makes known."""
        return self.barrier_agent(barrier), barrier.phase + 1

    def flag_agent(self, w: Warp) -> int:
        """Return the agent of a warp's strong writes to global memory.

        A thread may know that one has published something without knowing the warp's other accesses.
        """
        return 4 * self.warps + w.agent

    def of_warp(self, w: Warp) -> range:
        """Return the agents of a warp and of parts of it."""
        return range(w.agent, self._own, self.warps)

    def is_own(self, agent: int) -> bool:
        """Return whether an agent is a warp, or one kind of its accesses."""
        return agent < self._own

    def is_copy(self, agents: Array) -> Array:
        """Return which agents are copies, of an mbarrier or a group."""
        found: Array = (agents >= self._own) | (agents // self.warps == 2)
        return found

    def advance(self, w: Warp) -> None:
        """Separate the warp's later accesses from what it has published."""
        own = [w.agent, self.leader_agent(w)]
        for clock in self.every_clock(w):
            clock.order[own] += 1
        groups = self.groups(w)
        if groups is not None:
            groups.now += 1
            self._stamped(w, groups)

    def every_clock(self, w: Warp) -> list[Clock]:
        """Return the clock of all lanes of a warp, and the clocks of lanes that know more.

        They agree on the warp's own accesses.
        """
        parted = self._parted.get(w.agent)
        if parted is None:
            return [self.clocks[w.agent]]
        return [self.clocks[w.agent], *(clock for _, clock in parted.parts)]

    # ---- groups of lanes

    def groups(self, w: Warp) -> LaneGroups | None:
        """Return the groups of a warp's lanes, None while no part of a warp has met without the rest."""
        first = self.launch.setup.extra.get("groups")
        if first is None:
            return None
        epoch = self.epoch(w)
        found = self._groups.get(w.agent)
        if found is None:
            found = self._groups[w.agent] = LaneGroups(first, epoch)
            self._stamped(w, found)
        elif found.catch_up(first, epoch):
            self._stamped(w, found)
        return found

    def _stamped(self, w: Warp, groups: LaneGroups) -> None:
        for clock in self.every_clock(w):
            clock.order[self._group_agents(w)] = groups.now

    def _group_agents(self, w: Warp) -> slice:
        return slice(_OWN_AGENTS * self.warps + w.agent, self._own, self.warps)

    def acquired(self, w: Warp) -> None:
        """Note that a lane has acquired what others released, which ends the checks between lanes."""
        self._acquired[w.agent] = self._acquired.get(w.agent, 0) + 1

    def epoch(self, w: Warp) -> int:
        """Return a number that rises when the lanes of the warp meet, or acquire."""
        return 1 + w.meetings + self._acquired.get(w.agent, 0)

    # ---- what the lanes of a warp know

    def known(self, w: Warp) -> Clock:
        """Return what all executing lanes know; their accesses are checked against it."""
        parted = self._parted.get(w.agent)
        if parted is None:
            return self.clocks[w.agent]
        if parted.meetings != w.meetings:
            del self._parted[w.agent]
            return parted.merge()
        return parted.known(lanes_now(w))

    def known_by_any(self, w: Warp) -> Clock:
        """Return what any of the executing lanes knows; they publish it by arriving."""
        known = self.known(w)
        parted = self._parted.get(w.agent)
        for _, clock in parted.groups(lanes_now(w)) if parted is not None else ():
            if clock is not known:
                known = joined(known, clock)
        return known

    def knowers(self, w: Warp, indices: Array) -> list[tuple[Clock, Array]]:
        """Return (clock, granules) of each part of an access by lanes that know the same."""
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
        """Return the clocks that take what the executing lanes acquire; other lanes learn it when the warp meets."""
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
        """Publish what an atomic operation releases: the accesses before it."""
        if releases(order):
            self.advance(w)

    def lanes_met(self, w: Warp, groups: set[int]) -> None:
        """Let the lanes of each group share what they have acquired."""
        parted = self._parted.get(w.agent)
        if parted is not None and parted.meetings == w.meetings:
            for bits in groups:
                parted.meet(bits)
        refine(self.launch.setup.extra, groups)
        known = self.groups(w)
        if known is not None:
            known.meet(groups)
            self._stamped(w, known)

    def stamp(self, w: Warp, lanes: int, together: bool = False) -> tuple[int, int]:
        """Return (agent, clock) of an access by ``lanes`` lanes.

        What several lanes do on their own is published by one of them only after the lanes have met; what one lane
        does, or all do in one warp-wide instruction (together), at once.
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
        """Return (agent, clock, positions) of an access by ``lanes`` lanes: as ``stamp``, for each group of lanes."""
        groups = self.groups(w) if lanes > 1 and not together else None
        if groups is not None:
            here = np.flatnonzero(w.split.mask if w.guard is None else w.split.mask & w.guard)
            if len(here) == lanes:  # not where their addresses lie in several memories
                each = len(indices) // lanes
                agents, now = range(self.size)[self._group_agents(w)], groups.now.tolist()
                return [(agents[k], now[k], part.repeat(each)) for k, part in groups.divide(here)]
        return [(*self.stamp(w, lanes, together), slice(None))]

    def published(self, w: Warp, alone: bool) -> Clock:
        """Return what a release by the warp, or by one lane alone, makes known, and advance the warp's clock."""
        known = self.without_unmet(w, self.known_by_any(w).copy(), alone)
        self.advance(w)
        return known

    def without_unmet(self, w: Warp, known: Clock, alone: bool) -> Clock:
        """Take back what lanes did that have not met since: a single lane does not publish it."""
        if alone and self._met.get(w.agent) == w.meetings + w.part_meetings:
            least = self._unmet_from[w.agent] - 1
            known.order[w.agent] = min(int(known.order[w.agent]), least)
            known.proxy[w.agent] = min(int(known.proxy[w.agent]), least)
        groups = self.groups(w)
        if groups is not None:
            here = w.split.mask if w.guard is None else w.split.mask & w.guard
            agents, most = self._group_agents(w), groups.publishable(here, alone)
            np.minimum(known.order[agents], most, out=known.order[agents])
            np.minimum(known.proxy[agents], most, out=known.proxy[agents])
        return known

    def kind_of(self, agent: int) -> str:
        """Return "warp", "wgmma", "cp", "barrier" or "bulk"."""
        if self.is_own(agent):
            return {1: "wgmma", 2: "cp"}.get(agent // self.warps, "warp")
        return self._agent_names[agent]

    def who(self, agent: int) -> str:
        """Return an agent's name, for messages."""
        kind = self.kind_of(agent)
        if not self.is_own(agent):
            return {"bulk": "a bulk store", "cp": "a cp.async of some lanes"}.get(kind, "an asynchronous copy")
        per = self.warps // len(self.cluster.blocks)
        number = agent % self.warps
        text = f"warp {number % per}" + (f" of block rank {number // per}" if len(self.cluster.blocks) > 1 else "")
        return {"warp": text, "wgmma": f"a wgmma of {text}", "cp": f"a cp.async of {text}"}[kind]
