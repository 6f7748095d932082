"""The swizzle modes in one table: which address bits move, span, alignment, and what they are for. From the code."""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.descriptor.spec import TiledSpec
from cudatma.dtypes import tma_type
from cudatma.inspection.banks import read_costs
from cudatma.layout import Swizzle, required_alignment, swizzle

COLUMNS = ("mode", "span", "align", "address bits", "ldmatrix", "known from", "for")


@dataclass(frozen=True, slots=True)
class SwizzleRow:
    """One mode. span_bytes: least pitch of a row, 0 without swizzle. alignment_bytes: of the box in shared memory. xor:
    which address bits are XORed with which. ldmatrix_wavefronts: of eight rows as wide as the span (128 bytes without
    swizzle); 1 is free of conflicts. use: what it is for. evidence: how it is known."""

    mode: str
    span_bytes: int
    alignment_bytes: int
    xor: str
    ldmatrix_wavefronts: int
    use: str
    evidence: str

    def cells(self) -> tuple[str, ...]:
        """As COLUMNS."""
        span = f"{self.span_bytes} B" if self.span_bytes else "-"
        reads = f"{self.ldmatrix_wavefronts}-way" if self.ldmatrix_wavefronts > 1 else "free"
        return self.mode, span, f"{self.alignment_bytes} B", self.xor, reads, self.evidence, self.use


def swizzle_rows() -> tuple[SwizzleRow, ...]:
    """Every mode, in the order of CUtensorMapSwizzle."""
    return tuple(_row(mode) for mode in Swizzle)


def _row(mode: Swizzle) -> SwizzleRow:
    width = mode.span_bytes or 128
    spec = TiledSpec(dtype=tma_type("uint8"), dims=(width, 8), strides_bytes=(width,), box=(width, 8), swizzle=mode)
    ldmatrix = next(cost for cost in read_costs(spec) if cost.pattern == "ldmatrix")
    if mode is Swizzle.NONE:
        use = "plain order: 1D copies, tables, rows read whole"
    elif mode.is_atom:
        use = "operands that are swizzled in larger chunks; sm_100 and up"
    else:
        use = f"rows of up to {mode.span_bytes} bytes that are read in columns, ldmatrix and wgmma"
    evidence = "documents" if mode.is_atom else "H200"
    return SwizzleRow(
        mode.label, mode.span_bytes, required_alignment(mode), _xor(mode), ldmatrix.wavefronts, use, evidence
    )


def _xor(mode: Swizzle) -> str:
    """``"4-6 ^= 7-9"``: read off the function itself, bit by bit."""
    moved: dict[int, list[int]] = {}
    for bit in range(10):
        changed = swizzle(1 << bit, mode) ^ 1 << bit
        for target in range(10):
            if changed >> target & 1:
                moved.setdefault(bit - target, []).append(target)
    parts = [f"{_bits(low)} ^= {_bits([bit + shift for bit in low])}" for shift, low in moved.items()]
    return ", ".join(parts) or "-"


def _bits(bits: list[int]) -> str:
    return str(bits[0]) if len(bits) == 1 else f"{bits[0]}-{bits[-1]}"


def markdown() -> str:
    """The table as Markdown; docs/descriptors.md holds it."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(row.cells() for row in swizzle_rows())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
