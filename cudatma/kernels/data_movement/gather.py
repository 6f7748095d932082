"""Gather boxes of an array at given positions, or in a grid of boxes that may overlap.

Each box becomes one element along the first axis of the result.

[PTX ISA, cp.async.bulk.tensor]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.descriptor import OobFill, check_load
from cudatma.dtypes import TmaType, tma_type
from cudatma.errors import ArgumentError, DescriptorError, counted
from cudatma.kernels.arguments import Arguments, At, Sizes
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.data_movement.checks import as_key, check_out, described, whole_numbers
from cudatma.kernels.data_movement.configs import check_choice, check_rank, coordinates
from cudatma.kernels.data_movement.copy import PADS, copy_on_host, nan_type
from cudatma.kernels.data_movement.movement import LaunchLimits, Movement, checked
from cudatma.kernels.data_movement.plans import chunk_place, tensor_map
from cudatma.kernels.data_movement.ring import SLOT_BYTES, CopyRing, slot_bytes, usual_ring
from cudatma.kernels.data_movement.table import int_table
from cudatma.kernels.engine import run
from cudatma.kernels.host import host_array
from cudatma.kernels.operation import Checked
from cudatma.target import Target

TEMPLATE = "kernels/gather_boxes.cu.j2"
PLACES = ("table", "grid")
_INT32 = 1 << 31


@dataclass(frozen=True, slots=True)
class GatherConfig(CopyRing):
    """A configuration of ``kernels/gather_boxes.cu.j2``.

    Attributes
    ----------
    rank : int
        Number of axes of the source, 1 to 5.
    places : str
        "table" if an array contains the starts of the boxes; "grid" if the boxes form a grid.
    stage_bytes : int
        Maximum bytes of a box.
    stages, in_flight : int
        See CopyRing.

    Raises
    ------
    ArgumentError
        If a field is invalid.
    """

    rank: int
    places: str
    stage_bytes: int
    stages: int
    in_flight: int

    def __post_init__(self) -> None:
        check_field_types(self)
        check_rank(self.rank)
        check_choice("places", self.places, PLACES)
        self.check_ring()

    @property
    def entry(self) -> str:
        return "gather_boxes" if self.places == "table" else "halo_tiles"

    @property
    def at(self) -> str:
        """Names of the coordinates."""
        return coordinates(self.rank)


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
    """Gather boxes of an array: ``out[i] = src[starts[i] : starts[i] + box]``.

    Parameters
    ----------
    src : array
        The source, with 1 to 5 axes. The address and the pitches must be multiples of 16 bytes, elements must have 1,
        2, 4 or 8 bytes, and the last axis must be contiguous.
    starts : array (boxes, axes) of int
        Index of the first element of each box, which may be outside the source. The index along the last axis must
        correspond to a multiple of 16 bytes. A list or host array is checked and uploaded. A device array must be int32
        in C order.
    box : sequence of int
        Shape of a box, at most 256 elements per axis. Rows must be multiples of 16 bytes.
    out : array (boxes, ...), optional
        The result, in C order. Default: a new array.
    pad : {"zeros", "nan"}, default "zeros"
        Fill value for elements outside the source.
    check : bool, default True
        Whether to validate starts in device memory, which synchronizes the device. Without this check, a start that is
        not a multiple of 16 bytes traps and destroys the CUDA context.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the source's library.
    backend : str, optional
        Where to run: ``"cuda"``, ``"emulator"``, ``"reference"`` or ``"auto"``; see ``marlin_gemm``.

    Returns
    -------
    array
        The boxes.

    Raises
    ------
    ArgumentError, ArgumentTypeError, DescriptorError, LaunchError, TargetError, CompileError, DriverError, HazardError
        If an argument is invalid, if TMA cannot read the source, or if the kernel cannot run; see ``copy``.

    Examples
    --------
    >>> x = np.arange(32, dtype=np.int32).reshape(4, 8)
    >>> cudatma.gather(x, [[0, 4], [3, 0]], (1, 4), backend="reference").tolist()
    [[[4, 5, 6, 7]], [[24, 25, 26, 27]]]
    """
    info = described(src, "src")
    table = int_table(starts, len(info.shape), info, check)
    if table.values is not None:
        check_starts(info, table.values)
    inputs = src, table.on_device(info, out, stream)
    return run(GATHER, inputs, out, as_key(box, pad), stream=stream, backend=backend)


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
    """Return all tiles of an array, each with a border of elements from its neighbors.

    Parameters
    ----------
    src : array
        The source; see ``gather``.
    tile, halo : sequence of int
        Number of elements per axis of a tile, and of its border on each side. A tile with its border must be a valid
        box of ``gather``. Along the last axis, both must be multiples of 16 bytes.
    out : array (tiles of axis 0, ..., tile[0] + 2 halo[0], ...), optional
        The result, in C order, with ceil(n / tile) tiles per axis. Default: a new array.
    pad : {"zeros", "nan"}, default "zeros"
        Fill value for elements outside the source.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the source's library.
    backend : str, optional
        Where to run: ``"cuda"``, ``"emulator"``, ``"reference"`` or ``"auto"``; see ``marlin_gemm``.

    Returns
    -------
    array
        The tiles with their borders.

    Raises
    ------
    ArgumentError, ArgumentTypeError, DescriptorError, LaunchError, TargetError, CompileError, DriverError, HazardError
        If an argument is invalid or the kernel cannot run; see ``copy``.
    """
    return run(HALO_TILES, (src,), out, as_key(tile, halo, pad), stream=stream, backend=backend)


class _Problem(NamedTuple):
    """Layouts and boxes of a call.

    Attributes
    ----------
    fill : TmaType or None
        Type whose NaN fills elements outside the source, or None for zeros.
    grid : tuple[tuple[int, int, int], ...]
        Tuple (start, step, tiles) of each axis, or empty if a table contains the starts of the boxes.
    """

    src: ArrayInfo
    out: ArrayInfo
    box: tuple[int, ...]
    fill: TmaType | None
    grid: tuple[tuple[int, int, int], ...]


class Gather(Movement[_Problem]):
    """Operation of gather(). The options are box and pad."""

    name: ClassVar[str] = "gather"
    inputs: ClassVar[tuple[str, ...]] = ("src", "starts")

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], resource: Any) -> Checked[_Problem]:
        """Validate a call whose table has already been checked."""
        info, table, (box, pad) = described(inputs[0], "src"), describe(inputs[1], "starts"), options
        size, fill = check_box(info, box), check_pad(info, pad)
        shape = (table.shape[0], *size)
        result = check_out(out, info, shape, dense=True)
        return checked(_Problem, (info, table), result, shape, size, fill, ())

    def plan(self, problem: _Problem, limits: LaunchLimits) -> tuple[Arguments, ...]:
        return (plan_boxes(*problem, limits),)

    def reference(self, problem: _Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        for start, part in zip(host_array(arrays["starts"]), host_array(arrays["out"]), strict=True):
            copy_on_host(arrays["src"], describe(part), [int(at) for at in start], problem.fill is not None)


class HaloTiles(Movement[_Problem]):
    """Operation of halo_tiles(), with the options tile, halo and pad."""

    name: ClassVar[str] = "halo_tiles"

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], resource: Any) -> Checked[_Problem]:
        info, (tile, halo, pad) = described(inputs[0], "src"), options
        rank = len(info.shape)
        inner, border = whole_numbers("tile", tile, rank), whole_numbers("halo", halo, rank)
        for axis, (extent, edge) in enumerate(zip(inner, border, strict=True)):
            if extent < 1:
                raise ArgumentError(f"tile[{axis}]", extent, "at least 1")
            if edge < 0:
                raise ArgumentError(f"halo[{axis}]", edge, "at least 0")
        whole = tuple(extent + 2 * edge for extent, edge in zip(inner, border, strict=True))
        size, fill = check_box(info, whole, "tile + 2 halo"), check_pad(info, pad)
        check_starts(info, np.array([[-edge for edge in border], list(inner)]), "halo, tile")
        tiles = tuple(-(-n // extent) for n, extent in zip(info.shape, inner, strict=True))
        grid = tuple((-edge, extent, count) for edge, extent, count in zip(border, inner, tiles, strict=True))
        shape = (*tiles, *size)
        result = check_out(out, info, shape, dense=True)
        return checked(_Problem, (info,), result, shape, size, fill, grid)

    def plan(self, problem: _Problem, limits: LaunchLimits) -> tuple[Arguments, ...]:
        return (plan_boxes(*problem, limits),)

    def reference(self, problem: _Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        parts = host_array(arrays["out"])
        for index in np.ndindex(*(tiles for *_, tiles in problem.grid)):
            starts = [start + i * step for i, (start, step, _) in zip(index, problem.grid, strict=True)]
            copy_on_host(arrays["src"], describe(parts[index]), starts, problem.fill is not None)


GATHER, HALO_TILES = Gather(), HaloTiles()


def check_box(info: ArrayInfo, box: Sequence[int], field: str = "box") -> tuple[int, ...]:
    """Return the box as ints. Raises ArgumentError if TMA cannot load the box from this array."""
    size = whole_numbers(field, box, len(info.shape))
    check_rank(len(size))
    if info.dtype.itemsize not in (1, 2, 4, 8):
        raise ArgumentError("src.dtype", str(info.dtype), "1, 2, 4 or 8 bytes wide", "view the array as bytes")
    for axis, extent in enumerate(size):
        if not 1 <= extent <= 256:
            raise ArgumentError(f"{field}[{axis}]", extent, "1 to 256")
    if size[-1] * info.dtype.itemsize % 16:
        got = f"{size[-1]} elements of {counted(info.dtype.itemsize, 'byte')}"
        raise ArgumentError(f"{field}[{len(size) - 1}]", got, "a number of elements that fills whole 16-byte chunks")
    return size


def check_pad(info: ArrayInfo, pad: str) -> TmaType | None:
    """Return the type whose NaN fills elements outside the source, or None for zeros."""
    check_choice("pad", pad, PADS)
    return nan_type(info, pad)


def check_starts(info: ArrayInfo, starts: np.ndarray[Any, Any], field: str = "starts") -> None:
    """Raise ArgumentError for a start that would trap."""
    unit = max(1, 16 // info.dtype.itemsize)
    wrong = np.nonzero(starts[:, -1] % unit)[0]
    if wrong.size:
        row = int(wrong[0])
        name, value = f"{field}[{row}][{starts.shape[1] - 1}]", int(starts[row, -1])
        raise ArgumentError(name, value, f"a multiple of {unit} elements (16 bytes)")


def plan_boxes(
    src: ArrayInfo,
    out: ArrayInfo,
    box: tuple[int, ...],
    fill: TmaType | None,
    grid: Sequence[tuple[int, int, int]],
    limits: LaunchLimits,
) -> Arguments:
    """Return the launch for boxes whose positions are in the array "starts" or on a regular grid.

    ``fill`` is the type whose NaN fills elements outside the source, or None for zeros. ``grid`` contains (start, step,
    tiles) for each axis in NumPy order. It is empty if the array "starts" gives the positions. Raises DescriptorError
    if TMA cannot read the source, and ArgumentError if two boxes do not fit in shared memory.
    """
    if not src.size_elems:
        raise DescriptorError("src.shape", src.shape, "the shape of a nonempty array", "fill the result directly")
    kind = tma_type(f"uint{8 * src.dtype.itemsize}") if fill is None else fill
    load = tensor_map("src", src, box, limits, dtype=kind, oob_fill=OobFill.ZEROS if fill is None else OobFill.NAN)
    check_load(load.spec, (0,) * len(box))
    if out.pointer % 16:
        raise DescriptorError("out.address", chunk_place(out.pointer), "a multiple of 16 bytes")
    box_bytes = prod(box) * src.dtype.itemsize
    slot = max(SLOT_BYTES, slot_bytes(box_bytes))
    config = GatherConfig(len(box), "grid" if grid else "table", *usual_ring(limits.target, slot))
    boxes = out.size_elems // prod(box)
    if boxes >= _INT32:
        raise DescriptorError("boxes", boxes, "fewer than 2**31", "split the work into several calls")
    places = [value for axis in reversed(grid) for value in axis] if grid else [At("starts")]
    return Arguments(TEMPLATE, config, (load, At("out"), *places, box_bytes, boxes), Sizes(min(limits.ctas, boxes)))


def dump_configs(target: Target) -> list[GatherConfig]:
    """Return the configs for dumps and compile checks, or an empty list if the target cannot run them."""
    pairs = ((3, "table"), (2, "grid")) if target.has("tma") else ()
    return [GatherConfig(*pair, *usual_ring(target)) for pair in pairs]
