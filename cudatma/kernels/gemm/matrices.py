"""How the matrices of a batch lie in memory: row-major or column-major, and whether the kernels can read them."""

from __future__ import annotations

from dataclasses import replace

from cudatma.arrays import ArrayInfo
from cudatma.errors import ArgumentError
from cudatma.kernels.schedule import ceil_div

#: Bytes at whose multiples TMA, and copies of whole vectors, begin.
ALIGNMENT = 16


def batched(info: ArrayInfo, batch: int) -> ArrayInfo:
    """(rows, columns) or (batch, rows, columns) as the latter; a matrix that serves the whole batch has stride 0."""
    if len(info.shape) == 2:
        return replace(info, shape=(batch, *info.shape), strides_bytes=(0, *info.strides_bytes))
    step = info.strides_bytes[0] if info.shape[0] == batch > 1 else 0
    return replace(info, shape=(batch, *info.shape[1:]), strides_bytes=(step, *info.strides_bytes[1:]))


def letter_of(info: ArrayInfo, preferred: str) -> str:
    """R for (.., rows, columns) that are row-major, C for column-major ones, R where they are neither; for fp8, whose
    products need a certain one, ``preferred``."""
    (rows, columns), (down, across), element = info.shape[-2:], info.strides_bytes[-2:], info.dtype.itemsize
    if element == 1:
        return preferred
    if rows == 1:
        return "C" if columns > 1 and across != element else "R"
    return "C" if down == element and (columns == 1 or across != element) else "R"


def as_rows(info: ArrayInfo, letter: str) -> ArrayInfo:
    """Matrices of a layout as those whose rows are contiguous: transposed where they are column-major."""
    if letter == "R":
        return info
    (batch, rows, columns), (step, down, across) = info.shape, info.strides_bytes
    return replace(info, shape=(batch, columns, rows), strides_bytes=(step, across, down))


def why_copied(rows: ArrayInfo) -> str:
    """Why the kernels cannot read as_rows(), in words; empty where they can."""
    (batch, count, columns), (step, pitch, across) = rows.shape, rows.strides_bytes
    element = rows.dtype.itemsize
    if columns > 1 and across != element:
        return "elements that do not follow each other"
    if count > 1 and pitch < columns * element:
        return "rows that overlap or lie in reverse order"
    if batch > 1 and step < 0:
        return "matrices in reverse order"
    places = [rows.pointer, *([pitch] if count > 1 else []), *([step] if batch > 1 else [])]
    if any(place % ALIGNMENT for place in places):
        return f"rows that do not start at multiples of {ALIGNMENT} bytes"
    return ""


def dense_rows(rows: ArrayInfo) -> ArrayInfo:
    """The same with strides in dimensions of one element as if it were dense, which tensor maps accept."""
    (batch, count, columns), (step, pitch, _), element = rows.shape, rows.strides_bytes, rows.dtype.itemsize
    pitch = pitch if count > 1 else ceil_div(columns * element, ALIGNMENT) * ALIGNMENT
    return replace(rows, strides_bytes=(step if batch > 1 else count * pitch, pitch, element))


def result_rows(info: ArrayInfo) -> ArrayInfo:
    """(batch, M, N) that a kernel writes. ArgumentError unless its rows are contiguous and no two of them overlap."""
    element = info.dtype.itemsize
    if not info.size_elems:
        return info
    strides = info.strides_bytes[info.shape[0] == 1 :]  # of one matrix, as its caller knows them
    if info.pointer % element:
        raise ArgumentError("out.pointer", hex(info.pointer), f"a multiple of {element} bytes", "copy it")
    if info.shape[2] > 1 and info.strides_bytes[2] != element:
        raise ArgumentError("out.strides", strides, "contiguous rows", "copy it")
    span = element * info.shape[2]
    outer = zip(info.strides_bytes[:2], info.shape[:2], strict=True)
    for stride, extent in sorted((stride, extent) for stride, extent in outer if extent > 1):
        if stride < span or stride % element:
            raise ArgumentError("out.strides", strides, "rows that do not overlap", "copy it")
        span = stride * extent
    (batch, rows, columns), (step, pitch, _) = info.shape, info.strides_bytes
    pitch = pitch if rows > 1 else element * columns
    return replace(info, strides_bytes=(step if batch > 1 else rows * pitch, pitch, element))


def folded(info: ArrayInfo) -> ArrayInfo:
    """(batch, rows, columns) whose matrices follow each other, as one matrix of all rows."""
    batch, rows, columns = info.shape
    return replace(info, shape=(1, batch * rows, columns), strides_bytes=(0, *info.strides_bytes[1:]))


def follows(info: ArrayInfo) -> bool:
    """Whether folded() has the same elements."""
    return info.strides_bytes[0] == info.shape[1] * info.strides_bytes[1]
