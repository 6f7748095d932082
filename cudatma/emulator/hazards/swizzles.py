"""Check that readers use the same swizzle and layout as the tensor copies that wrote the bytes.

The offsets of a wgmma matrix descriptor must match the boxes that the wgmma reads. Each row of an operand (each k, if
the operand is MN-major) must be a row of a box. Consecutive rows of the operand must be consecutive rows of the box,
and the 16-byte chunks of a row must be consecutive chunks of the box row. At the end of a box, the operand may continue
in another box. Wrong offsets violate these conditions. For example, a stride offset that is too small repeats rows, and
interchanged offsets advance along a row instead of to the next row.

Source: PTX ISA, "Swizzling Modes", "Matrix Descriptor Format", "Strides", "Canonical Layouts", "cp.async.bulk.tensor".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatma.emulator.hazards.findings import Reporter
from cudatma.emulator.machine.events import Copy, Observer, Same
from cudatma.emulator.machine.memory import SHARED_START
from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.state import Block, Cluster, Warp
from cudatma.emulator.ptx.types import LANES, Array
from cudatma.emulator.tensor_core.wgmma import CHUNK, WARP_ROWS, WARPS, Operand, operand_of
from cudatma.layout import Swizzle, required_alignment, swizzle

#: Flag in Boxes.mode for a swizzled box that does not start at a multiple of the swizzle pattern.
_MISALIGNED = 32
#: Number of bits of Boxes.plane that distinguish the planes of a tensor map.
_PLANE_BITS = 20
#: Maximum number of reads per instruction that are examined to determine whether the instruction applies the swizzle.
_READS_CHECKED = 64
_UNSWIZZLE = 'the swizzle in the reader\'s address (chunk ^= row % 8 for 128B), or swizzle="none" in the tensor map'
_LANES = np.arange(LANES)
_LANE_BITS = _LANES[:, None] >> np.arange(5) & 1


def _swizzle_of(mode: int) -> Swizzle:
    """Return the swizzle of a nonzero entry of Boxes.mode."""
    return Swizzle((mode & (_MISALIGNED - 1)) - 1)


def _regularity(places: Array) -> int:
    """Return a score for how regularly the addresses of lanes cover a tile.

    The score is 2 if the addresses form an arithmetic series, 1 if each bit of the lane number adds a power of two (as
    in rows of fragments), and 0 otherwise.
    """
    steps = places - places[0]
    if (steps == _LANES * steps[1]).all():
        return 2
    bits = steps[1 << np.arange(5)]
    return int(not (bits & (bits - 1)).any() and (steps == _LANE_BITS @ bits).all())


class Boxes:
    """Tensor box of each 16-byte chunk of a CTA's shared memory."""

    def __init__(self, size: int) -> None:
        count = -(-size // CHUNK) + 16
        #: Whether there are tensor boxes, swizzled boxes, and boxes that are not aligned to their pattern.
        self.has_boxes = self.has_swizzled = self.has_misaligned = False
        #: 1 + the swizzle of the box that wrote the chunk, possibly with _MISALIGNED, or 0 if another access wrote the
        #: chunk last.
        self.mode: Array = np.zeros(count, np.int8)
        #: Row and column of the chunk in the box, or -1 if another access wrote the chunk last.
        self.row: Array = np.full(count, -1, np.int32)
        self.column: Array = np.full(count, -1, np.int32)
        #: Two-dimensional plane of the box. The low _PLANE_BITS contain the number of the plane, and the bits above
        #: identify the tensor map. The entry is 0 if the rows of the box need not be rows of a matrix.
        self.plane: Array = np.zeros(count, np.int32)

    def forget(self, offsets: Array) -> None:
        """Record that other data has replaced tensor boxes."""
        if self.has_boxes:
            self.mode[offsets // CHUNK] = 0
            self.column[offsets // CHUNK] = -1


class Swizzles(Observer):
    """Hazard check that compares each reader's swizzle of a tensor box with the box's tensor map."""

    def __init__(self, cluster: Cluster, reporter: Reporter) -> None:
        self._reporter, self._findings = reporter, reporter.findings
        self._boxes = [Boxes(block.shared.size) for block in cluster.blocks]
        #: Maps (warp, offsets) to the last linear read of swizzled bytes at these offsets.
        self._linear: dict[tuple[int, bytes], tuple[Warp, Program, int, Swizzle]] = {}
        #: Number of the next plane, and the number assigned to the address of each tensor map.
        self._planes = 0
        self._sources: dict[int, int] = {}

    # ---- writes

    def copy_issued(self, copy: Copy) -> None:
        """Record the row and column of each chunk, and whether the box starts at a multiple of its pattern.

        The hardware swizzles absolute addresses. Code that swizzles offsets in the tile reads different bytes unless
        the tile is aligned to the pattern.
        """
        boxes, offsets = self._boxes[copy.block.rank], copy.offsets
        if copy.box is None:
            boxes.forget(offsets)
            return
        mode, plane_rows, chunks = copy.box.spec.swizzle, copy.box.plane_rows, offsets // CHUNK
        repeat = required_alignment(mode)
        is_misaligned = (
            bool(mode) and offsets.size * CHUNK >= repeat and (copy.destination + SHARED_START) % repeat != 0
        )
        boxes.has_boxes, boxes.has_misaligned = True, boxes.has_misaligned or is_misaligned
        boxes.has_swizzled = boxes.has_swizzled or bool(mode)
        boxes.mode[chunks] = int(mode) + 1 + (_MISALIGNED if is_misaligned else 0)
        boxes.row[chunks] = np.arange(chunks.shape[0])[:, None]
        boxes.column[chunks] = np.arange(chunks.shape[1])[None, :]
        # Wide rows without a swizzle are not core matrices. The order of their bytes in shared memory does not change.
        is_matrix = bool(mode) or chunks.shape[1] == 1
        planes = (self._planes + np.arange(chunks.shape[0]) // plane_rows) & (1 << _PLANE_BITS) - 1
        number = self._sources.setdefault(copy.map_address, 1 + len(self._sources) % 1000)
        boxes.plane[chunks] = (planes | number << _PLANE_BITS)[:, None] if is_matrix else 0
        self._planes += -(-chunks.shape[0] // plane_rows)

    def shared_write(
        self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str, together: bool, same: Same
    ) -> None:
        """Treat an earlier linear read as part of an in-place update if the whole warp now stores to the same bytes."""
        boxes = self._boxes[block.rank]
        if boxes.has_boxes and self._linear:
            read = self._linear.pop((w.agent, offsets.tobytes()), None)
            if read is not None:
                self._findings.reads_to_check[read[1].function.name, read[2]] = 0
        boxes.forget(offsets)

    # ---- ordinary reads

    def shared_read(
        self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str, together: bool
    ) -> None:
        boxes = self._boxes[block.rank]
        if boxes.has_misaligned and (boxes.mode[offsets // CHUNK] >= _MISALIGNED).any():
            message = "ordinary loads read a swizzled tile that does not start at a multiple of its pattern's size"
            self._reporter.report("swizzle_alignment", w, at, message)
        elif boxes.has_swizzled and not together:
            self._note_linear(w, at, boxes, offsets)

    def _note_linear(self, w: Warp, at: int, boxes: Boxes, offsets: Array) -> None:
        """Record a load by a whole warp that traverses a swizzled box as if the box were not swizzled.

        Code that applies the swizzle accesses the elements in a regular order, and therefore the bytes in an irregular
        order. A read whose byte order is regular but whose element order is not is a mistake, a raw dump of the tile,
        or the first half of an in-place update. A store to the same bytes indicates an update.
        """
        program = w.split.frame.program
        key = program.function.name, at
        left = self._findings.reads_to_check.get(key, _READS_CHECKED)
        if not left or len(offsets) != LANES:
            return
        modes = boxes.mode[offsets // CHUNK]
        mode = _swizzle_of(int(modes[0])) if modes[0] else Swizzle.NONE
        if mode is Swizzle.NONE or (modes != modes[0]).any():
            return
        self._findings.reads_to_check[key] = left - 1
        at_bytes, at_elements = _regularity(offsets), _regularity(swizzle(offsets + SHARED_START, mode))
        if at_bytes < at_elements:
            self._findings.reads_to_check[key] = 0
        elif at_bytes > at_elements:
            self._linear[w.agent, offsets.tobytes()] = (w, program, at, mode)

    def cluster_ended(self) -> None:
        """Warn about linear reads of swizzled boxes, except for in-place updates."""
        for w, program, at, mode in self._linear.values():
            if self._findings.reads_to_check.get((program.function.name, at)) == 0:
                continue
            text = f"ordinary loads read a tile linearly, but its tensor map wrote it with swizzle {mode.label}"
            self._findings.add("swizzle_mismatch", text, program, at, w, advice=_UNSWIZZLE, is_warning=True)
        self._linear.clear()

    # ---- other reads

    def matrices_read(self, w: Warp, at: int, block: Block, offsets: Array) -> None:
        """Check that eight matrix rows from eight rows of a box are in the same column of the box.

        Otherwise, the code assumes a swizzle that differs from the tensor map's.
        """
        boxes = self._boxes[block.rank]
        chunks = (offsets // CHUNK).reshape(-1, 8)
        rows, columns = boxes.row[chunks], boxes.column[chunks]
        mixed = (columns != columns[:, :1]).any(axis=1) & (columns >= 0).all(axis=1)
        if mixed.any() and any(len(set(matrix.tolist())) == 8 for matrix in rows[mixed]):
            mode = _swizzle_of(int(boxes.mode[chunks[mixed][0, 0]]))
            message = f"rows of a matrix are from different columns of a box with swizzle {mode.label}"
            self._reporter.report("swizzle_mismatch", w, at, message)

    def wgmma_operand(
        self, w: Warp, at: int, position: int, bits: int, offsets: Array, shape: tuple[int, int, bool], group: int
    ) -> None:
        """Check that a descriptor has the tensor map's swizzle, and that its offsets match the box.

        Tiles that a tensor copy wrote need not be aligned to the swizzle pattern, even with base offset 0, because TMA
        and wgmma both swizzle absolute addresses. For example, CUTLASS aligns tiles only to 128 bytes.
        """
        if not self._is_new_operand(w, at, position, bits, offsets):
            return
        operand = operand_of(bits, *shape)
        if operand.places.min() < 0 or operand.places.max() + CHUNK > w.block.shared.size:
            return
        boxes, mode = self._boxes[w.block.rank], operand.descriptor.mode
        if self._compare(w, at, boxes.mode[operand.places // CHUNK], mode, "a wgmma descriptor"):
            return
        text = _misread(boxes, operand)
        if text:
            message, advice = f"{_name_of(operand)} {text}", _advice_for(operand)
            self._reporter.report("swizzle_mismatch", w, at, message, advice=advice)

    def _is_new_operand(self, w: Warp, at: int, position: int, bits: int, offsets: Array) -> bool:
        """Return whether a wgmma uses a descriptor for the first time on bytes with this layout."""
        boxes, chunks = self._boxes[w.block.rank], offsets // CHUNK
        written = 0
        if boxes.has_boxes:
            # Offsets are relative to the warp's rows of A, so that the four warps of a warpgroup use the same tile.
            rows = boxes.row[chunks] - position * WARP_ROWS * (w.index % WARPS)
            sources = boxes.plane[chunks] >> _PLANE_BITS
            fields = (boxes.mode[chunks], rows, boxes.column[chunks], sources)
            written = hash(b"".join(field.tobytes() for field in fields))
        key = w.split.frame.program.function.name, at, bits, position, written
        seen = self._findings.operands
        if key in seen:
            return False
        seen.add(key)
        return True

    def box_stored(
        self, w: Warp, at: int, block: Block, offsets: Array, box: Any, map_address: int, group: Any
    ) -> None:
        """Check that a tensor store has the swizzle of the tensor load that wrote the chunks."""
        modes = self._boxes[block.rank].mode[offsets // CHUNK]
        self._compare(w, at, modes, box.spec.swizzle, "the store's tensor map")

    def _compare(self, w: Warp, at: int, modes: Array, mode: Swizzle, reader: str) -> bool:
        """Report bytes that a tensor copy wrote with a different swizzle. Return whether any were reported."""
        modes = modes & (_MISALIGNED - 1)
        wrong = (modes != 0) & (modes != int(mode) + 1)
        if wrong.any():
            expected = _swizzle_of(int(modes[wrong][0]))
            text = f"{reader} has swizzle {mode.label}, but these bytes were loaded with swizzle {expected.label}"
            self._reporter.report("swizzle_mismatch", w, at, text)
        return bool(wrong.any())


def _name_of(operand: Operand) -> str:
    """Return the fields of an operand's descriptor for messages."""
    d = operand.descriptor
    base = f", base offset {d.base_offset}" if d.base_offset else ""
    major = "MN" if operand.is_mn_major else "K"
    return (
        f"a wgmma matrix descriptor (start {d.start:#x}, leading {d.leading}, stride {d.stride}{base}, "
        f"{d.mode.label}, {major}-major)"
    )


def _advice_for(operand: Operand) -> str:
    """Return advice that states the descriptor offsets of the canonical layout."""
    span = operand.descriptor.mode.span_bytes
    if span and not operand.is_mn_major:
        return (
            f"stride offset {8 * span}, from 8 rows to the next 8 (the leading offset is not used); the instruction's "
            "transpose bit if the tile is MN-major"
        )
    if span:
        return (
            f"stride offset {8 * span}, from 8 elements of K to the next 8; leading offset from one {span}-byte panel "
            "to the next; no transpose bit if the tile is K-major"
        )
    if operand.is_mn_major:
        return (
            "leading offset from 8 elements of K to the next 8; stride offset from 8 elements of M or N to the next 8"
        )
    return "leading offset from 16 bytes of K to the next 16; stride offset from 8 rows to the next 8"


def _misread(boxes: Boxes, operand: Operand) -> str:
    """Return a message that describes an error in the chunks that a descriptor reads, or "" if there is none."""
    chunks = operand.places // CHUNK
    row, column = boxes.row[chunks], boxes.column[chunks]
    plane = np.where(boxes.mode[chunks] != 0, boxes.plane[chunks], 0)
    if plane[0, 0] and not operand.descriptor.base_offset and (plane == plane[0, 0]).all():
        rows, columns = np.ogrid[row[0, 0] : row[0, 0] + len(row), column[0, 0] : column[0, 0] + column.shape[1]]
        if (row == rows).all() and (column == columns).all():
            return ""
    return _crosses(boxes, operand, plane, row, column) or _repeats(operand, bool(boxes.mode[chunks].any()))


def _crosses(boxes: Boxes, operand: Operand, plane: Array, row: Array, column: Array) -> str:
    """Return a message that states where the operand departs from the rows and columns of its boxes, or ""."""
    if not plane.any():
        return ""
    line, part = ("k", "elements") if operand.is_mn_major else ("row", "bytes")
    wrong = (plane > 0) & (column != operand.columns)
    if operand.descriptor.base_offset and wrong.any():
        i, j = np.argwhere(wrong)[0]
        columns = f"column {column[i, j]} of a box for column {operand.columns[i, j]}"
        return f"reads {columns}; tiles loaded by TMA require base offset 0"
    joined = (plane[:, 1:] == plane[:, :-1]) & (plane[:, 1:] > 0)
    wrong = joined & ((row[:, 1:] != row[:, :-1]) | (column[:, 1:] != column[:, :-1] + 1))
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        ends = f"{_at(row, column, i, j)} and {_at(row, column, i, j + 1)}"
        return f"reads neighboring {part} of {line} {i} from {ends} of a box"
    joined = (plane[1:] == plane[:-1]) & (plane[1:] > 0)
    wrong = joined & ((column[1:] != column[:-1]) | (row[1:] <= row[:-1]))
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        ends = f"{_at(row, column, i, j)} and {_at(row, column, i + 1, j)}"
        return f"reads {line} {i} and {line} {i + 1} from {ends} of a box"
    # An operand that continues in another box must leave the first box at its end.
    span = operand.descriptor.mode.span_bytes or CHUNK
    after = np.minimum((operand.places // span + 1) * span // CHUNK, len(boxes.mode) - 1)
    continues = (boxes.mode[after] != 0) & (boxes.plane[after] == plane) & (plane > 0)
    jumps = operand.places[1:] // span - operand.places[:-1] // span != 1
    moves = (plane[1:] != plane[:-1]) & (plane[1:] > 0) & (plane[:-1] > 0)
    wrong = moves & continues[:-1] & jumps
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        return f"reads {line} {i} from row {row[i, j]} of a box that has more rows, but {line} {i + 1} from another box"
    wrong = moves & (plane[1:] >> _PLANE_BITS != plane[:-1] >> _PLANE_BITS) & (row[0] > 0)
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        first = f"starts at row {row[0, j]} of a box and leaves it after {line} {i}"
        return f"{first}, and continues in a box of another tensor map"
    return ""


def _at(row: Array, column: Array, i: int, j: int) -> str:
    return f"row {row[i, j]} column {column[i, j]}"


def _repeats(operand: Operand, is_from_box: bool) -> str:
    """Return a message if two parts of the matrix occupy the same bytes, otherwise "".

    If ordinary stores wrote the bytes, an offset of 0 intentionally repeats a core matrix.
    """
    unique, count = np.unique(operand.places, return_counts=True)
    if unique.size == operand.places.size:
        return ""
    d = operand.descriptor
    uses_leading = operand.is_mn_major or not d.mode
    if not is_from_box and (d.stride == 0 or (uses_leading and d.leading == 0)):
        return ""
    return f"reads {int((count > 1).sum())} of its 16-byte chunks for several parts of the matrix"
