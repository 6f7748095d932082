"""How many bytes the copies keep in flight, and how: the numbers that were chosen by measurement, in one place.

`cudatma bench data_movement --search` times others. A kernel that is not named here takes the numbers of ``ring.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.errors import ArgumentError
from cudatma.kernels.data_movement.ring import BLOCKS_PER_SM, MOST_STAGES, SLOT_ALIGNMENT, SLOT_BYTES, stages_for
from cudatma.pipeline import MBARRIER_BYTES
from cudatma.target import KIB, Target


@dataclass(frozen=True, slots=True)
class Setting:
    """The ring of a copy, and how many CTAs have one.

    slot_bytes: the most that one slot holds. blocks_per_sm: CTAs that share an SM. most_stages: slots of a CTA, if
    shared memory holds them. in_flight: stores that may still read their slots; 0 is half of the slots. load_cache,
    store_cache: L2 policies of a call that names none, "" for the GPU's default.
    Raises ArgumentError.
    """

    slot_bytes: int = SLOT_BYTES
    blocks_per_sm: int = BLOCKS_PER_SM
    most_stages: int = MOST_STAGES
    in_flight: int = 0
    load_cache: str = ""
    store_cache: str = ""

    def __post_init__(self) -> None:
        if self.blocks_per_sm < 1:
            raise ArgumentError("blocks_per_sm", self.blocks_per_sm, "1 and up")
        if self.most_stages < 2:
            raise ArgumentError("most_stages", self.most_stages, "2 and up", "one slot is filled, another stored")
        if self.in_flight < 0:
            raise ArgumentError("in_flight", self.in_flight, "0 and up", "0 is half of the slots")

    def slot(self, target: Target) -> int:
        """Bytes of a slot on a target: fewer if two slots of slot_bytes do not fit."""
        share = target.smem_share_bytes(self.blocks_per_sm) // 2 - MBARRIER_BYTES
        return min(self.slot_bytes, share - share % SLOT_ALIGNMENT)

    def ring(self, target: Target, slot_bytes: int) -> tuple[int, int]:
        """(stages, in_flight) on a target for slots of this size."""
        stages = stages_for(target, slot_bytes, self.blocks_per_sm, self.most_stages)
        return stages, min(self.in_flight or stages // 2, stages - 1)

    def ctas(self, usual: int) -> int:
        """CTAs of a launch if kernels with BLOCKS_PER_SM have ``usual`` ones."""
        return max(1, usual * self.blocks_per_sm // BLOCKS_PER_SM)


#: Copies of runs of bytes; small ones have slots of SMALL_SLOT_BYTES.
RUN = Setting()
#: Copies of windows as boxes: one CTA with many small slots on each SM.
BOXES = Setting(slot_bytes=8 * KIB, blocks_per_sm=1, most_stages=10)
#: Reductions, of runs and of boxes.
REDUCTIONS = Setting()
