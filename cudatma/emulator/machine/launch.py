"""Execute a launch under one schedule by starting, running and ending its clusters."""

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

#: Number of bytes of shared memory that the system reserves in each CTA.
RESERVED_BYTES = 1024
#: Maximum host memory of live clusters in bytes, as estimated by ``Launch.cluster_bytes``.
MAX_LIVE_BYTES = 2 << 30
#: Host memory of the emulator and the hazard checks in bytes: per byte of shared memory, and per warp (without clocks).
_BYTES_PER_SHARED, _BYTES_PER_WARP = 24, 24 << 10
#: First step of the emulated time that passes while all threads only read clocks, and the total time after which the
#: launch counts as deadlocked.
FIRST_IDLE_NS, MAX_IDLE_NS = 1_000_000, 10**13


@dataclass(slots=True)
class Setup:
    """Validated parameters of a launch.

    ``parameters`` is the kernel's parameter buffer. ``registers`` is the number of registers per thread, as for
    ``EmulatedModule.launch``.
    """

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
    #: Function that returns the observers of a cluster in the order in which they receive events.
    observe: Callable[[Launch, Cluster], Sequence[Observer]] = lambda launch, cluster: ()
    show_steps: Callable[[int], None] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class GridLaunch:
    """A running grid.

    The schedule determines the order in which clusters start. Live clusters are interleaved.
    """

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
        #: Offset of the barriers for cooperative groups of several warps, which follow all other shared memory.
        self.reserved_start = -(-self.shared_bytes // 16) * 16
        self.reserved_bytes = RESERVED_BYTES if setup.image.reads(setup.program.function.name, "%reserved_smem") else 0
        #: Maps the address of each live malloc allocation to its size in bytes.
        self.heap: dict[int, int] = {}
        self.printed: list[str] = []
        #: Descriptions of omitted checks, with reasons.
        self.unchecked: list[str] = []
        #: Maps (special register, warp) to its vector, which is the same in every CTA.
        self.lane_values: dict[tuple[str, int], Array] = {}
        self._parameter_values: dict[tuple[str, int, str, int], Array] = {}
        self.decoded_maps: dict[bytes, Any] = {}
        raw = np.zeros(setup.program.param_bytes + 128, np.uint8)
        skip = -address_of(raw) % 128
        self._parameters: Array = raw[skip : skip + max(setup.program.param_bytes, 1)]
        self._parameters[: len(setup.parameters)] = np.frombuffer(setup.parameters, np.uint8)
        self.param_base = self.memory.add(self._parameters, "kernel parameters")
        self.param_span = (self.param_base, self.param_base + self._parameters.size)
        #: Difference between the generic address and the .param address of a kernel parameter.
        self.param_shift = np.full(LANES, self.param_base - PARAM_START, np.uint64)
        #: Workspace that the driver passes to a cooperative launch. It contains its size in bytes and the grid barrier.
        workspace = np.array([8, 0], np.uint32)
        self.workspace_base = self.memory.add(workspace, "grid workspace")
        self.scheduler = Scheduler(self, schedule, seed, setup.step_limit)
        #: Emulated time in ns in addition to the steps, and whether the kernel has read a clock since the time last
        #: advanced.
        self._waited_ns, self._has_read_clock = 0, False
        #: Clusters that have started and have not exited.
        self.resident: list[Cluster] = []
        self._waiting = self._origins()
        #: Clusters among which the schedule selects the next one to start.
        self._window: list[Dim] = []
        #: Maps the number of each started cluster to its first CTA.
        self.started: list[Dim] = []

    def unmap(self) -> None:
        """Remove the launch's own buffers from memory."""
        for base in (self.param_base, self.workspace_base, *self.heap):
            self.memory.remove(base)

    def _origins(self) -> Iterator[Dim]:
        grid, cluster = self.grid, self.cluster
        for z in range(0, grid[2], cluster[2]):
            for y in range(0, grid[1], cluster[1]):
                for x in range(0, grid[0], cluster[0]):
                    yield x, y, z

    def run(self) -> None:
        """Run the whole grid. Raise the same exceptions as Scheduler.run()."""
        with np.errstate(all="ignore"):
            self.admit()
            self.scheduler.run()

    def admit(self) -> bool:
        """Start the cluster that the schedule selects unless none is left or too many are live."""
        if len(self.resident) >= self.setup.resident_clusters:
            return False
        return self._start(self._take(self.scheduler.pick))

    def admit_beyond(self) -> bool:
        """Start more clusters than the limit allows, because all live clusters may be waiting for them.

        Raise ResidencyError if the live clusters would use too much memory.
        """
        started = False
        for _ in range(max(1, len(self.resident) // 4)):  # Batches speed up long chains of waiting clusters.
            origin = self._take(lambda count: 0)
            if origin is not None and (len(self.resident) + 1) * self.cluster_bytes > MAX_LIVE_BYTES:
                live, blocks = len(self.resident), self.cluster[0] * self.cluster[1] * self.cluster[2]
                raise ResidencyError(live * blocks, self.cluster_bytes * live, MAX_LIVE_BYTES)
            started = self._start(origin) or started
        return started

    @property
    def cluster_bytes(self) -> int:
        """Return the estimated host memory of a live cluster in bytes."""
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
        """Remove and return one of the next clusters to start.

        The choice is limited to a window of clusters because grids may be large.
        """
        window = self._window
        missing = self.setup.resident_clusters - len(window)
        if missing:
            window.extend(islice(self._waiting, missing))
        return window.pop(pick(len(window))) if window else None

    def take_cluster(self) -> Dim | None:
        """Cancel a cluster that has not started, so that a running cluster can do its work.

        Return the first CTA of the canceled cluster, or None if no cluster is left.
        """
        return self._take(self.scheduler.pick)

    def block_ended(self, block: Block) -> None:
        """Remove a cluster after its last CTA has exited, so that another cluster can start."""
        if block.cluster.is_done:
            self.resident.remove(block.cluster)

    def parameter(self, name: str, offset: int, code: str, count: int) -> Array:
        """Return elements of a kernel parameter, shape (count, 32), which are equal in all lanes."""
        values = self._parameter_values.get((name, offset, code, count))
        if values is None:
            start = self.program.param_offsets[name] + offset
            raw = self._parameters[start : start + NUMPY[code].itemsize * count].copy().view(NUMPY[code])
            values = np.ascontiguousarray(np.broadcast_to(raw[:, None], (count, LANES)))
            values.flags.writeable = False
            self._parameter_values[name, offset, code, count] = values
        return values

    def show_steps(self, steps: int) -> None:
        """Report the steps of the current schedule to the caller of the launch."""
        if self.setup.show_steps is not None:
            self.setup.show_steps(steps)

    def clock(self, name: str) -> int:
        """Return %clock, %globaltimer or half of one of these registers, which count the steps plus the idle time."""
        self._has_read_clock = True
        steps = self.scheduler.steps * 32 + self._waited_ns
        if name in ("clock", "globaltimer_lo"):
            return steps & 0xFFFFFFFF
        return steps >> 32 if name in ("clock_hi", "globaltimer_hi") else steps

    @property
    def has_idled(self) -> bool:
        """Return whether emulated time has passed while all threads waited."""
        return self.scheduler.has_stalled

    def pass_time(self) -> bool:
        """Advance the clock because all threads are waiting, and return whether a thread may now continue.

        Time passes only up to a limit, and only if a thread has read a clock since the last advance. Waits with a
        time limit therefore end, while a kernel that reads a clock only once still deadlocks. Each advance equals the
        sum of all previous advances.
        """
        if not self._has_read_clock or self._waited_ns > MAX_IDLE_NS:
            return False
        self._has_read_clock = False
        self._waited_ns += max(FIRST_IDLE_NS, self._waited_ns)
        return True


def new_cluster(launch: Launch, first: Dim, number: int) -> Cluster:
    """Return cluster ``number``, whose first CTA is ``first``, without warps."""
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
    """Create the warps of all CTAs and pass them to the scheduler."""
    for block in cluster.blocks:
        for number in range(block.warp_count):
            warp = Warp(block, number, block.launch.program, SpecialValues(block, number))
            block.warps.append(warp)
            block.live_warps += 1
            block.live_threads += int(np.count_nonzero(warp.alive))
            block.launch.scheduler.add(warp.split)
            warp.events.warp_started(warp)


def _shared_memory(launch: Launch) -> Array:
    """Return the shared memory of a CTA, including the system's zeroed part if the kernel uses it."""
    if not launch.reserved_bytes:
        return _poisoned(launch.shared_bytes)
    data = _poisoned(launch.reserved_start + launch.reserved_bytes)
    data[launch.reserved_start :] = 0
    return data


def _poisoned(size: int) -> Array:
    """Return shared memory filled with a nonzero pattern, because shared memory is uninitialized on a GPU."""
    rounded = -(-size // 16) * 16
    return np.full(rounded, 0xA5, np.uint8)[:size]
