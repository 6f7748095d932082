"""Blocks, warps and their lanes: who is where in the program.

Lanes of a warp that part at a branch become splits which run independently (so that one may wait for another) and meet
again at the branch's immediate post-dominator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudatma.emulator.errors import EmulatorError, TrapError
from cudatma.emulator.machine.memory import LOCAL_WINDOW, PARAM_START, RANK_SHIFT, SHARED_WINDOW, Region
from cudatma.emulator.machine.special_values import SpecialValues
from cudatma.emulator.ptx.types import LANES, Array

if TYPE_CHECKING:
    from cudatma.emulator.machine.cluster import Block
    from cudatma.emulator.machine.program import Program

#: What a segment returns when its split stays where it is, or when the warp's splits have changed.
BLOCK, SWITCH = -1, -2
FULL = np.ones(LANES, bool)
FULL.flags.writeable = False
_LANES = np.arange(LANES)
#: Deepest chain of calls, and the most local memory of one thread.
MAX_CALLS, MAX_LOCAL_BYTES = 256, 512 << 10


class Frame:
    """One activation of a function: registers, parameter buffers, where its locals lie, where to return to."""

    __slots__ = ("addresses", "caller", "local_base", "params", "program", "registers", "return_to")

    def __init__(self, program: Program, caller: Frame | None, return_to: int, local_base: int) -> None:
        self.program, self.caller, self.return_to, self.local_base = program, caller, return_to, local_base
        self.registers: list[Array] = list(program.initial_registers)
        self.params: dict[str, Region] = {}
        self.addresses: dict[tuple[str, int], Array] = {}


class Join:
    """Where splits meet. at: segment, -1 for the end of the frame's function; missing: splits still on their way."""

    __slots__ = ("at", "frame", "mask", "missing", "parent")

    def __init__(self, at: int, frame: Frame, parent: Join | None, missing: int) -> None:
        self.at, self.frame, self.parent, self.missing = at, frame, parent, missing
        self.mask: Array = np.zeros(LANES, bool)


class Split:
    """Lanes of one warp that are at the same place. waits_for: None while they can run."""

    __slots__ = (
        "frame",
        "is_full",
        "join",
        "last_poll",
        "mask",
        "pc",
        "polls",
        "timed_out",
        "token",
        "waits_for",
        "warp",
    )

    def __init__(self, warp: Warp, pc: int, mask: Array, frame: Frame, join: Join | None) -> None:
        self.warp, self.pc, self.mask, self.frame, self.join = warp, pc, mask, frame, join
        self.is_full = mask is FULL or bool(mask.all())
        self.waits_for: Any = None
        self.timed_out = False
        self.polls = 0
        self.token: Any = None
        self.last_poll: Any = None

    def widen(self, lanes: Array) -> None:
        """Take in the lanes of another split."""
        self.mask = self.mask | lanes
        self.is_full = bool(self.mask.all())


class Warp:
    """32 threads of a block. ``split`` is the one that runs; ``alive`` the lanes that have not left the kernel."""

    def __init__(self, block: Block, index: int, program: Program) -> None:
        self.block, self.index = block, index
        self.launch = block.launch
        self.special = SpecialValues(block, index)
        self.alive: Array = FULL if LANES * (index + 1) <= block.threads else _LANES + LANES * index < block.threads
        self.carry: Array = ~FULL
        #: End of what alloca has taken of local memory; frames of calls begin behind it.
        self.stack_top = 0
        #: How often all live lanes have met at a warp-wide instruction, and how often some of them.
        self.meetings = 0
        self.part_meetings = 0
        #: Lanes whose guard holds, while a guarded instruction runs that the hazard layer is told of.
        self.guard: Array | None = None
        #: (instruction, value) of the last strong load: one that finds the same again is spinning.
        self.looked: tuple[int, bytes] | None = None
        self.local = Region(0, np.zeros(0, np.uint8), "local memory")
        self.local_bytes = 0
        self.agent = block.rank * block.warp_count + index
        self.async_state: dict[str, Any] = {}
        #: Splits that wait for other lanes at an instruction that a warp executes together (rendezvous.Wait).
        self.waiting: list[Any] = []
        self.splits: list[Split] = []
        frame = Frame(program, None, -1, 0)
        self._reserve_local(program.local_bytes)
        self.split = Split(self, 0, self.alive, frame, None)
        self.splits.append(self.split)

    # ---- what generated code asks for

    @property
    def frame(self) -> Frame:
        return self.split.frame

    def address(self, name: str, offset: int) -> Array:
        """The address of a variable in its own space, as (32,) uint64."""
        frame = self.split.frame
        kept = frame.addresses if name in frame.program.local_offsets else self.block.addresses
        found = kept.get((name, offset))
        if found is None:
            found = np.full(LANES, self._resolve(frame, name) + offset, np.uint64)
            found.flags.writeable = False
            kept[name, offset] = found
        return found

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
            raise EmulatorError(f"`{name}` has no address: it is declared but not defined in this module")
        return address

    def function_address(self, name: str) -> Array:
        return np.full(LANES, self.launch.image.function_number(name), np.uint64)

    def clock(self, name: str) -> Array:
        """Steps of the whole launch stand for clock cycles and nanoseconds."""
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

    # ---- divergence

    def diverge(self, taken: Array, target: int, following: int, meet: int) -> int:
        """Part the running split: lanes in ``taken`` go to target, the others to following; they meet at ``meet``."""
        split = self.split
        join = self._join_at(split, meet)
        others = split.mask & ~taken
        for mask, pc in ((taken, target), (others, following)):
            self._place(Split(self, pc, mask, split.frame, join))
        self.remove(split)
        return SWITCH

    def _join_at(self, split: Split, meet: int) -> Join | None:
        """The join for two new splits in place of one."""
        join = split.join
        if join is not None and join.at == meet and join.frame is split.frame:
            join.missing += 1
            return join
        if meet == -1 and split.frame.caller is None:
            if join is not None:
                join.missing += 1
            return join
        return Join(meet, split.frame, join, 2)

    def _place(self, split: Split) -> None:
        """Put a new split among the warp's, or let it arrive at once where it begins at its join."""
        self.splits.append(split)
        join = split.join
        if join is not None and split.pc == join.at and split.frame is join.frame:
            self.arrive(split)
        else:
            self.launch.scheduler.add(split)

    def remove(self, split: Split) -> None:
        """A split that is no more."""
        self.splits.remove(split)
        self.launch.scheduler.drop(split)

    def arrive(self, split: Split) -> None:
        """A split has come to its join."""
        join = split.join
        if join is None:
            raise EmulatorError("a split without a join arrived at one")
        self.remove(split)
        join.mask = join.mask | split.mask
        self.one_less(join)
        if self.waiting:
            self._lanes_moved()

    def one_less(self, join: Join) -> None:
        """A split, or an inner join, that the join waited for has come or never will."""
        join.missing -= 1
        if join.missing:
            return
        mask = join.mask & self.alive
        parent = join.parent
        if not mask.any():
            if parent is not None:
                self.one_less(parent)
            return
        frame, pc = join.frame, join.at
        if pc == -1:
            caller = frame.caller
            if caller is None:
                raise EmulatorError("a kernel's end was joined")
            pc, frame = frame.return_to, caller
        self._place(Split(self, pc, mask, frame, parent))

    def leave(self, mask: Array | None) -> int:
        """The running split (or those lanes of it) comes to the function's end."""
        split = self.split
        if split.frame.caller is None:
            return self.quit(mask)
        lanes = split.mask if mask is None else split.mask & mask
        rest = split.mask & ~lanes
        join = split.join
        if join is None or join.at != -1:
            raise EmulatorError("a return that does not meet its call")
        if rest.any():
            join.mask = join.mask | lanes
            split.mask, split.is_full = rest, False
        else:
            self.arrive(split)
        return SWITCH

    def quit(self, mask: Array | None) -> int:
        """The running split (or those lanes of it) leaves the kernel."""
        split = self.split
        lanes = split.mask if mask is None else split.mask & mask
        rest = split.mask & ~lanes
        self.alive = self.alive & ~lanes
        self.block.live_threads -= int(np.count_nonzero(lanes))
        if np.count_nonzero(rest):
            split.mask, split.is_full = rest, False
            if self.waiting:
                self._lanes_moved()
            self.block.lanes_ended()
            return SWITCH
        self.remove(split)
        if split.join is not None:
            self.one_less(split.join)
        if self.waiting:
            self._lanes_moved()
        if self.alive.any():
            self.block.lanes_ended()
        else:
            self.block.warp_ended(self)
        return SWITCH

    def _lanes_moved(self) -> None:
        from cudatma.emulator.machine import rendezvous

        rendezvous.lanes_moved(self)

    # ---- calls

    def call(self, program: Program, arguments: list[str], results: list[str], return_to: int) -> int:
        """Enter a .func with the running split's lanes. arguments, results: the caller's .param variables."""
        split = self.split
        caller = split.frame
        depth, walk = 0, caller
        while walk.caller is not None:
            depth, walk = depth + 1, walk.caller
        if depth >= MAX_CALLS:
            raise TrapError(f"calls nested deeper than {MAX_CALLS}: the stack is exhausted")
        base = max(caller.local_base + caller.program.local_bytes, self.stack_top)
        frame = Frame(program, caller, return_to, base)
        self._reserve_local(frame.local_base + program.local_bytes)
        for formal, actual in zip(program.function.params, arguments, strict=True):
            frame.params[formal.name] = self.param_buffer(caller, actual, formal.size_bytes)
        for formal, actual in zip(program.function.returns, results, strict=True):
            frame.params[formal.name] = self.param_buffer(caller, actual, formal.size_bytes)
        self.remove(split)
        self._place(Split(self, 0, split.mask, frame, Join(-1, frame, split.join, 1)))
        return SWITCH

    def param_buffer(self, frame: Frame, name: str, size: int) -> Region:
        """The (32 lanes x size) bytes of a .param variable of a frame."""
        found = frame.params.get(name)
        if found is None:
            variable = frame.program.function.param_locals.get(name)
            size = max(size, variable.size_bytes if variable else 0)
            size = -(-size // 16) * 16
            found = Region(0, np.zeros(LANES * size, np.uint8), f"parameter {name}")
            frame.params[name] = found
        return found

    def allocate(self, size: int, align: int) -> int:
        """Take local memory for alloca; returns its address."""
        frame = self.split.frame
        top = max(self.stack_top, frame.local_base + frame.program.local_bytes)
        start = -(-top // align) * align
        self._reserve_local(start + size)
        self.stack_top = start + size
        return start

    def _reserve_local(self, size: int) -> None:
        """Make each lane's local memory at least this large, keeping what is there."""
        if size <= self.local_bytes:
            return
        if size > MAX_LOCAL_BYTES:
            raise TrapError(f"{size} bytes of local memory for each thread; the stack ends at {MAX_LOCAL_BYTES}")
        size = -(-size // 64) * 64
        data = np.zeros((LANES, size), np.uint8)
        if self.local_bytes:
            data[:, : self.local_bytes] = self.local.data.reshape(LANES, -1)
        self.local, self.local_bytes = Region(0, data.reshape(-1), "local memory"), size
