"""Shared-memory rings of the copy kernels.

One thread of a CopyRing loads and stores. In a BoxRing, one thread loads and another thread stores.

``parts/copy_ring.cuh.j2`` implements a CopyRing on the device. A CopyRing is a TmaPipeline without `empty` barriers,
because the thread that refills a slot also waits for the bulk groups that store the slot. Source: PTX ISA,
"cp.async.bulk.wait_group". A Setting determines how many bytes a copy keeps in flight. RUN, BOXES and REDUCTIONS were
chosen by measurement. `cudatma bench data_movement --search` measures other settings.
"""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.errors import ArgumentError, counted
from cudatma.pipeline import MBARRIER_BYTES, Operand, PipelineSpec
from cudatma.target import KIB, Target

#: Number of threads per CTA with a CopyRing (one warp) and with a BoxRing (two warps), and number of CTAs per SM.
THREADS, BOX_THREADS, CTAS_PER_SM = 32, 64, 2
#: Usual size of a slot in bytes, large enough for a single issuing thread to keep up with the memory
#: (docs/design/data_movement.md).
SLOT_BYTES = 16 * KIB
#: Size of a slot in bytes for small arrays, so that every CTA has work.
SMALL_SLOT_BYTES = 4 * KIB
MIN_STAGES, MAX_STAGES = 2, 6
#: Alignment of a slot in bytes. TMA can write boxes only to addresses with this alignment.
SLOT_ALIGNMENT = 128
_MAX_BOX = 256


class CopyRing:
    """Base class of the configs whose kernels copy work units (boxes or segments) through ``parts/copy_ring.cuh.j2``.

    Attributes
    ----------
    stages : int
        Number of slots, at least 2.
    in_flight : int
        Number of stores in flight when the next load is issued, less than ``stages``.
    stage_bytes : int
        Bytes per slot, a multiple of 128. A work unit has at most this size.
    """

    __slots__ = ()

    stages: int
    in_flight: int
    stage_bytes: int

    def check_ring(self) -> None:
        """Raise ArgumentError for invalid fields, and the errors of PipelineSpec."""
        if self.stages < MIN_STAGES:
            allowed = f"at least {MIN_STAGES} (one slot is filled while another is stored)"
            raise ArgumentError("stages", self.stages, allowed)
        if not 1 <= self.in_flight < self.stages:
            allowed = f"1 to {self.stages - 1}"
            raise ArgumentError("in_flight", self.in_flight, allowed, "leave at least one slot for the next load")
        if self.stage_bytes % SLOT_ALIGNMENT:
            allowed = f"a multiple of {SLOT_ALIGNMENT} (TMA writes boxes only to aligned addresses)"
            raise ArgumentError("stage_bytes", self.stage_bytes, allowed)
        _ = self.ring

    @property
    def ring(self) -> PipelineSpec:
        """The ring, with one work unit per stage."""
        unit = Operand("unit", self.stage_bytes, self.stage_bytes, SLOT_ALIGNMENT)
        return PipelineSpec(self.stages, (unit,), consumer_arrivals=0)

    @property
    def notes(self) -> tuple[str, ...]:
        """Description of the ring in the opening comment of the generated source."""
        return (
            f"ring: {self.stages} slots of {self.stage_bytes} bytes; stores may still be "
            f"reading up to {self.in_flight} of them; {self.smem_bytes} bytes of shared memory in total",
        )

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def smem_bytes(self) -> int:
        return self.ring.smem_bytes

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """Return (name, offset, bytes) of each array in dynamic shared memory."""
        ring = self.ring
        return [("slots", 0, ring.barriers_offset), ("barriers", ring.barriers_offset, ring.barrier_bytes)]

    def stage_layout(self) -> list[tuple[str, int]]:
        """Return the parts of a slot as pairs of description and size in bytes."""
        return [("work unit (maximum size)", self.stage_bytes)]

    def check_target(self, target: Target) -> None:
        """Raise TargetError unless the target has TMA, and ArgumentError if the ring does not fit."""
        target.require("tma", type(self).__name__)
        self.ring.check_fits(target, min_stages=MIN_STAGES)


def slot_bytes(payload_bytes: int) -> int:
    """Return the size in bytes of a slot for this payload."""
    return -(-payload_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def stages_for(target: Target, stage_bytes: int, ctas_per_sm: int = CTAS_PER_SM, max_stages: int = MAX_STAGES) -> int:
    """Return the number of slots per CTA, at least 2, if ``ctas_per_sm`` CTAs share an SM."""
    return max(MIN_STAGES, min(max_stages, target.smem_share_bytes(ctas_per_sm) // (stage_bytes + MBARRIER_BYTES)))


def usual_ring(target: Target, slot_bytes: int = SLOT_BYTES) -> tuple[int, int, int]:
    """Return (stage_bytes, stages, in_flight) of a CopyRing with slots of this size.

    Stores may use half of the slots.
    """
    stages = stages_for(target, slot_bytes)
    return slot_bytes, stages, stages // 2


class BoxRing:
    """Base class of the configs whose kernels copy boxes with one thread that loads and another thread that stores.

    Attributes
    ----------
    element_bytes : int
        Bytes per element, 1, 2, 4 or 8.
    box_rows, box_columns : int
        Number of rows and columns of a box, at most 256 each. Rows must be multiples of 16 bytes.
    stages : int
        Number of boxes in flight, at least 2.
    """

    __slots__ = ()

    element_bytes: int
    box_rows: int
    box_columns: int
    stages: int

    def check_box(self) -> None:
        """Raise ArgumentError for invalid fields."""
        if self.element_bytes not in (1, 2, 4, 8):
            raise ArgumentError("element_bytes", self.element_bytes, "1, 2, 4 or 8")
        for field in ("box_rows", "box_columns"):
            if not 1 <= getattr(self, field) <= _MAX_BOX:
                raise ArgumentError(field, getattr(self, field), f"1 to {_MAX_BOX}")
        if self.box_columns * self.element_bytes % TMA_ALIGNMENT_BYTES:
            got = f"{self.box_columns} columns of {counted(self.element_bytes, 'byte')}"
            raise ArgumentError(
                "box_columns", got, f"a number of columns that fills whole {TMA_ALIGNMENT_BYTES}-byte chunks"
            )
        if self.stages < 2:
            raise ArgumentError("stages", self.stages, "at least 2 (a slot is released only after the next store)")

    @property
    def ring(self) -> PipelineSpec:
        """The ring, with one box per stage. One thread loads the box, and another thread stores the box.

        Each load fills a whole slot.
        """
        box_bytes = self.box_rows * self.box_columns * self.element_bytes
        return PipelineSpec(self.stages, (Operand("tile", box_bytes, box_bytes),))

    @property
    def threads(self) -> int:
        return BOX_THREADS

    @property
    def notes(self) -> tuple[str, ...]:
        """Description of the ring in the opening comment of the generated source."""
        return self.ring.notes()

    @property
    def smem_bytes(self) -> int:
        return self.ring.smem_bytes

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """Return (name, offset, bytes) of each array in dynamic shared memory."""
        ring = self.ring
        return [
            ("tiles", 0, ring.stages * ring.stage_bytes),
            ("barriers", ring.barriers_offset, ring.barrier_bytes),
        ]

    def stage_layout(self) -> list[tuple[str, int]]:
        """Return the parts of a stage as pairs of description and size in bytes."""
        shape = f"{self.box_rows} x {self.box_columns}"
        return [(f"tile {shape} of {self.element_bytes}-byte elements", self.ring.stage_bytes)]


@dataclass(frozen=True, slots=True)
class Setting:
    """Ring size and number of CTAs of a copy.

    Attributes
    ----------
    slot_bytes : int
        Maximum bytes per slot.
    ctas_per_sm : int
        Number of CTAs per SM.
    max_stages : int
        Number of slots per CTA, fewer if they do not fit in shared memory.
    in_flight : int
        Number of stores in flight, or 0 for half of the slots.
    load_cache, store_cache : str
        L2 policies of calls that do not specify one, or "" for the GPU's default.

    Raises
    ------
    ArgumentError
        If a field is invalid.
    """

    slot_bytes: int = SLOT_BYTES
    ctas_per_sm: int = CTAS_PER_SM
    max_stages: int = MAX_STAGES
    in_flight: int = 0
    load_cache: str = ""
    store_cache: str = ""

    def __post_init__(self) -> None:
        if self.ctas_per_sm < 1:
            raise ArgumentError("ctas_per_sm", self.ctas_per_sm, "at least 1")
        if self.max_stages < 2:
            allowed = "at least 2 (one slot is filled while another is stored)"
            raise ArgumentError("max_stages", self.max_stages, allowed)
        if self.in_flight < 0:
            raise ArgumentError("in_flight", self.in_flight, "at least 0", "pass 0 to select half of the slots")

    def slot(self, target: Target) -> int:
        """Return the number of bytes per slot on a target, which is smaller if two slots of slot_bytes do not fit."""
        share = target.smem_share_bytes(self.ctas_per_sm) // 2 - MBARRIER_BYTES
        return min(self.slot_bytes, share - share % SLOT_ALIGNMENT)

    def ring(self, target: Target, slot_bytes: int) -> tuple[int, int]:
        """Return (stages, in_flight) for slots of this size on a target."""
        stages = stages_for(target, slot_bytes, self.ctas_per_sm, self.max_stages)
        return stages, min(self.in_flight or stages // 2, stages - 1)

    def ctas(self, usual: int) -> int:
        """Scale ``usual``, the number of CTAs at CTAS_PER_SM CTAs per SM, to this setting's CTAs per SM."""
        return max(1, usual * self.ctas_per_sm // CTAS_PER_SM)


#: Setting for copies of runs of bytes. Small copies have slots of SMALL_SLOT_BYTES.
RUN = Setting()
#: Setting for copies of windows as boxes: one CTA per SM with many small slots.
BOXES = Setting(slot_bytes=8 * KIB, ctas_per_sm=1, max_stages=10)
#: Settings for reductions of runs and of boxes.
REDUCTIONS = Setting()
