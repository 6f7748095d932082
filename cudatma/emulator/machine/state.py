"""State of a running grid: clusters, CTAs and their barriers, warps, and splits of diverged lanes.

Lanes of a warp that diverge at a branch become splits. Splits run independently, so a split may wait for another
split of its warp. Splits reconverge at the immediate post-dominator of the branch (divergence.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatma.emulator.errors import EmulatorError, TrapError
from cudatma.emulator.machine.events import UNOBSERVED, Observer
from cudatma.emulator.machine.memory import LOCAL_WINDOW, PARAM_START, RANK_SHIFT, SHARED_START, SHARED_WINDOW, Region
from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.protocols import Dim, Launch
from cudatma.emulator.ptx.types import LANES, Array

#: Return codes of a segment: the split does not advance (BLOCK), or the warp's splits have changed (SWITCH).
BLOCK, SWITCH = -1, -2
FULL = np.ones(LANES, bool)
FULL.flags.writeable = False
NOBODY = ~FULL
NOBODY.flags.writeable = False
_LANES = np.arange(LANES)
#: Maximum local memory per thread in bytes.
MAX_LOCAL_BYTES = 512 << 10


class Frame:
    """A function call: registers, parameter buffers, base of the local memory, and segment to return to."""

    __slots__ = (
        "addresses",
        "caller",
        "local_base",
        "params",
        "program",
        "registers",
        "return_to",
        "undefined",
        "undefined_at",
    )

    def __init__(self, program: Program, caller: Frame | None, return_to: int, local_base: int) -> None:
        self.program, self.caller, self.return_to, self.local_base = program, caller, return_to, local_base
        self.registers: list[Array] = list(program.initial_registers)
        self.params: dict[str, Region] = {}
        self.addresses: dict[tuple[str, int], Array] = {}
        #: Maps a register to the lanes whose value a shuffle left undefined, and the last such shuffle (undefined.py).
        self.undefined: dict[int, Array] = {}
        self.undefined_at = -1


class Join:
    """Reconvergence point of splits.

    ``at`` is a segment, or -1 for the end of the frame's function. ``missing`` is the number of splits that may still
    arrive.
    """

    __slots__ = ("at", "frame", "mask", "missing", "parent")

    def __init__(self, at: int, frame: Frame, parent: Join | None, missing: int) -> None:
        self.at, self.frame, self.parent, self.missing = at, frame, parent, missing
        self.mask: Array = np.zeros(LANES, bool)


class Split:
    """Lanes of a warp at the same program position.

    If ``is_full`` is true, the lanes run the unmasked version of a segment, which does not track undefined values.
    ``waits_for`` is the wait of the lanes, or None if they can run.
    """

    __slots__ = (
        "frame",
        "is_full",
        "join",
        "last_poll",
        "mask",
        "pc",
        "polls",
        "released",
        "timed_out",
        "token",
        "waits_for",
        "warp",
    )

    def __init__(self, warp: Warp, pc: int, mask: Array, frame: Frame, join: Join | None) -> None:
        self.warp, self.pc, self.mask, self.frame, self.join = warp, pc, mask, frame, join
        self.is_full = (mask is FULL or bool(mask.all())) and not frame.undefined
        self.waits_for: Any = None
        self.timed_out = False
        #: Lanes for which this split waits and that have left a join early to arrive (divergence.py).
        self.released: Array = NOBODY
        self.polls = 0
        self.token: Any = None
        self.last_poll: Any = None

    def widen(self, lanes: Array) -> None:
        self.mask = self.mask | lanes
        self.is_full = bool(self.mask.all()) and not self.frame.undefined


class Warp:
    """The 32 threads of a warp.

    ``split`` is the running split. ``alive`` is the mask of the lanes that have not exited.
    """

    def __init__(self, block: Block, index: int, program: Program, special: dict[str, Array]) -> None:
        """Create a warp. ``special`` maps the name of a special register to a (32,) vector."""
        self.block, self.index, self.special = block, index, special
        self.launch, self.events = block.launch, block.cluster.events
        self.alive: Array = FULL if LANES * (index + 1) <= block.threads else _LANES + LANES * index < block.threads
        self.carry: Array = ~FULL
        #: End of the local memory that alloca has allocated. Frames of calls start after it.
        self.stack_top = 0
        #: Number of synchronizations of all live lanes. The second count includes only partial synchronizations.
        self.meetings = 0
        self.part_meetings = 0
        #: Whether lanes have left a join while other lanes polled.
        self.has_left_joins = False
        #: Lanes whose guard is true, while observers receive the events of a guarded instruction.
        self.guard: Array | None = None
        #: Instruction and value of the last strong load. The warp spins if it reads the same value again.
        self.last_read: tuple[int, bytes] | None = None
        #: Last flag that a split of the warp has polled, or None.
        self.last_poll: Any = None
        self.local = Region(0, np.zeros(0, np.uint8), "local memory")
        self.local_bytes = 0
        self.agent = block.rank * block.warp_count + index
        self.async_state: dict[str, Any] = {}
        #: Splits that wait for other lanes at an instruction that these lanes must execute together (divergence.Wait).
        self.waiting: list[Any] = []
        self.splits: list[Split] = []
        frame = Frame(program, None, -1, 0)
        self.reserve_local(program.local_bytes)
        self.split = Split(self, 0, self.alive, frame, None)
        self.splits.append(self.split)

    # ---- calls from generated code

    @property
    def frame(self) -> Frame:
        return self.split.frame

    def address(self, name: str, offset: int) -> Array:
        """Return the address of a variable in its state space, as 32 uint64 values."""
        frame = self.split.frame
        cache = frame.addresses if name in frame.program.local_offsets else self.block.addresses
        vector = cache.get((name, offset))
        if vector is None:
            vector = np.full(LANES, self._resolve(frame, name) + offset, np.uint64)
            vector.flags.writeable = False
            cache[name, offset] = vector
        return vector

    def _resolve(self, frame: Frame, name: str) -> int:
        program = frame.program
        if name in program.local_offsets:
            return frame.local_base + program.local_offsets[name]
        if name in self.launch.shared_offsets:
            return self.block.shared_base + self.launch.shared_offsets[name]
        if name in program.param_offsets and program.is_entry:
            return PARAM_START + program.param_offsets[name]
        address = self.launch.image.addresses.get(name)
        if address is None:
            raise EmulatorError(f"`{name}` is declared but not defined in this module, so it has no address")
        return address

    def function_address(self, name: str) -> Array:
        return np.full(LANES, self.launch.image.function_number(name), np.uint64)

    def clock(self, name: str) -> Array:
        """Return the value of a clock. A step of the launch counts as one clock cycle and one nanosecond."""
        value = self.launch.clock(name)
        return np.full(LANES, value, np.uint64)

    def is_space(self, space: str, address: Array) -> Array:
        window = address >> np.uint64(60)
        name = space.split("::")[0]
        if name == "shared":
            inside: Array = np.asarray(window == np.uint64(SHARED_WINDOW >> 60))
            if space == "shared::cta":
                rank = (address - np.uint64(SHARED_WINDOW)) >> np.uint64(RANK_SHIFT)
                inside = inside & (rank == np.uint64(self.block.rank))
            return inside
        if name == "local":
            return np.asarray(window == np.uint64(LOCAL_WINDOW >> 60))
        inside = np.asarray(window == np.uint64(0))
        if name in ("const", "param"):
            spans = self.launch.image.const_spans if name == "const" else [self.launch.param_span]
            hit = np.zeros(LANES, bool)
            for low, high in spans:
                hit |= (address >= np.uint64(low)) & (address < np.uint64(high))
            return hit
        return inside

    def param_buffer(self, frame: Frame, name: str, size: int) -> Region:
        """Return the buffer (32 lanes x size bytes) of a .param variable of a frame."""
        buffer = frame.params.get(name)
        if buffer is None:
            variable = frame.program.function.param_locals.get(name)
            size = max(size, variable.size_bytes if variable else 0)
            size = -(-size // 16) * 16
            buffer = Region(0, np.zeros(LANES * size, np.uint8), f"parameter {name}")
            frame.params[name] = buffer
        return buffer

    def allocate(self, size: int, align: int) -> int:
        """Allocate local memory for alloca and return its address."""
        frame = self.split.frame
        top = max(self.stack_top, frame.local_base + frame.program.local_bytes)
        start = -(-top // align) * align
        self.reserve_local(start + size)
        self.stack_top = start + size
        return start

    def reserve_local(self, size: int) -> None:
        """Enlarge the local memory of each lane to at least ``size`` bytes and keep its contents."""
        if size <= self.local_bytes:
            return
        if size > MAX_LOCAL_BYTES:
            raise TrapError(f"local memory per thread must be at most {MAX_LOCAL_BYTES} bytes, got {size}")
        size = -(-size // 64) * 64
        data = np.zeros((LANES, size), np.uint8)
        if self.local_bytes:
            data[:, : self.local_bytes] = self.local.data.reshape(LANES, -1)
        self.local, self.local_bytes = Region(0, data.reshape(-1), "local memory"), size


class NamedBarrier:
    """One of the 16 barriers of a CTA (bar.sync id).

    ``arrived`` is the number of threads that have arrived. ``expected`` is None until an arrival states a thread count.
    """

    __slots__ = ("arrived", "expected", "number", "reductions", "waiters", "warps")

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrived = 0
        self.expected: int | None = None
        self.waiters: list[Split] = []
        self.warps: list[Warp] = []
        self.reductions: list[tuple[Split, Array, Array]] = []


class ClusterBarrier:
    """The barrier of a cluster (barrier.cluster). Every live thread arrives on it once per phase."""

    def __init__(self) -> None:
        self.arrived: dict[int, int] = {}
        self.waiters: list[Split] = []
        self.phase = 0


class Cluster:
    """CTAs that can access each other's shared memory. ``events`` is the observer of the cluster."""

    def __init__(self, launch: Launch, number: int) -> None:
        self.launch, self.number = launch, number
        self.barrier = ClusterBarrier()
        self.blocks: list[Block] = []
        self.events: Observer = UNOBSERVED

    @property
    def is_done(self) -> bool:
        return all(block.is_done for block in self.blocks)


class Block:
    """A CTA: its shared memory, barriers and warps. ``index`` is blockIdx. ``rank`` is the rank in its cluster."""

    launch: Launch
    cluster: Cluster
    index: Dim
    place: Dim
    rank: int
    warp_count: int
    shared_base: int

    def __init__(self, launch: Launch, cluster: Cluster, index: Dim, place: Dim, rank: int, shared: Array) -> None:
        self.launch, self.cluster, self.index, self.place, self.rank = launch, cluster, index, place, rank
        self.threads = launch.threads
        self.warp_count = -(-self.threads // LANES)
        self.shared_base = (rank << RANK_SHIFT) | SHARED_START
        self.shared = Region(self.shared_base, shared, f"shared memory of block {index}", is_writable=True)
        self.barriers = [NamedBarrier(k) for k in range(16)]
        self.mbarriers: dict[int, Any] = {}
        #: Register pool (register_pool.RegisterPool), or None until a warp executes setmaxnreg.
        self.register_pool: Any = None
        self.warps: list[Warp] = []
        self.live_warps, self.live_threads = 0, 0
        #: Special registers and addresses that all warps of the CTA share.
        self.common_values: dict[str, Array] = {}
        self.addresses: dict[tuple[str, int], Array] = {}

    @property
    def is_done(self) -> bool:
        return self.live_warps == 0
