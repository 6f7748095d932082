"""Prefetch of an array, or of a window of one, into L2; nothing signals its completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.errors import ArgumentError
from cudatma.kernels.data_movement.call import Call, Place, described, tensor_map
from cudatma.kernels.data_movement.copy import check_window, part_of
from cudatma.kernels.data_movement.ring import SLOT_BYTES, THREADS
from cudatma.kernels.data_movement.specs import coordinates
from cudatma.kernels.data_movement.window import CHUNK_BYTES, Axis, Window, carried, choose_box, simplify, tile_counts
from cudatma.kernels.launch import Launch
from cudatma.target import Target

TEMPLATE = "kernels/prefetch.cu.j2"


@dataclass(frozen=True, slots=True)
class PrefetchSpec:
    """One instance of ``kernels/prefetch.cu.j2``.

    rank: axes of the tensor map, 1..5; 0 for a run of bytes, in segments of segment_bytes, a multiple of 16.
    Raises ArgumentError.
    """

    rank: int
    segment_bytes: int = SLOT_BYTES
    entry: str = "prefetch"

    def __post_init__(self) -> None:
        if not 0 <= self.rank <= 5:
            raise ArgumentError("rank", self.rank, "0..5")
        if self.segment_bytes < CHUNK_BYTES or self.segment_bytes % CHUNK_BYTES:
            raise ArgumentError("segment_bytes", self.segment_bytes, f"multiples of {CHUNK_BYTES}")

    @property
    def at(self) -> str:
        """The coordinates' names."""
        return coordinates(self.rank)

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def smem_bytes(self) -> int:
        return 0

    def check_target(self, target: Target) -> None:
        """TargetError without TMA."""
        target.require("tma", self.entry)


def prefetch(
    src: Any,
    *,
    offset: Sequence[int] | None = None,
    shape: Sequence[int] | None = None,
    stream: Any = None,
    backend: str | None = None,
) -> None:
    """Prefetch a window of an array into L2.

    src, offset, shape: as in copy(), the window inside of the source. Of a run of bytes, whole 16-byte chunks are
    prefetched. Of any other window, address and pitches are multiples of 16 bytes and the elements of a row follow each
    other; DescriptorError says what TMA cannot read. stream, backend: as in copy(); the emulator checks the addresses,
    "reference" does nothing.

    [PTX ISA, cp.async.bulk.prefetch, cp.async.bulk.prefetch.tensor] Raises as copy().
    """
    call = Call("prefetch", backend, described(src, "src"), None, stream, offset, shape)
    if call.is_known:
        call.again()
        return
    part = part_of(call.src, *check_window(call.src, offset, shape, None))
    planned = plan_prefetch(part, call.place) if part.size_elems else None
    if planned is not None and call.place.backend != "reference":
        call.first([planned])


def plan_prefetch(src: ArrayInfo, place: Place) -> Launch | None:
    """The launch, None for a run without a whole chunk. Raises DescriptorError where TMA cannot."""
    axes = tuple(Axis(0, n, n, s, s) for n, s in zip(src.shape, src.strides_bytes, strict=True))
    window = simplify(Window(src.pointer, src.pointer, src.dtype.itemsize, axes))
    if window.is_one_run:
        first = -(-window.source // CHUNK_BYTES) * CHUNK_BYTES
        nbytes = (window.source + window.nbytes - first) // CHUNK_BYTES * CHUNK_BYTES
        if nbytes <= 0:
            return None
        grid = min(place.ctas, -(-nbytes // SLOT_BYTES))
        return Launch(TEMPLATE, PrefetchSpec(0), grid, (replace(src, pointer=first), nbytes), (src,))
    window = carried(window) if window.is_dense else window
    extents = tuple(axis.extent for axis in window.axes)
    box = choose_box(extents, window.itemsize, SLOT_BYTES)
    source = replace(
        src,
        pointer=window.source,
        shape=extents,
        strides_bytes=tuple(axis.source_stride for axis in window.axes),
        dtype=np.dtype(f"uint{8 * window.itemsize}"),
    )
    tiles = tile_counts(extents, box)
    places = [value for pair in zip(reversed(box), reversed(tiles), strict=True) for value in pair]
    grid = min(place.ctas, prod(tiles))
    load = tensor_map(source, box, place)
    return Launch(TEMPLATE, PrefetchSpec(len(box)), grid, (load, *places, prod(tiles)), (src,))


def dump_specs(target: Target) -> list[PrefetchSpec]:
    """The specs for dumps and compile checks; none if the target cannot run them."""
    return [PrefetchSpec(3)] if target.has("tma") else []
