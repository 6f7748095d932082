"""The events that the machine reports while it runs, their arguments, and their order.

An observer of a cluster is a subclass of Observer that overrides the events it needs. The machine calls
``w.events.shared_read(...)`` and ignores the result, because observers do not change what a kernel computes. Hazard
checks (hazards/) and the trace (trace/recording.py) are observers.

Unless its description says otherwise, an event comes before its effect: memory, barriers and registers still hold their
values from before the instruction. Observers of a cluster are called in the order in which they were given.
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

#: A function that returns whether memory already holds the bytes that a store is about to write.
Same = Callable[[], bool]


def never() -> bool:
    """Return False, as the ``same`` argument of a store whose bytes are not compared."""
    return False


@dataclass(slots=True, eq=False)
class Copy:
    """An asynchronous operation on a CTA's shared memory, from its issue until it is complete.

    Attributes
    ----------
    w, program, at
        The warp that issues the operation, and the index of the instruction in ``program``.
    what
        ``"cp.async"``, ``"cp.async.bulk"``, ``"cp.async.bulk.tensor"``, ``"st.async"`` or ``"cp.reduce.async.bulk"``
        for a write into shared memory; ``"store"`` for a store or reduction out of it.
    block, offsets, size
        The CTA, and the offsets of pieces of ``size`` bytes in its shared memory.
    barrier, phase
        The mbarrier on which the copy completes, and the phase of the mbarrier at the issue. None for cp.async and
        stores.
    group
        The group of a cp.async or a store.
    lanes
        The lane of each piece of a cp.async.
    scope
        Memory order and scope of a reduction (such as "relaxed.cluster"), or "" for a plain copy.
    number
        Number that identifies the copy.
    box, destination, map_address
        The box (async_copy.tensor_box.Box) of a tensor load, the offset that it is loaded to, and the address of the
        tensor map.
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
    """An observer of one cluster. All methods of this base class do nothing.

    Common arguments
    ----------------
    w, at
        The warp (state.Warp) and the index of its instruction in the function's body. ``w.split`` is the group of
        lanes that executes it, ``w.guard`` the lanes whose guard holds (None: all).
    block, offsets
        The CTA (state.Block) whose shared memory is accessed, and byte offsets in it, one per lane or per piece.
    region
        Global memory (memory.Region) that holds the bytes. Offsets are relative to its base.
    barrier
        An mbarrier (async_copy.mbarrier.MBarrier), unless the event says otherwise.
    group
        Copies for which a thread waits together (async_copy.groups.Group).
    order
        Memory order and scope, such as ``"acquire.gpu"``; ``""`` for a weak access, ``"nc"`` for ld.global.nc.
    """

    # ---- the life of warps

    def warp_started(self, w: Any) -> None:
        """A warp has been created."""

    def segment_begins(self, split: Any, pc: int) -> None:
        """A split is about to run a segment of its program."""

    def blocked(self, split: Any, reason: Any) -> None:
        """A split has started to wait. ``reason`` has ``describe()`` and may have ``at`` and ``barrier``."""

    def woken(self, split: Any) -> None:
        """A split can run again."""

    def lanes_met(self, w: Any, groups: set[int]) -> None:
        """Some but not all lanes of a warp have synchronized at an instruction with a member mask.

        groups: the lanes of each mask, as bits.
        """

    def cluster_ended(self) -> None:
        """The last thread of the cluster has exited. This event comes before ``block_ended`` and ``warp_ended``."""

    def block_ended(self, block: Any) -> None:
        """The last thread of a CTA has exited. This event comes before ``warp_ended``."""

    def warp_ended(self, w: Any) -> None:
        """The last thread of a warp has exited."""

    def deadlocked(self) -> None:
        """No warp of the grid can proceed. This event comes before the deadlock is reported."""

    def trapped(self) -> None:
        """The grid ends in a trap after a time in which all warps only waited."""

    # ---- hazards

    def violation(self, kind: str, w: Any, at: int, message: str, places: Sequence[Any] = (), /) -> None:
        """The machine has found a hazard: an instruction violates a rule on which its execution depends.

        kind: a key of hazards.hazard.CAUSES. places: the locations that the hazard concerns (hazards.hazard.Place).
        """

    def warning(self, kind: str, w: Any, at: int, message: str, /) -> None:
        """The machine has found code that may be intended but that PTX does not guarantee to work."""

    def hazard_found(self, hazard: Any, w: Any) -> None:
        """A hazard (hazards.hazard.Hazard) has been recorded at a new place, during an access by this warp."""

    # ---- plain accesses and fences

    def shared_read(
        self, w: Any, at: int, block: Any, offsets: Array, size: int, order: str, together: bool, /
    ) -> None:
        """Lanes read ``size`` bytes each (ld, ldmatrix).

        together: whether this is one warp-wide instruction.
        """

    def shared_write(
        self, w: Any, at: int, block: Any, offsets: Array, size: int, order: str, together: bool, same: Same, /
    ) -> None:
        """Lanes write ``size`` bytes each (st, stmatrix, st.bulk, tensormap.replace)."""

    def shared_atomic(self, w: Any, at: int, block: Any, offsets: Array, size: int, order: str, /) -> None:
        """One lane executes atom or red. Each lane is a separate event."""

    def matrices_read(self, w: Any, at: int, block: Any, offsets: Array, /) -> None:
        """ldmatrix reads matrix rows, with eight offsets per matrix. This event comes after its ``shared_read``."""

    def global_read(self, w: Any, at: int, region: Region, offsets: Array, size: int, order: str, /) -> None:
        """Lanes read ``size`` bytes each of one region."""

    def global_write(
        self, w: Any, at: int, region: Region, offsets: Array, size: int, order: str, same: Same, /
    ) -> None:
        """Lanes write ``size`` bytes each of one region."""

    def atomic(self, w: Any, at: int, addresses: Array, space: str, size: int, order: str, returns: bool, /) -> None:
        """Lanes execute atom or red. This event comes before their ``shared_atomic`` events.

        addresses: those of the active lanes. space: the opcode's state space, ``""`` for generic addresses. returns:
        whether the result of an atom is used.
        """

    def fence(self, w: Any, at: int, kind: str, /) -> None:
        """A warp executes membar or fence. kind: the opcode after its root."""

    def map_fence(self, w: Any, addresses: set[int], scope: int, /) -> None:
        """A warp executes fence.proxy.tensormap::generic.acquire on the tensor maps at these addresses."""

    def grid_waited(self, w: Any, /) -> None:
        """A warp executes griddepcontrol.wait. The previous grid has ended."""

    # ---- asynchronous copies

    def copy_issued(self, copy: Copy, /) -> None:
        """A copy into shared memory is issued."""

    def copy_landed(self, copy: Copy, /) -> None:
        """The bytes of a copy are in place. The mbarrier or group counts them after this event."""

    def store_issued(self, store: Copy, /) -> None:
        """A bulk or tensor store is issued. This event comes after its ``shared_source``."""

    def store_landed(self, store: Copy, /) -> None:
        """The bytes of a store are in global memory. The group counts them after this event."""

    def shared_source(self, w: Any, at: int, block: Any, offsets: Array, end: Any, /) -> None:
        """An asynchronous operation will read 16-byte chunks of shared memory.

        end: the object that signals the end of the reads: the group of a store, or the mbarrier of a copy to another
        CTA.
        """

    def global_source(self, w: Any, at: int, region: Region, offsets: Array, barrier: Any, /) -> None:
        """A bulk copy that completes on an mbarrier will read 16-byte chunks.

        This event comes before its ``copy_issued``.
        """

    def tensor_source(self, copy: Copy, region: Region | None, group: Any, /) -> None:
        """A tensor load will read its box. This event comes after its ``copy_issued``.

        region: the memory that contains the tensor, or None if it contains no part of the box. group: the issuing
        thread's open bulk group. A wait for this group also covers reads of the tensor map.
        """

    def cp_async_source(self, w: Any, at: int, addresses: Array, counts: Array, group: Any, /) -> None:
        """A cp.async will read ``counts[i]`` bytes at each global address.

        This event comes after its ``copy_issued``.
        """

    def bulk_target(self, w: Any, at: int, region: Region, offsets: Array, group: Any, is_reduction: bool, /) -> None:
        """A bulk store will write 16-byte chunks of global memory. This event comes before its ``shared_source``."""

    def tensor_target(
        self, w: Any, at: int, box: Any, written: Array, operation: str, group: Any, is_repeat: bool, /
    ) -> None:
        """A tensor store will write the chunks of its box that ``written`` marks.

        This event comes before its ``shared_source``.

        operation: the operation of a reduction, otherwise "". is_repeat: whether a lower lane issues the same store.
        """

    def box_stored(
        self, w: Any, at: int, block: Any, offsets: Array, box: Any, map_address: int, group: Any, /
    ) -> None:
        """A tensor store reads a box from these chunks. This event comes after its ``tensor_target``."""

    def map_read(self, w: Any, at: int, region: Region, offset: int, /) -> None:
        """A tensor copy or prefetch reads a tensor map."""

    def map_edited(self, w: Any, at: int, region: Region, offset: int, together: bool, /) -> None:
        """tensormap.replace or tensormap.cp_fenceproxy writes a tensor map.

        together: whether several lanes write at once.
        """

    def groups_waited(self, w: Any, at: int, kind: str, waited: list[Any], reads_only: bool, /) -> None:
        """A wait for groups passes.

        kind: "bulk" or "cp". reads_only: whether the wait has .read, so that it covers only reads of the source.
        """

    def cp_arrival_issued(self, w: Any, arrival: Any, /) -> None:
        """A warp executes cp.async.mbarrier.arrive. Its threads will arrive when their earlier copies have landed.

        arrival: an object that identifies the arrival in ``cp_arrived``.
        """

    def cp_arrived(self, arrival: Any, barrier: Any, /) -> None:
        """The copies before a cp.async.mbarrier.arrive have landed, and its threads arrive."""

    # ---- barriers of a CTA or a cluster

    def barrier_arrived(self, w: Any, barrier: Any, /) -> None:
        """A warp arrives on a state.NamedBarrier."""

    def barrier_completed(self, barrier: Any, warps: list[Any], /) -> None:
        """All threads have arrived on a state.NamedBarrier. warps: those that wait for it."""

    def cluster_arrived(self, w: Any, is_release: bool, /) -> None:
        """A warp executes barrier.cluster.arrive."""

    def cluster_completed(self) -> None:
        """All threads of the cluster have arrived on the cluster barrier."""

    def cluster_waited(self, w: Any, /) -> None:
        """A warp's barrier.cluster.wait passes."""

    # ---- mbarriers

    def mbarrier_init(self, w: Any, at: int, barrier: Any, old: Any, lanes: int, /) -> None:
        """A warp executes mbarrier.init.

        old: the live mbarrier at this address, or None. lanes: the executing threads, as bits.
        """

    def mbarrier_inval(self, w: Any, at: int, barrier: Any, /) -> None:
        """A warp executes mbarrier.inval."""

    def mbarrier_used(self, w: Any, at: int, barrier: Any, what: str, /) -> None:
        """An instruction uses an initialized mbarrier.

        what: the name of the instruction for messages, or "a wait" for a wait.
        """

    def arrivals_over(self, w: Any, program: Program, at: int, barrier: Any, number: int, expects: bool, /) -> None:
        """More threads arrive than arrivals are pending.

        number: the number of arrivals by this instruction. expects: whether the instruction has .expect_tx.
        """

    def mbarrier_arrived(self, w: Any, barrier: Any, order: str, is_alone: bool, /) -> None:
        """Threads arrive on an mbarrier.

        is_alone: whether a single lane arrives although its warp has several live lanes.
        """

    def bytes_expected(self, w: Any, at: int, barrier: Any, /) -> None:
        """An instruction has increased the number of bytes that the current phase expects."""

    def phase_ended(self, barrier: Any, /) -> None:
        """A phase has ended, and ``barrier.phase`` includes it. Waiters have not been woken yet."""

    def mbarrier_acquired(self, w: Any, at: int, barrier: Any, order: str, /) -> None:
        """A wait for a phase of an mbarrier passes."""

    def bytes_over(self, barrier: Any, /) -> None:
        """The byte count of a phase is wrong, and no pending operation can change it."""

    # ---- tensor cores

    def mma_computed(self, w: Any, at: int, name: str, addends: tuple[Array, ...], /) -> None:
        """A warp computes an MMA ("mma" or "wgmma"). This event comes after the other events of the instruction.

        addends: the registers of the accumulator.
        """

    def wgmma_operand(
        self, w: Any, at: int, position: int, bits: int, offsets: Array, shape: tuple[int, int, bool], group: int, /
    ) -> None:
        """A wgmma reads a matrix in 16-byte chunks of its CTA's shared memory.

        position: 0 for B, 1 for A. bits: the matrix descriptor. offsets: the chunks that this warp reads. shape:
        (extent, bytes of K, MN-major) of the whole matrix. group: the number of the wgmma-group.
        """

    def wgmma_issued(self, w: Any, at: int, shared: tuple[Array, ...], /) -> None:
        """A warp issues a wgmma.

        shared: scale-d and the matrix descriptors, which must be the same in all threads of a warpgroup.
        """

    def wgmma_fenced(self, w: Any, /) -> None:
        """A warp executes wgmma.fence."""

    def wgmma_committed(self, w: Any, /) -> None:
        """A warp executes wgmma.commit_group."""

    def wgmma_waited(self, w: Any, at: int, done: int, warps: list[Any], /) -> None:
        """A warp's wgmma.wait_group passes.

        done: the number of complete groups. warps: the warps of the warpgroup.
        """

    def registers_set(self, w: Any, at: int, count: int, is_increase: bool, /) -> None:
        """A warp executes setmaxnreg. This event comes only once, before the warp waits for registers."""


#: The observer of a cluster without observers.
UNOBSERVED = Observer()


def combined(observers: Sequence[Observer]) -> Observer:
    """Return an observer that passes each event to the given observers in order."""
    return cast(Observer, _Combined(tuple(observers))) if observers else UNOBSERVED


class _Combined:
    """An observer that looks up the handlers of an event when it first occurs.

    If only one observer handles an event, the event is a direct call to the observer's method.
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
    """Return the positions of the classes that handle an event."""
    ignored = getattr(Observer, event)
    return tuple(k for k, observer in enumerate(observers) if getattr(observer, event) is not ignored)


def _in_turn(handlers: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        for handler in handlers:
            handler(*args)

    return call
