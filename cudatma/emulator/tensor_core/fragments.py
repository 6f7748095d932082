"""Layouts of dense and sparse matrices in the registers of a warp, for mma, wgmma, ldmatrix, stmatrix and movmatrix.

Source: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and the sections after it, "Register
Fragments for wgmma.mma_async.m64nNk16", "ldmatrix", "stmatrix", "movmatrix", "Sparse matrix storage".
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from cudatma.emulator.arithmetic.conversions import values
from cudatma.emulator.arithmetic.numeric import canon, canon16
from cudatma.emulator.ptx.types import LANES, Array

_GROUP, _THREAD = np.arange(LANES) >> 2, np.arange(LANES) & 3

#: Maps each PTX element type to its number of bits in a register or in shared memory. 6-bit and 4-bit floats take one
#: byte each. "e2m1p" is e2m1 with two elements per byte, as in .kind::mxf4.
ELEMENT_BITS = {
    **dict.fromkeys(("f16", "bf16"), 16),
    **dict.fromkeys(("tf32", "f32", "s32"), 32),
    **dict.fromkeys(("s8", "u8", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1"), 8),
    **dict.fromkeys(("s4", "u4", "e2m1p"), 4),
    "b1": 1,
    "f64": 64,
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
    """Convert the raw bits of elements of ``kind`` along the last axis to float64.

    Float64 represents all integer element types exactly.
    """
    if kind == "tf32":
        raw = (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return raw.astype(np.float64)
    if kind == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind in _VIEWS:
        result: Array = raw.view(_VIEWS[kind]).astype(np.float64)
        return result
    return _narrow(raw.view(np.uint8), kind).astype(np.float64)


def _narrow(raw: Array, kind: str) -> Array:
    """Unpack elements of fewer than 8 bits from bytes."""
    elements: Array
    if kind == "b1":
        return np.unpackbits(raw, axis=-1, bitorder="little")
    if kind in ("e3m2", "e2m3", "e2m1"):
        elements = values(kind)[(raw >> 2 & 15) if kind == "e2m1" else raw & 63]
        return elements
    fields = np.stack((raw & 15, raw >> 4), axis=-1).reshape(*raw.shape[:-1], -1)
    elements = values("e2m1")[fields] if kind == "e2m1p" else fields
    return (fields ^ 8).view(np.int8) - np.int8(8) if kind == "s4" else elements


@lru_cache(maxsize=64)
def a_order(rows: int, depth: int, bits: int) -> Array:
    """Return the position of each element (m, k) of operand A in its fragment, as (register, lane, element)."""
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
    """Return the position of each element (k, n) of operand B in its fragment."""
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
    """Return the element m * columns + n at each position (register, lane) of an accumulator of 32 or 64 bits.

    Registers 4 j and 4 j + 1 contain columns 8 j + 2 t and 8 j + 2 t + 1 of row g. Registers 4 j + 2 and 4 j + 3
    contain the same columns of row g + 8.
    """
    halves = rows // 8
    order = np.zeros((rows * columns // LANES, LANES), np.int64)
    for register in range(len(order)):
        block, inside = divmod(register, 2 * halves)
        row = _GROUP + 8 * (inside // 2)
        order[register] = row * columns + 8 * block + 2 * _THREAD + inside % 2
    return order


@lru_cache(maxsize=64)
def c_places(rows: int, columns: int) -> Array:
    """Return the position of each element in the accumulator, shape (rows, columns), the inverse of c_order()."""
    return np.argsort(c_order(rows, columns), axis=None).reshape(rows, columns)


def gather_a(registers: tuple[Array, ...], rows: int, depth: int, kind: str) -> Array:
    """Return operand A as float64, shape (rows, depth)."""
    return _gather(registers, a_order(rows, depth, ELEMENT_BITS[kind]), kind)


def gather_b(registers: tuple[Array, ...], depth: int, columns: int, kind: str) -> Array:
    """Return operand B as float64, shape (depth, columns)."""
    return _gather(registers, b_order(depth, columns, ELEMENT_BITS[kind]), kind)


def _gather(registers: tuple[Array, ...], order: Array, kind: str) -> Array:
    return numbers(np.concatenate(registers), kind)[order]


def gather_c(registers: tuple[Array, ...], rows: int, columns: int, kind: str) -> Array:
    """Return an accumulator as float64, shape (rows, columns)."""
    flat = np.concatenate(registers).reshape(len(registers), -1)
    if kind == "f16":
        flat = flat.view(np.float16).reshape(len(registers), LANES, 2).transpose(0, 2, 1)
        values: Array = flat.reshape(-1, LANES).astype(np.float64)
    else:
        values = flat.view(_VIEWS[kind]).astype(np.float64)
    return values.reshape(-1)[c_places(rows, columns)]


def rounded_bits(values_of: Array, kind: str) -> Array:
    """Round float64 to f16, f32 or f64 and return the bits as unsigned integers. NaNs become canonical."""
    if kind == "f16":
        return canon16(values_of.astype(np.float16).reshape(-1)).reshape(values_of.shape).view(np.uint16)
    if kind == "f64":
        return values_of.view(np.uint64)
    return canon(values_of.astype(np.float32).reshape(-1)).reshape(values_of.shape).view(np.uint32)


def scatter_c(matrix: Array, kind: str) -> Array:
    """Return the raw bits of an accumulator, shape (registers, 32), as uint64 for f64 and uint32 otherwise."""
    rows, columns = matrix.shape
    placed = matrix.reshape(-1)[c_order(rows, columns)]
    if kind == "s32":
        return (placed.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
    bits = rounded_bits(placed, kind)
    if kind == "f16":
        return np.ascontiguousarray(bits.reshape(-1, 2, LANES).transpose(0, 2, 1)).view(np.uint32)[..., 0]
    return bits


def load_rows(rows: Array, transposed: bool) -> Array:
    """Convert (8 n, 16) uint8 rows of ldmatrix to (n, 32) uint32 registers."""
    if not transposed:
        return np.ascontiguousarray(rows).view(np.uint32).reshape(-1, LANES)
    matrices = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(matrices.transpose(0, 2, 1)).view(np.uint32).reshape(-1, LANES)


def load_square_rows(rows: Array) -> Array:
    """Convert (16 n, 16) uint8 rows of ldmatrix.m16n16.trans to (2 n, 32) registers.

    A thread contains four rows of columns g and g + 8.
    """
    matrices = np.ascontiguousarray(rows).reshape(-1, 16, 16).transpose(0, 2, 1)
    return np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, LANES)


def spread_bits(rows: Array, source: str) -> Array:
    """Unpack 16-byte rows whose first 8 (.b4x16_p64) or 12 (.b6x16_p32) bytes contain elements to one element per byte.

    4-bit elements are placed in the middle of a byte and 6-bit elements in the low bits, as mma expects.
    """
    bits = 4 if source == "b4x16_p64" else 6
    flat = np.unpackbits(rows[:, : 2 * bits], axis=1, bitorder="little").reshape(len(rows), 16, bits)
    wide = np.zeros((len(rows), 16, 8), np.uint8)
    first = 2 if bits == 4 else 0
    wide[:, :, first : first + bits] = flat
    return np.packbits(wide.reshape(len(rows), -1), axis=1, bitorder="little")


def store_rows(registers: Array, transposed: bool) -> Array:
    """Convert (n, 32) uint32 registers of stmatrix to (8 n, 16) uint8 rows."""
    matrices = np.ascontiguousarray(registers).view(np.uint16).reshape(-1, 8, 8)
    if transposed:
        matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1))
    return matrices.view(np.uint8).reshape(-1, 16)


def store_byte_rows(registers: Array) -> Array:
    """Convert (n, 32) registers of stmatrix.m16n8.trans (accumulator fragments of bytes) to (8 n, 16) uint8.

    The rows of the result are the columns of the fragments.
    """
    parts = np.ascontiguousarray(registers).view(np.uint8).reshape(-1, 8, 4, 2, 2)
    # The axes are matrix, row g, thread, half (row g or g + 8) and column (2 t or 2 t + 1). The result is ordered by
    # column.
    return np.ascontiguousarray(parts.transpose(0, 2, 4, 3, 1)).reshape(-1, 16)


_ROWS = 16
#: Types for which the metadata of a thread consists of 16 bits of row g and 16 bits of row g + 8. For other types, the
#: metadata is one word of one row.
_HALF_WORDS = ("f16", "bf16", "tf32")


def _metadata_bits(metadata: Array, selector: int, kind: str, stored: int) -> Array:
    """Return the metadata of the threads that the selector chooses, shape (16, metadata bits per row).

    ``stored`` is the number of stored elements per row of A.
    """
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


def _sparse_columns(metadata: Array, selector: int, kind: str, stored: int) -> Array:
    """Return the columns in the whole matrix A of each row's stored elements, shape (16, stored)."""
    bits = _metadata_bits(metadata, selector, kind, stored)
    pairs = bits[:, 0::2].astype(np.int64) + 2 * bits[:, 1::2]
    place = np.arange(stored)
    if kind == "tf32":
        # One of two elements is stored. The index counts half-elements, so the first index is 0 or 2.
        columns: Array = 2 * place[None, :] + pairs[:, 0::2] // 2
    elif kind in ("s4", "u4", "e2m1p"):
        columns = 8 * (place // 4)[None, :] + 2 * np.repeat(pairs, 2, axis=1) + place % 2
    else:
        columns = 4 * (place // 2)[None, :] + pairs
    return columns


def expand_sparse(stored: Array, metadata: Array, selector: int, kind: str) -> Array:
    """Expand (16, K / 2) stored elements to a (16, K) matrix."""
    whole = np.zeros((_ROWS, 2 * stored.shape[1]))
    np.put_along_axis(whole, _sparse_columns(metadata, selector, kind, stored.shape[1]), stored, axis=1)
    return whole
