"""Description of a ring of shared-memory slots: stages, phases, expected bytes and arrivals.

The device side is ``TmaPipeline<Stages>`` in ``ptx_templates/parts/pipeline.cuh.j2``. A slot has two mbarriers. The
arrivals of the producer and the bytes of its TMA loads complete `full`, and the arrivals of the consumers complete
`empty`. Kernel configs describe their ring with a PipelineSpec and read all offsets and counts from it, so that
inconsistent values raise an error instead of hanging the kernel. Source: PTX ISA, "mbarrier" (counts, phases) and
"cp.async.bulk" (alignment).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cudatma.errors import ArgumentError, ArgumentTypeError, counted, quoted
from cudatma.target import Target

MBARRIER_BYTES = 8
#: Maximum arrival count and maximum number of outstanding bytes per phase (PTX ISA, "Contents of the mbarrier object").
MBARRIER_MAX_COUNT = (1 << 20) - 1
MBARRIER_MAX_TX_BYTES = (1 << 20) - 1
#: Maximum number of CTAs in a cluster of non-portable size (CUDA C++ Programming Guide).
MAX_CLUSTER = 16
#: Bulk copies require sizes and addresses that are multiples of 16 bytes (PTX ISA, "cp.async.bulk").
BULK_UNIT_BYTES = 16


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of ``alignment`` that is at least ``value``."""
    return -(-value // alignment) * alignment


def _whole(field: str, value: object, minimum: int, maximum: int | None = None, remedy: str = "") -> int:
    allowed = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(field, value, f"an int, {allowed}", remedy)
    if value < minimum or (maximum is not None and value > maximum):
        raise ArgumentError(field, value, allowed, remedy)
    return value


@dataclass(frozen=True, slots=True)
class Operand:
    """An array of which each stage of a ring holds one part.

    Parameters
    ----------
    name : str
        Identifier of the operand, which must be unique in the ring.
    footprint_bytes : int
        Number of bytes of shared memory per stage. It exceeds ``expected_bytes`` if rows are padded to the swizzle span
        (``TensorMap.footprint_bytes``).
    expected_bytes : int
        Number of bytes that the loads of one stage report to `full`, including elements outside the tensor
        (``TensorMap.expected_bytes``). 0 if threads write the operand (cp.async, ordinary stores).
    alignment : int, default: 128
        Alignment of each stage's copy in bytes: 128 for a TMA box without swizzle, or 256, 512 or 1024 with the 32-,
        64- or 128-byte swizzle.

    Raises
    ------
    ArgumentError
        If the numbers contradict each other.
    """

    name: str
    footprint_bytes: int
    expected_bytes: int
    alignment: int = 128

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ArgumentError(
                "operand.name", self.name, "an identifier", "choose a name that the template can use for its constants"
            )
        field = f"operand {self.name}"
        _whole(f"{field}.footprint_bytes", self.footprint_bytes, 1)
        _whole(f"{field}.expected_bytes", self.expected_bytes, 0)
        _whole(f"{field}.alignment", self.alignment, BULK_UNIT_BYTES)
        if self.alignment & (self.alignment - 1):
            raise ArgumentError(
                f"{field}.alignment", self.alignment, "a power of two", "pass 128 for a box without swizzle"
            )
        if self.expected_bytes % BULK_UNIT_BYTES:
            allowed = f"a multiple of {BULK_UNIT_BYTES}"
            raise ArgumentError(f"{field}.expected_bytes", self.expected_bytes, allowed, "pad the rows to 16 bytes")
        if self.expected_bytes > self.footprint_bytes:
            raise ArgumentError(
                f"{field}.footprint_bytes",
                self.footprint_bytes,
                f"at least expected_bytes = {self.expected_bytes}",
                "increase footprint_bytes, because the load would otherwise overwrite the next operand",
            )


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A ring of slots that one producer fills and many consumers read.

    The slots come first in shared memory, and each slot contains the operands in order, each at its alignment. The
    barriers full[stages] and empty[stages] follow the last slot.

    Parameters
    ----------
    stages : int
        Number of slots.
    operands : tuple of Operand
        Operands in a slot.
    producer_arrivals : int, default: 1
        Arrivals on `full` per phase: 1 for the thread that calls expect_tx, plus 1 for each thread that arrives without
        announcing bytes (cp.async, ordinary stores).
    consumer_arrivals : int, default: 1
        Number of calls to release() per slot and phase by the consumers of one CTA. 0 describes a ring without `empty`
        barriers (``parts/copy_ring.cuh.j2``).
    expect_tx_bytes : int, optional
        Number of bytes that the kernel passes to expect_tx. It must match the operands.
    cluster : int, default: 1
        Number of CTAs that fill each other's slots by multicast. Each consumer then releases a slot in every CTA. The
        ``expected_bytes`` of an operand must include the bytes that other CTAs send.
    by_operand : bool, default: False
        Whether memory is ordered by operand and then by slot, instead of by slot and then by operand.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the numbers contradict each other. The message states the consequence.

    Examples
    --------
    >>> a = cudatma.Operand("a", footprint_bytes=16384, expected_bytes=16384, alignment=1024)
    >>> b = cudatma.Operand("b", footprint_bytes=8192, expected_bytes=8192, alignment=1024)
    >>> ring = cudatma.PipelineSpec(stages=4, operands=(a, b), consumer_arrivals=2)
    >>> ring.stage_tx_bytes, ring.offset("b"), ring.smem_bytes
    (24576, 16384, 98368)
    >>> [(ring.slot(i), ring.consumer_parity(i)) for i in range(3, 6)]
    [(3, 0), (0, 1), (1, 1)]
    """

    stages: int
    operands: tuple[Operand, ...]
    producer_arrivals: int = 1
    consumer_arrivals: int = 1
    expect_tx_bytes: int | None = None
    cluster: int = 1
    by_operand: bool = False

    def __post_init__(self) -> None:
        _whole("stages", self.stages, 1)
        if not isinstance(self.operands, tuple) or not all(isinstance(o, Operand) for o in self.operands):
            raise ArgumentTypeError("operands", type(self.operands).__name__, "a tuple of Operand")
        if not self.operands:
            raise ArgumentError("operands", (), "a nonempty tuple of Operand objects", "add the operands of a stage")
        names = [o.name for o in self.operands]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ArgumentError(
                "operands",
                f"several operands named {', '.join(repeated)}",
                "a tuple of operands with different names",
                "rename an operand",
            )
        remedy = "pass the number of threads that call expect_tx() or arrive() to fill a slot"
        _whole("producer_arrivals", self.producer_arrivals, 1, MBARRIER_MAX_COUNT, remedy)
        _whole("consumer_arrivals", self.consumer_arrivals, 0, MBARRIER_MAX_COUNT, "pass 0 for a ring without `empty`")
        _whole("cluster", self.cluster, 1, MAX_CLUSTER)
        if self.empty_arrivals > MBARRIER_MAX_COUNT:
            allowed = f"at most {MBARRIER_MAX_COUNT}"
            raise ArgumentError(
                "consumer_arrivals * cluster",
                self.empty_arrivals,
                allowed,
                "release each slot with one thread per warp",
            )
        if self.stage_tx_bytes > MBARRIER_MAX_TX_BYTES:
            allowed = f"small enough that TMA loads at most {MBARRIER_MAX_TX_BYTES} bytes per stage"
            raise ArgumentError("operands", f"{self.stage_tx_bytes} bytes per stage", allowed, "use smaller boxes")
        if self.consumer_arrivals == 0 and self.cluster > 1:
            raise ArgumentError(
                "consumer_arrivals",
                0,
                "at least 1 in a cluster",
                "set it to the number of release() calls per slot and CTA",
            )
        if type(self.by_operand) is not bool:
            raise ArgumentTypeError("by_operand", type(self.by_operand).__name__, "bool")
        if self.expect_tx_bytes is not None:
            _whole("expect_tx_bytes", self.expect_tx_bytes, 0)
            self.check_expected(self.expect_tx_bytes)

    # ---- Bytes and arrivals per stage

    @property
    def stage_tx_bytes(self) -> int:
        """Number of bytes that one stage's loads report to `full`. Pass this number to expect_tx."""
        return sum(o.expected_bytes for o in self.operands)

    @property
    def empty_arrivals(self) -> int:
        """Arrival count of `empty`, which is the number of consumer arrivals, from all CTAs, that free a slot."""
        return self.cluster * self.consumer_arrivals

    def check_expected(self, expect_tx_bytes: int, *, field: str = "expect_tx_bytes") -> None:
        """Raise ArgumentError unless expect_tx announces exactly the bytes that a stage's loads deliver.

        Parameters
        ----------
        expect_tx_bytes : int
            Number of bytes that the kernel announces.
        field : str, default: "expect_tx_bytes"
            Name of the argument in the error.

        Raises
        ------
        ArgumentError
            If the numbers differ.
        """
        delivered = self.stage_tx_bytes
        if expect_tx_bytes == delivered:
            return
        parts = " + ".join(f"{o.expected_bytes} ({o.name})" for o in self.operands if o.expected_bytes)
        fate = (
            "expect exactly the delivered bytes, because the wait would otherwise never end"
            if expect_tx_bytes > delivered
            else "expect exactly the delivered bytes, because the wait would otherwise end too early or never"
        )
        raise ArgumentError(field, expect_tx_bytes, f"{delivered} = {parts or '0'}", fate)

    def check_arrivals(self, *, produced: int | None = None, released: int | None = None) -> None:
        """Raise ArgumentError unless one CTA's arrivals per slot and phase match the ring.

        Parameters
        ----------
        produced : int, optional
            Number of arrivals on `full`.
        released : int, optional
            Number of arrivals on `empty` from this CTA's consumers.

        Raises
        ------
        ArgumentError
            If the numbers differ.
        """
        for field, expected, count, waiter in (
            ("producer_arrivals", self.producer_arrivals, produced, "consumers"),
            ("consumer_arrivals", self.consumer_arrivals, released, "the producer"),
        ):
            if count is None or count == expected:
                continue
            fate = (
                f"add the missing arrivals, because {waiter} would otherwise wait forever"
                if count < expected
                else f"remove the extra arrivals, because {waiter} would otherwise continue too early"
            )
            raise ArgumentError(field, expected, f"{count} (the number of arrivals in the kernel)", fate)

    # ---- Shared memory

    def offset(self, name: str) -> int:
        """Return the offset of an operand in slot 0.

        Parameters
        ----------
        name : str
            Name of the operand.

        Returns
        -------
        int
            Offset from the base of the ring in bytes.

        Raises
        ------
        ArgumentError
            If the operand does not exist.
        """
        position = 0
        for operand in self.operands:
            position = align_up(position, operand.alignment)
            if operand.name == name:
                return position
            position += self.slot_distance(operand.name) * self.stages if self.by_operand else operand.footprint_bytes
        raise ArgumentError("operand", name, quoted(o.name for o in self.operands))

    @property
    def alignment(self) -> int:
        """Alignment of the ring in shared memory, in bytes."""
        return max(o.alignment for o in self.operands)

    @property
    def stage_bytes(self) -> int:
        """Number of bytes of shared memory per stage, including alignment padding."""
        if self.by_operand:
            return sum(self.slot_distance(o.name) for o in self.operands)
        last = self.operands[-1]
        return align_up(self.offset(last.name) + last.footprint_bytes, self.alignment)

    def slot_distance(self, name: str) -> int:
        """Return the distance between an operand's copies in consecutive slots.

        Parameters
        ----------
        name : str
            Name of the operand.

        Returns
        -------
        int
            Distance in bytes.

        Raises
        ------
        ArgumentError
            If the operand does not exist.
        """
        if not self.by_operand:
            return self.stage_bytes
        operand = next((o for o in self.operands if o.name == name), None)
        if operand is None:
            raise ArgumentError("operand", name, quoted(o.name for o in self.operands))
        return align_up(operand.footprint_bytes, operand.alignment)

    def address(self, name: str, slot: int) -> int:
        """Return the offset of an operand's copy in a slot.

        Parameters
        ----------
        name : str
            Name of the operand.
        slot : int
            Slot from 0 to ``stages - 1``.

        Returns
        -------
        int
            Offset from the base of the ring in bytes.

        Raises
        ------
        ArgumentError
            If the operand or the slot does not exist.
        """
        return _whole("slot", slot, 0, self.stages - 1) * self.slot_distance(name) + self.offset(name)

    @property
    def barriers_offset(self) -> int:
        """Offset of the barriers (base_address of TmaPipeline) from the base of the ring, in bytes."""
        if self.by_operand:
            last = self.operands[-1]
            end = self.offset(last.name) + self.slot_distance(last.name) * self.stages
            return align_up(end, MBARRIER_BYTES)
        return self.stages * self.stage_bytes

    @property
    def has_empty_barriers(self) -> bool:
        """Whether consumers release slots through barriers."""
        return self.consumer_arrivals > 0

    @property
    def stage_barrier_bytes(self) -> int:
        """Number of bytes that the barriers of one stage occupy."""
        return (1 + self.has_empty_barriers) * MBARRIER_BYTES

    @property
    def barrier_bytes(self) -> int:
        """Number of bytes that full[stages] and empty[stages] occupy."""
        return self.stages * self.stage_barrier_bytes

    def barrier_layout(self, *, base: int = 0) -> list[tuple[str, int, int]]:
        """Return the offset and the size of each array of barriers.

        Parameters
        ----------
        base : int, default: 0
            Offset of the first barrier in bytes.

        Returns
        -------
        list of tuple
            (name, offset, bytes) of each array of barriers.
        """
        size = self.stages * MBARRIER_BYTES
        empty = [("empty_barriers", base + size, size)] if self.has_empty_barriers else []
        return [("full_barriers", base, size), *empty]

    @property
    def smem_bytes(self) -> int:
        """Number of bytes of shared memory that the ring and its barriers occupy."""
        return self.barriers_offset + self.barrier_bytes

    def check_fits(self, target: Target, *, other_bytes: int = 0, min_stages: int = 1) -> None:
        """Raise ArgumentError unless the ring fits into the shared memory of a CTA.

        Parameters
        ----------
        target : Target
            The architecture.
        other_bytes : int, default: 0
            Number of bytes of shared memory that the kernel uses besides the ring.
        min_stages : int, default: 1
            Minimum number of stages that the kernel needs. The error does not suggest fewer stages.

        Raises
        ------
        ArgumentError
            If the ring does not fit. The message contains the number of stages that fit.
        """
        total, limit = self.smem_bytes + other_bytes, target.smem_per_block_bytes
        if total > limit:
            max_stages = max(0, (limit - other_bytes) // (self.stage_bytes + self.stage_barrier_bytes))
            while max_stages > 0 and replace(self, stages=max_stages).smem_bytes + other_bytes > limit:
                max_stages -= 1  # a by_operand ring also has padding between its arrays
            remedy = f"use at most {max_stages} stages"
            if max_stages < min_stages:
                fewest = "one stage fits" if min_stages == 1 else f"{min_stages} stages fit"
                remedy = f"choose smaller boxes, because not even {fewest}"
            raise ArgumentError(
                "stages",
                f"{self.stages} ({total} bytes)",
                f"small enough for {limit} bytes of shared memory on {target.name}",
                remedy,
            )

    # ---- Slots and parities of the waits in a producer's or consumer's loop

    def slot(self, iteration: int) -> int:
        """Return the slot of an iteration.

        Parameters
        ----------
        iteration : int
            Iteration of the producer or consumer, from 0.

        Returns
        -------
        int
            The slot that the iteration fills or reads.
        """
        return iteration % self.stages

    def consumer_parity(self, iteration: int) -> int:
        """Return the phase parity that a consumer passes to wait().

        Parameters
        ----------
        iteration : int
            Iteration of the consumer, from 0.

        Returns
        -------
        int
            The parity. The wait ends after the producer has filled the slot ``iteration // stages + 1``
            times.
        """
        return iteration // self.stages & 1

    def producer_parity(self, iteration: int) -> int:
        """Return the phase parity that the producer passes to acquire().

        Parameters
        ----------
        iteration : int
            Iteration of the producer, from 0.

        Returns
        -------
        int
            The parity. The wait ends after the consumers have released the slot in the previous lap of
            the ring. In the first lap, the wait ends at once, because a new barrier counts the phase with parity 1 as
            completed.
        """
        return self.consumer_parity(iteration) ^ 1

    def notes(self) -> tuple[str, ...]:
        """Return the lines that describe a stage in the opening comment of a rendered kernel.

        Returns
        -------
        tuple of str
            Lines of the comment.
        """
        lines = [
            f"ring: {self.stages} stages of {self.stage_bytes} bytes; per stage, "
            f"expect_tx of {self.stage_tx_bytes} bytes, "
            f"{counted(self.producer_arrivals, 'producer arrival')} and "
            f"{counted(self.empty_arrivals, 'consumer arrival')}; "
            f"{self.smem_bytes} bytes of shared memory in total"
        ]
        for operand in self.operands:
            fed = f"{operand.expected_bytes} loaded by TMA" if operand.expected_bytes else "written by threads"
            lines.append(f"  +{self.offset(operand.name)} {operand.name}: {operand.footprint_bytes} bytes, {fed}")
        empty = f", empty[{self.stages}]" if self.has_empty_barriers else ""
        lines.append(f"  barriers at +{self.barriers_offset}: full[{self.stages}]{empty}")
        return tuple(lines)


def max_stages(target: Target, operands: Iterable[Operand], other_bytes: int = 0) -> int:
    """Return the maximum number of stages that fit into a CTA's shared memory besides ``other_bytes``.

    The result is 0 if no stage fits.
    """
    ring = PipelineSpec(1, tuple(operands))
    return max(0, (target.smem_per_block_bytes - other_bytes) // (ring.stage_bytes + 2 * MBARRIER_BYTES))
