"""What a ring of shared-memory slots holds, counts and waits for: stages, phases, expected bytes, arrivals. Pure.

The device side is ``TmaPipeline<Stages>`` in ``ptx_templates/parts/pipeline.cuh.j2``. A slot has two mbarriers: `full`
(completed by the producer's arrivals and by the bytes that TMA delivers) and `empty` (completed by the consumers'
arrivals). Kernel configs describe their ring here and take every offset and count from it; a contradiction raises an
error before a kernel can hang. Source: PTX ISA, "mbarrier" (ranges of counts, phases) and "cp.async.bulk" (alignment).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.target import Target

MBARRIER_BYTES = 8
#: Largest arrival count and most outstanding bytes of one phase (PTX ISA, "Contents of the mbarrier object").
MBARRIER_MAX_COUNT = (1 << 20) - 1
MBARRIER_MAX_TX_BYTES = (1 << 20) - 1
#: CTAs of the largest cluster, where a kernel asks for a non-portable size (CUDA C++ programming guide).
MAX_CLUSTER = 16
#: Bulk copies move multiples of 16 bytes to addresses that are multiples of 16 (PTX ISA, "cp.async.bulk").
BULK_UNIT_BYTES = 16


def align_up(value: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is at least ``value``."""
    return -(-value // alignment) * alignment


def _whole(field: str, value: object, least: int, most: int | None = None, remedy: str = "") -> int:
    allowed = f"{least} and up" if most is None else f"{least}..{most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(field, value, f"an int, {allowed}", remedy)
    if value < least or (most is not None and value > most):
        raise ArgumentError(field, value, allowed, remedy)
    return value


@dataclass(frozen=True, slots=True)
class Operand:
    """One array that a stage holds.

    name: an identifier, unique in its ring.
    footprint_bytes: shared memory that one stage of it takes; more than what arrives where rows are padded to the
    swizzle span (``TensorMap.footprint_bytes``).
    expected_bytes: bytes that the loads of one stage report to `full` (``TensorMap.expected_bytes``, out-of-bounds
    elements included); 0 for an operand that threads bring themselves (cp.async, plain stores).
    alignment: of each stage's copy, bytes; 128 for a TMA box, 256, 512 or 1024 under the 32-, 64- or 128-byte swizzle.
    """

    name: str
    footprint_bytes: int
    expected_bytes: int
    alignment: int = 128

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ArgumentError("operand.name", self.name, "an identifier", "it names constants in the template")
        field = f"operand {self.name}"
        _whole(f"{field}.footprint_bytes", self.footprint_bytes, 1)
        _whole(f"{field}.expected_bytes", self.expected_bytes, 0)
        _whole(f"{field}.alignment", self.alignment, BULK_UNIT_BYTES)
        if self.alignment & (self.alignment - 1):
            raise ArgumentError(f"{field}.alignment", self.alignment, "a power of two", "128 suits an unswizzled box")
        if self.expected_bytes % BULK_UNIT_BYTES:
            allowed = f"a multiple of {BULK_UNIT_BYTES}"
            raise ArgumentError(f"{field}.expected_bytes", self.expected_bytes, allowed, "TMA moves no other amounts")
        if self.expected_bytes > self.footprint_bytes:
            raise ArgumentError(
                f"{field}.footprint_bytes",
                self.footprint_bytes,
                f"at least expected_bytes = {self.expected_bytes}",
                "the load would overrun the next operand",
            )


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A ring of ``stages`` slots, each with every operand, for one producer and many consumers.

    producer_arrivals: arrivals at `full` a lap: one for the thread that calls expect_tx, plus one for each thread that
    arrives without bytes (cp.async, plain stores).
    consumer_arrivals: how many times the consumers of one CTA call release() for a slot in a lap. 0: the ring has no
    `empty` barriers, because its producer knows without them when a slot may be filled again: one thread loads and
    stores, and waits for its own bulk groups (``parts/copy_ring.cuh.j2``).
    expect_tx_bytes: what the kernel passes to expect_tx, where it counts for itself; it must agree with the operands.
    cluster: CTAs of a cluster that fill each other's slots by multicast. Each consumer then releases a slot in every
    CTA of the cluster. An operand's expected_bytes include the bytes that other CTAs send.
    by_operand: True puts all slots of the first operand first, then those of the next one.

    The slots come first, operands in the order given, each at its alignment; then full[stages], empty[stages].
    Raises ArgumentError or ArgumentTypeError for numbers that contradict each other, and says what would happen.
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
            raise ArgumentError("operands", (), "at least one Operand", "nothing would complete a slot")
        names = [o.name for o in self.operands]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ArgumentError("operands", ", ".join(repeated), "different names", "rename one of them")
        waiter = "`full` would never complete: consumers wait for ever"
        _whole("producer_arrivals", self.producer_arrivals, 1, MBARRIER_MAX_COUNT, waiter)
        _whole("consumer_arrivals", self.consumer_arrivals, 0, MBARRIER_MAX_COUNT, "0 is a ring without `empty`")
        _whole("cluster", self.cluster, 1, MAX_CLUSTER)
        if self.empty_arrivals > MBARRIER_MAX_COUNT:
            allowed = f"at most {MBARRIER_MAX_COUNT} arrivals of all CTAs"
            raise ArgumentError("consumer_arrivals * cluster", self.empty_arrivals, allowed, "release once a warp")
        if self.stage_tx_bytes > MBARRIER_MAX_TX_BYTES:
            allowed = f"at most {MBARRIER_MAX_TX_BYTES} bytes a stage"
            raise ArgumentError("operands", self.stage_tx_bytes, allowed, "the barrier's byte count would overflow")
        if self.consumer_arrivals == 0 and self.cluster > 1:
            raise ArgumentError(
                "consumer_arrivals", 0, "1 or more in a cluster", "other CTAs fill the slot by multicast"
            )
        if type(self.by_operand) is not bool:
            raise ArgumentTypeError("by_operand", type(self.by_operand).__name__, "bool")
        if self.expect_tx_bytes is not None:
            _whole("expect_tx_bytes", self.expect_tx_bytes, 0)
            self.check_expected(self.expect_tx_bytes)

    # What a stage counts.

    @property
    def stage_tx_bytes(self) -> int:
        """Bytes that the loads of one stage report to `full`: the argument of expect_tx."""
        return sum(o.expected_bytes for o in self.operands)

    @property
    def empty_arrivals(self) -> int:
        """Arrivals that free a slot, of the consumers of all CTAs: the consumer_arrivals that init() is told."""
        return self.cluster * self.consumer_arrivals

    def check_expected(self, expect_tx_bytes: int, *, field: str = "expect_tx_bytes") -> None:
        """Raise ArgumentError unless expect_tx announces exactly the bytes that the loads of one stage deliver."""
        delivered = self.stage_tx_bytes
        if expect_tx_bytes == delivered:
            return
        parts = " + ".join(f"{o.expected_bytes} ({o.name})" for o in self.operands if o.expected_bytes)
        fate = (
            "expect_tx differs from the delivered bytes: the wait never ends"
            if expect_tx_bytes > delivered
            else "expect_tx differs from the delivered bytes: the wait ends before the data is there, or never"
        )
        raise ArgumentError(field, expect_tx_bytes, f"{delivered} = {parts or '0'}", fate)

    def check_arrivals(self, *, produced: int | None = None, released: int | None = None) -> None:
        """Raise ArgumentError unless the arrivals of one CTA for one slot and lap are those that init() expects."""
        for field, told, count, waiter in (
            ("producer_arrivals", self.producer_arrivals, produced, "consumers"),
            ("consumer_arrivals", self.consumer_arrivals, released, "the producer"),
        ):
            if count is None or count == told:
                continue
            fate = (
                f"an arrival is missing: {waiter} would wait for ever"
                if count < told
                else f"an arrival too many completes the next phase too: {waiter} would go on before the slot is ready"
            )
            raise ArgumentError(field, told, f"{count}, the arrivals that the kernel makes", fate)

    # Places of a stage's operands.

    def offset(self, name: str) -> int:
        """Offset of an operand's copy in slot 0 from the ring's base, bytes."""
        position = 0
        for operand in self.operands:
            position = align_up(position, operand.alignment)
            if operand.name == name:
                return position
            position += self.slot_distance(operand.name) * self.stages if self.by_operand else operand.footprint_bytes
        raise ArgumentError("operand", name, ", ".join(o.name for o in self.operands))

    @property
    def alignment(self) -> int:
        """Alignment of the ring's base in shared memory, bytes."""
        return max(o.alignment for o in self.operands)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage, bytes; the padding of every operand's alignment included."""
        if self.by_operand:
            return sum(self.slot_distance(o.name) for o in self.operands)
        last = self.operands[-1]
        return align_up(self.offset(last.name) + last.footprint_bytes, self.alignment)

    def slot_distance(self, name: str) -> int:
        """Distance from an operand's copy in one slot to the one in the next slot, bytes."""
        if not self.by_operand:
            return self.stage_bytes
        operand = next((o for o in self.operands if o.name == name), None)
        if operand is None:
            raise ArgumentError("operand", name, ", ".join(o.name for o in self.operands))
        return align_up(operand.footprint_bytes, operand.alignment)

    def address(self, name: str, slot: int) -> int:
        """Offset of an operand's copy in slot 0..stages-1 from the ring's base, bytes."""
        return _whole("slot", slot, 0, self.stages - 1) * self.slot_distance(name) + self.offset(name)

    @property
    def barriers_offset(self) -> int:
        """Offset of the barriers (TmaPipeline's base_address) from the ring's base, bytes."""
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
        """Shared memory of one stage's barriers, `full` and, if it has one, `empty`, bytes."""
        return (1 + self.has_empty_barriers) * MBARRIER_BYTES

    @property
    def barrier_bytes(self) -> int:
        """Shared memory of full[stages] and empty[stages], bytes."""
        return self.stages * self.stage_barrier_bytes

    def barrier_layout(self, *, base: int = 0) -> list[tuple[str, int, int]]:
        """(name, offset, bytes) of the barriers. base: offset of the first one."""
        size = self.stages * MBARRIER_BYTES
        empty = [("empty_barriers", base + size, size)] if self.has_empty_barriers else []
        return [("full_barriers", base, size), *empty]

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the ring and its barriers, from a base of the right alignment, bytes."""
        return self.barriers_offset + self.barrier_bytes

    def check_fits(self, target: Target, *, other_bytes: int = 0, least_stages: int = 1) -> None:
        """Raise ArgumentError unless the ring and ``other_bytes`` more fit into one CTA's shared memory.

        least_stages: the fewest with which the kernel works; the error suggests no fewer.
        """
        total, limit = self.smem_bytes + other_bytes, target.smem_per_block_bytes
        if total > limit:
            most = max(0, (limit - other_bytes) // (self.stage_bytes + self.stage_barrier_bytes))
            while most > 0 and replace(self, stages=most).smem_bytes + other_bytes > limit:
                most -= 1  # the padding between the arrays of a ring by operand
            remedy = f"at most {most} stages fit"
            if most < least_stages:
                least = "one stage fits" if least_stages == 1 else f"{least_stages} stages fit"
                remedy = f"not even {least}: choose smaller boxes"
            raise ArgumentError("stages", f"{self.stages} ({total} bytes)", f"{limit} bytes on {target.name}", remedy)

    # When who waits for what: iteration i = 0, 1, .. of a producer's or a consumer's loop.

    def slot(self, iteration: int) -> int:
        """The slot that iteration i fills or reads."""
        return iteration % self.stages

    def consumer_parity(self, iteration: int) -> int:
        """The parity that wait() passes: it ends with the producer's fill number i // stages of the slot."""
        return iteration // self.stages & 1

    def producer_parity(self, iteration: int) -> int:
        """The parity that acquire() passes: it ends with the release of the slot's lap before this one; on the first
        lap at once, because on a fresh barrier the phase of parity 1 counts as ended."""
        return self.consumer_parity(iteration) ^ 1

    def notes(self) -> tuple[str, ...]:
        """What each stage holds, for the comment that a rendered kernel opens with."""
        lines = [
            f"ring: {self.stages} stages of {self.stage_bytes} bytes, expect_tx {self.stage_tx_bytes}, "
            f"{self.producer_arrivals} producer and {self.empty_arrivals} consumer arrivals; "
            f"{self.smem_bytes} bytes of shared memory"
        ]
        for operand in self.operands:
            fed = f"{operand.expected_bytes} by TMA" if operand.expected_bytes else "brought by threads"
            lines.append(f"  +{self.offset(operand.name)} {operand.name}: {operand.footprint_bytes} bytes, {fed}")
        empty = f", empty[{self.stages}]" if self.has_empty_barriers else ""
        lines.append(f"  barriers at +{self.barriers_offset}: full[{self.stages}]{empty}")
        return tuple(lines)


def most_stages(target: Target, operands: Iterable[Operand], other_bytes: int = 0) -> int:
    """How many stages of these operands fit into one CTA's shared memory together with ``other_bytes``; 0 if none
    does."""
    one = PipelineSpec(1, tuple(operands))
    return max(0, (target.smem_per_block_bytes - other_bytes) // (one.stage_bytes + 2 * MBARRIER_BYTES))
