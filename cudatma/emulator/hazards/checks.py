"""Create the hazard checks for a cluster."""

from __future__ import annotations

from functools import lru_cache, partial

from cudatma.emulator.hazards.agents import Agents
from cudatma.emulator.hazards.findings import Findings, Reporter
from cudatma.emulator.hazards.global_races import GlobalRaces
from cudatma.emulator.hazards.lane_races import LaneRaces
from cudatma.emulator.hazards.lifetimes import Lifetimes, PeerUses
from cudatma.emulator.hazards.mbarriers import BarrierRecords, MBarriers
from cudatma.emulator.hazards.memory_order import MemoryOrder
from cudatma.emulator.hazards.registers import Accumulators, UnwrittenRegisters, WgmmaRegisters
from cudatma.emulator.hazards.shared_accesses import SharedAccesses
from cudatma.emulator.hazards.shared_memory import SharedMemory
from cudatma.emulator.hazards.shared_races import SharedRaces
from cudatma.emulator.hazards.swizzles import Swizzles
from cudatma.emulator.hazards.synchronization import Synchronization
from cudatma.emulator.hazards.warpgroups import Warpgroups
from cudatma.emulator.machine.events import Observer
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.machine.state import Cluster


def checks_of(launch: Launch, cluster: Cluster, findings: Findings) -> list[Observer]:
    """Return the hazard checks for the instructions of a kernel, in the order in which they receive events.

    The checks share the following objects:

    - Agents contains the clocks of warps.
    - SharedMemory records the last accesses to shared memory.
    - MemoryOrder tracks fences and flags.
    - BarrierRecords contains the record of each mbarrier since its init.
    - Reporter collects hazards.

    Synchronization comes last because it updates the clocks that the other checks use. PeerUses must precede
    SharedAccesses, which advances the clock at a releasing store.
    """
    number = cluster.number
    reporter = Reporter(launch, findings)
    agents = Agents(launch, cluster)
    order, records = MemoryOrder(agents, number), BarrierRecords(agents)
    memory = SharedMemory(launch, cluster)
    races = SharedRaces(cluster, agents, memory, reporter)
    lanes = LaneRaces(agents, memory, reporter, number)
    uses = partial(_uses, launch.image.opcodes(launch.program.function.name))
    return [
        reporter,
        agents,
        races,
        lanes,
        *([PeerUses(agents, memory, records, reporter)] if memory.has_peers else ()),
        SharedAccesses(agents, memory, order, races, lanes),
        *([UnwrittenRegisters(reporter)] if launch.program.unwritten else ()),
        *([Accumulators(reporter)] if uses("mma") else ()),
        *([WgmmaRegisters(reporter)] if uses("wgmma") else ()),
        *([Warpgroups(cluster, agents, reporter)] if uses("wgmma", "setmaxnreg") else ()),
        *([MBarriers(cluster, agents, memory, records, races, reporter)] if uses("mbarrier") else ()),
        GlobalRaces(agents, lanes, order, reporter, number),
        *([Swizzles(cluster, reporter)] if uses("wgmma", ".tensor") else ()),
        *([Lifetimes(agents, records, reporter)] if uses("mbarrier", "bulk") else ()),
        Synchronization(agents, memory, records, order, number),
    ]


@lru_cache(maxsize=1024)
def _uses(opcodes: frozenset[str], *words: str) -> bool:
    """Return whether any of these words occurs in any of the opcodes."""
    return any(word in opcode for opcode in opcodes for word in words)
