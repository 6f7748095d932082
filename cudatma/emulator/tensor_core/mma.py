"""Execute ldmatrix, stmatrix, movmatrix and mma.sync. The module wgmma.py executes wgmma.

Products and sums are computed in float64 and rounded once. The order of the hardware's additions is not documented, so
results agree within the error of fp32 accumulation. Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate
Instructions".
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cudatma.emulator.arithmetic.conversions import from_ue8m0, values
from cudatma.emulator.arithmetic.numeric import canon, canon16
from cudatma.emulator.machine import access
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import LANES, Array
from cudatma.emulator.ptx.writer import RUNTIME
from cudatma.emulator.tensor_core import fragments

ROW_BYTES = 16


def _rows(w: Warp, at: int, addresses: Array, count: int) -> tuple[Any, Array]:
    """Return the CTA and the offsets of the matrix rows at the addresses of the first ``count`` lanes."""
    first = addresses[:count]
    if np.bitwise_or.reduce(first) & np.uint64(ROW_BYTES - 1):
        access.trap(w, at, "the address of a matrix row must be 16-byte aligned")
    block, offsets = access.shared_offsets(w, at, first, ROW_BYTES, False)
    w.meetings += 1
    return block, offsets


_BYTES = np.arange(ROW_BYTES)


def ldmatrix(w: Warp, at: int, addresses: Array, count: int, form: str) -> Array:
    """Load ``count`` matrices and return registers, shape (registers, 32).

    ``form`` is "", "trans", "square" (m16n16), a packed source format (m8n16), or "square." followed by a packed format
    (m16n16).
    """
    is_square = form.startswith("square")
    block, offsets = _rows(w, at, addresses, (16 if is_square else 8) * count)
    w.events.shared_read(w, at, block, offsets, ROW_BYTES, "", True)
    w.events.matrices_read(w, at, block, offsets)
    rows = block.shared.data[offsets[:, None] + _BYTES]
    source = form.removeprefix("square.")
    if source in ("b4x16_p64", "b6x16_p32"):
        rows = fragments.spread_bits(rows, source)
    return fragments.load_square_rows(rows) if is_square else fragments.load_rows(rows, form == "trans")


def stmatrix(w: Warp, at: int, addresses: Array, registers: tuple[Array, ...], form: str) -> None:
    """Store matrices. ``form`` is "", "trans" or "bytes" (m16n8 of .b8)."""
    block, offsets = _rows(w, at, addresses, 8 * len(registers))
    stacked = np.stack(registers)
    rows = fragments.store_byte_rows(stacked) if form == "bytes" else fragments.store_rows(stacked, form == "trans")
    data, places = block.shared.data, offsets[:, None] + _BYTES
    # The lanes synchronize before the store but not after it, so the store does not count as a warp-wide access.
    same = partial(_holds, data, places, rows)
    w.launch.scheduler.store(same)
    w.events.shared_write(w, at, block, offsets, ROW_BYTES, "", False, same)
    data[places] = rows


def _holds(data: Array, places: Array, rows: Array) -> bool:
    return bool((data[places] == rows).all())


def movmatrix(register: Array) -> Array:
    """Return the transpose of an 8 x 8 matrix of 16-bit elements."""
    result: Array = fragments.load_rows(fragments.store_rows(register[None], True), False)[0]
    return result


def mma_traced(w: Warp, at: int, *operands: Any) -> Array:
    """Synchronize the lanes of the warp, compute mma(), and notify observers."""
    w.meetings += 1
    w.events.mma_computed(w, at, "mma", operands[3])
    return mma(*operands)


@dataclass(frozen=True, slots=True)
class Mma:
    """Form of an mma instruction.

    ``kinds`` are the types of D, A, B and C. ``scale`` is the type of the block scales, and ``scale_count`` is their
    number along K. If ``sparse`` is true, A contains half of its elements. ``logic`` is "xor" or "and" for single-bit
    operands.
    """

    shape: tuple[int, int, int]
    kinds: tuple[str, str, str, str]
    saturates: bool = False
    sparse: bool = False
    scale: str = ""
    scale_count: int = 0
    logic: str = ""


def mma(
    form: Mma,
    a: tuple[Array, ...],
    b: tuple[Array, ...],
    c: tuple[Array, ...],
    metadata: tuple[Array, int] | None = None,
    scales: tuple[tuple[Array, int, int], tuple[Array, int, int]] | None = None,
) -> Array:
    """Compute D = A B + C for mma.sync and return its raw bits, shape (registers, 32).

    ``metadata`` contains the metadata and the selector of a sparse A. ``scales`` contains (data, byte, thread) for A
    and B.
    """
    m, n, k = form.shape
    d_kind, a_kind, b_kind, c_kind = form.kinds
    left = fragments.gather_a(a, m, k // 2 if form.sparse else k, a_kind)
    if metadata is not None:
        left = fragments.expand_sparse(left, *metadata, a_kind)
    right = fragments.gather_b(b, k, n, b_kind)
    if scales is not None:
        left = left * block_scales(*scales[0], form, True)
        right = right * block_scales(*scales[1], form, False).T
    total = product_of(left, right, form.logic) + fragments.gather_c(c, m, n, c_kind)
    if form.saturates:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return fragments.scatter_c(total, d_kind)


def product_of(left: Array, right: Array, logic: str) -> Array:
    """Return the product A B. For single-bit operands, count the set bits of ``A & B`` or ``A ^ B``."""
    product: Array = left @ right
    if logic == "xor":
        count: Array = left.sum(axis=1)[:, None] + right.sum(axis=0)[None, :] - 2 * product
        return count
    return product


def block_scales(data: Array, byte: int, thread: int, form: Mma, of_a: bool) -> Array:
    """Return the scale factors, shape (rows of A or columns of B, K).

    For A, two threads in each group of four contain rows g and g + 8. For B, one thread contains column g.
    """
    count = form.scale_count
    raw = np.ascontiguousarray(data).view(np.uint8).reshape(8, 4, 4)[:, :, byte : byte + count]
    chosen = np.concatenate((raw[:, 2 * thread], raw[:, 2 * thread + 1])) if of_a else raw[:, thread]
    if form.scale == "ue8m0":
        factors = from_ue8m0(chosen).astype(np.float64)
    else:
        factors = values("e4m3")[chosen & 0x7F].astype(np.float64)
    return np.repeat(factors, form.shape[2] // count, axis=1)


_LANE = np.arange(LANES)
#: For each lane, the matrix product (of four) that it computes, its index among four rows or columns, and the offset of
#: its half-warp.
_QUAD, _INDEX, _HIGH = _LANE % 16 // 4, _LANE % 4, 4 * (_LANE // 16)


def _operand(registers: tuple[Array, ...], along_k: bool) -> Array:
    """Return the rows of A or columns of B along K, shape (4 products, 8, 4).

    If ``along_k`` is true, a lane contains four neighboring elements along k.
    """
    elements = np.stack(registers, axis=1).view(np.float16).astype(np.float64)
    out = np.zeros((4, 8, 4))
    for i in range(4):
        if along_k:
            out[_QUAD, _INDEX + _HIGH, i] = elements[:, i]
        else:
            out[_QUAD, i + _HIGH, _INDEX] = elements[:, i]
    return out


def _places(kind: str) -> tuple[Array, Array]:
    """Return the row and the column of each lane's eight accumulator elements, each of shape (32, 8)."""
    i, lane = np.arange(8)[None, :], _LANE[:, None]
    if kind == "f16":
        return (_INDEX + _HIGH)[:, None] + 0 * i, i + 0 * lane
    return (lane & 1) + (i & 2) + _HIGH[:, None], (i & 4) + (lane & 2) + (i & 1)


def quad_mma(
    kinds: tuple[str, str], columns_of_a: bool, columns_of_b: bool, a: tuple[Array, ...], b: tuple[Array, ...], c: Array
) -> Array:
    """Compute mma.m8n8k4 for f16, which consists of four products, each computed by four lanes of each half-warp.

    Return the raw bits of D = A B + C, shape (registers, 32). ``kinds`` are the types of D and C. ``c`` contains raw
    bits in the same shape.
    """
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


RUNTIME["tensorcore"] = sys.modules[__name__]
