"""Boxes of an array at given places, or in a grid where they may overlap, each an entry of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.deprecation import former_arguments
from cudatma.descriptor import OobFill, check_load
from cudatma.dtypes import tma_type
from cudatma.errors import ArgumentError, DescriptorError
from cudatma.kernels.data_movement.call import Call, Place, described, tensor_map
from cudatma.kernels.data_movement.copy import PADS, copy_on_host, nan_type, whole_numbers
from cudatma.kernels.data_movement.ring import SLOT_BYTES, CopyRing, slot_bytes, usual_ring
from cudatma.kernels.data_movement.specs import check_choice, check_rank, coordinates
from cudatma.kernels.data_movement.table import int_table
from cudatma.kernels.host import host_array
from cudatma.kernels.launch import Launch
from cudatma.target import Target

TEMPLATE = "kernels/gather_boxes.cu.j2"
PLACES = ("table", "grid")
_INT32 = 1 << 31


@dataclass(frozen=True, slots=True)
class GatherSpec(CopyRing):
    """One instance of ``kernels/gather_boxes.cu.j2``.

    rank: axes of the source, 1..5. places: "table" if an array holds where boxes begin, "grid" if they form a grid.
    stage_bytes: the most that a box may have. stages, in_flight: as in CopyRing. Raises ArgumentError.
    """

    rank: int
    places: str
    stage_bytes: int
    stages: int
    in_flight: int

    def __post_init__(self) -> None:
        check_rank(self.rank)
        check_choice("places", self.places, PLACES)
        self.check_ring()

    @property
    def entry(self) -> str:
        return "gather_boxes" if self.places == "table" else "halo_tiles"

    @property
    def at(self) -> str:
        """The coordinates' names."""
        return coordinates(self.rank)


@former_arguments("out")
def gather(
    src: Any,
    starts: Any,
    box: Sequence[int],
    *,
    out: Any = None,
    pad: str = "zeros",
    check: bool = True,
    stream: Any = None,
    backend: str | None = None,
) -> Any:
    """Boxes of an array, ``out[i] = src[starts[i] : starts[i] + box]``; returns ``out``, a new array unless given.

    src: 1 to 5 axes; pitches and address multiples of 16 bytes, elements of 1, 2, 4 or 8 bytes that follow each other
    in the last axis. starts: (boxes, axes) ints, any of them outside of the source; the last one of each counts whole
    16-byte chunks. A list or host array is checked and uploaded. Of an array on the device (int32, C order) check=True
    reads it back first, which waits for the device; with check=False a start off 16 bytes traps and loses the context.
    box: at most 256 elements an axis, rows of whole 16-byte chunks. out: (boxes, *box), C order.
    pad: what stands outside of the source, "zeros" or "nan". stream, backend: as in copy().

    [PTX ISA, cp.async.bulk.tensor] Raises as copy().
    """
    info = described(src, "src")
    size, fill = check_box(info, box), check_pad(info, pad)
    table = int_table(starts, len(info.shape), info, check)
    if table.values is not None:
        check_starts(info, table.values)
    call = Call("gather", backend, info, out, stream, size, pad, table.rows)
    if call.is_known:
        with table.on_device(call.place, call.stream) as where:
            return call.again(where)
    result = call.take((table.rows, *size), dense=True)
    if not result.size_elems:
        return call.result
    if call.place.backend == "reference":
        for start, part in zip(table.host(), host_array(result), strict=True):
            copy_on_host(info, described(part, "out"), [int(at) for at in start], fill is not None)
        return call.result
    with table.on_device(call.place, call.stream) as where:
        return call.first([plan_boxes(info, result, size, call.place, fill, table=where)], where)


@former_arguments("out")
def halo_tiles(
    src: Any,
    tile: Sequence[int],
    halo: Sequence[int],
    *,
    out: Any = None,
    pad: str = "zeros",
    stream: Any = None,
    backend: str | None = None,
) -> Any:
    """All tiles of an array with a border of their neighbours' elements; returns ``out``, a new array unless given.

    tile, halo: elements an axis; the tile with twice its halo is a box as in gather(), and tile and halo of the last
    axis are whole 16-byte chunks. out: (tiles of axis 0, .., tile[0] + 2 halo[0], ..), C order; tiles = ceil(n / tile).
    pad: what stands outside of the source, "zeros" or "nan". src, stream, backend: as in gather(). Raises as copy().
    """
    call = Call("halo_tiles", backend, described(src, "src"), out, stream, tile, halo, pad)
    if call.is_known:
        return call.again()
    info = call.src
    rank = len(info.shape)
    inner, border = whole_numbers("tile", tile, rank), whole_numbers("halo", halo, rank)
    for axis, (extent, edge) in enumerate(zip(inner, border, strict=True)):
        if extent < 1:
            raise ArgumentError(f"tile[{axis}]", extent, "1 and up")
        if edge < 0:
            raise ArgumentError(f"halo[{axis}]", edge, "0 and up")
    size = check_box(
        info, tuple(extent + 2 * edge for extent, edge in zip(inner, border, strict=True)), "tile + 2 halo"
    )
    fill = check_pad(info, pad)
    check_starts(info, np.array([[-edge for edge in border], list(inner)]), "halo, tile")
    tiles = tuple(-(-n // extent) for n, extent in zip(info.shape, inner, strict=True))
    result = call.take((*tiles, *size), dense=True)
    if not result.size_elems:
        return call.result
    if call.place.backend == "reference":
        parts = host_array(result)
        for index in np.ndindex(*tiles):
            starts = [i * extent - edge for i, extent, edge in zip(index, inner, border, strict=True)]
            copy_on_host(info, described(parts[index], "out"), starts, fill is not None)
        return call.result
    axes = [(-edge, extent, count) for edge, extent, count in zip(border, inner, tiles, strict=True)]
    return call.first([plan_boxes(info, result, size, call.place, fill, grid=axes)])


def check_box(info: ArrayInfo, box: Sequence[int], field: str = "box") -> tuple[int, ...]:
    """The box as ints. ArgumentError where it is not a box of this array."""
    size = whole_numbers(field, box, len(info.shape))
    check_rank(len(size))
    if info.dtype.itemsize not in (1, 2, 4, 8):
        raise ArgumentError("src.dtype", str(info.dtype), "elements of 1, 2, 4 or 8 bytes", "view it as bytes")
    for axis, extent in enumerate(size):
        if not 1 <= extent <= 256:
            raise ArgumentError(f"{field}[{axis}]", extent, "1..256")
    if size[-1] * info.dtype.itemsize % 16:
        got = f"{size[-1]} elements of {info.dtype.itemsize} bytes"
        raise ArgumentError(f"{field}[{len(size) - 1}]", got, "rows of whole 16-byte chunks")
    return size


def check_pad(info: ArrayInfo, pad: str) -> Any:
    """The type whose NaN is filled in, None for zeros."""
    check_choice("pad", pad, PADS)
    return nan_type(info, pad)


def check_starts(info: ArrayInfo, starts: np.ndarray[Any, Any], field: str = "starts") -> None:
    """ArgumentError for a start that the hardware would trap at."""
    unit = max(1, 16 // info.dtype.itemsize)
    wrong = np.nonzero(starts[:, -1] % unit)[0]
    if wrong.size:
        row = int(wrong[0])
        name, value = f"{field}[{row}][{starts.shape[1] - 1}]", int(starts[row, -1])
        raise ArgumentError(name, value, f"multiples of {unit} elements, 16 bytes")
    if starts.size and (int(starts.min()) < -_INT32 or int(starts.max()) >= _INT32):
        raise ArgumentError(field, f"{int(starts.min())}..{int(starts.max())}", "signed 32-bit integers")


def plan_boxes(
    src: ArrayInfo,
    out: ArrayInfo,
    box: tuple[int, ...],
    place: Place,
    fill: Any = None,
    *,
    table: ArrayInfo | None = None,
    grid: Sequence[tuple[int, int, int]] = (),
) -> Launch:
    """The launch for boxes at the places of a table, or of a grid of (start, step, tiles) by axis, NumPy order.

    Raises DescriptorError where TMA cannot, ArgumentError for a box of which no two fit into shared memory.
    """
    if not src.size_elems:
        raise DescriptorError("src.shape", src.shape, "an array with elements", "fill the result yourself")
    kind = tma_type(f"uint{8 * src.dtype.itemsize}") if fill is None else fill
    source = replace(src, dtype=np.dtype(f"uint{8 * src.dtype.itemsize}") if fill is None else src.dtype)
    load = tensor_map(source, box, place, dtype=kind, oob_fill=OobFill.ZEROS if fill is None else OobFill.NAN)
    check_load(load.spec, (0,) * len(box))
    if out.pointer % 16:
        raise DescriptorError("out.address", hex(out.pointer), "a multiple of 16 bytes")
    box_bytes = prod(box) * src.dtype.itemsize
    slot = max(SLOT_BYTES, slot_bytes(box_bytes))
    spec = GatherSpec(len(box), "table" if table is not None else "grid", *usual_ring(place.target, slot))
    boxes = out.size_elems // prod(box)
    if boxes >= _INT32:
        raise DescriptorError("boxes", boxes, "below 2**31", "take them in parts")
    if table is not None:
        places, touched = (table,), (src, out, table)
    else:
        places, touched = tuple(value for axis in reversed(grid) for value in axis), (src, out)  # type: ignore[assignment]
    return Launch(TEMPLATE, spec, min(place.ctas, boxes), (load, out, *places, box_bytes, boxes), touched)


def dump_specs(target: Target) -> list[GatherSpec]:
    """The specs for dumps and compile checks; none if the target cannot run them."""
    pairs = ((3, "table"), (2, "grid")) if target.has("tma") else ()
    return [GatherSpec(*pair, *usual_ring(target)) for pair in pairs]
