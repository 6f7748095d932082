"""mma.m8n8k4 of f16: four products at once, each by four lanes of the lower and four of the upper half of a warp.

Source: PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f16 floating point type".
"""

from __future__ import annotations

import sys

import numpy as np

from cudatma.emulator.arithmetic.numeric import canon, canon16
from cudatma.emulator.ptx.types import LANES, Array
from cudatma.emulator.ptx.writer import RUNTIME

_LANE = np.arange(LANES)
#: Which of the four products a lane works on, and its row (or column) of four in the half of the warp.
_QUAD, _INDEX, _HIGH = _LANE % 16 // 4, _LANE % 4, 4 * (_LANE // 16)


def _operand(registers: tuple[Array, ...], along_k: bool) -> Array:
    """(4 products, 8, 4): rows of A or columns of B, by k. along_k: a lane holds four neighbours in k."""
    elements = np.stack(registers, axis=1).view(np.float16).astype(np.float64)
    out = np.zeros((4, 8, 4))
    for i in range(4):
        if along_k:
            out[_QUAD, _INDEX + _HIGH, i] = elements[:, i]
        else:
            out[_QUAD, i + _HIGH, _INDEX] = elements[:, i]
    return out


def _places(kind: str) -> tuple[Array, Array]:
    """(rows, columns) of the eight elements of each lane of an accumulator, both (32, 8)."""
    i, lane = np.arange(8)[None, :], _LANE[:, None]
    if kind == "f16":
        return (_INDEX + _HIGH)[:, None] + 0 * i, i + 0 * lane
    return (lane & 1) + (i & 2) + _HIGH[:, None], (i & 4) + (lane & 2) + (i & 1)


def mma(
    kinds: tuple[str, str], columns_of_a: bool, columns_of_b: bool, a: tuple[Array, ...], b: tuple[Array, ...], c: Array
) -> Array:
    """(registers, 32) raw bits of D = A B + C. kinds: of D and C; c: (registers, 32) raw bits."""
    left, right = _operand(a, not columns_of_a), _operand(b, columns_of_b)
    product = left @ right.transpose(0, 2, 1)
    rows, columns = _places(kinds[1])
    raw = np.ascontiguousarray(np.asarray(c).T)
    added = raw.view(np.float16 if kinds[1] == "f16" else np.float32).astype(np.float64)
    total = np.zeros((4, 8, 8))
    total[_QUAD[:, None], rows, columns] = added
    total += product
    rows, columns = _places(kinds[0])
    result = total[_QUAD[:, None], rows, columns]
    if kinds[0] == "f16":
        bits = canon16(result.astype(np.float16).reshape(-1)).view(np.uint32)
    else:
        bits = canon(result.astype(np.float32).reshape(-1)).view(np.uint32)
    return np.ascontiguousarray(bits.reshape(LANES, -1).T)


RUNTIME["quad_mma"] = sys.modules[__name__]
