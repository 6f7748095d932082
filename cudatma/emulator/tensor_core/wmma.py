"""Execute wmma, which loads, stores and multiplies whole matrices.

PTX does not specify the lane of each element of a fragment. In the emulator, element e = row * columns + column of an m
x n matrix is element e // 32 of lane e % 32. Fragments have the size that the ISA specifies. A fragment that is larger
than the matrix repeats its elements. Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Operations Using wmma
Instructions".
"""

from __future__ import annotations

import sys

import numpy as np

from cudatma.emulator.machine import access, windows
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import LANES, NUMPY, Array
from cudatma.emulator.ptx.writer import RUNTIME
from cudatma.emulator.tensor_core import fragments
from cudatma.emulator.tensor_core import mma as tensorcore

#: Maps an element type to the type of its registers. The default is u32.
_CODES = {"f64": "u64"}
#: Maps the bits per element to the type of a memory access. Elements of fewer than 16 bits are accessed as bytes.
_MEMORY = {16: "u16", 32: "u32", 64: "u64"}


def _shape(operand: str, shape: tuple[int, int, int]) -> tuple[int, int]:
    m, n, k = shape
    return {"a": (m, k), "b": (k, n)}.get(operand, (m, n))


def _elements(kind: str) -> int:
    """Return the number of elements per register."""
    return max(1, 32 // fragments.ELEMENT_BITS[kind])


def pack(matrix: Array, kind: str, registers: int) -> Array:
    """Pack raw elements (rows, columns), given as unsigned integers, into registers (registers, 32)."""
    per = _elements(kind)
    flat = np.resize(matrix.reshape(-1), registers * per * LANES).reshape(registers, per, LANES)
    if per == 1:
        return flat[:, 0].astype(NUMPY[_CODES.get(kind, "u32")])
    bits = np.uint32(32 // per)
    out = np.zeros((registers, LANES), np.uint32)
    for k in range(per):
        out |= flat[:, k].astype(np.uint32) << np.uint32(k * int(bits))
    return out


def unpack(registers: tuple[Array, ...], kind: str, rows: int, columns: int) -> Array:
    """Unpack registers (registers, 32) into raw elements (rows, columns)."""
    per, stacked = _elements(kind), np.stack(registers)
    if per > 1:
        bits = 32 // per
        mask = np.uint32((1 << bits) - 1)
        fields = [stacked >> np.uint32(k * bits) & mask for k in range(per)]
        stacked = np.stack(fields, axis=1)
    return stacked.reshape(-1)[: rows * columns].reshape(rows, columns)


def _addresses(w: Warp, base: int, rows: int, columns: int, kind: str, by_column: bool, stride: int) -> Array:
    """Return the addresses of a matrix in memory, shape (rows or columns, units per row or column)."""
    bits = fragments.ELEMENT_BITS[kind]
    lines, along = (columns, rows) if by_column else (rows, columns)
    unit = max(bits // 8, 1)
    units = along * bits // 8 // unit
    pitch = stride * bits // 8
    line: Array = np.arange(lines, dtype=np.uint64)[:, None] * np.uint64(pitch)
    addresses: Array = np.uint64(base) + line + np.arange(units, dtype=np.uint64)[None, :] * np.uint64(unit)
    return addresses


def _chunks(addresses: Array) -> list[tuple[Array, Array | None, int]]:
    """Divide addresses into groups of (32 addresses, mask, number of valid addresses)."""
    flat, out = addresses.reshape(-1), []
    for first in range(0, flat.size, LANES):
        part = flat[first : first + LANES]
        mask = None if part.size == LANES else np.arange(LANES) < part.size
        out.append((np.resize(part, LANES), mask, part.size))
    return out


def load(
    w: Warp,
    at: int,
    space: str,
    operand: str,
    shape: tuple[int, int, int],
    kind: str,
    by_column: bool,
    registers: int,
    address: Array,
    stride: Array | None,
) -> Array:
    """Execute wmma.load and return the registers, shape (registers, 32)."""
    rows, columns = _shape(operand, shape)
    pitch = int(stride[0]) if stride is not None else (rows if by_column else columns)
    places = _addresses(w, int(address[0]), rows, columns, kind, by_column, pitch)
    bits = fragments.ELEMENT_BITS[kind]
    code = _MEMORY.get(bits, "u8")
    parts = []
    for lanes, mask, count in _chunks(places):
        value = _load(w, at, space, lanes, code, mask)
        parts.append(value[:count])
    units = np.concatenate(parts).reshape(places.shape)
    matrix = _fields(units, bits)
    w.meetings += 1
    return pack(matrix.T if by_column else matrix, kind, registers)


def _load(w: Warp, at: int, space: str, lanes: Array, code: str, mask: Array | None) -> Array:
    if space == "shared":
        rows = access.ld_shared(w, at, lanes, code, 1, mask, False)
    elif space == "global":
        rows = access.ld_global(w, at, lanes, code, 1, mask)
    else:
        rows = windows.ld_generic(w, at, lanes, code, 1, mask)
    result: Array = rows[0]
    return result


def _fields(units: Array, bits: int) -> Array:
    """Unpack bytes into elements of fewer bits."""
    if bits >= 8:
        return units
    per = 8 // bits
    fields = [units >> np.uint8(bits * k) & np.uint8((1 << bits) - 1) for k in range(per)]
    return np.stack(fields, axis=-1).reshape(units.shape[0], -1)


def store(
    w: Warp,
    at: int,
    space: str,
    shape: tuple[int, int, int],
    kind: str,
    by_column: bool,
    address: Array,
    registers: tuple[Array, ...],
    stride: Array | None,
) -> None:
    rows, columns = _shape("d", shape)
    pitch = int(stride[0]) if stride is not None else (rows if by_column else columns)
    places = _addresses(w, int(address[0]), rows, columns, kind, by_column, pitch)
    code = _MEMORY[fragments.ELEMENT_BITS[kind]]
    matrix = unpack(registers, kind, rows, columns).astype(NUMPY[code])
    flat = (matrix.T if by_column else matrix).reshape(-1)
    for number, (lanes, mask, _) in enumerate(_chunks(places)):
        value = (np.resize(flat[number * LANES : (number + 1) * LANES], LANES),)
        if space == "shared":
            access.st_shared(w, at, lanes, code, value, mask, False)
        elif space == "global":
            access.st_global(w, at, lanes, code, value, mask)
        else:
            windows.st_generic(w, at, lanes, code, value, mask)
    w.meetings += 1


def _numbers(registers: tuple[Array, ...], kind: str, rows: int, columns: int) -> Array:
    raw = unpack(registers, kind, rows, columns)
    bits = fragments.ELEMENT_BITS[kind]
    if bits >= 8:
        return fragments.numbers(np.ascontiguousarray(raw.astype(f"u{bits // 8}")), kind)
    values = raw.astype(np.float64)
    return np.where(values >= 8, values - 16, values) if kind == "s4" else values


def mma(
    w: Warp,
    at: int,
    form: tensorcore.Mma,
    registers: int,
    a: tuple[Array, ...],
    b: tuple[Array, ...],
    c: tuple[Array, ...],
) -> Array:
    """Execute wmma.mma and return the registers of D = A B + C, shape (registers, 32)."""
    m, n, k = form.shape
    d_kind, a_kind, b_kind, c_kind = form.kinds
    w.meetings += 1
    product = tensorcore.product_of(_numbers(a, a_kind, m, k), _numbers(b, b_kind, k, n), form.logic)
    total = product + _numbers(c, c_kind, m, n)
    if d_kind == "s32":
        whole = np.clip(total, -(2**31), 2**31 - 1) if form.saturates else total
        raw = (whole.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
    else:
        raw = fragments.rounded_bits(total, d_kind)
    return pack(raw, d_kind, registers)


RUNTIME["wmma"] = sys.modules[__name__]
