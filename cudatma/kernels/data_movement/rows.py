"""Rows of a matrix by number, four an instruction: gather4 and scatter4 of sm_100 and, gather4 alone, sm_120.

Compiled and emulated; not run on a GPU that has these instructions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.deprecation import former_arguments
from cudatma.descriptor import check_load, check_store
from cudatma.errors import ArgumentError, DescriptorError
from cudatma.kernels.data_movement.call import Call, Place, check_written, described, tensor_map
from cudatma.kernels.data_movement.ring import LEAST_STAGES, SLOT_BYTES, CopyRing, usual_ring
from cudatma.kernels.data_movement.specs import check_choice
from cudatma.kernels.data_movement.table import int_table
from cudatma.kernels.data_movement.window import choose_box
from cudatma.kernels.host import host_array
from cudatma.kernels.launch import Launch
from cudatma.pipeline import align_up
from cudatma.target import Target

TEMPLATE = "kernels/rows.cu.j2"
OPS = ("gather", "scatter")
#: Rows of a box: four instructions.
BOX_ROWS = 16
_INT32 = 1 << 31


@dataclass(frozen=True, slots=True)
class RowsSpec(CopyRing):
    """One instance of ``kernels/rows.cu.j2``. op: "gather" or "scatter". rows: of a box, a multiple of 4.
    stage_bytes: the most that a box may have. stages, in_flight: as in CopyRing. Raises ArgumentError."""

    op: str
    stage_bytes: int
    stages: int
    in_flight: int
    rows: int = BOX_ROWS

    def __post_init__(self) -> None:
        check_choice("op", self.op, OPS)
        if not 4 <= self.rows <= 256 or self.rows % 4:
            raise ArgumentError("rows", self.rows, "multiples of 4 up to 256")
        self.check_ring()

    @property
    def entry(self) -> str:
        return f"{self.op}_rows"

    def check_target(self, target: Target) -> None:
        """TargetError without TMA and the instruction, ArgumentError where the ring does not fit."""
        target.require("tma", self.entry)
        target.require(f"{self.op}4", self.entry)
        self.ring.check_fits(target, least_stages=LEAST_STAGES)


@former_arguments("out")
def gather_rows(src: Any, rows: Any, *, out: Any = None, stream: Any = None, backend: str | None = None) -> Any:
    """``out[i] = src[rows[i]]``, zeros where src has no such row; returns ``out``, a new array unless given.

    src: (rows, columns), pitch, address and the result's rows in whole 16-byte chunks, elements of 1, 2, 4 or 8 bytes.
    rows: ints, a list, a host array or int32 on the device. out: (len(rows), columns), C order.
    Needs gather4 (sm_100, sm_120); not run on hardware. stream, backend: as in copy(); the emulator takes the target of
    $CUDATMA_TARGET. [PTX ISA, cp.async.bulk.tensor, .tile::gather4] Raises as copy().
    """
    info = _matrix(src, "src")
    index = int_table(rows, None, info, False, "rows")
    call = Call("gather_rows", backend, info, out, stream, index.rows)
    if call.is_known:
        with index.on_device(call.place, call.stream) as where:
            return call.again(where)
    result = call.take((index.rows, info.shape[1]), dense=True)
    if not result.size_elems:
        return call.result
    if call.place.backend == "reference":
        wanted, values = index.host(), host_array(result)
        inside = (wanted >= 0) & (wanted < info.shape[0])
        values[...] = np.zeros((), info.dtype)
        values[inside] = host_array(info)[wanted[inside]]
        return call.result
    with index.on_device(call.place, call.stream) as where:
        return call.first([plan_rows("gather", info, result, where, call.place)], where)


def scatter_rows(dst: Any, rows: Any, src: Any, *, stream: Any = None, backend: str | None = None) -> Any:
    """``dst[rows[i]] = src[i]``, rows that dst does not have left out; returns ``dst``.

    dst, src: (rows, columns) with as many columns, otherwise as in gather_rows(). Of rows named twice one is stored, no
    telling which. Needs scatter4 (sm_100); not run on hardware. [PTX ISA, .tile::scatter4] Raises as copy().
    """
    into, info = _matrix(dst, "dst"), _matrix(src, "src")
    if info.dtype != into.dtype or info.shape[1] != into.shape[1]:
        got = f"{info.shape[1]} columns of {info.dtype}"
        raise ArgumentError("src", got, f"{into.shape[1]} columns of {into.dtype}, as dst")
    index = int_table(rows, None, info, False, "rows")
    if index.rows != info.shape[0]:
        raise ArgumentError("rows.shape", (index.rows,), f"({info.shape[0]},), one for each row of src")
    call = Call("scatter_rows", backend, info, into, stream, index.rows, field="dst")
    if call.is_known:
        with index.on_device(call.place, call.stream) as where:
            call.again(where)
        return dst
    check_written(into, info, "dst")
    if not info.size_elems or not into.size_elems:
        return dst
    if call.place.backend == "reference":
        wanted = index.host()
        inside = (wanted >= 0) & (wanted < into.shape[0])
        host_array(into)[wanted[inside]] = host_array(info)[inside]
        return dst
    with index.on_device(call.place, call.stream) as where:
        call.first([plan_rows("scatter", info, into, where, call.place)], where)
    return dst


def _matrix(array: Any, field: str) -> ArrayInfo:
    info = described(array, field)
    if len(info.shape) != 2:
        raise ArgumentError(f"{field}.shape", info.shape, "two dimensions")
    if info.dtype.itemsize not in (1, 2, 4, 8):
        raise ArgumentError(f"{field}.dtype", str(info.dtype), "elements of 1, 2, 4 or 8 bytes", "view it as bytes")
    return info


def plan_rows(op: str, src: ArrayInfo, dst: ArrayInfo, index: ArrayInfo, place: Place) -> Launch:
    """The launch. Raises DescriptorError where TMA cannot."""
    if not src.size_elems:
        raise DescriptorError("src.shape", src.shape, "an array with elements", "fill the result yourself")
    itemsize, columns, count = src.dtype.itemsize, src.shape[1], index.shape[0]
    kind = np.dtype(f"uint{8 * itemsize}")
    # Four rows fill a multiple of 128 bytes: the next four begin where TMA may write.
    width = align_up(choose_box((columns,), itemsize, SLOT_BYTES // BOX_ROWS)[0], 32 // itemsize)
    one, many = (1, width), (BOX_ROWS, width)
    shapes = (one, many) if op == "gather" else (many, one)
    load, store = (
        tensor_map(replace(info, dtype=kind), box, place) for info, box in zip((src, dst), shapes, strict=True)
    )
    check_load(load.spec, (0, 0))
    check_store(store.spec)
    # Within int32, and of rows that neither has.
    outside = max(src.shape[0], dst.shape[0])
    column_boxes = -(-columns // width)
    boxes = -(-count // BOX_ROWS) * column_boxes
    if max(outside, boxes) >= _INT32:
        raise DescriptorError("rows", f"{outside} rows, {boxes} boxes", "below 2**31", "take them in parts")
    spec = RowsSpec(op, *usual_ring(place.target))
    sizes = (count, outside, width, column_boxes, 4 * width * itemsize, boxes)
    return Launch(TEMPLATE, spec, min(place.ctas, boxes), (load, store, index, *sizes), (src, dst, index))


def dump_specs(target: Target) -> list[RowsSpec]:
    """The specs for dumps and compile checks; none if the target cannot run them."""
    return [RowsSpec(op, *usual_ring(target)) for op in OPS if target.has(f"{op}4")]
