"""Order across the grid through global memory: fences, and flags that strong writes set and strong reads see.

A fence makes what is ordered before it ready to be published at its scope; a strong write (relaxed, volatile, atomic)
after it, by the same thread or by one that a barrier has ordered after it, publishes it at its address. A strong read
that sees the write, or an atomic that follows it there, has acquired it once a fence of that scope follows it.
.release and .acquire do both at once. Source: PTX ISA, "Memory Consistency Model": release and acquire patterns,
observation order, scopes, "membar, fence".
"""

from __future__ import annotations

from typing import Any

from cudatma.emulator.hazards.checks import Checks
from cudatma.emulator.hazards.clocks import Clock, joined
from cudatma.emulator.hazards.shadow import GlobalShadow, Shadow
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import SCOPES

_GPU = SCOPES["gpu"]
#: Scope and, below gpu, whose -> by cluster number, what its warps have published there.
Published = dict[tuple[int, Any], dict[int, Clock]]


def scope_of(order: str) -> int:
    """Return the scope of a strong access. order: "relaxed.gpu", "volatile", "acquire.cta", ..."""
    return SCOPES.get(order.rpartition(".")[2], _GPU)


def strength_of(order: str) -> int:
    """Return 0 for a weak access, else 1 + its scope."""
    return 0 if not order or order == "nc" else 1 + scope_of(order)


def releases(order: str) -> bool:
    return order.startswith(("release", "acq_rel"))


def acquires(order: str) -> bool:
    return order.startswith(("acquire", "acq_rel"))


class MemoryOrder:
    """Fences and flags of one cluster's warps; what is published is kept with the shadows, which clusters share."""

    def __init__(self, observer: Checks, number: int) -> None:
        self._observer, self._number = observer, number

    def fence(self, w: Warp, kind: str) -> None:
        """fence.acq_rel, .sc, .acquire, .release and membar at their scope. kind: the opcode after its root."""
        observer = self._observer
        parts = kind.split(".")
        scope = next((SCOPES[part] for part in parts if part in SCOPES), _GPU)
        alone = observer.lanes.single(w) >= 0 and int(w.alive.sum()) > 1
        for clock in observer.learners(w):
            far = clock.beyond()
            if "release" not in parts:
                for needed in [s for s in far.seen if s <= scope]:
                    clock.join(far.seen.pop(needed))
            if "acquire" not in parts:
                ready = clock.bare()
                far.fenced[scope] = observer.without_unmet(w, ready, alone)
        if "release" not in parts:
            observer.acquired(w)
        observer.advance(w)

    def stamp(self, w: Warp) -> tuple[int, int]:
        """(agent, clock) of a strong write: a thread that acquires what it publishes also knows of the write itself."""
        observer = self._observer
        agent = observer.flag_agent(w)
        clocks = observer.every_clock(w)
        now = int(clocks[0].order[agent]) + 1
        for clock in clocks:
            clock.order[agent] = now
        return agent, now

    def _scopes(self, w: Warp, strength: int) -> list[tuple[int, Any]]:
        """Keys of Published that an access reaches, narrowest first."""
        keys: list[tuple[int, Any]] = [(0, (self._number, w.block.rank)), (1, self._number), (2, None)]
        return keys[:strength]

    def wrote(
        self, w: Warp, shadow: GlobalShadow | Shadow, place: int, order: str, lanes: int, *, is_update: bool
    ) -> None:
        """A strong write at a granule. is_update: an atomic operation, which keeps what was published before it."""
        observer = self._observer
        clock = observer.told(w)
        alone = lanes == 1 and int(w.alive.sum()) > 1
        flag = observer.flag_agent(w)
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
            ready = observer.without_unmet(w, ready.bare(), alone)
            ready.order[flag] = clock.order[flag]
            known_here = entry.setdefault((scope, owner), {})
            old = known_here.get(self._number)
            known_here[self._number] = ready if old is None else joined(old, ready)
        if entry:
            shadow.published[place] = entry
        else:
            shadow.published.pop(place, None)
        if now is not None:
            observer.advance(w)

    def read(self, w: Warp, shadow: GlobalShadow | Shadow, place: int, order: str) -> None:
        """A strong read of a granule: acquires what is published there, or notes it until a fence does."""
        entry: Published | None = shadow.published.get(place)
        if not entry:
            return
        observer = self._observer
        now = acquires(order)
        for scope, owner in self._scopes(w, strength_of(order)):
            for number, known in entry.get((scope, owner), {}).items():
                for clock in observer.learners(w):
                    if now:
                        clock.absorb(number, known, self._number)
                    else:
                        clock.note(scope, number, known, self._number)
        if now:
            observer.acquired(w)
