"""Release and acquire across the grid through fences and strong accesses to memory.

A fence prepares the accesses that happen before it for publication at the scope of the fence. A later strong write
(relaxed, volatile or atomic) publishes these accesses at its address. The writer may be the same thread, or a thread
that a barrier orders after the fence. If a strong read observes this write (or a later atomic operation at the same
address) and a fence of this scope follows the read, the reader acquires the accesses. The qualifiers .release and
.acquire each combine a fence and an access.

Source: PTX ISA, "Memory Consistency Model": release and acquire patterns, observation order, scopes, "membar, fence".
"""

from __future__ import annotations

from typing import Any, Protocol

from cudatma.emulator.hazards.agents import Agents, only_lane
from cudatma.emulator.hazards.clocks import Clock, acquires, joined, releases, strength_of
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import SCOPES

#: Maps (scope, CTA or cluster of that scope; None for gpu scope) and the cluster number to the clock that the cluster's
#: warps have published.
Published = dict[tuple[int, Any], dict[int, Clock]]


class Flags(Protocol):
    """Shadow that stores the clocks that strong writes have published, by granule."""

    published: dict[int, Any]


class MemoryOrder:
    """Fences and flags of a cluster's warps.

    The published clocks are stored in the shadows, which all clusters share.
    """

    def __init__(self, agents: Agents, number: int) -> None:
        """Create the state of cluster ``number``."""
        self._agents, self._number = agents, number

    def fence(self, w: Warp, kind: str) -> None:
        """Execute fence.acq_rel, .sc, .acquire, .release or membar. ``kind`` is the opcode without its root."""
        agents = self._agents
        parts = kind.split(".")
        scope = next((SCOPES[part] for part in parts if part in SCOPES), SCOPES["gpu"])
        alone = only_lane(w) >= 0 and int(w.alive.sum()) > 1
        for clock in agents.learners(w):
            far = clock.beyond()
            if "release" not in parts:
                for needed in [s for s in far.seen if s <= scope]:
                    clock.join(far.seen.pop(needed))
            if "acquire" not in parts:
                ready = clock.bare()
                far.fenced[scope] = agents.without_unmet(w, ready, alone)
        if "release" not in parts:
            agents.count_acquire(w)
        agents.advance(w)

    def stamp(self, w: Warp) -> tuple[int, int]:
        """Return the agent and clock of a strong write.

        A thread that acquires the published clock also acquires the write.
        """
        agent = self._agents.flag_agent(w)
        clocks = self._agents.every_clock(w)
        now = int(clocks[0].order[agent]) + 1
        for clock in clocks:
            clock.order[agent] = now
        return agent, now

    def _scopes(self, w: Warp, strength: int) -> list[tuple[int, Any]]:
        """Return the keys of Published in the scope of an access, narrowest first."""
        keys: list[tuple[int, Any]] = [(0, (self._number, w.block.rank)), (1, self._number), (2, None)]
        return keys[:strength]

    def publish(self, w: Warp, shadow: Flags, place: int, order: str, lanes: int, *, is_update: bool) -> None:
        """Publish the accesses that a strong write releases at a granule.

        ``is_update`` is true for an atomic operation, which preserves previously published clocks.
        """
        agents = self._agents
        clock = agents.known_by_any(w)
        alone = lanes == 1 and int(w.alive.sum()) > 1
        flag = agents.flag_agent(w)
        fenced = clock.far.fenced if clock.far is not None else {}
        entry: Published = shadow.published.get(place, {}) if is_update else {}
        now = None
        if releases(order):
            now = clock.bare()
        for scope, owner in self._scopes(w, strength_of(order)):
            ready = now
            for reach, known in fenced.items():
                if reach >= scope:
                    ready = known if ready is None else joined(ready, known)
            if ready is None:
                continue
            ready = agents.without_unmet(w, ready.bare(), alone)
            ready.order[flag] = clock.order[flag]
            known_here = entry.setdefault((scope, owner), {})
            old = known_here.get(self._number)
            known_here[self._number] = ready if old is None else joined(old, ready)
        if entry:
            shadow.published[place] = entry
        else:
            shadow.published.pop(place, None)
        if now is not None:
            agents.advance(w)

    def observe(self, w: Warp, shadow: Flags, place: int, order: str) -> None:
        """Acquire the clocks that are published at a granule, or store them until a fence acquires them."""
        entry: Published | None = shadow.published.get(place)
        if not entry:
            return
        now = acquires(order)
        for scope, owner in self._scopes(w, strength_of(order)):
            for number, known in entry.get((scope, owner), {}).items():
                for clock in self._agents.learners(w):
                    if now:
                        clock.absorb(number, known, self._number)
                    else:
                        clock.note(scope, number, known, self._number)
        if now:
            self._agents.count_acquire(w)
