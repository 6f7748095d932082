"""One launch under one schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cudatma.emulator import register_watch
from cudatma.emulator.cluster import Block, Cluster, Dim
from cudatma.emulator.image import Image
from cudatma.emulator.machine import Split
from cudatma.emulator.memory import GlobalMemory, address_of
from cudatma.emulator.program import Program
from cudatma.emulator.scheduler import Scheduler
from cudatma.emulator.types import Array


@dataclass(slots=True)
class Setup:
    """What a launch asks for, checked. parameters: the kernel's parameter buffer, in its layout."""

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
    observe: Callable[[Launch, Cluster], Any] | None = None
    trace: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


class Launch:
    """A running grid. Clusters are let in one by one while earlier ones end or need them."""

    def __init__(self, setup: Setup, schedule: int, seed: int) -> None:
        self.setup = setup
        self.image, self.program, self.memory = setup.image, setup.program, setup.memory
        self.grid, self.block, self.cluster = setup.grid, setup.block, setup.cluster
        self.threads = setup.block[0] * setup.block[1] * setup.block[2]
        self.dynamic_bytes = setup.dynamic_bytes
        self.shared_offsets, self.dynamic_start = setup.image.shared_layout(setup.program.function.name)
        self.shared_bytes = self.dynamic_start + setup.dynamic_bytes
        self.printed: list[str] = []
        self.decoded_maps: dict[bytes, Any] = {}
        self.trace = setup.trace
        self.watch: Callable[[Split, int], None] | None = None
        raw = np.zeros(setup.program.param_bytes + 128, np.uint8)
        skip = -address_of(raw) % 128
        self._parameters: Array = raw[skip : skip + max(setup.program.param_bytes, 1)]
        self._parameters[: len(setup.parameters)] = np.frombuffer(setup.parameters, np.uint8)
        self.param_base = self.memory.add(self._parameters, "kernel parameters")
        self.param_span = (self.param_base, self.param_base + self._parameters.size)
        self.scheduler = Scheduler(self, schedule, seed, setup.step_limit)
        self.resident: list[Cluster] = []
        self._waiting = self._origins()
        self._count = 0

    def _origins(self) -> Iterator[Dim]:
        grid, cluster = self.grid, self.cluster
        for z in range(0, grid[2], cluster[2]):
            for y in range(0, grid[1], cluster[1]):
                for x in range(0, grid[0], cluster[0]):
                    yield x, y, z

    def run(self) -> None:
        """Run the whole grid. Raises what the scheduler raises."""
        if self.trace is not None:
            self.trace.begin(self)
        with np.errstate(all="ignore"):
            self.admit()
            self.scheduler.run()

    def admit(self) -> bool:
        """Let the next cluster in, where one is left and there is room."""
        if len(self.resident) >= self.setup.resident_clusters:
            return False
        origin = next(self._waiting, None)
        if origin is None:
            return False
        self.scheduler.progress += 1
        self._count += 1
        self.resident.append(Cluster(self, origin, self._count - 1))
        return True

    def block_ended(self, block: Block) -> None:
        """A block's last thread has left; a cluster that is done makes room for the next."""
        if block.cluster.is_done:
            self.resident.remove(block.cluster)

    def new_observer(self, cluster: Cluster) -> Any:
        """The hazard layer of a cluster, None where it is switched off."""
        if self.setup.observe is None:
            return None
        if self.program.unwritten:
            self.watch = register_watch.watch
        return self.setup.observe(self, cluster)

    def clock(self, name: str) -> int:
        """The step counter as %clock, %globaltimer or a half of them."""
        steps = self.scheduler.steps * 32
        if name in ("clock", "globaltimer_lo"):
            return steps & 0xFFFFFFFF
        return steps >> 32 if name in ("clock_hi", "globaltimer_hi") else steps
