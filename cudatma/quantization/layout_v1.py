"""Layout version 1 of packed weights. This module computes the position of each value for NumPy and CuPy arrays.

A 64 x 64 block (rows of K x columns of N) has 2048 contiguous bytes, which form four groups of 16 columns. Each group
has 16 bytes for each of 32 lanes. The bytes of a lane are its registers of operand A of mma.m16n8k16 for four k16 steps
(PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"). wgmma.m64k16 assigns its registers in the same
way.

With n = 64 n64 + 16 c + 8 r0 + g and k = 64 k64 + 16 j + 8 r1 + 2 t + h (g = 0..7, t = 0..3), lane 4 g + t holds the
value in word j, nibble r0 + 2 r1 + 4 h. The byte inside the word is r1 + 2 h, and r0 selects its low or high nibble.

A 64 x 64 block of 8-bit codes consists of two such blocks of 2048 bytes, for rows 0 to 31 and for rows 32 to 63. In
each of them, step j of a lane has the words 2 j and 2 j + 1, and word 2 j + r1 holds the value in byte r0 + 2 h.

In formats with e2m1 codes, the 32 bits of a word are in another order (E2M1_BITS), so that kernels can extract the
codes with few instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAYOUT_VERSION = 1
#: Number of rows and of columns per block, and number of bytes per block.
BLOCK = 64
BLOCK_BYTES = BLOCK * BLOCK // 2
#: Offset of symmetric weights. Padding also has this value.
SYMMETRIC_ZERO = 8


def blocks(extent: int) -> int:
    """Return the number of 64-wide blocks that cover ``extent``."""
    return -(-extent // BLOCK)


def group_count(k: int, group_size: int) -> int:
    """Return the number of scale groups along K, which is ceil(K / group_size), or 1 if group_size is -1."""
    return 1 if group_size == -1 else -(-k // group_size)


def row_blocks(k: int, bits: int) -> int:
    """Return the number of blocks of 2048 bytes along K."""
    return blocks(k) * bits // 4


def part_shapes(k: int, n: int, group_size: int, bits: int = 4) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a packed weight's arrays, by name."""
    rows = (group_count(k, group_size), blocks(n) * BLOCK)
    return {"qweight": (blocks(n) * row_blocks(k, bits), BLOCK_BYTES), "scales": rows, "zeros": rows, "perm": (k,)}


def pack_codes(q: Any, bits: int, is_e2m1: bool, xp: Any) -> Any:
    """Pack codes, uint8 (64 K64, 64 N64), into bytes, uint8 (N64 * K64 * bits / 4, 2048)."""
    if bits == 8:
        return pack_bytes(q)
    packed = pack_values(q)
    return _reordered_bits(packed, _stored_e2m1(), xp) if is_e2m1 else packed


def unpack_codes(packed: Any, k64: int, n64: int, bits: int, is_e2m1: bool, xp: Any) -> Any:
    """Undo pack_codes()."""
    if bits == 8:
        return unpack_bytes(packed, k64, n64)
    return unpack_values(_reordered_bits(packed, _plain_e2m1(), xp) if is_e2m1 else packed, k64, n64, xp)


def pack_bytes(q: Any) -> Any:
    """Pack 8-bit codes, uint8 (64 K64, 64 N64), into bytes, uint8 (N64 * K64 * 2, 2048)."""
    k, n = q.shape
    split = q.reshape(k // 32, 2, 2, 4, 2, n // BLOCK, 4, 2, 8)  # k32 j r1 t h n64 c r0 g
    return split.transpose(5, 0, 6, 8, 3, 1, 2, 4, 7).reshape(-1, BLOCK_BYTES)  # n64 k32 c g t j r1 h r0


def unpack_bytes(packed: Any, k64: int, n64: int) -> Any:
    """Undo pack_bytes()."""
    split = packed.reshape(n64, 2 * k64, 4, 8, 4, 2, 2, 2, 2)  # n64 k32 c g t j r1 h r0
    return split.transpose(1, 5, 6, 4, 7, 0, 2, 8, 3).reshape(k64 * BLOCK, n64 * BLOCK)


#: Bits of the eight e2m1 codes of a word, from the highest to the lowest bit of a code: sign, exponent and mantissa. In
#: each half of a register, a bf16 number has these fields in bits 15, 8, 7 and 6. Shifts by 0, 3 and 6 bits move the
#: first three codes of a half there. After a rotation by 6 bits, a product with 2^2 + 2^7 + 2^12 contains the bits of
#: the fourth code of each half at these positions.
E2M1_BITS = (
    (15, 8, 7, 6),
    (12, 5, 4, 3),
    (9, 2, 1, 0),
    (29, 27, 26, 30),
    (31, 24, 23, 22),
    (28, 21, 20, 19),
    (25, 18, 17, 16),
    (13, 11, 10, 14),
)
#: The position of each bit of a word of plain codes, beginning with the lowest bit.
_STORED_AT = tuple(position for positions in E2M1_BITS for position in reversed(positions))


@cache
def _stored_e2m1() -> NDArray[np.uint32]:
    """Return the stored bits of each value of the lower and the upper half of a word, shape (2, 65536)."""
    return np.stack([_moved_bits(_STORED_AT[:16]), _moved_bits(_STORED_AT[16:])])


@cache
def _plain_e2m1() -> NDArray[np.uint32]:
    """Return the tables of the inverse of _stored_e2m1()."""
    plain_at = [_STORED_AT.index(bit) for bit in range(32)]
    return np.stack([_moved_bits(plain_at[:16]), _moved_bits(plain_at[16:])])


def _moved_bits(positions: Sequence[int]) -> NDArray[np.uint32]:
    """Return the 16-bit integers with bit i moved to positions[i]."""
    values = np.arange(1 << 16, dtype=np.uint32)
    moved = np.zeros_like(values)
    for bit, position in enumerate(positions):
        moved |= (values >> np.uint32(bit) & np.uint32(1)) << np.uint32(position)
    return moved


def _reordered_bits(packed: Any, tables: NDArray[np.uint32], xp: Any) -> Any:
    """Replace all words by the combination of their halves' entries in two tables."""
    low, high = xp.asarray(tables)
    halves = xp.ascontiguousarray(packed).view(np.uint16)
    return (low[halves[..., ::2]] | high[halves[..., 1::2]]).view(np.uint8)


def pack_values(q: Any) -> Any:
    """Pack uint8 values from 0 to 15 of shape (64 K64, 64 N64) into bytes, uint8 (N64 * K64, 2048), in C order."""
    k, n = q.shape
    k64, n64 = k // BLOCK, n // BLOCK
    halves = q.reshape(k, n64, 4, 2, 8)
    pairs = halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)  # r0 = 0 in the low nibble: (k, n64, c, g)
    split = pairs.reshape(k64, 4, 2, 4, 2, n64, 4, 8)  # k64 j r1 t h n64 c g
    return split.transpose(5, 0, 6, 7, 3, 1, 4, 2).reshape(n64 * k64, BLOCK_BYTES)  # n64 k64 c g t j h r1


def unpack_values(packed: Any, k64: int, n64: int, xp: Any) -> Any:
    """Unpack bytes, uint8 (N64 * K64, 2048), into uint8 values (64 K64, 64 N64)."""
    split = packed.reshape(n64, k64, 4, 8, 4, 4, 2, 2)  # n64 k64 c g t j h r1
    pairs = split.transpose(1, 5, 7, 4, 6, 0, 2, 3).reshape(k64 * BLOCK, n64, 4, 8)
    halves = xp.empty((k64 * BLOCK, n64, 4, 2, 8), dtype=packed.dtype)
    halves[:, :, :, 0] = pairs & 15
    halves[:, :, :, 1] = pairs >> 4
    return halves.reshape(k64 * BLOCK, n64 * BLOCK)


def order_columns(rows: Any) -> Any:
    """Reorder rows (G, 64 N64) for storage. In every 64 columns, column 16 c + 8 r + g moves to 8 g + 2 c + r."""
    groups, n = rows.shape
    split = rows.reshape(groups, n // BLOCK, 4, 2, 8)
    return split.transpose(0, 1, 4, 2, 3).reshape(groups, n)


def restore_columns(rows: Any) -> Any:
    """Undo order_columns()."""
    groups, n = rows.shape
    split = rows.reshape(groups, n // BLOCK, 8, 4, 2)
    return split.transpose(0, 1, 3, 4, 2).reshape(groups, n)


def column_at(position: int) -> int:
    """Return the column of N whose scale is at ``position`` of a stored row."""
    block, inside = divmod(position, BLOCK)
    lane, rest = divmod(inside, 8)
    return block * BLOCK + 16 * (rest // 2) + 8 * (rest % 2) + lane
