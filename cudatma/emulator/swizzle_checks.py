"""Who laid bytes down with which swizzle, and who reads them with another.

Source: PTX ISA, "Swizzling Modes", "Matrix descriptor" (swizzling mode, base offset), "cp.async.bulk.tensor".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudatma.emulator.barrier_events import BarrierEvents
from cudatma.emulator.machine import Warp
from cudatma.emulator.types import Array
from cudatma.layout import Swizzle, required_alignment

if TYPE_CHECKING:
    from cudatma.emulator.cluster import Block

#: Flag in Shadow.mode: the swizzled box does not begin where its pattern does.
CROOKED = 32


def _swizzle_of(mode: int) -> Swizzle:
    """The swizzle that an entry of Shadow.mode stands for; 0 means that nobody laid the bytes down by a tensor map."""
    return Swizzle((mode & (CROOKED - 1)) - 1)


class SwizzleChecks(BarrierEvents):
    """Shadow.mode, box_row and box_column: each 16-byte chunk of a box, and what its readers think of it."""

    def swizzled(self, block: Block, offsets: Array, mode: Swizzle, address: int) -> None:
        """Remember how (rows, columns) of 16-byte chunks were laid down, and whether the box began on the pattern.

        The hardware swizzles absolute addresses; code that swizzles offsets into the tile reads other bytes unless the
        tile is aligned to the pattern.
        """
        repeat = required_alignment(mode)
        crooked = int(mode) and offsets.size * 16 >= repeat and address % repeat
        shadow, chunks = self.shadows[block.rank], offsets // 16
        shadow.has_boxes, shadow.has_crooked = True, shadow.has_crooked or bool(crooked)
        shadow.mode[chunks] = int(mode) + 1 + (CROOKED if crooked else 0)
        shadow.box_row[chunks] = np.arange(chunks.shape[0])[:, None]
        shadow.box_column[chunks] = np.arange(chunks.shape[1])[None, :]

    def matrices_read(self, w: Warp, at: int, block: Block, offsets: Array) -> None:
        """ldmatrix: the eight rows of a matrix that lie in eight rows of a box are pieces of one column of it.

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

    def descriptor_read(self, w: Warp, at: int, offsets: Array, descriptor: Any) -> None:
        """wgmma: the descriptor's swizzle is the map's.

        A tile that does not begin on the pattern is none of its concern: both swizzle absolute addresses, so base
        offset 0 is right wherever a tensor copy has put the tile (CUTLASS aligns its tiles to 128 bytes only).
        """
        laid = self.shadows[w.block.rank].mode[offsets // 16]
        self._compare(w, at, laid, descriptor.mode, "a wgmma descriptor says")

    def box_stored(self, w: Warp, at: int, block: Block, offsets: Array, mode: Swizzle) -> None:
        """A tensor store of chunks that a tensor load has laid down: both maps have one swizzle."""
        self._compare(w, at, self.shadows[block.rank].mode[offsets // 16], mode, "the store's tensor map says")

    def _compare(self, w: Warp, at: int, laid: Array, mode: Swizzle, who: str) -> None:
        laid = laid & (CROOKED - 1)
        wrong = (laid != 0) & (laid != int(mode) + 1)
        if wrong.any():
            found = _swizzle_of(int(laid[wrong][0]))
            text = f"{who} {mode.label}, the tensor map that filled these bytes {found.label}"
            self.report("swizzle_mismatch", w, at, text)
