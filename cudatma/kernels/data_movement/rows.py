"""Gather and scatter rows of a matrix by index, four rows per instruction.

sm_100 supports gather4 and scatter4, and sm_120 supports only gather4. These kernels have been compiled and emulated,
but have not been run on a GPU.

[PTX ISA, cp.async.bulk.tensor, .tile::gather4, .tile::scatter4]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.descriptor import check_load, check_store
from cudatma.dtypes import tma_type
from cudatma.errors import ArgumentError, DescriptorError
from cudatma.kernels.arguments import Arguments, At, Sizes
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.data_movement.checks import check_device, check_out, check_written, described
from cudatma.kernels.data_movement.configs import check_choice
from cudatma.kernels.data_movement.movement import LaunchLimits, Movement, checked
from cudatma.kernels.data_movement.plans import tensor_map
from cudatma.kernels.data_movement.ring import MIN_STAGES, SLOT_BYTES, CopyRing, usual_ring
from cudatma.kernels.data_movement.table import int_table
from cudatma.kernels.data_movement.window import choose_box
from cudatma.kernels.engine import run
from cudatma.kernels.host import host_array
from cudatma.kernels.operation import Checked
from cudatma.pipeline import align_up
from cudatma.target import Target

TEMPLATE = "kernels/rows.cu.j2"
OPS = ("gather", "scatter")
#: Number of rows per box. Four instructions load a box.
BOX_ROWS = 16
_INT32 = 1 << 31


@dataclass(frozen=True, slots=True)
class RowsConfig(CopyRing):
    """A configuration of ``kernels/rows.cu.j2``.

    Attributes
    ----------
    op : str
        "gather" or "scatter".
    rows : int
        Number of rows per box, a multiple of 4.
    stage_bytes : int
        Maximum size of a box in bytes.
    stages, in_flight : int
        See CopyRing.

    Raises
    ------
    ArgumentError
        If a field is invalid.
    """

    op: str
    stage_bytes: int
    stages: int
    in_flight: int
    rows: int = BOX_ROWS

    def __post_init__(self) -> None:
        check_field_types(self)
        check_choice("op", self.op, OPS)
        if not 4 <= self.rows <= 256 or self.rows % 4:
            raise ArgumentError("rows", self.rows, "a multiple of 4 from 4 to 256")
        self.check_ring()

    @property
    def entry(self) -> str:
        return f"{self.op}_rows"

    def check_target(self, target: Target) -> None:
        """Raise TargetError unless the target has the instruction, and ArgumentError if the ring does not fit."""
        target.require("tma", self.entry)
        target.require(f"{self.op}4", self.entry)
        self.ring.check_fits(target, min_stages=MIN_STAGES)


def gather_rows(src: Any, rows: Any, *, out: Any = None, stream: Any = None, backend: str | None = None) -> Any:
    """Gather rows of a matrix: ``out[i] = src[rows[i]]``. Rows outside the matrix are filled with zeros.

    Parameters
    ----------
    src : array (rows, columns)
        The source, with elements of 1, 2, 4 or 8 bytes. Its address and pitch, and the length of the result's rows,
        must be multiples of 16 bytes.
    rows : array (count,) of int
        32-bit row indices, as a list, a host array, or an int32 array on the device.
    out : array (count, columns), optional
        The result, in C order. Default: a new array.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the source's library.
    backend : str, optional
        Where to run; see ``marlin_gemm``. The emulator uses the target in $CUDATMA_TARGET.

    Returns
    -------
    array
        The gathered rows.

    Raises
    ------
    ArgumentError, ArgumentTypeError, DescriptorError, LaunchError, TargetError, CompileError, DriverError, HazardError
        If an argument is invalid or the kernel cannot run; see ``copy``. TargetError is also raised if the target does
        not support gather4, which only sm_100 and sm_120 do.

    Examples
    --------
    >>> x = np.arange(12, dtype=np.int32).reshape(3, 4)
    >>> cudatma.gather_rows(x, [2, 0], backend="reference").tolist()
    [[8, 9, 10, 11], [0, 1, 2, 3]]
    """
    info = _matrix(src, "src")
    index = int_table(rows, None, info, False, "rows").on_device(info, out, stream)
    return run(GATHER_ROWS, (src, index), out, (), stream=stream, backend=backend)


def scatter_rows(dst: Any, rows: Any, src: Any, *, stream: Any = None, backend: str | None = None) -> Any:
    """Scatter rows of a matrix: ``dst[rows[i]] = src[i]``. Indices outside dst are skipped.

    Parameters
    ----------
    dst : array (rows, columns)
        Array to update. It must meet the requirements for the source of ``gather_rows``.
    rows : array (count,) of int
        Row indices; see ``gather_rows``. If an index occurs twice, either source row may be stored.
    src : array (count, columns)
        Rows to store, with the dtype of ``dst``.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the source's library.
    backend : str, optional
        Where to run; see ``gather_rows``.

    Returns
    -------
    array
        The updated array.

    Raises
    ------
    ArgumentError, ArgumentTypeError, DescriptorError, LaunchError, TargetError, CompileError, DriverError, HazardError
        If an argument is invalid or the kernel cannot run; see ``copy``. TargetError is also raised if the target does
        not support scatter4, which only sm_100 does.
    """
    info = _matrix(src, "src")
    index = int_table(rows, None, info, False, "rows").on_device(info, dst, stream)
    return run(SCATTER_ROWS, (src, index), dst, (), stream=stream, backend=backend)


class _Problem(NamedTuple):
    src: ArrayInfo
    out: ArrayInfo
    rows: int


class GatherRows(Movement[_Problem]):
    """Operation of gather_rows()."""

    name: ClassVar[str] = "gather_rows"
    inputs: ClassVar[tuple[str, ...]] = ("src", "index")

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], resource: Any) -> Checked[_Problem]:
        """Validate a call whose row indices have already been checked."""
        info, index = _matrix(inputs[0], "src"), describe(inputs[1], "rows")
        shape = index.shape[0], info.shape[1]
        return checked(_Problem, (info, index), check_out(out, info, shape, dense=True), shape, index.shape[0])

    def plan(self, problem: _Problem, limits: LaunchLimits) -> tuple[Arguments, ...]:
        return (plan_rows("gather", *problem, limits),)

    def reference(self, problem: _Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        src, index, result = (host_array(arrays[name]) for name in ("src", "index", "out"))
        inside = (index >= 0) & (index < len(src))
        result[...] = np.zeros((), src.dtype)
        result[inside] = src[index[inside]]


class ScatterRows(Movement[_Problem]):
    """Operation of scatter_rows(), whose result is dst."""

    name: ClassVar[str] = "scatter_rows"
    inputs: ClassVar[tuple[str, ...]] = ("src", "index")

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], resource: Any) -> Checked[_Problem]:
        """Validate a call whose row indices have already been checked."""
        into, info, index = _matrix(out, "dst"), _matrix(inputs[0], "src"), describe(inputs[1], "rows")
        check_device(into, info, "dst")
        if info.dtype != into.dtype or info.shape[1] != into.shape[1]:
            got = f"{info.shape[1]} columns of {info.dtype}"
            raise ArgumentError("src", got, f"an array with {into.shape[1]} columns of {into.dtype} to match dst")
        if index.shape[0] != info.shape[0]:
            raise ArgumentError("rows.shape", index.shape, f"({info.shape[0]},) (the number of rows of src)")
        check_written(into, info, "dst")
        return checked(_Problem, (info, index), into, into.shape, index.shape[0])

    def plan(self, problem: _Problem, limits: LaunchLimits) -> tuple[Arguments, ...]:
        """Return the launch, or an empty tuple if there are no rows."""
        return (plan_rows("scatter", *problem, limits),) if problem.src.size_elems else ()

    def reference(self, problem: _Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        src, index, into = (host_array(arrays[name]) for name in ("src", "index", "out"))
        inside = (index >= 0) & (index < len(into))
        into[index[inside]] = src[inside]


GATHER_ROWS, SCATTER_ROWS = GatherRows(), ScatterRows()


def _matrix(array: Any, field: str) -> ArrayInfo:
    info = described(array, field)
    if len(info.shape) != 2:
        raise ArgumentError(f"{field}.shape", info.shape, "(rows, columns)")
    if info.dtype.itemsize not in (1, 2, 4, 8):
        raise ArgumentError(f"{field}.dtype", str(info.dtype), "1, 2, 4 or 8 bytes wide", "view the array as bytes")
    return info


def plan_rows(op: str, src: ArrayInfo, dst: ArrayInfo, rows: int, limits: LaunchLimits) -> Arguments:
    """Return the launch for ``rows`` rows. Raises DescriptorError if TMA cannot read or write the arrays."""
    if not src.size_elems:
        raise DescriptorError("src.shape", src.shape, "the shape of a nonempty array", "fill the result directly")
    itemsize, columns = src.dtype.itemsize, src.shape[1]
    kind = tma_type(f"uint{8 * itemsize}")
    # Four rows take a multiple of 128 bytes, so that the next four rows begin at an address that TMA can write.
    width = align_up(choose_box((columns,), itemsize, SLOT_BYTES // BOX_ROWS)[0], 32 // itemsize)
    row_box, rows_box = (1, width), (BOX_ROWS, width)
    shapes = (row_box, rows_box) if op == "gather" else (rows_box, row_box)
    load = tensor_map("src", src, shapes[0], limits, dtype=kind)
    store = tensor_map("out", dst, shapes[1], limits, dtype=kind)
    check_load(load.spec, (0, 0))
    check_store(store.spec)
    # This row index is outside both arrays.
    outside = max(src.shape[0], dst.shape[0])
    column_boxes = -(-columns // width)
    boxes = -(-rows // BOX_ROWS) * column_boxes
    if max(outside, boxes) >= _INT32:
        raise DescriptorError(
            "rows", f"{outside} rows in {boxes} boxes", "fewer than 2**31", "split the rows into several calls"
        )
    config = RowsConfig(op, *usual_ring(limits.target))
    sizes = (rows, outside, width, column_boxes, 4 * width * itemsize, boxes)
    return Arguments(TEMPLATE, config, (load, store, At("index"), *sizes), Sizes(min(limits.ctas, boxes)))


def dump_configs(target: Target) -> list[RowsConfig]:
    """Return the configs for dumps and compile checks, or an empty list if the target cannot run them."""
    return [RowsConfig(op, *usual_ring(target)) for op in OPS if target.has(f"{op}4")]
