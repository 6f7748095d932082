"""Whether the offsets of a wgmma matrix descriptor follow the tensor boxes that they read.

The rows of an operand (its k, if it is MN-major) are consecutive rows of a box, and the 16-byte chunks of one row are
consecutive chunks of the box's row; an operand may continue in another box where one ends. Wrong offsets break this: a
stride offset that is too small repeats rows, and exchanged offsets go along a row where the next row is due.

Source: PTX ISA, "Matrix Descriptor Format", "Strides", "Canonical Layouts".
"""

from __future__ import annotations

import numpy as np

from cudatma.emulator.hazards.shadow import PLANE_BITS, Shadow
from cudatma.emulator.ptx.types import Array
from cudatma.emulator.tensor_core.wgmma import CHUNK, Operand


def name_of(operand: Operand) -> str:
    """Return the fields of an operand's descriptor, for messages."""
    d = operand.descriptor
    base = f", base offset {d.base_offset}" if d.base_offset else ""
    major = "MN" if operand.is_mn_major else "K"
    return (
        f"a wgmma matrix descriptor (start {d.start:#x}, leading {d.leading}, stride {d.stride}{base}, "
        f"{d.mode.label}, {major}-major)"
    )


def advice_for(operand: Operand) -> str:
    """Return the offsets of the canonical layout."""
    span = operand.descriptor.mode.span_bytes
    if span and not operand.is_mn_major:
        return (
            f"stride offset {8 * span}, from 8 rows to the next 8 (the leading offset is not used); the instruction's "
            "transpose bit if the tile is MN-major"
        )
    if span:
        return (
            f"stride offset {8 * span}, from 8 k to the next 8; leading offset from one {span}-byte panel to the next; "
            "no transpose bit if the tile is K-major"
        )
    if operand.is_mn_major:
        return "leading offset from 8 k to the next 8; stride offset from 8 elements of M or N to the next 8"
    return "leading offset from 16 bytes of k to the next 16; stride offset from 8 rows to the next 8"


def misread(shadow: Shadow, operand: Operand) -> str:
    """Say what is wrong with the chunks that a descriptor reads; return "" if they are right."""
    chunks = operand.places // CHUNK
    row, column = shadow.box_row[chunks], shadow.box_column[chunks]
    plane = np.where(shadow.mode[chunks] != 0, shadow.box_plane[chunks], 0)
    if plane[0, 0] and not operand.descriptor.base_offset and (plane == plane[0, 0]).all():
        rows, columns = np.ogrid[row[0, 0] : row[0, 0] + len(row), column[0, 0] : column[0, 0] + column.shape[1]]
        if (row == rows).all() and (column == columns).all():
            return ""
    return _crosses(shadow, operand, plane, row, column) or _repeats(operand, bool(shadow.mode[chunks].any()))


def _crosses(shadow: Shadow, operand: Operand, plane: Array, row: Array, column: Array) -> str:
    """Say where the operand does not follow the rows and columns of the boxes that it reads."""
    if not plane.any():
        return ""
    line, part = ("k", "elements") if operand.is_mn_major else ("row", "bytes")
    wrong = (plane > 0) & (column != operand.columns)
    if operand.descriptor.base_offset and wrong.any():
        i, j = np.argwhere(wrong)[0]
        columns = f"column {column[i, j]} of a box for column {operand.columns[i, j]}"
        return f"reads {columns}: tiles loaded by TMA need base offset 0"
    joined = (plane[:, 1:] == plane[:, :-1]) & (plane[:, 1:] > 0)
    wrong = joined & ((row[:, 1:] != row[:, :-1]) | (column[:, 1:] != column[:, :-1] + 1))
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        ends = f"{_at(row, column, i, j)} and {_at(row, column, i, j + 1)}"
        return f"takes neighboring {part} of {line} {i} from {ends} of one box"
    joined = (plane[1:] == plane[:-1]) & (plane[1:] > 0)
    wrong = joined & ((column[1:] != column[:-1]) | (row[1:] <= row[:-1]))
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        ends = f"{_at(row, column, i, j)} and {_at(row, column, i + 1, j)}"
        return f"takes {line} {i} and {line} {i + 1} from {ends} of one box"
    # An operand that goes on in another box leaves the first one at its end.
    span = operand.descriptor.mode.span_bytes or CHUNK
    after = np.minimum((operand.places // span + 1) * span // CHUNK, len(shadow.mode) - 1)
    goes_on = (shadow.mode[after] != 0) & (shadow.box_plane[after] == plane) & (plane > 0)
    jumps = operand.places[1:] // span - operand.places[:-1] // span != 1
    moves = (plane[1:] != plane[:-1]) & (plane[1:] > 0) & (plane[:-1] > 0)
    wrong = moves & goes_on[:-1] & jumps
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        return (
            f"takes {line} {i} from row {row[i, j]} of a box, which has more rows, and {line} {i + 1} from another box"
        )
    wrong = moves & (plane[1:] >> PLANE_BITS != plane[:-1] >> PLANE_BITS) & (row[0] > 0)
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        first = f"begins at row {row[0, j]} of a box and leaves it after {line} {i}"
        return f"{first}, and goes on in a box of another tensor map"
    return ""


def _at(row: Array, column: Array, i: int, j: int) -> str:
    return f"row {row[i, j]} column {column[i, j]}"


def _repeats(operand: Operand, is_laid: bool) -> str:
    """Say whether two parts of the matrix are the same bytes.

    Over bytes that plain stores wrote, an offset of 0 repeats a core matrix on purpose.
    """
    unique, count = np.unique(operand.places, return_counts=True)
    if unique.size == operand.places.size:
        return ""
    d = operand.descriptor
    uses_leading = operand.is_mn_major or not d.mode
    if not is_laid and (d.stride == 0 or (uses_leading and d.leading == 0)):
        return ""
    return f"reads {int((count > 1).sum())} of its 16-byte chunks for several parts of the matrix"
