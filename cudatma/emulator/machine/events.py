"""Events that the machine reports to observers while it runs.

An observer of a cluster is a subclass of Observer that overrides the methods of the events that it handles. The machine
calls, for example, ``w.events.shared_read(...)`` and ignores the result, because observers do not affect the results
of a kernel. Hazard checks (hazards/) and the trace (trace/recording.py) are observers.

Unless its description states otherwise, an event precedes its effect: memory, barriers and registers still have the
values from before the instruction. The observers of a cluster are called in the order in which they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any, cast

from cudatma.emulator.machine.memory import Region
from cudatma.emulator.machine.program import Program
from cudatma.emulator.ptx.types import Array

#: Function that returns whether memory already contains the bytes that a store is about to write.
Same = Callable[[], bool]


def never() -> bool:
    """Return False, as the ``same`` argument of stores whose bytes are not compared."""
    return False


@dataclass(slots=True, eq=False)
class Copy:
    """An asynchronous operation on a CTA's shared memory.

    Attributes
    ----------
    w, program, at
        Warp that issues the operation, and index of the instruction in ``program``.
    what
        ``"cp.async"``, ``"cp.async.bulk"``, ``"cp.async.bulk.tensor"``, ``"st.async"`` or ``"cp.reduce.async.bulk"``
        for a write to shared memory, or ``"store"`` for a store or reduction from shared memory.
    block, offsets, size
        CTA whose shared memory is accessed, offsets of the accessed pieces, and size of each piece in bytes.
    barrier, phase
        mbarrier on which the copy completes, and its phase when the copy was issued. Both are None for cp.async
        and stores.
    group
        Group of a cp.async or a store.
    lanes
        Lane that issued each piece of a cp.async.
    scope
        Memory order and scope of a reduction (such as "relaxed.cluster"), or "" for a copy.
    number
        Number that identifies the copy.
    box, destination, map_address
        Box (async_copy.tensor_box.Box) of a tensor load, the offset of its destination, and the address of the tensor
        map.
    """

    w: Any
    at: int
    what: str
    block: Any
    offsets: Array
    size: int
    barrier: Any = None
    group: Any = None
    lanes: Array | None = None
    scope: str = ""
    box: Any = None
    destination: int = 0
    map_address: int = 0
    program: Any = None
    phase: int = 0
    number: int = field(default_factory=count(1).__next__)

    def __post_init__(self) -> None:
        self.program = self.w.split.frame.program
        if self.barrier is not None:
            self.phase = self.barrier.phase


class Observer:
    """Base class of observers of a cluster. Its methods do nothing.

    Common arguments
    ----------------
    w, at
        Warp (state.Warp), and index of its instruction in the function's body. ``w.split`` contains the lanes that
        execute the instruction, and ``w.guard`` the lanes whose guard is true (None for all).
    block, offsets
        CTA (state.Block) whose shared memory is accessed, and byte offsets in it, one per lane or per piece.
    region
        Global memory (memory.Region) that contains the bytes. Offsets are relative to its base.
    barrier
        mbarrier (async_copy.mbarrier.MBarrier), unless the event states otherwise.
    group
        Group of copies (async_copy.groups.Group) that a thread waits for.
    order
        Memory order and scope, such as ``"acquire.gpu"``; ``""`` for a weak access and ``"nc"`` for ld.global.nc.
    """

    # ---- the life of warps

    def warp_started(self, w: Any) -> None:
        """A warp has been created."""

    def segment_begins(self, split: Any, pc: int) -> None:
        """A split is about to run a segment of its program."""

    def blocked(self, split: Any, reason: Any) -> None:
        """A split has started to wait. ``reason`` provides ``describe()`` and may provide ``at`` and ``barrier``."""

    def woken(self, split: Any) -> None:
        """A split can run again."""

    def lanes_met(self, w: Any, groups: set[int]) -> None:
        """Some but not all lanes of a warp have synchronized at an instruction with a member mask.

        ``groups`` contains the lanes of each mask as bits.
        """

    def cluster_ended(self) -> None:
        """The last thread of the cluster has exited. This event precedes ``block_ended`` and ``warp_ended``."""

    def block_ended(self, block: Any) -> None:
        """The last thread of a CTA has exited. This event precedes ``warp_ended``."""

    def warp_ended(self, w: Any) -> None:
        """The last thread of a warp has exited."""

    def deadlocked(self) -> None:
        """No warp of the grid can proceed. This event precedes the report of the deadlock."""

    def trapped(self) -> None:
        """The grid has ended in a trap while all warps were only waiting."""

    # ---- hazards

    def violation(self, kind: str, w: Any, at: int, message: str, places: Sequence[Any] = (), /) -> None:
        """The machine has found a hazard: an instruction that violates a rule of execution.

        ``kind`` is a key of hazards.hazard.CAUSES. ``places`` contains the locations that the hazard affects
        (hazards.hazard.Place).
        """

    def warning(self, kind: str, w: Any, at: int, message: str, /) -> None:
        """The machine has found code that relies on behavior that PTX does not guarantee."""

    def hazard_found(self, hazard: Any, w: Any) -> None:
        """A hazard (hazards.hazard.Hazard) has been recorded at a new place during an access by this warp."""

    # ---- plain accesses and fences

    def shared_read(
        self, w: Any, at: int, block: Any, offsets: Array, size: int, order: str, together: bool, /
    ) -> None:
        """Lanes read ``size`` bytes each (ld, ldmatrix).

        ``together`` is true if the access is one warp-wide instruction.
        """

    def shared_write(
        self, w: Any, at: int, block: Any, offsets: Array, size: int, order: str, together: bool, same: Same, /
    ) -> None:
        """Lanes write ``size`` bytes each (st, stmatrix, st.bulk, tensormap.replace)."""

    def shared_atomic(self, w: Any, at: int, block: Any, offsets: Array, size: int, order: str, /) -> None:
        """A lane executes atom or red. Each lane causes a separate event."""

    def matrices_read(self, w: Any, at: int, block: Any, offsets: Array, /) -> None:
        """ldmatrix reads matrix rows, with eight offsets per matrix. This event follows its ``shared_read``."""

    def global_read(self, w: Any, at: int, region: Region, offsets: Array, size: int, order: str, /) -> None:
        """Lanes read ``size`` bytes each of one region."""

    def global_write(
        self, w: Any, at: int, region: Region, offsets: Array, size: int, order: str, same: Same, /
    ) -> None:
        """Lanes write ``size`` bytes each of one region."""

    def atomic(self, w: Any, at: int, addresses: Array, space: str, size: int, order: str, returns: bool, /) -> None:
        """Lanes execute atom or red. This event precedes their ``shared_atomic`` events.

        ``addresses`` contains the addresses of the active lanes. ``space`` is the opcode's state space, or ``""`` for
        generic addresses. ``returns`` is true if the result of an atom is used.
        """

    def fence(self, w: Any, at: int, kind: str, /) -> None:
        """A warp executes membar or fence. ``kind`` is the opcode after its root."""

    def map_fence(self, w: Any, addresses: set[int], scope: int, /) -> None:
        """A warp executes fence.proxy.tensormap::generic.acquire on the tensor maps at these addresses."""

    def grid_waited(self, w: Any, /) -> None:
        """A warp executes griddepcontrol.wait. The previous grid has completed."""

    # ---- asynchronous copies

    def copy_issued(self, copy: Copy, /) -> None:
        """A copy into shared memory is issued."""

    def copy_landed(self, copy: Copy, /) -> None:
        """The bytes of a copy have been written. The mbarrier or group counts them after this event."""

    def store_issued(self, store: Copy, /) -> None:
        """A bulk or tensor store is issued. This event follows its ``shared_source``."""

    def store_landed(self, store: Copy, /) -> None:
        """The bytes of a store have been written to global memory. The group counts them after this event."""

    def shared_source(self, w: Any, at: int, block: Any, offsets: Array, end: Any, /) -> None:
        """An asynchronous operation will read 16-byte chunks of shared memory.

        ``end`` signals the end of the reads. It is the group of a store, or the mbarrier of a copy to another CTA.
        """

    def global_source(self, w: Any, at: int, region: Region, offsets: Array, barrier: Any, /) -> None:
        """A bulk copy that completes on an mbarrier will read 16-byte chunks of global memory.

        This event precedes its ``copy_issued``.
        """

    def tensor_source(self, copy: Copy, region: Region | None, group: Any, /) -> None:
        """A tensor load is about to read its box. This event follows the load's ``copy_issued``.

        ``region`` is the memory that contains the tensor, or None if the box is completely outside the tensor.
        ``group`` is the issuing thread's open bulk group. A wait for this group also covers reads of the tensor map.
        """

    def cp_async_source(self, w: Any, at: int, addresses: Array, counts: Array, group: Any, /) -> None:
        """A cp.async will read ``counts[i]`` bytes at each global address.

        This event follows its ``copy_issued``.
        """

    def bulk_target(self, w: Any, at: int, region: Region, offsets: Array, group: Any, is_reduction: bool, /) -> None:
        """A bulk store will write 16-byte chunks of global memory. This event precedes its ``shared_source``."""

    def tensor_target(
        self, w: Any, at: int, box: Any, written: Array, operation: str, group: Any, is_repeat: bool, /
    ) -> None:
        """A tensor store will write the chunks of its box that are marked in ``written``.

        This event precedes its ``shared_source``. ``operation`` is the operation of a reduction, otherwise "".
        ``is_repeat`` is true if a lower lane issues the same store.
        """

    def box_stored(
        self, w: Any, at: int, block: Any, offsets: Array, box: Any, map_address: int, group: Any, /
    ) -> None:
        """A tensor store reads a box from these chunks. This event follows its ``tensor_target``."""

    def map_read(self, w: Any, at: int, region: Region, offset: int, /) -> None:
        """A tensor copy or prefetch reads a tensor map."""

    def map_edited(self, w: Any, at: int, region: Region, offset: int, together: bool, /) -> None:
        """tensormap.replace or tensormap.cp_fenceproxy writes a tensor map.

        ``together`` is true if several lanes write at once.
        """

    def groups_waited(self, w: Any, at: int, kind: str, waited: list[Any], reads_only: bool, /) -> None:
        """A wait for groups returns.

        ``kind`` is "bulk" or "cp". ``reads_only`` is true if the wait has .read and covers only reads of the source.
        """

    def cp_arrival_issued(self, w: Any, arrival: Any, /) -> None:
        """A warp executes cp.async.mbarrier.arrive. Its threads arrive after their earlier copies have completed.

        ``arrival`` is an object that identifies the arrival in ``cp_arrived``.
        """

    def cp_arrived(self, arrival: Any, barrier: Any, /) -> None:
        """The copies before a cp.async.mbarrier.arrive have completed, and its threads arrive."""

    # ---- barriers of a CTA or a cluster

    def barrier_arrived(self, w: Any, barrier: Any, /) -> None:
        """A warp arrives on a state.NamedBarrier."""

    def barrier_completed(self, barrier: Any, warps: list[Any], /) -> None:
        """All threads have arrived on a state.NamedBarrier. ``warps`` contains the waiting warps."""

    def cluster_arrived(self, w: Any, is_release: bool, /) -> None:
        """A warp executes barrier.cluster.arrive."""

    def cluster_completed(self) -> None:
        """All threads of the cluster have arrived on the cluster barrier."""

    def cluster_waited(self, w: Any, /) -> None:
        """A warp's barrier.cluster.wait returns."""

    # ---- mbarriers

    def mbarrier_init(self, w: Any, at: int, barrier: Any, old: Any, lanes: int, /) -> None:
        """A warp executes mbarrier.init.

        ``old`` is the live mbarrier at this address, or None. ``lanes`` contains the executing threads as bits.
        """

    def mbarrier_inval(self, w: Any, at: int, barrier: Any, /) -> None:
        """A warp executes mbarrier.inval."""

    def mbarrier_used(self, w: Any, at: int, barrier: Any, what: str, /) -> None:
        """An instruction uses an initialized mbarrier.

        ``what`` is the name of the instruction for messages, or "a wait" for a wait.
        """

    def arrivals_over(self, w: Any, program: Program, at: int, barrier: Any, number: int, expects: bool, /) -> None:
        """An instruction arrives more times than the number of pending arrivals.

        ``number`` is the number of arrivals by this instruction. ``expects`` is true if the instruction has .expect_tx.
        """

    def mbarrier_arrived(self, w: Any, barrier: Any, order: str, is_alone: bool, /) -> None:
        """Threads arrive on an mbarrier.

        ``is_alone`` is true if only one lane arrives although its warp has several live lanes.
        """

    def bytes_expected(self, w: Any, at: int, barrier: Any, /) -> None:
        """An instruction has increased the number of bytes that the current phase expects."""

    def phase_ended(self, barrier: Any, /) -> None:
        """A phase has ended, and ``barrier.phase`` includes it. Waiters have not been woken yet."""

    def mbarrier_acquired(self, w: Any, at: int, barrier: Any, order: str, /) -> None:
        """A wait for a phase of an mbarrier returns."""

    def bytes_over(self, barrier: Any, /) -> None:
        """The byte count of a phase is wrong, and no pending operation can change it."""

    # ---- tensor cores

    def mma_computed(self, w: Any, at: int, name: str, addends: tuple[Array, ...], /) -> None:
        """A warp computes an MMA ("mma" or "wgmma"). This event follows the other events of the instruction.

        ``addends`` contains the accumulator registers.
        """

    def wgmma_operand(
        self, w: Any, at: int, position: int, bits: int, offsets: Array, shape: tuple[int, int, bool], group: int, /
    ) -> None:
        """A wgmma reads a matrix in 16-byte chunks of its CTA's shared memory.

        ``position`` is 0 for B and 1 for A. ``bits`` is the matrix descriptor. ``offsets`` contains the chunks that
        this warp reads. ``shape`` is (extent, bytes of K, whether MN-major) of the whole matrix. ``group`` is the
        number of the wgmma-group.
        """

    def wgmma_issued(self, w: Any, at: int, shared: tuple[Array, ...], /) -> None:
        """A warp issues a wgmma.

        ``shared`` contains scale-d and the matrix descriptors, which must be equal in all threads of a warpgroup.
        """

    def wgmma_fenced(self, w: Any, /) -> None:
        """A warp executes wgmma.fence."""

    def wgmma_committed(self, w: Any, /) -> None:
        """A warp executes wgmma.commit_group."""

    def wgmma_waited(self, w: Any, at: int, done: int, warps: list[Any], /) -> None:
        """A warp's wgmma.wait_group returns.

        ``done`` is the number of completed groups. ``warps`` contains the warps of the warpgroup.
        """

    def registers_set(self, w: Any, at: int, count: int, is_increase: bool, /) -> None:
        """A warp executes setmaxnreg. This event occurs only once, before the warp waits for registers."""


#: Observer of a cluster that has no observers.
UNOBSERVED = Observer()


def combined(observers: Sequence[Observer]) -> Observer:
    """Return an observer that passes each event to the given observers in order."""
    return cast(Observer, _Combined(tuple(observers))) if observers else UNOBSERVED


class _Combined:
    """Observer that determines the handlers of an event when the event first occurs.

    If only one observer handles an event, the machine calls its method directly.
    """

    def __init__(self, observers: tuple[Observer, ...]) -> None:
        self._observers = observers

    def __getattr__(self, event: str) -> Callable[..., None]:
        positions = _subscribers(event, *map(type, self._observers))
        handlers = [getattr(self._observers[k], event) for k in positions] or [getattr(UNOBSERVED, event)]
        handler = handlers[0] if len(handlers) == 1 else _in_turn(handlers)
        setattr(self, event, handler)
        return handler


@lru_cache(maxsize=4096)
def _subscribers(event: str, *observers: type[Observer]) -> tuple[int, ...]:
    """Return the indices of the classes that handle an event."""
    ignored = getattr(Observer, event)
    return tuple(k for k, observer in enumerate(observers) if getattr(observer, event) is not ignored)


def _in_turn(handlers: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        for handler in handlers:
            handler(*args)

    return call
