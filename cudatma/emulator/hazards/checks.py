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
    uses_wgmma = any(opcode.startswith("wgmma") for opcode in opcodes)
    observers: list[Observer] = [
        reporter,  # what the machine itself finds
        agents,
        races,
        lanes,
    ]
    if uses_wgmma or launch.program.unwritten:
        observers.append(Registers(reporter))
    observers.append(Warpgroups(cluster, agents, reporter))
    observers.append(MBarriers(cluster, agents, memory, inits, races, reporter))
    observers.append(GlobalRaces(agents, lanes, order, reporter, number))
    if uses_wgmma or any(".tensor" in opcode for opcode in opcodes):
        observers.append(Swizzles(cluster, reporter))
    if memory.has_peers:
        observers.append(PeerUses(agents, memory, reporter))
    observers.append(Lifetimes(agents, reporter))
    return [*observers, Synchronization(agents, memory, inits, order, number), memory]
