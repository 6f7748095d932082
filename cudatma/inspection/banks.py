"""Compute bank conflicts of reads from a box in shared memory, and a table of the swizzle modes.

Shared memory has 32 banks of 4 bytes. A read takes one wavefront unless lanes access different words in the same bank.
cudatma.layout computes the wavefronts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cudatma.descriptor.rules import CHUNK_BYTES, smem_bits
from cudatma.descriptor.spec import AnySpec, TiledSpec
from cudatma.dtypes import tma_type
from cudatma.layout import WARP_LANES, Interleave, Swizzle, required_alignment, swizzle, wavefronts

#: Number of chunk columns to evaluate. The pattern repeats after eight.
_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Cost of a read at the worst position in a box.

    Parameters
    ----------
    pattern : str
        "row" (32 lanes along a row), "column" (32 rows, one element each) or "ldmatrix" (8 rows of 16 bytes, one
        matrix).
    lanes, access_bytes : int
        Number of lanes, and number of bytes per lane.
    wavefronts, min_wavefronts : int
        Number of wavefronts in this layout, and the minimum for this amount of data.
    """

    pattern: str
    lanes: int
    access_bytes: int
    wavefronts: int
    min_wavefronts: int

    @property
    def ways(self) -> float:
        """Ratio of the number of wavefronts to the minimum. A ratio of 1 means no conflicts."""
        return self.wavefronts / max(1, self.min_wavefronts)


def read_costs(spec: AnySpec, base: int = 0) -> tuple[ReadCost, ...]:
    """Return the cost of reads by row, by column and with ldmatrix for a box at shared-memory address ``base``.

    Reads that require a larger box are omitted. Packed elements smaller than a byte are read as bytes.
    """
    rows, row_bytes, pitch = _lines(spec)
    size = max(1, smem_bits(spec.dtype) // 8)

    def at(row: int, byte: int) -> int:
        return swizzle(base + row * pitch + byte, spec.swizzle)

    def chunk(row: int, byte: int) -> int:
        # The flip mode swaps the halves of a chunk and leaves the chunk at its address.
        return at(row, byte) // CHUNK_BYTES * CHUNK_BYTES

    columns = range(0, min(row_bytes, _COLUMNS * CHUNK_BYTES), CHUNK_BYTES)
    costs = []
    lanes = min(WARP_LANES, row_bytes // size)
    if lanes > 1:
        along = [[at(row, lane * size) for lane in range(lanes)] for row in range(min(rows, 8))]
        costs.append(_worst("row", along, size))
    lanes = min(WARP_LANES, rows)
    if lanes > 1:
        down = [[at(row, column) for row in range(lanes)] for column in columns]
        costs.append(_worst("column", down, size))
    if rows >= 8:
        matrices = [[chunk(row, column) for row in range(8)] for column in columns]
        costs.append(_worst("ldmatrix", matrices, CHUNK_BYTES))
    return tuple(costs)


def _lines(spec: AnySpec) -> tuple[int, int, int]:
    """Return the number, size and pitch of the rows. With interleaving, a row is the channel slice of a pixel."""
    layout = spec.box_layout
    if spec.interleave is Interleave.NONE:
        return layout.rows, layout.row_bytes, layout.pitch_bytes
    width = spec.interleave.slice_bytes
    return layout.expected_bytes // width, width, width


def _worst(pattern: str, accesses: Sequence[Sequence[int]], size: int) -> ReadCost:
    costs = [(*wavefronts(addresses, size), len(addresses)) for addresses in accesses]
    worst = max(costs, key=lambda cost: cost[0] / max(1, cost[1]))
    return ReadCost(pattern, worst[2], size, worst[0], worst[1])


COLUMNS = ("mode", "span", "align", "address bits", "ldmatrix", "evidence", "use")


@dataclass(frozen=True, slots=True)
class SwizzleRow:
    """Row of the table of swizzle modes.

    Parameters
    ----------
    mode : Swizzle
        The swizzle mode.
    span_bytes : int
        Minimum pitch of a row, or 0 without swizzle.
    alignment_bytes : int
        Required alignment of the box in shared memory.
    xor : str
        Address bits that the mode XORs.
    ldmatrix_wavefronts : int
        Number of wavefronts for eight rows as wide as the span (128 bytes without swizzle). One means no conflicts.
    use : str
        Purpose of the mode.
    evidence : str
        Evidence for the pattern.
    """

    mode: str
    span_bytes: int
    alignment_bytes: int
    xor: str
    ldmatrix_wavefronts: int
    use: str
    evidence: str

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row in the order of COLUMNS."""
        span = f"{self.span_bytes} B" if self.span_bytes else "-"
        reads = f"{self.ldmatrix_wavefronts}-way" if self.ldmatrix_wavefronts > 1 else "free"
        return self.mode, span, f"{self.alignment_bytes} B", self.xor, reads, self.evidence, self.use


def swizzle_rows() -> tuple[SwizzleRow, ...]:
    """Return one row per swizzle mode in the order of CUtensorMapSwizzle."""
    return tuple(_row(mode) for mode in Swizzle)


def _row(mode: Swizzle) -> SwizzleRow:
    width = mode.span_bytes or 128
    spec = TiledSpec(dtype=tma_type("uint8"), dims=(width, 8), strides_bytes=(width,), box=(width, 8), swizzle=mode)
    ldmatrix = next(cost for cost in read_costs(spec) if cost.pattern == "ldmatrix")
    if mode is Swizzle.NONE:
        use = "linear layout for 1D copies, tables, and rows that each warp reads as a whole"
    elif mode.is_atom:
        use = "operands swizzled in larger chunks, on sm_100 and later"
    else:
        use = f"rows of up to {mode.span_bytes} bytes that are read by column, by ldmatrix or by wgmma"
    evidence = "documentation" if mode.is_atom else "H200"
    return SwizzleRow(
        mode.label, mode.span_bytes, required_alignment(mode), _xor(mode), ldmatrix.wavefronts, use, evidence
    )


def _xor(mode: Swizzle) -> str:
    """Derive the XORed address bits, such as ``"4-6 ^= 7-9"``, from swizzle()."""
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
    """Return the table of swizzle modes as Markdown, for docs/reference/tensor_map_format.md."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(row.cells() for row in swizzle_rows())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
