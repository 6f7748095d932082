"""Windows of strided arrays. A Window describes a part of a source and its destination, axis by axis.

Axes are in NumPy order. A window begins at ``start`` in each axis of the source and has ``extent`` elements. Elements
outside the source are filled. The kernels receive a simplified form, in which axes of one element are folded into the
pointers, and axes that are dense in both arrays are merged. A copy of whole rows becomes a copy of one long row, and a
window with more than five axes may become a window with fewer axes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES

_MAX_BOX = 256


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a window.

    Attributes
    ----------
    start : int
        Index of the window's first element in the source, which may be negative.
    extent : int
        Number of window elements, at least 1.
    size : int
        Number of source elements.
    source_stride, destination_stride : int
        Strides in bytes.
    """

    start: int
    extent: int
    size: int
    source_stride: int
    destination_stride: int

    @property
    def lead(self) -> int:
        """Number of elements of the window before the start of the source."""
        return min(self.extent, max(0, -self.start))

    @property
    def first(self) -> int:
        """Index of the first source element in the window."""
        return max(0, self.start)

    @property
    def body(self) -> int:
        """Number of window elements in the source."""
        return max(0, min(self.size, self.start + self.extent) - self.first)

    @property
    def is_whole(self) -> bool:
        """Whether the window is exactly the whole source."""
        return self.start == 0 and self.extent == self.size


@dataclass(frozen=True, slots=True)
class Window:
    """A window of a source array and its destination.

    Attributes
    ----------
    source, destination : int
        Addresses of element [0, ..] of the source array and of the window's result.
    itemsize : int
        Bytes per element.
    axes : tuple[Axis, ...]
        The axes, outermost first.
    """

    source: int
    destination: int
    itemsize: int
    axes: tuple[Axis, ...]

    @property
    def is_inside(self) -> bool:
        """Whether the window is inside the source, so that no element is filled."""
        return all(axis.body == axis.extent for axis in self.axes)

    @property
    def has_body(self) -> bool:
        """Whether any element is copied."""
        return all(axis.body for axis in self.axes)

    @property
    def first_byte(self) -> int:
        """Address of the first copied element, which is undefined unless has_body is True."""
        return self.source + sum(axis.first * axis.source_stride for axis in self.axes)

    @property
    def is_one_run(self) -> bool:
        """Whether this simplified window is one run of bytes in both arrays."""
        return self.is_inside and len(self.axes) == 1 and self.is_dense

    @property
    def is_dense(self) -> bool:
        """Whether the innermost axis has no gaps in either array."""
        inner = self.axes[-1]
        return inner.source_stride == inner.destination_stride == self.itemsize

    @property
    def nbytes(self) -> int:
        """Size of the window in bytes."""
        total = self.itemsize
        for axis in self.axes:
            total *= axis.extent
        return total


def simplify(window: Window) -> Window:
    """Return an equivalent window with the fewest axes (at least one), outermost axis of the result first."""
    source, kept = window.source, []
    for axis in window.axes:
        if axis.extent == 1 and axis.body == 1:
            source += axis.start * axis.source_stride
        else:
            kept.append(axis)
    kept.sort(key=lambda axis: -axis.destination_stride)
    merged: list[Axis] = []
    for axis in kept:
        while merged and (joined := _join(merged[-1], axis)) is not None:
            merged.pop()
            axis = joined
        merged.append(axis)
    if not merged:
        merged = [Axis(0, 1, 1, window.itemsize, window.itemsize)]
    return replace(window, source=source, axes=tuple(merged))


def _join(outer: Axis, inner: Axis) -> Axis | None:
    """Return two adjacent axes as one if each step of the outer axis follows the last element of the inner one."""
    follows = (
        inner.is_whole
        and outer.source_stride == inner.size * inner.source_stride
        and outer.destination_stride == inner.size * inner.destination_stride
    )
    if not follows:
        return None
    n = inner.size
    return Axis(outer.start * n, outer.extent * n, outer.size * n, inner.source_stride, inner.destination_stride)


def carried(window: Window, widest: int = 4) -> Window:
    """Return an equivalent window with the widest elements (up to ``widest`` bytes) that divide the innermost axis.

    The window must be dense and cropped. Wider elements allow wider boxes, because a box has at most 256 elements per
    axis.
    """
    *outer, inner = window.axes
    size = window.itemsize
    lead, body, extent = inner.lead * size, inner.body * size, inner.extent * size
    width = max(w for w in (1, 2, 4, 8) if w <= widest and not (lead % w or body % w or extent % w))
    axis = Axis(-(lead // width), extent // width, body // width, width, width)
    return replace(window, itemsize=width, axes=(*outer, axis))


def cropped(window: Window) -> Window:
    """Return the part of the window that is in the source, as a window of an array that ends with this part.

    Each start becomes 0 or minus the number of filled elements.
    """
    axes = tuple(
        Axis(-axis.lead, axis.extent, axis.body, axis.source_stride, axis.destination_stride) for axis in window.axes
    )
    return Window(window.first_byte, window.destination, window.itemsize, axes)


def folded(window: Window) -> Window:
    """Split a long dense axis into rows of equal length if the window and the source consist of whole rows.

    A box has at most 256 elements per axis, but it can have many rows.
    """
    *outer, inner = window.axes
    width = gcd(inner.lead, inner.body, inner.extent)
    if (
        outer
        or not window.is_dense
        or width < _MAX_BOX // 2
        or width == inner.extent
        or width * window.itemsize % TMA_ALIGNMENT_BYTES
    ):
        return window
    pitch = width * window.itemsize
    rows = Axis(-(inner.lead // width), inner.extent // width, inner.body // width, pitch, pitch)
    return replace(window, axes=(rows, Axis(0, width, width, window.itemsize, window.itemsize)))


def choose_box(extents: tuple[int, ...], itemsize: int, slot_bytes: int) -> tuple[int, ...]:
    """Return a box of about ``slot_bytes`` for tensors with these extents, in NumPy order, at most 256 per axis.

    Rows of the box are multiples of 16 bytes. An axis with several boxes is divided evenly.
    """
    unit = max(1, TMA_ALIGNMENT_BYTES // itemsize)
    widest = min(_MAX_BOX, max(unit, slot_bytes // itemsize // unit * unit))
    box = [_even(extents[-1], widest, unit)]
    room = max(1, slot_bytes // (box[0] * itemsize))
    for extent in reversed(extents[:-1]):
        box.append(_even(extent, min(_MAX_BOX, room), 1))
        room = max(1, room // box[-1])
    return tuple(reversed(box))


def _even(extent: int, max_extent: int, unit: int) -> int:
    """Return the extent of a box, a multiple of ``unit``, that divides an axis evenly into the fewest boxes."""
    parts = -(-extent // max_extent)
    return min(max_extent, -(-extent // parts // unit) * unit)


def tile_counts(extents: tuple[int, ...], box: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of boxes along each axis."""
    return tuple(-(-extent // size) for extent, size in zip(extents, box, strict=True))
