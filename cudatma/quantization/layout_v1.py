"""Pack and unpack NumPy and CuPy arrays in layout version 1 of packed weights.

A 64 x 64 block of 4-bit codes (rows along K, columns along N) takes 2048 contiguous bytes, 512 for each group of 16
columns. In a group, each of 32 lanes has 16 bytes, which hold the lane's elements of operand A of mma.m16n8k16 in four
k16 steps (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"). wgmma.m64k16 distributes operand A in
the same way.

Let n = 64 n64 + 16 c + 8 r0 + g and k = 64 k64 + 16 j + 8 r1 + 2 t + h (g = 0..7, t = 0..3). Lane 4 g + t of group c
then holds value (k, n) in word j, nibble r0 + 2 r1 + 4 h, which is the low (r0 = 0) or high (r0 = 1) nibble of byte
r1 + 2 h.

A 64 x 64 block of 8-bit codes consists of two blocks of 2048 bytes, one for rows 0 to 31 and one for rows 32 to 63. In
each of them, a lane uses words 2 j and 2 j + 1 in step j, and byte r0 + 2 h of word 2 j + r1 holds value (k, n).

Formats with e2m1 codes reorder the 32 bits of every word (see E2M1_BITS), so that kernels can extract the codes with
few instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAYOUT_VERSION = 1
#: Side length of a block, and size in bytes of a block of 4-bit codes.
BLOCK = 64
BLOCK_BYTES = BLOCK * BLOCK // 2
#: Offset of symmetric int4 weights, and code of their padding.
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
    return _reordered_bits(packed, _e2m1_tables(inverse=False), xp) if is_e2m1 else packed


def unpack_codes(packed: Any, k64: int, n64: int, bits: int, is_e2m1: bool, xp: Any) -> Any:
    """Undo pack_codes()."""
    if bits == 8:
        return unpack_bytes(packed, k64, n64)
    return unpack_values(_reordered_bits(packed, _e2m1_tables(inverse=True), xp) if is_e2m1 else packed, k64, n64, xp)


def pack_bytes(q: Any) -> Any:
    """Pack 8-bit codes, uint8 (64 K64, 64 N64), into bytes, uint8 (N64 * K64 * 2, 2048)."""
    k, n = q.shape
    split = q.reshape(k // 32, 2, 2, 4, 2, n // BLOCK, 4, 2, 8)  # k32 j r1 t h n64 c r0 g
    return split.transpose(5, 0, 6, 8, 3, 1, 2, 4, 7).reshape(-1, BLOCK_BYTES)  # n64 k32 c g t j r1 h r0


def unpack_bytes(packed: Any, k64: int, n64: int) -> Any:
    """Undo pack_bytes()."""
    split = packed.reshape(n64, 2 * k64, 4, 8, 4, 2, 2, 2, 2)  # n64 k32 c g t j r1 h r0
    return split.transpose(1, 5, 6, 4, 7, 0, 2, 8, 3).reshape(k64 * BLOCK, n64 * BLOCK)


#: Positions of the bits of eight e2m1 codes in a word. Each tuple lists a code's sign, exponent (2 bits) and mantissa.
#: In each half of a register, bf16 has its sign, the two lowest exponent bits and the highest mantissa bit at bits 15,
#: 8, 7 and 6. Shifts by 0, 3 and 6 bits move the first three codes of a half there. After a rotation by 6 bits, a
#: product with 2^2 + 2^7 + 2^12 contains the fourth code of each half there.
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
#: Position of each bit of a plain word, beginning with the lowest bit.
_STORED_AT = tuple(position for positions in E2M1_BITS for position in reversed(positions))


@cache
def _e2m1_tables(inverse: bool) -> NDArray[np.uint32]:
    """Return the stored bits for each value of a plain word's lower and upper half, or the inverse.

    The result has the shape (2, 65536).
    """
    positions = [_STORED_AT.index(bit) for bit in range(32)] if inverse else _STORED_AT
    return np.stack([_moved_bits(positions[:16]), _moved_bits(positions[16:])])


def _moved_bits(positions: Sequence[int]) -> NDArray[np.uint32]:
    """Return the 16-bit integers with bit i moved to positions[i]."""
    values = np.arange(1 << 16, dtype=np.uint32)
    moved = np.zeros_like(values)
    for bit, position in enumerate(positions):
        moved |= (values >> np.uint32(bit) & np.uint32(1)) << np.uint32(position)
    return moved


def _reordered_bits(packed: Any, tables: NDArray[np.uint32], xp: Any) -> Any:
    """Replace each word by the entries of its halves in two tables."""
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
    """Reorder rows (G, 64 N64) for storage. Within 64 columns, column 16 c + 8 r + g moves to 8 g + 2 c + r."""
    groups, n = rows.shape
    split = rows.reshape(groups, n // BLOCK, 4, 2, 8)
    return split.transpose(0, 1, 4, 2, 3).reshape(groups, n)


def restore_columns(rows: Any) -> Any:
    """Undo order_columns()."""
    groups, n = rows.shape
    split = rows.reshape(groups, n // BLOCK, 8, 4, 2)
    return split.transpose(0, 1, 3, 4, 2).reshape(groups, n)


def column_at(position: int) -> int:
    """Return the column whose scale is at ``position`` in a stored row."""
    block, inside = divmod(position, BLOCK)
    lane, rest = divmod(inside, 8)
    return block * BLOCK + 16 * (rest // 2) + 8 * (rest % 2) + lane
