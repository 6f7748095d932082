"""The ring of slots that one thread of a block fills by loads and empties by stores.

The device side is ``parts/copy_ring.cuh.j2``: no consumer besides TMA's stores, so a slot needs one mbarrier (full);
that it is empty again the thread learns from its own bulk groups. Source: PTX ISA, "cp.async.bulk.wait_group".
"""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.errors import ArgumentError
from cudatma.pipeline import BULK_UNIT_BYTES, MBARRIER_BYTES, MBARRIER_MAX_TX_BYTES
from cudatma.target import KIB, Target

#: Every kernel of this package runs one warp a block, this many blocks on a multiprocessor.
THREADS, BLOCKS_PER_SM = 32, 2
#: What a slot should hold: large enough that one issuing thread keeps up with the memory (docs/operations.md).
SLOT_BYTES = 16 * KIB
#: Of small arrays: slots of which enough exist to occupy every block.
SMALL_SLOT_BYTES = 4 * KIB
MOST_STAGES = 6
#: Each slot begins where TMA may write a box.
SLOT_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class CopyRing:
    """stages: slots. in_flight: stores that may still read their slots when the next load is asked for; the others are
    free, or being filled. stage_bytes: of one slot, a multiple of 128. Raises ArgumentError.
    """

    stages: int
    in_flight: int
    stage_bytes: int

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ArgumentError("stages", self.stages, "2 and up", "one slot is filled while another is stored")
        if not 1 <= self.in_flight < self.stages:
            allowed = f"1..{self.stages - 1}"
            raise ArgumentError("in_flight", self.in_flight, allowed, "a slot must be left to load into")
        if self.stage_bytes < BULK_UNIT_BYTES or self.stage_bytes > MBARRIER_MAX_TX_BYTES:
            raise ArgumentError("stage_bytes", self.stage_bytes, f"{BULK_UNIT_BYTES}..{MBARRIER_MAX_TX_BYTES}")
        if self.stage_bytes % SLOT_ALIGNMENT:
            allowed = f"a multiple of {SLOT_ALIGNMENT}"
            raise ArgumentError("stage_bytes", self.stage_bytes, allowed, "each slot begins where TMA may write a box")

    @property
    def barriers_offset(self) -> int:
        """Offset of the mbarriers behind the slots, bytes."""
        return self.stages * self.stage_bytes

    @property
    def smem_bytes(self) -> int:
        return self.barriers_offset + self.stages * MBARRIER_BYTES

    def layout(self) -> list[tuple[str, int, int]]:
        """(name, offset, bytes) of what stands in dynamic shared memory."""
        return [
            ("slots", 0, self.barriers_offset),
            ("barriers", self.barriers_offset, self.stages * MBARRIER_BYTES),
        ]

    def notes(self) -> tuple[str, ...]:
        """Lines for the head of the generated source."""
        return (
            f"ring: {self.stages} slots of {self.stage_bytes} bytes, {self.in_flight} of them may be in stores; "
            f"{self.smem_bytes} bytes of shared memory",
        )

    def check_fits(self, target: Target) -> None:
        """ArgumentError unless a block's shared memory holds the ring."""
        if self.smem_bytes > target.smem_per_block_bytes:
            allowed = f"{target.smem_per_block_bytes} bytes on {target.name}"
            got = f"{self.stages} of {self.stage_bytes} bytes"
            raise ArgumentError("stages", got, allowed, "fewer stages, or a smaller box")


class RingSpec:
    """What every spec has whose kernel copies pieces through a CopyRing; its dataclass has these three fields."""

    __slots__ = ()

    stages: int
    in_flight: int
    stage_bytes: int

    @property
    def ring(self) -> CopyRing:
        return CopyRing(self.stages, self.in_flight, self.stage_bytes)

    @property
    def barriers_offset(self) -> int:
        return self.ring.barriers_offset

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the head of the generated source."""
        return self.ring.notes()

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def smem_bytes(self) -> int:
        return self.ring.smem_bytes

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """(name, offset, bytes) of what stands in dynamic shared memory."""
        return self.ring.layout()

    def stage_layout(self) -> list[tuple[str, int]]:
        """(what, bytes) that one slot holds."""
        return [("a piece, at most", self.stage_bytes)]

    def check_target(self, target: Target) -> None:
        """TargetError without TMA, ArgumentError where the ring does not fit."""
        target.require("tma", type(self).__name__)
        self.ring.check_fits(target)


def slot_bytes(payload_bytes: int) -> int:
    """The room of a slot for so many bytes."""
    return -(-payload_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def stages_for(
    target: Target, stage_bytes: int, blocks_per_sm: int = BLOCKS_PER_SM, most_stages: int = MOST_STAGES
) -> int:
    """How many slots of this size a block gets where so many blocks share a multiprocessor; at least 2."""
    return max(2, min(most_stages, target.smem_share_bytes(blocks_per_sm) // (stage_bytes + MBARRIER_BYTES)))
