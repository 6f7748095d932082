"""Layout version 1 of packed weights. This module computes the position of each value for NumPy and CuPy arrays.

A 64 x 64 block (rows of K x columns of N) has 2048 contiguous bytes, which form four groups of 16 columns. Each group
has 16 bytes for each of 32 lanes. The bytes of a lane are its registers of operand A of mma.m16n8k16 for four k16 steps
(PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"). wgmma.m64k16 assigns its registers in the same
way.

With n = 64 n64 + 16 c + 8 r0 + g and k = 64 k64 + 16 j + 8 r1 + 2 t + h (g = 0..7, t = 0..3), lane 4 g + t holds the
value in word j, nibble r0 + 2 r1 + 4 h. The byte inside the word is r1 + 2 h, and r0 selects its low or high nibble.
"""

from __future__ import annotations

from typing import Any

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


def part_shapes(k: int, n: int, group_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a packed weight's arrays, by name."""
    rows = (group_count(k, group_size), blocks(n) * BLOCK)
    return {"qweight": (blocks(n) * blocks(k), BLOCK_BYTES), "scales": rows, "zeros": rows, "perm": (k,)}


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
