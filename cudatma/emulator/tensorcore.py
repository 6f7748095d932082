"""ldmatrix, stmatrix, movmatrix and mma.sync at run time; wgmma stands in wgmma.py.

Products and sums are formed in float64 and rounded once: hardware's order of additions is not documented, so results
agree within the error of fp32 accumulation. Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cudatma.emulator import access, bulk, fragments
from cudatma.emulator.machine import Warp
from cudatma.emulator.types import Array
from cudatma.emulator.writer import RUNTIME

ROW_BYTES = 16


def _rows(w: Warp, at: int, addresses: Array, count: int, writes: bool) -> tuple[Array, Array]:
    """(data of the block, offsets) of the rows that the first 8 n lanes point at."""
    first = addresses[: 8 * count]
    if int(first[0]) >> 60:
        first = np.array([bulk.strip(int(a)) for a in first.tolist()], np.uint64)
    if np.bitwise_or.reduce(first) & np.uint64(ROW_BYTES - 1):
        access.trap(w, at, "a matrix row that is not aligned to 16 bytes")
    block, offsets = access.shared_offsets(w, at, first, ROW_BYTES, False)
    w.meetings += 1
    observer = w.block.cluster.observer
    if observer is not None:
        if writes:
            observer.generic_write(w, at, block, offsets, ROW_BYTES, "", True)
        else:
            observer.generic_read(w, at, block, offsets, ROW_BYTES, "", True)
            observer.matrices_read(w, at, block, offsets)
    return block.shared.data, offsets


_BYTES = np.arange(ROW_BYTES)


def ldmatrix(w: Warp, at: int, addresses: Array, count: int, transposed: bool) -> Array:
    """(count, 32) registers."""
    data, offsets = _rows(w, at, addresses, count, False)
    return fragments.load_rows(data[offsets[:, None] + _BYTES], transposed)


def stmatrix(w: Warp, at: int, addresses: Array, registers: tuple[Array, ...], transposed: bool) -> None:
    data, offsets = _rows(w, at, addresses, len(registers), True)
    data[offsets[:, None] + _BYTES] = fragments.store_rows(np.stack(registers), transposed)


def movmatrix(register: Array) -> Array:
    """The 8 x 8 matrix of 16-bit elements, transposed."""
    result: Array = fragments.load_rows(fragments.store_rows(register[None], True), False)[0]
    return result


def mma_traced(w: Warp, at: int, *operands: Any) -> Array:
    """mma(), seen by the trace; the lanes of the warp meet here."""
    w.meetings += 1
    if w.launch.trace is not None:
        w.launch.trace.instant(w, at, "mma")
    return mma(*operands)


def mma(
    shape: tuple[int, int, int],
    kinds: tuple[str, str, str, str],
    a: tuple[Array, ...],
    b: tuple[Array, ...],
    c: tuple[Array, ...],
    saturates: bool,
) -> Array:
    """mma.sync: (registers, 32) raw bits of D = A B + C."""
    m, n, k = shape
    d_kind, a_kind, b_kind, c_kind = kinds
    product = fragments.gather_a(a, m, k, a_kind) @ fragments.gather_b(b, k, n, b_kind)
    total = product + fragments.gather_c(c, m, n, c_kind)
    if saturates:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return fragments.scatter_c(total, d_kind)


RUNTIME["tensorcore"] = sys.modules[__name__]
