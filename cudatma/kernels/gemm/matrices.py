"""Layouts of batches of row-major or column-major matrices, and whether the kernels can read them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from cudatma.arrays import ArrayInfo
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.errors import ArgumentError
from cudatma.pipeline import align_up


class Matrix(NamedTuple):
    """Layout of a batch of matrices with contiguous rows or columns.

    Attributes
    ----------
    pitch_bytes : int
        Bytes from one row (or column) to the next.
    batch_bytes : int
        Bytes from one matrix to the next, or 0 for a single matrix.
    is_aligned : bool
        Whether every row begins at a multiple of 16 bytes.
    """

    pitch_bytes: int = 0
    batch_bytes: int = 0
    is_aligned: bool = False


def matrix_of(info: ArrayInfo, letter: str, alignment: int = TMA_ALIGNMENT_BYTES) -> Matrix:
    """Return the layout of an array (batch, rows, columns). ``letter`` is R for row-major or C for column-major.

    A single row has the pitch of a dense row, rounded up to the alignment.
    """
    (batch, rows, columns), (step, pitch, across) = info.shape, info.strides_bytes
    if letter == "C":
        rows, columns, pitch = columns, rows, across
    if rows == 1:
        pitch = align_up(columns * info.dtype.itemsize, alignment)
    step = step if batch > 1 else 0
    is_aligned = not any(offset % TMA_ALIGNMENT_BYTES for offset in (info.pointer, step, pitch))
    return Matrix(pitch, step, is_aligned)


def batched(info: ArrayInfo, batch: int) -> ArrayInfo:
    """Return the array as (batch, rows, columns), with stride 0 for a matrix that the whole batch shares."""
    if len(info.shape) == 2:
        return replace(info, shape=(batch, *info.shape), strides_bytes=(0, *info.strides_bytes))
    step = info.strides_bytes[0] if info.shape[0] == batch > 1 else 0
    return replace(info, shape=(batch, *info.shape[1:]), strides_bytes=(step, *info.strides_bytes[1:]))


def letter_of(info: ArrayInfo, field: str) -> str:
    """Return "C" for a column-major operand (..., rows, columns), and "R" for any other operand.

    For fp8, return the layout that MMAs require: "R" for ``a``, and "C" for ``b``. ``field`` is the name of the
    operand.
    """
    (rows, columns), (down, across), element = info.shape[-2:], info.strides_bytes[-2:], info.dtype.itemsize
    if element == 1:
        return "R" if field == "a" else "C"
    if rows == 1:
        return "C" if columns > 1 and across != element else "R"
    return "C" if down == element and (columns == 1 or across != element) else "R"


def as_rows(info: ArrayInfo, letter: str) -> ArrayInfo:
    """Return the matrices with contiguous rows. Column-major matrices are transposed."""
    if letter == "R":
        return info
    (batch, rows, columns), (step, down, across) = info.shape, info.strides_bytes
    return replace(info, shape=(batch, columns, rows), strides_bytes=(step, across, down))


def why_copied(info: ArrayInfo, letter: str) -> str:
    """Return the reason why the kernels cannot read an operand with this layout, or "" if they can."""
    rows = as_rows(info, letter)
    (batch, count, columns), (step, pitch, across), element = rows.shape, rows.strides_bytes, rows.dtype.itemsize
    if columns > 1 and across != element:
        return "non-contiguous elements"
    if count > 1 and pitch < columns * element:
        return "overlapping or reversed rows"
    if batch > 1 and step < 0:
        return "matrices in reverse order"
    if matrix_of(rows, "R").is_aligned:
        return ""
    return f"rows that do not start at multiples of {TMA_ALIGNMENT_BYTES} bytes"


def result_rows(info: ArrayInfo) -> ArrayInfo:
    """Return the result (batch, M, N), in which axes of one element have the strides of a dense array.

    Raises ArgumentError unless rows are contiguous and do not overlap.
    """
    element = info.dtype.itemsize
    if not info.size_elems:
        return info
    strides = info.strides_bytes[info.shape[0] == 1 :]  # The caller passed one matrix without the batch axis.
    check_pointer(info, "out")
    if info.shape[2] > 1 and info.strides_bytes[2] != element:
        raise ArgumentError("out.strides", strides, "contiguous within rows", "pass an array with contiguous rows")
    span = element * info.shape[2]
    outer = zip(info.strides_bytes[:2], info.shape[:2], strict=True)
    for stride, extent in sorted((stride, extent) for stride, extent in outer if extent > 1):
        if stride < span or stride % element:
            raise ArgumentError(
                "out.strides", strides, "free of overlaps between rows", "omit out or pass another array"
            )
        span = stride * extent
    (batch, rows, columns), (step, pitch, _) = info.shape, info.strides_bytes
    pitch = pitch if rows > 1 else element * columns
    return replace(info, strides_bytes=(step if batch > 1 else rows * pitch, pitch, element))


def folded(info: ArrayInfo) -> ArrayInfo:
    """Return the batch, whose matrices must be contiguous, as one matrix with all rows."""
    batch, rows, columns = info.shape
    return replace(info, shape=(1, batch * rows, columns), strides_bytes=(0, *info.strides_bytes[1:]))


def follows(info: ArrayInfo) -> bool:
    """Return whether there are no gaps between the matrices of a batch."""
    return info.strides_bytes[0] == info.shape[1] * info.strides_bytes[1]


def check_pointer(info: ArrayInfo, field: str) -> None:
    """Raise ArgumentError unless an array is aligned to its element size."""
    if info.pointer % info.dtype.itemsize:
        allowed = f"a multiple of {info.dtype.itemsize} bytes"
        raise ArgumentError(f"{field}.pointer", hex(info.pointer), allowed, "pass an aligned copy")
