"""Bytes that are written with one swizzle and read with another.

Source: PTX ISA, "Swizzling Modes", "Matrix descriptor" (swizzling mode, base offset), "cp.async.bulk.tensor".
"""

from __future__ import annotations

import numpy as np

from cudatma.emulator.hazards.barrier_events import BarrierEvents
from cudatma.emulator.hazards.descriptor_checks import advice_for, misread, name_of
from cudatma.emulator.hazards.findings import Findings
from cudatma.emulator.hazards.shadow import PLANE_BITS, Shadow
from cudatma.emulator.machine.memory import SHARED_START
from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.machine.state import Block, Cluster, Warp
from cudatma.emulator.ptx.types import LANES, Array
from cudatma.emulator.tensor_core.wgmma import WARP_ROWS, WARPS, Operand
from cudatma.layout import Swizzle, required_alignment, swizzle

#: Flag in Shadow.mode: the swizzled box does not begin where its pattern does.
CROOKED = 32
#: Reads of one instruction that are looked at until it is known whether it heeds the swizzle.
_READS_CHECKED = 64
_UNSWIZZLE = "the swizzle in the reader's address: chunk ^= row % 8 (128B), or swizzle none in the tensor map"
_LANES = np.arange(LANES)
_LANE_BITS = _LANES[:, None] >> np.arange(5) & 1


def _swizzle_of(mode: int) -> Swizzle:
    """The swizzle that an entry of Shadow.mode means; 0: no tensor map wrote the bytes."""
    return Swizzle((mode & (CROOKED - 1)) - 1)


def _regularity(places: Array) -> int:
    """How regularly lanes go over a tile: 2 in an arithmetic series; 1 where each bit of the lane adds a power of two,
    as in rows of fragments; else 0."""
    steps = places - places[0]
    if (steps == _LANES * steps[1]).all():
        return 2
    bits = steps[1 << np.arange(5)]
    return int(not (bits & (bits - 1)).any() and (steps == _LANE_BITS @ bits).all())


class SwizzleChecks(BarrierEvents):
    """Shadow.mode, box_row and box_column: each 16-byte chunk of a box, and what its readers think of it."""

    def __init__(self, launch: Launch, cluster: Cluster, findings: Findings) -> None:
        super().__init__(launch, cluster, findings)
        #: (warp, offsets) -> the last linear read of swizzled bytes there.
        self._linear: dict[tuple[int, bytes], tuple[Warp, Program, int, Swizzle]] = {}
        #: The number of the next plane of a box, and one for each address of a tensor map.
        self._planes = 0
        self._sources: dict[int, int] = {}

    def swizzled(self, block: Block, offsets: Array, mode: Swizzle, address: int, plane_rows: int, source: int) -> None:
        """Remember how (rows, columns) of 16-byte chunks were laid down, and whether the box began on the pattern.

        The hardware swizzles absolute addresses; code that swizzles offsets into the tile reads other bytes unless the
        tile is aligned to the pattern. plane_rows: rows of a two-dimensional plane of the box. source: the tensor map.
        """
        repeat = required_alignment(mode)
        crooked = int(mode) and offsets.size * 16 >= repeat and address % repeat
        shadow, chunks = self.shadows[block.rank], offsets // 16
        shadow.has_boxes, shadow.has_crooked = True, shadow.has_crooked or bool(crooked)
        shadow.has_swizzled = shadow.has_swizzled or bool(mode)
        shadow.mode[chunks] = int(mode) + 1 + (CROOKED if crooked else 0)
        shadow.box_row[chunks] = np.arange(chunks.shape[0])[:, None]
        shadow.box_column[chunks] = np.arange(chunks.shape[1])[None, :]
        # Without a swizzle, wide rows are not core matrices: the tensor map moves bytes that are in order already.
        is_matrix = bool(mode) or chunks.shape[1] == 1
        planes = (self._planes + np.arange(chunks.shape[0]) // plane_rows) & (1 << PLANE_BITS) - 1
        number = self._sources.setdefault(source, 1 + len(self._sources) % 1000)
        shadow.box_plane[chunks] = (planes | number << PLANE_BITS)[:, None] if is_matrix else 0
        self._planes += -(-chunks.shape[0] // plane_rows)

    def plain_read(self, w: Warp, at: int, shadow: Shadow, offsets: Array) -> None:
        """ld of a whole warp from a swizzled box: note where it goes over the bytes as if the box were not swizzled.

        Code that applies the swizzle visits the elements in a regular order, and therefore not the bytes. A read
        whose bytes are regular and whose elements are not is a mistake, a raw dump of the tile, or the first half of an
        update in place, which the store that follows tells.
        """
        program = w.split.frame.program
        key = program.function.name, at
        left = self.findings.reads_to_check.get(key, _READS_CHECKED)
        if not left or len(offsets) != LANES:
            return
        laid = shadow.mode[offsets // 16]
        mode = _swizzle_of(int(laid[0])) if laid[0] else Swizzle.NONE
        if mode is Swizzle.NONE or (laid != laid[0]).any():
            return
        self.findings.reads_to_check[key] = left - 1
        at_bytes, at_elements = _regularity(offsets), _regularity(swizzle(offsets + SHARED_START, mode))
        if at_bytes < at_elements:
            self.findings.reads_to_check[key] = 0
        elif at_bytes > at_elements:
            self._linear[w.agent, offsets.tobytes()] = (w, program, at, mode)

    def plain_write(self, w: Warp, offsets: Array) -> None:
        """A store of a whole warp: where it has read the same bytes from, it updates them in place."""
        found = self._linear.pop((w.agent, offsets.tobytes()), None)
        if found is not None:
            self.findings.reads_to_check[found[1].function.name, found[2]] = 0

    def warn_of_linear_reads(self) -> None:
        """The cluster has ended: its linear reads of swizzled boxes were no updates in place."""
        for w, program, at, mode in self._linear.values():
            if self.findings.reads_to_check.get((program.function.name, at)) == 0:
                continue
            text = f"plain code reads a tile linearly that its tensor map has laid down with swizzle {mode.label}"
            self.findings.add("swizzle_mismatch", text, self.launch, program, at, w, advice=_UNSWIZZLE, is_warning=True)
        self._linear.clear()

    def matrices_read(self, w: Warp, at: int, block: Block, offsets: Array) -> None:
        """ldmatrix: the eight rows of a matrix that are in eight rows of a box are parts of one column of it.

        Where they are not, the code that made the addresses thinks of another swizzle than the tensor map's.
        """
        shadow = self.shadows[block.rank]
        chunks = (offsets // 16).reshape(-1, 8)
        rows, columns = shadow.box_row[chunks], shadow.box_column[chunks]
        mixed = (columns != columns[:, :1]).any(axis=1) & (columns >= 0).all(axis=1)
        if mixed.any() and any(len(set(found.tolist())) == 8 for found in rows[mixed]):
            mode = _swizzle_of(int(shadow.mode[chunks[mixed][0, 0]]))
            message = f"rows of one matrix come from several columns of a box laid down with swizzle {mode.label}"
            self.report("swizzle_mismatch", w, at, message)

    def is_new_operand(self, w: Warp, at: int, bits: int, position: int, offsets: Array) -> bool:
        """Return whether a wgmma uses a descriptor for the first time over bytes that tensor copies wrote like this.

        bits: the descriptor. position: 0 for B, 1 for A. offsets: the chunks that the warp reads.
        """
        shadow, chunks = self.shadows[w.block.rank], offsets // 16
        written = 0
        if shadow.has_boxes:
            # Relative to the warp's rows of A, so that the four warps of a warpgroup agree on one tile.
            rows = shadow.box_row[chunks] - position * WARP_ROWS * (w.index % WARPS)
            sources = shadow.box_plane[chunks] >> PLANE_BITS
            fields = (shadow.mode[chunks], rows, shadow.box_column[chunks], sources)
            written = hash(b"".join(field.tobytes() for field in fields))
        key = w.split.frame.program.function.name, at, bits, position, written
        seen = self.findings.operands
        if key in seen:
            return False
        seen.add(key)
        return True

    def descriptor_used(self, w: Warp, at: int, operand: Operand) -> None:
        """wgmma: the descriptor's swizzle is the tensor map's, and its offsets follow the box.

        A tile that does not begin on the pattern is right with base offset 0, too, wherever a tensor copy has put it:
        both swizzle absolute addresses (CUTLASS aligns its tiles to 128 bytes only).
        """
        shadow = self.shadows[w.block.rank]
        if not self._compare(
            w, at, shadow.mode[operand.places // 16], operand.descriptor.mode, "a wgmma descriptor says"
        ):
            text = misread(shadow, operand)
            if text:
                self.report("swizzle_mismatch", w, at, f"{name_of(operand)} {text}", advice=advice_for(operand))

    def box_stored(self, w: Warp, at: int, block: Block, offsets: Array, mode: Swizzle) -> None:
        """A tensor store of chunks that a tensor load has laid down: both maps have one swizzle."""
        self._compare(w, at, self.shadows[block.rank].mode[offsets // 16], mode, "the store's tensor map says")

    def _compare(self, w: Warp, at: int, laid: Array, mode: Swizzle, who: str) -> bool:
        """Report bytes that a tensor map has laid down with another swizzle. Return whether it found any."""
        laid = laid & (CROOKED - 1)
        wrong = (laid != 0) & (laid != int(mode) + 1)
        if wrong.any():
            found = _swizzle_of(int(laid[wrong][0]))
            text = f"{who} {mode.label}, the tensor map that filled these bytes {found.label}"
            self.report("swizzle_mismatch", w, at, text)
        return bool(wrong.any())
