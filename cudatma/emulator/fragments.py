"""How matrices lie in the registers of a warp: mma.sync, wgmma, ldmatrix, stmatrix, movmatrix.

Source: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and its neighbours, "Register Fragments
for wgmma.mma_async.m64nNk16", "ldmatrix", "stmatrix", "movmatrix".
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from cudatma.emulator.types import LANES, Array

_GROUP, _THREAD = np.arange(LANES) >> 2, np.arange(LANES) & 3

#: PTX element type -> (bits, how the raw bits become numbers).
ELEMENT_BITS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "s8": 8,
    "u8": 8,
    "e4m3": 8,
    "e5m2": 8,
    "f64": 64,
    "f32": 32,
    "s32": 32,
}
_VIEWS: dict[str, Any] = {
    "f16": np.float16,
    "s8": np.int8,
    "u8": np.uint8,
    "f64": np.float64,
    "f32": np.float32,
    "s32": np.int32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "bf16": ml_dtypes.bfloat16,
}


def numbers(raw: Array, kind: str) -> Array:
    """Raw bits, whole elements of ``kind`` along the last axis, as float64 (integers stay exact in it)."""
    if kind == "tf32":
        raw = (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return raw.astype(np.float64)
    if kind == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    result: Array = raw.view(_VIEWS[kind]).astype(np.float64)
    return result


@lru_cache(maxsize=64)
def a_order(rows: int, depth: int, bits: int) -> Array:
    """Where element (m, k) of operand A stands in its fragment, flattened as (register, lane, element)."""
    per = max(1, 32 // bits)
    order = np.zeros((rows, depth), np.int64)
    halves = rows // 8
    for register in range(rows * depth // (LANES * per)):
        for element in range(per):
            row = _GROUP + 8 * (register % halves)
            column = _THREAD * per + element + 4 * per * (register // halves)
            order[row, column] = (register * LANES + np.arange(LANES)) * per + element
    return order


@lru_cache(maxsize=64)
def b_order(depth: int, columns: int, bits: int) -> Array:
    """Where element (k, n) of operand B stands in its fragment."""
    per = max(1, 32 // bits)
    order = np.zeros((depth, columns), np.int64)
    for register in range(depth * columns // (LANES * per)):
        for element in range(per):
            order[_THREAD * per + element + 4 * per * register, _GROUP] = (
                register * LANES + np.arange(LANES)
            ) * per + element
    return order


@lru_cache(maxsize=64)
def c_order(rows: int, columns: int) -> Array:
    """Element (m, n), as m * columns + n, of each place (register, lane) of an accumulator of 32- or 64-bit elements.

    (registers, 32): registers 4 j and 4 j + 1 hold columns 8 j + 2 t and the next of row g, the others of row g + 8.
    """
    halves = rows // 8
    order = np.zeros((rows * columns // LANES, LANES), np.int64)
    for register in range(len(order)):
        block, inside = divmod(register, 2 * halves)
        row = _GROUP + 8 * (inside // 2)
        order[register] = row * columns + 8 * block + 2 * _THREAD + inside % 2
    return order


def gather_a(registers: tuple[Array, ...], rows: int, depth: int, kind: str) -> Array:
    """Operand A as (rows, depth) float64."""
    return _gather(registers, a_order(rows, depth, ELEMENT_BITS[kind]), kind)


def gather_b(registers: tuple[Array, ...], depth: int, columns: int, kind: str) -> Array:
    """Operand B as (depth, columns) float64."""
    return _gather(registers, b_order(depth, columns, ELEMENT_BITS[kind]), kind)


def _gather(registers: tuple[Array, ...], order: Array, kind: str) -> Array:
    flat = np.stack(registers).reshape(-1)
    return numbers(flat, kind)[order]


def gather_c(registers: tuple[Array, ...], rows: int, columns: int, kind: str) -> Array:
    """An accumulator as (rows, columns) float64."""
    flat = np.stack(registers)
    order = c_order(rows, columns)
    if kind == "f16":
        flat = flat.view(np.float16).reshape(len(registers), LANES, 2).transpose(0, 2, 1)
        values: Array = flat.reshape(-1, LANES).astype(np.float64)
    else:
        values = flat.view(_VIEWS[kind]).astype(np.float64)
    result = np.empty(rows * columns)
    result[order] = values
    return result.reshape(rows, columns)


def scatter_c(matrix: Array, kind: str) -> Array:
    """(registers, 32) raw bits of an accumulator: uint32, or uint64 for f64."""
    rows, columns = matrix.shape
    placed = matrix.reshape(-1)[c_order(rows, columns)]
    if kind == "f16":
        half = placed.astype(np.float16).reshape(-1, 2, LANES).transpose(0, 2, 1)
        return np.ascontiguousarray(half).view(np.uint32)[..., 0]
    if kind == "s32":
        return (placed.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
    if kind == "f64":
        return placed.view(np.uint64)
    return placed.astype(np.float32).view(np.uint32)


def load_rows(rows: Array, transposed: bool) -> Array:
    """ldmatrix: (8 n, 16) uint8 rows to (n, 32) uint32 registers."""
    if not transposed:
        return np.ascontiguousarray(rows).view(np.uint32).reshape(-1, LANES)
    matrices = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(matrices.transpose(0, 2, 1)).view(np.uint32).reshape(-1, LANES)


def store_rows(registers: Array, transposed: bool) -> Array:
    """stmatrix: (n, 32) uint32 registers to (8 n, 16) uint8 rows."""
    matrices = np.ascontiguousarray(registers).view(np.uint16).reshape(-1, 8, 8)
    if transposed:
        matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1))
    return matrices.view(np.uint8).reshape(-1, 16)
