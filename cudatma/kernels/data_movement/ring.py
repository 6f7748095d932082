"""The ring of slots that one thread of a CTA fills by loads and empties by stores.

The device side is ``parts/copy_ring.cuh.j2``: a TmaPipeline without `empty` barriers, because the thread that refills a
slot knows from its own bulk groups that the slot has been stored. Source: PTX ISA, "cp.async.bulk.wait_group".
"""

from __future__ import annotations

from cudatma.errors import ArgumentError
from cudatma.pipeline import MBARRIER_BYTES, Operand, PipelineSpec
from cudatma.target import KIB, Target

#: Every kernel of this package runs one warp a CTA, this many CTAs on an SM.
THREADS, BLOCKS_PER_SM = 32, 2
#: What a slot should hold: large enough that one issuing thread keeps up with the memory (docs/operations.md).
SLOT_BYTES = 16 * KIB
#: For small arrays: slots of which there are enough for every CTA.
SMALL_SLOT_BYTES = 4 * KIB
LEAST_STAGES, MOST_STAGES = 2, 6
#: TMA writes boxes at multiples of this.
SLOT_ALIGNMENT = 128


class CopyRing:
    """Base of the specs whose kernel copies work units through ``parts/copy_ring.cuh.j2``: boxes, or segments.

    stages: slots, 2 and up. in_flight: stores that may still read their slots when the next load is issued, fewer than
    stages. stage_bytes: of one slot, a multiple of 128; a work unit has at most as many.
    """

    __slots__ = ()

    stages: int
    in_flight: int
    stage_bytes: int

    def check_ring(self) -> None:
        """ArgumentError unless the fields are as above, and what PipelineSpec raises."""
        if self.stages < LEAST_STAGES:
            allowed = f"{LEAST_STAGES} and up"
            raise ArgumentError("stages", self.stages, allowed, "one slot is filled while another is stored")
        if not 1 <= self.in_flight < self.stages:
            allowed = f"1..{self.stages - 1}"
            raise ArgumentError("in_flight", self.in_flight, allowed, "a slot must be left to load into")
        if self.stage_bytes % SLOT_ALIGNMENT:
            allowed = f"a multiple of {SLOT_ALIGNMENT}"
            raise ArgumentError("stage_bytes", self.stage_bytes, allowed, "TMA writes boxes at multiples of it")
        _ = self.ring

    @property
    def ring(self) -> PipelineSpec:
        """One work unit a stage."""
        unit = Operand("unit", self.stage_bytes, self.stage_bytes, SLOT_ALIGNMENT)
        return PipelineSpec(self.stages, (unit,), consumer_arrivals=0)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the ring holds, for the head of the generated source."""
        return (
            f"ring: {self.stages} slots of {self.stage_bytes} bytes, {self.in_flight} of them may be in stores; "
            f"{self.smem_bytes} bytes of shared memory",
        )

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def smem_bytes(self) -> int:
        return self.ring.smem_bytes

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """(name, offset, bytes) of each array in dynamic shared memory."""
        ring = self.ring
        return [("slots", 0, ring.barriers_offset), ("barriers", ring.barriers_offset, ring.barrier_bytes)]

    def stage_layout(self) -> list[tuple[str, int]]:
        """(what, bytes) that one slot holds."""
        return [("a work unit, at most", self.stage_bytes)]

    def check_target(self, target: Target) -> None:
        """TargetError without TMA, ArgumentError if the ring does not fit."""
        target.require("tma", type(self).__name__)
        self.ring.check_fits(target, least_stages=LEAST_STAGES)


def slot_bytes(payload_bytes: int) -> int:
    """Size of a slot for so many bytes."""
    return -(-payload_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def stages_for(
    target: Target, stage_bytes: int, blocks_per_sm: int = BLOCKS_PER_SM, most_stages: int = MOST_STAGES
) -> int:
    """How many slots of this size a CTA gets if so many CTAs share an SM; at least 2."""
    return max(LEAST_STAGES, min(most_stages, target.smem_share_bytes(blocks_per_sm) // (stage_bytes + MBARRIER_BYTES)))
