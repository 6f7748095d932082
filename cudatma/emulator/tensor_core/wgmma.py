"""Execute wgmma.mma_async: matrix descriptors, and the 16 rows of the result that each warp computes.

Warp i of a warpgroup computes rows 16 i to 16 i + 15. Source: PTX ISA, "Asynchronous Warpgroup Level Matrix
Instructions" (matrix descriptor format, leading and stride dimension byte offsets, canonical layouts).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cudatma.emulator.machine import access
from cudatma.emulator.machine.memory import SHARED_START
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import Array
from cudatma.emulator.ptx.writer import RUNTIME
from cudatma.emulator.tensor_core import fragments
from cudatma.emulator.tensor_core.mma import Mma, product_of
from cudatma.layout import Swizzle, swizzle

#: Swizzle modes of a matrix descriptor, whose numbering is the reverse of a tensor map's.
_SWIZZLES = {0: Swizzle.NONE, 1: Swizzle.B128, 2: Swizzle.B64, 3: Swizzle.B32}
CHUNK = 16
WARP_ROWS = 16
WARPS = 4
_ADDRESS_BITS = 1 << 18


@dataclass(frozen=True, slots=True)
class MatrixDescriptor:
    """Fields of a 64-bit matrix descriptor. All but the base offset and the mode are in bytes."""

    start: int
    leading: int
    stride: int
    base_offset: int
    mode: Swizzle

    @classmethod
    def read(cls, bits: int) -> MatrixDescriptor:
        def field(first: int) -> int:
            return (bits >> first & 0x3FFF) << 4

        return cls(field(0), field(16), field(32), bits >> 49 & 7, _SWIZZLES[bits >> 62 & 3])


@lru_cache(maxsize=256)
def chunk_pattern(descriptor: MatrixDescriptor, extent: int, depth_bytes: int, mn_major: bool) -> Array:
    """Return the unswizzled distances of 16-byte chunks from the start address.

    For a K-major operand, the shape is (extent, depth_bytes / 16), and the entries are chunk j of row r. For an
    MN-major operand (16-bit elements only), the shape is (depth, extent / 8), and an entry is the chunk of elements 8 j
    to 8 j + 7 of column k.
    """
    span = descriptor.mode.span_bytes
    lead, stride = descriptor.leading, descriptor.stride
    if not mn_major:
        row = np.arange(extent, dtype=np.int64)[:, None]
        chunk = np.arange(depth_bytes // CHUNK, dtype=np.int64)[None, :]
        if span:
            return (row // 8) * stride + (row % 8) * span + chunk * CHUNK
        return (row // 8) * stride + (row % 8) * CHUNK + chunk * lead
    depth = np.arange(depth_bytes // 2, dtype=np.int64)[:, None]
    chunk = np.arange(extent // 8, dtype=np.int64)[None, :]
    if span:
        per = span // CHUNK
        return (depth % 8) * span + (depth // 8) * stride + (chunk % per) * CHUNK + (chunk // per) * lead
    return (depth % 8) * CHUNK + (depth // 8) * lead + chunk * stride


@dataclass(frozen=True, slots=True)
class Operand:
    """Matrix operand that a descriptor specifies.

    ``places`` contains the shared-memory offsets of the 16-byte chunks, shape (rows, chunks per row), or (k, chunks of
    8 elements) for an MN-major operand. ``columns`` contains the columns of the chunks in their swizzled rows for base
    offset 0.
    """

    descriptor: MatrixDescriptor
    is_mn_major: bool
    places: Array
    columns: Array


def operand_of(bits: int, extent: int, depth_bytes: int, mn_major: bool) -> Operand:
    """Return the whole operand that the warpgroup reads."""
    descriptor = MatrixDescriptor.read(bits)
    addresses = descriptor.start + chunk_pattern(descriptor, extent, depth_bytes, mn_major)
    per_row = max(1, descriptor.mode.span_bytes // CHUNK)
    return Operand(descriptor, mn_major, _offsets(descriptor, addresses), addresses // CHUNK % per_row)


def _offsets(descriptor: MatrixDescriptor, addresses: Array) -> Array:
    """Return the offsets in shared memory of chunks at unswizzled addresses.

    The swizzle uses absolute address bits. The hardware subtracts the base offset from the row number in these bits
    (measured on an H200).
    """
    rows = addresses - (descriptor.base_offset << 7)
    absolute = addresses ^ rows ^ swizzle(rows, descriptor.mode)
    offsets: Array = (absolute & (_ADDRESS_BITS - 1)) - SHARED_START
    return offsets


def read_matrix(
    w: Warp, at: int, bits: int, first: int, extent: int, depth: int, kind: str, mn_major: bool
) -> tuple[Array, Array]:
    """Return the elements of ``extent`` rows from ``first``, shape (extent, depth), and the offsets of their chunks."""
    descriptor = MatrixDescriptor.read(bits)
    total = first + extent
    pattern = chunk_pattern(descriptor, total, depth * fragments.ELEMENT_BITS[kind] // 8, mn_major)
    pattern = pattern[:, first // 8 :] if mn_major else pattern[first:]
    start = descriptor.start
    offsets = _offsets(descriptor, start + pattern)
    shared = w.block.shared
    if int(offsets.min()) < 0 or int(offsets.max()) + CHUNK > shared.size:
        message = (
            f"a wgmma matrix descriptor (start {start:#x}, leading {descriptor.leading}, stride {descriptor.stride}, "
            f"{descriptor.mode.label}) extends beyond the CTA's {shared.size} bytes of shared memory"
        )
        w.events.violation("out_of_bounds", w, at, message)
        access.trap(w, at, message)
    rows = shared.data[: shared.size - shared.size % CHUNK].reshape(-1, CHUNK)[offsets // CHUNK]
    flat = np.ascontiguousarray(rows).reshape(rows.shape[0], -1)
    values = fragments.numbers(flat, kind)
    return (values.T if mn_major else values), offsets.reshape(-1)


def mma_async(
    w: Warp,
    at: int,
    form: Mma,
    a: object,
    b: Array,
    d: tuple[Array, ...],
    scale_d: Array,
    sign: int,
    transposes: tuple[bool, bool],
    metadata: tuple[Array, int] | None = None,
) -> Array:
    """Compute this warp's 16 rows of D = A B + D and return the raw bits, shape (registers, 32).

    ``a`` contains the registers of a fragment, or is a vector of descriptors. ``sign`` is the sign of A B. ``metadata``
    contains the metadata and the selector of a sparse A.
    """
    _, n, k = form.shape
    stored = k // 2 if form.sparse else k
    d_kind, a_kind, b_kind, _ = form.kinds
    if not w.split.mask.all():
        access.trap(w, at, "all threads of a warp must execute wgmma")
    if w.block.warp_count - 4 * (w.index // 4) < 4:
        access.trap(w, at, "wgmma requires a warpgroup of four warps")
    b_bits = int(b[0])
    right, b_chunks = read_matrix(w, at, b_bits, 0, n, k, b_kind, transposes[1])
    group = w.async_state.get("wgmma", 0)
    element_bits = fragments.ELEMENT_BITS[a_kind]
    operands = [(b_bits, b_chunks, (n, k * element_bits // 8, transposes[1]))]
    if isinstance(a, tuple):
        left = fragments.gather_a(a, WARP_ROWS, stored, a_kind)
    else:
        a_bits = int(np.asarray(a)[0])
        first = WARP_ROWS * (w.index % 4)
        left, a_chunks = read_matrix(w, at, a_bits, first, WARP_ROWS, stored, a_kind, transposes[0])
        shape = WARPS * WARP_ROWS, stored * element_bits // 8, transposes[0]
        operands.append((a_bits, a_chunks, shape))
    for position, (bits, offsets, shape) in enumerate(operands):
        w.events.wgmma_operand(w, at, position, bits, offsets, shape, group)
    w.events.wgmma_issued(w, at, (scale_d, b) if isinstance(a, tuple) else (scale_d, b, np.asarray(a)))
    w.events.mma_computed(w, at, "wgmma", d if scale_d[0] else ())
    if metadata is not None:
        left = fragments.expand_sparse(left, *metadata, a_kind)
    total = sign * product_of(left, right.T, form.logic)
    if scale_d[0]:
        total = total + fragments.gather_c(d, WARP_ROWS, n, d_kind)
    if form.saturates:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return fragments.scatter_c(total, d_kind)


def fence(w: Warp, at: int) -> None:
    """Execute wgmma.fence, which orders accesses to registers and shared memory before later wgmmas."""
    w.meetings += 1
    w.events.wgmma_fenced(w)


@dataclass(slots=True)
class GroupWait:
    """A wait of a warp until the other warps of its warpgroup have committed the group."""

    at: int
    number: int
    may_time_out: bool = False

    def describe(self) -> str:
        return f"wgmma.wait_group: not all four warps of the warpgroup have committed group {self.number}"


def warpgroup(w: Warp) -> list[Warp]:
    """Return the four warps that execute a wgmma together."""
    first = w.index // WARPS * WARPS
    return w.block.warps[first : first + WARPS]


def commit(w: Warp, at: int) -> None:
    w.meetings += 1
    w.async_state["wgmma"] = w.async_state.get("wgmma", 0) + 1
    w.events.wgmma_committed(w)
    for other in warpgroup(w):
        waiting = other.async_state.get("wgmma_waiters")
        if waiting:
            w.launch.scheduler.wake(waiting)


def wait(w: Warp, at: int, newest: int) -> bool:
    """Execute wgmma.wait_group and return whether the split must wait.

    The emulator computes a wgmma when it is issued. A group is complete when all four warps have committed it.
    """
    group = warpgroup(w)
    number = w.async_state.get("wgmma", 0) - newest
    if any(other.async_state.get("wgmma", 0) < number and other.alive.any() for other in group):
        w.async_state.setdefault("wgmma_waiters", []).append(w.split)
        w.launch.scheduler.block(w.split, GroupWait(at, number))
        return True
    w.events.wgmma_waited(w, at, number, group)
    return False


RUNTIME["wgmma"] = sys.modules[__name__]
