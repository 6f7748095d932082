"""One launch under one schedule: its clusters begin, run and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from cudatma.emulator.errors import ResidencyError
from cudatma.emulator.machine.events import Observer, combined
from cudatma.emulator.machine.memory import PARAM_START, GlobalMemory, address_of
from cudatma.emulator.machine.program import Image, Program
from cudatma.emulator.machine.protocols import Dim, Launch
from cudatma.emulator.machine.scheduler import Scheduler
from cudatma.emulator.machine.special_values import SpecialValues
from cudatma.emulator.machine.state import Block, Cluster, Warp
from cudatma.emulator.ptx.types import LANES, NUMPY, Array

#: Shared memory that a GPU reserves for the system in each CTA.
RESERVED_BYTES = 1024
#: Memory that live clusters may take, as ``Launch.cluster_bytes`` estimates it.
MOST_LIVE_BYTES = 2 << 30
#: Bytes that emulator and hazard checks keep for each byte of shared memory, and for each warp besides its clock.
_BYTES_PER_SHARED, _BYTES_PER_WARP = 24, 24 << 10
#: Time that passes where all threads only look at a clock: at first, and after how much a deadlock is one all the same.
FIRST_IDLE_NS, MOST_IDLE_NS = 1_000_000, 10**13


@dataclass(slots=True)
class Setup:
    """What a launch asks for, checked. parameters: the kernel's parameter buffer, in its layout. registers: of a
    thread, as ``EmulatedModule.launch`` takes them."""

    image: Image
    program: Program
    grid: Dim
    block: Dim
    cluster: Dim
    dynamic_bytes: int
    parameters: bytes
    memory: GlobalMemory
    step_limit: int
    resident_clusters: int
    registers: int | None = None
    #: Returns the observers of a cluster, in the order in which events reach them.
    observe: Callable[[Launch, Cluster], Sequence[Observer]] = lambda launch, cluster: ()
    show_steps: Callable[[int], None] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class GridLaunch:
    """A running grid. Clusters start in an order that the schedule picks; those that are live run interleaved."""

    grid: Dim
    block: Dim
    cluster: Dim
    dynamic_bytes: int
    shared_bytes: int
    workspace_base: int
    reserved_start: int

    def __init__(self, setup: Setup, schedule: int, seed: int) -> None:
        self.setup = setup
        self.image, self.program, self.memory = setup.image, setup.program, setup.memory
        self.grid, self.block, self.cluster = setup.grid, setup.block, setup.cluster
        self.threads = setup.block[0] * setup.block[1] * setup.block[2]
        self.dynamic_bytes = setup.dynamic_bytes
        self.shared_offsets, self.dynamic_start = setup.image.shared_layout(setup.program.function.name)
        self.shared_bytes = self.dynamic_start + setup.dynamic_bytes
        #: Where cooperative groups keep the barriers of groups of several warps: after all other shared memory.
        self.reserved_start = -(-self.shared_bytes // 16) * 16
        self.reserved_bytes = RESERVED_BYTES if setup.image.reads(setup.program.function.name, "%reserved_smem") else 0
        #: What malloc has given: address -> bytes.
        self.heap: dict[int, int] = {}
        self.printed: list[str] = []
        #: What of the kernel could not be checked, and why.
        self.unchecked: list[str] = []
        #: (special register, warp) -> its vector, the same in every CTA.
        self.lane_values: dict[tuple[str, int], Array] = {}
        self._parameter_values: dict[tuple[str, int, str, int], Array] = {}
        self.decoded_maps: dict[bytes, Any] = {}
        raw = np.zeros(setup.program.param_bytes + 128, np.uint8)
        skip = -address_of(raw) % 128
        self._parameters: Array = raw[skip : skip + max(setup.program.param_bytes, 1)]
        self._parameters[: len(setup.parameters)] = np.frombuffer(setup.parameters, np.uint8)
        self.param_base = self.memory.add(self._parameters, "kernel parameters")
        self.param_span = (self.param_base, self.param_base + self._parameters.size)
        #: From an address in the .param space to the generic one.
        self.param_shift = np.full(LANES, self.param_base - PARAM_START, np.uint64)
        #: What the driver gives a cooperative launch: the workspace's size in bytes, the grid's barrier.
        workspace = np.array([8, 0], np.uint32)
        self.workspace_base = self.memory.add(workspace, "grid workspace")
        self.scheduler = Scheduler(self, schedule, seed, setup.step_limit)
        #: Time that has passed in addition to the steps, in ns, and whether the kernel has looked at a clock since
        #: then.
        self._waited_ns, self._looked_at_clock = 0, False
        #: Clusters that have started and not ended.
        self.resident: list[Cluster] = []
        self._waiting = self._origins()
        #: Of those that have not started, the ones of which the next is picked.
        self._window: list[Dim] = []
        #: The first CTA of each cluster that has started, by the cluster's number.
        self.started: list[Dim] = []

    def unmap(self) -> None:
        """Take the launch's own buffers out of memory."""
        for base in (self.param_base, self.workspace_base, *self.heap):
            self.memory.remove(base)

    def _origins(self) -> Iterator[Dim]:
        grid, cluster = self.grid, self.cluster
        for z in range(0, grid[2], cluster[2]):
            for y in range(0, grid[1], cluster[1]):
                for x in range(0, grid[0], cluster[0]):
                    yield x, y, z

    def run(self) -> None:
        """Run the whole grid. Raises what the scheduler raises."""
        with np.errstate(all="ignore"):
            self.admit()
            self.scheduler.run()

    def admit(self) -> bool:
        """Start a cluster that the schedule picks, where one is left and no more are live than may be."""
        if len(self.resident) >= self.setup.resident_clusters:
            return False
        return self._start(self._take(self.scheduler.pick))

    def admit_beyond(self) -> bool:
        """All live clusters wait, perhaps for clusters that have not started: start the first of these, however many
        are live. Raises ResidencyError where they would take too much memory."""
        started = False
        for _ in range(max(1, len(self.resident) // 4)):  # so that many that wait for many do not take for ever
            origin = self._take(lambda count: 0)
            if origin is not None and (len(self.resident) + 1) * self.cluster_bytes > MOST_LIVE_BYTES:
                live, blocks = len(self.resident), self.cluster[0] * self.cluster[1] * self.cluster[2]
                raise ResidencyError(live * blocks, self.cluster_bytes * live, MOST_LIVE_BYTES)
            started = self._start(origin) or started
        return started

    @property
    def cluster_bytes(self) -> int:
        """About what a live cluster takes of the host's memory."""
        blocks = self.cluster[0] * self.cluster[1] * self.cluster[2]
        warps = -(-self.threads // LANES)
        clock = 8 * blocks * (5 * warps + 2 * self.threads)
        return blocks * (_BYTES_PER_SHARED * self.shared_bytes + warps * (_BYTES_PER_WARP + clock))

    def _start(self, origin: Dim | None) -> bool:
        if origin is None:
            return False
        self.scheduler.progress += 1
        cluster = new_cluster(self, origin, len(self.started))
        self.resident.append(cluster)
        self.started.append(origin)
        cluster.events = combined(self.setup.observe(self, cluster))
        start(cluster)
        return True

    def _take(self, pick: Callable[[int], int]) -> Dim | None:
        """Take a cluster out of those that have not started: one of the next few, for a grid may be large."""
        window = self._window
        missing = self.setup.resident_clusters - len(window)
        if missing:
            window.extend(islice(self._waiting, missing))
        return window.pop(pick(len(window))) if window else None

    def take_cluster(self) -> Dim | None:
        """The first CTA of a cluster that will not be launched, because a running one does its work."""
        return self._take(self.scheduler.pick)

    def block_ended(self, block: Block) -> None:
        """A CTA's last thread has exited; the next cluster replaces one that is done."""
        if block.cluster.is_done:
            self.resident.remove(block.cluster)

    def parameter(self, name: str, offset: int, code: str, count: int) -> Array:
        """(count, 32) elements of a kernel parameter, the same for every thread."""
        found = self._parameter_values.get((name, offset, code, count))
        if found is None:
            start = self.program.param_offsets[name] + offset
            raw = self._parameters[start : start + NUMPY[code].itemsize * count].copy().view(NUMPY[code])
            found = np.ascontiguousarray(np.broadcast_to(raw[:, None], (count, LANES)))
            found.flags.writeable = False
            self._parameter_values[name, offset, code, count] = found
        return found

    def show_steps(self, steps: int) -> None:
        """Report the steps of the running schedule to the caller of the launch."""
        if self.setup.show_steps is not None:
            self.setup.show_steps(steps)

    def clock(self, name: str) -> int:
        """The step counter as %clock, %globaltimer or a half of them, and the time that has passed in idleness."""
        self._looked_at_clock = True
        steps = self.scheduler.steps * 32 + self._waited_ns
        if name in ("clock", "globaltimer_lo"):
            return steps & 0xFFFFFFFF
        return steps >> 32 if name in ("clock_hi", "globaltimer_hi") else steps

    @property
    def has_idled(self) -> bool:
        """Whether there was a time when nobody could do anything but wait."""
        return self.scheduler.has_stalled

    def pass_time(self) -> bool:
        """Nobody can do anything but look at a clock: let time pass. False where nobody does, or it has not helped.

        A wait that is bounded by a clock ends here; a kernel that merely reads a clock still deadlocks, because it
        does not read it again. Each time is as long as all before it together.
        """
        if not self._looked_at_clock or self._waited_ns > MOST_IDLE_NS:
            return False
        self._looked_at_clock = False
        self._waited_ns += max(FIRST_IDLE_NS, self._waited_ns)
        return True


def new_cluster(launch: Launch, first: Dim, number: int) -> Cluster:
    """A cluster whose first CTA is ``first``, without warps yet. number: how many have started before it."""
    cluster = Cluster(launch, number)
    shape = launch.cluster
    for z in range(shape[2]):
        for y in range(shape[1]):
            for x in range(shape[0]):
                where = (first[0] + x, first[1] + y, first[2] + z)
                rank = len(cluster.blocks)
                cluster.blocks.append(Block(launch, cluster, where, (x, y, z), rank, _shared_memory(launch)))
    return cluster


def start(cluster: Cluster) -> None:
    """Create the warps of all CTAs and hand them to the scheduler."""
    for block in cluster.blocks:
        for number in range(block.warp_count):
            warp = Warp(block, number, block.launch.program, SpecialValues(block, number))
            block.warps.append(warp)
            block.live_warps += 1
            block.live_threads += int(np.count_nonzero(warp.alive))
            block.launch.scheduler.add(warp.split)
            warp.events.warp_started(warp)


def _shared_memory(launch: Launch) -> Array:
    """A CTA's shared memory: what the kernel asked for, and the system's part, which is zero, where it is used."""
    if not launch.reserved_bytes:
        return _poisoned(launch.shared_bytes)
    data = _poisoned(launch.reserved_start + launch.reserved_bytes)
    data[launch.reserved_start :] = 0
    return data


def _poisoned(size: int) -> Array:
    """Shared memory as a kernel finds it: with something in it that is not zero."""
    rounded = -(-size // 16) * 16
    return np.full(rounded, 0xA5, np.uint8)[:size]
