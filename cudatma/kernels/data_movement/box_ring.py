"""The ring of the kernels that copy 2D arrays box by box: one thread loads a box, another one stores it."""

from __future__ import annotations

from cudatma.errors import ArgumentError
from cudatma.pipeline import Operand, PipelineSpec

#: Of addresses, pitches and rows: TMA stores clip at 16 bytes, not at the element.
TMA_ALIGNMENT_BYTES = 16
_MAX_BOX = 256


class BoxRing:
    """Base of their specs.

    element_bytes: bytes of an element, 1, 2, 4 or 8. box_rows, box_columns: elements of one box, at most 256 each; a
    row of the box is a multiple of 16 bytes. stages: boxes in flight, 2 and up.
    """

    __slots__ = ()

    element_bytes: int
    box_rows: int
    box_columns: int
    stages: int

    def check_box(self) -> None:
        """ArgumentError unless the fields are as above."""
        if self.element_bytes not in (1, 2, 4, 8):
            raise ArgumentError("element_bytes", self.element_bytes, "1, 2, 4, 8")
        for field in ("box_rows", "box_columns"):
            if not 1 <= getattr(self, field) <= _MAX_BOX:
                raise ArgumentError(field, getattr(self, field), f"1 to {_MAX_BOX}")
        if self.box_columns * self.element_bytes % TMA_ALIGNMENT_BYTES:
            got = f"{self.box_columns} elements of {self.element_bytes} bytes"
            raise ArgumentError("box_columns", got, f"a multiple of {TMA_ALIGNMENT_BYTES} bytes")
        if self.stages < 2:
            raise ArgumentError("stages", self.stages, "2 and up", "the kernel frees a slot one store later")

    @property
    def ring(self) -> PipelineSpec:
        """One box a stage; one thread loads it, one stores it. What the load delivers is what the slot holds."""
        box_bytes = self.box_rows * self.box_columns * self.element_bytes
        return PipelineSpec(self.stages, (Operand("tile", box_bytes, box_bytes),))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the ring holds, for the head of the generated source."""
        return self.ring.notes()

    @property
    def smem_bytes(self) -> int:
        return self.ring.smem_bytes

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """(name, offset, bytes) of what stands in dynamic shared memory."""
        ring = self.ring
        return [
            ("tiles", 0, ring.stages * ring.stage_bytes),
            ("barriers", ring.barriers_offset, ring.barrier_bytes),
        ]

    def stage_layout(self) -> list[tuple[str, int]]:
        """(what, bytes) that one stage holds."""
        shape = f"{self.box_rows} x {self.box_columns}"
        return [(f"tile {shape} of {self.element_bytes}-byte elements", self.ring.stage_bytes)]
