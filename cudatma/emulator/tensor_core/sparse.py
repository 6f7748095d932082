"""Structured sparsity of operand A in mma.sp and wgmma.sp: from stored elements and metadata to the whole matrix.

Source: PTX ISA, "Sparse matrix storage" and the metadata layouts of each shape.
"""

from __future__ import annotations

import numpy as np

from cudatma.emulator.ptx.types import LANES, Array

_ROWS = 16
#: Types whose metadata are 16 bits of row g and 16 bits of row g + 8 in each thread; those of other types fill a
#: word of one row.
_HALF_WORDS = ("f16", "bf16", "tf32")


def row_bits(metadata: Array, selector: int, kind: str, stored: int) -> Array:
    """(16, metadata bits of a row) of what the threads chosen by the selector hold. stored: elements of a row of A."""
    bits = stored * {"tf32": 4, "s4": 1, "u4": 1, "e2m1p": 1}.get(kind, 2)
    words = np.ascontiguousarray(metadata).reshape(LANES // 4, 4)
    if kind in _HALF_WORDS:
        count = bits // 16
        chosen = np.ascontiguousarray(words[:, selector * count : (selector + 1) * count])
        halves = chosen.view(np.uint16).reshape(8, count, 2)
        rows = np.concatenate((halves[:, :, 0], halves[:, :, 1]))
    else:
        count = bits // 32
        chosen = words[:, 2 * selector * count : 2 * (selector + 1) * count]
        rows = np.concatenate((chosen[:, 0::2], chosen[:, 1::2]))
    return np.unpackbits(np.ascontiguousarray(rows).view(np.uint8), axis=1, bitorder="little")


def columns(metadata: Array, selector: int, kind: str, stored: int) -> Array:
    """(16, stored) columns that the stored elements of each row of A have in the whole matrix."""
    bits = row_bits(metadata, selector, kind, stored)
    pairs = bits[:, 0::2].astype(np.int64) + 2 * bits[:, 1::2]
    place = np.arange(stored)
    if kind == "tf32":
        # One of two: the index counts halves of an element, 0 or 2 first.
        found: Array = 2 * place[None, :] + pairs[:, 0::2] // 2
    elif kind in ("s4", "u4", "e2m1p"):
        found = 8 * (place // 4)[None, :] + 2 * np.repeat(pairs, 2, axis=1) + place % 2
    else:
        found = 4 * (place // 2)[None, :] + pairs
    return found


def expand(stored: Array, metadata: Array, selector: int, kind: str) -> Array:
    """(16, K) matrix out of (16, K / 2) stored elements."""
    whole = np.zeros((_ROWS, 2 * stored.shape[1]))
    np.put_along_axis(whole, columns(metadata, selector, kind, stored.shape[1]), stored, axis=1)
    return whole
