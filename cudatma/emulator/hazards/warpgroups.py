"""Check that all four warps of a warpgroup execute the same wgmma.mma_async and setmaxnreg instructions.

Source: PTX ISA, "wgmma.mma_async" (.aligned requires that all threads in the warpgroup execute the same instruction),
"setmaxnreg" (the same rule, and all warps of the warpgroup must synchronize before they change the number again).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cudatma.emulator.hazards.agents import Agents
from cudatma.emulator.hazards.findings import Reporter
from cudatma.emulator.machine.events import Observer
from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.state import Block, Cluster, Warp
from cudatma.emulator.machine.sync import ClusterWait, NamedWait
from cudatma.emulator.ptx.types import Array

WARPS = 4
#: Operands of a wgmma that must be equal in all threads of a warpgroup.
_SHARED = "scale-d", "the matrix descriptor of B", "the matrix descriptor of A"


@dataclass(frozen=True, slots=True)
class _Event:
    """An execution of an instruction by a warp.

    ``operands`` must be equal in all threads. ``stamp`` is the agent and clock of the execution.
    """

    w: Warp
    program: Program
    at: int
    operands: tuple[int, ...]
    stamp: tuple[int, int] = (0, 0)


class Warpgroups(Observer):
    """Hazard check that compares the instructions of each warpgroup's warps."""

    def __init__(self, cluster: Cluster, agents: Agents, reporter: Reporter) -> None:
        self._cluster, self._agents, self._reporter = cluster, agents, reporter
        #: Maps each warp to its uncommitted wgmmas.
        self._open: dict[int, list[_Event]] = {}
        #: Maps (first warp of a warpgroup, wgmma-group) and a warp to the warp's wgmmas, until all warps have committed
        #: the group.
        self._groups: dict[tuple[int, int], dict[int, list[_Event]]] = {}
        self._committed: dict[int, int] = {}
        #: Maps each warp to its setmaxnregs.
        self._settings: dict[int, list[_Event]] = {}

    def wgmma_issued(self, w: Warp, at: int, shared: Sequence[Array]) -> None:
        """Check that the operands are equal in all lanes, and record the wgmma."""
        for name, vector in zip(_SHARED, shared, strict=False):
            if (vector != vector[0]).any():
                self._reporter.report("wgmma_operands", w, at, f"{name} is not equal in all lanes")
        operands = tuple(int(vector[0]) for vector in shared)
        self._open.setdefault(w.agent, []).append(_Event(w, w.split.frame.program, at, operands))

    def wgmma_committed(self, w: Warp) -> None:
        """Compare the wgmmas that a warp commits with those of the first warp in the same group."""
        number = self._committed[w.agent] = self._committed.get(w.agent, 0) + 1
        warps = _warpgroup(w)
        key = warps[0].agent, number
        group = self._groups.setdefault(key, {})
        own = group[w.index] = self._open.pop(w.agent, [])
        first = next(iter(group))
        if len(group[first]) == len(own):
            self._compare(group[first], own)
        else:
            few, many = sorted((first, w.index), key=lambda index: len(group[index]))
            counts = f"warp {many} executes {len(group[many])}, but warp {few} executes {len(group[few])}"
            text = f"all four warps must execute each wgmma.mma_async; in a wgmma-group, {counts}"
            self._report(group[many][-1], text)
        if len(group) == len(warps):
            del self._groups[key]

    def _compare(self, first: list[_Event], own: list[_Event]) -> None:
        for event, other in zip(first, own, strict=True):
            for name, left, right in zip(_SHARED, event.operands, other.operands, strict=False):
                if left != right:
                    self._report(other, f"{name} is not equal in all warps of the warpgroup", "wgmma_operands")

    def registers_set(self, w: Warp, at: int, count: int, is_increase: bool) -> None:
        """Check a setmaxnreg against the other warps of the warpgroup.

        Repeating a setmaxnreg with the same number does not require synchronization.
        """
        own = self._settings.setdefault(w.agent, [])
        event = _Event(w, w.split.frame.program, at, (count, is_increase), self._agents.stamp(w, 1))
        number = len(own)
        is_change = bool(own) and own[-1].operands[0] != count
        known = self._agents.known(w)
        for other in _warpgroup(w):
            if other is w:
                continue
            theirs = self._settings.get(other.agent, [])
            before = theirs[number - 1].stamp if 0 < number <= len(theirs) else None
            if is_change and (before is None or known.order[before[0]] < before[1]):
                text = f"this setmaxnreg is not ordered after the previous setmaxnreg of warp {other.index}"
                self._report(event, f"{text}; the warps of a warpgroup must synchronize in between")
                break
            if len(theirs) > number and theirs[number].operands != event.operands:
                text = f"{_named(event)} here, but {_named(theirs[number])} in warp {other.index} of the same warpgroup"
                self._report(event, text)
                break
        own.append(event)

    def block_ended(self, block: Block) -> None:
        """When a CTA exits, report instructions that only some warps of a warpgroup have executed."""
        self._report_missing(block.warps)

    def deadlocked(self) -> None:
        warps = [w for block in self._cluster.blocks for w in block.warps]
        self._report_missing([w for w in warps if not w.alive.any() or _rendezvous(w)])

    def _report_missing(self, absent: Sequence[Warp]) -> None:
        """Report instructions that a warp in ``absent`` has not executed although another warp of its warpgroup has."""
        for w in absent:
            first = _warpgroup(w)[0].agent
            own = len(self._settings.get(w.agent, ()))
            for other in _warpgroup(w):
                for event in self._settings.get(other.agent, [])[own:]:
                    self._report(event, f"all four warps must execute each setmaxnreg, but warp {w.index} does not")
            for (group, _), done in self._groups.items():
                if group == first and w.index not in done:
                    for event in next((events for events in done.values() if events), []):
                        text = f"all four warps must execute each wgmma.mma_async, but warp {w.index} does not"
                        self._report(event, text)

    def _report(self, event: _Event, message: str, kind: str = "divergent_warp") -> None:
        self._reporter.findings.add(kind, message, event.program, event.at, event.w)


def _named(event: _Event) -> str:
    count, is_inc = event.operands
    return f"setmaxnreg.{'inc' if is_inc else 'dec'} {count}"


def _warpgroup(w: Warp) -> list[Warp]:
    first = w.index // WARPS * WARPS
    return w.block.warps[first : first + WARPS]


def _rendezvous(w: Warp) -> bool:
    """Return whether all lanes of a warp wait at a barrier of their CTA or cluster."""
    return all(isinstance(split.waits_for, NamedWait | ClusterWait) for split in w.splits)
