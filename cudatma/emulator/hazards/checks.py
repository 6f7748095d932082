"""The hazard checks of a cluster, in the order in which events reach them."""

from __future__ import annotations

from cudatma.emulator.hazards.agents import Agents
from cudatma.emulator.hazards.findings import Findings, Reporter
from cudatma.emulator.hazards.global_races import GlobalRaces
from cudatma.emulator.hazards.lane_races import LaneRaces
from cudatma.emulator.hazards.lifetimes import Lifetimes, PeerUses
from cudatma.emulator.hazards.mbarriers import Inits, MBarriers
from cudatma.emulator.hazards.memory_order import MemoryOrder
from cudatma.emulator.hazards.registers import Registers
from cudatma.emulator.hazards.shared_memory import SharedMemory
from cudatma.emulator.hazards.shared_races import SharedRaces
from cudatma.emulator.hazards.swizzles import Swizzles
from cudatma.emulator.hazards.synchronization import Synchronization
from cudatma.emulator.hazards.warpgroups import Warpgroups
from cudatma.emulator.machine.events import Observer
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.machine.state import Cluster


def checks_of(launch: Launch, cluster: Cluster, findings: Findings) -> list[Observer]:
    """Return the observers that find a cluster's hazards.

    Checks share what they need to know: who has seen what (Agents), what has accessed shared memory (SharedMemory),
    fences and flags (MemoryOrder), mbarrier.inits and their fences (Inits), and where hazards go (Reporter). They come
    before Synchronization and SharedMemory, which record the event: a check sees what was known before it.
    """
    number = cluster.number
    reporter = Reporter(launch, cluster, findings)
    agents = Agents(launch, cluster)
    order, inits = MemoryOrder(agents, number), Inits(agents)
    memory = SharedMemory(launch, cluster, agents, order)
    races = SharedRaces(cluster, agents, memory, reporter)
    lanes = LaneRaces(agents, memory, reporter, number)
    opcodes = launch.image.opcodes(launch.program.function.name)
    uses_mma = any("mma" in opcode for opcode in opcodes)
    uses_boxes = any("wgmma" in opcode or ".tensor" in opcode for opcode in opcodes)
    return [
        reporter,
        agents,
        races,
        lanes,
        *([Registers(reporter)] if uses_mma or launch.program.unwritten else ()),
        Warpgroups(cluster, agents, reporter),
        MBarriers(cluster, agents, memory, inits, races, reporter),
        GlobalRaces(agents, lanes, order, reporter, number),
        *([Swizzles(cluster, reporter)] if uses_boxes else ()),
        *([PeerUses(agents, memory, reporter)] if memory.has_peers else ()),
        Lifetimes(agents, reporter),
        Synchronization(agents, memory, inits, order, number),
        memory,
    ]
