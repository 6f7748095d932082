"""Transpose each matrix of a batch in shared memory. TMA loads and stores the tiles.

[PTX ISA, cp.async.bulk.tensor, ldmatrix, stmatrix]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.descriptor import L2Promotion, Swizzle, check_store
from cudatma.errors import ArgumentError, DescriptorError, alternatives, counted
from cudatma.kernels.arguments import Arguments, Map, Sizes
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.data_movement.checks import as_key, check_out, described
from cudatma.kernels.data_movement.configs import check_choice
from cudatma.kernels.data_movement.copy import VIAS, plan_copy
from cudatma.kernels.data_movement.movement import LaunchLimits, Movement, checked
from cudatma.kernels.data_movement.plans import tensor_map
from cudatma.kernels.data_movement.ring import CTAS_PER_SM
from cudatma.kernels.data_movement.window import Axis, Window, simplify
from cudatma.kernels.engine import run
from cudatma.kernels.host import host_array
from cudatma.kernels.operation import Checked
from cudatma.pipeline import Operand, PipelineSpec
from cudatma.target import Target

TEMPLATE = "kernels/transpose.cu.j2"
#: Bytes per row of a panel, which is the span of the 128-byte swizzle (8 chunks of 16 bytes).
LINE_BYTES = 128
#: Alignment of a panel in bytes. With this alignment, the swizzle of a row depends only on the row's index.
_PANEL_ALIGNMENT = 1024
_CUDA_TYPES = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
#: Number of squares per tile, down and across, for each element size in bytes. A tile has 16 KiB, and its rows in the
#: result have at least 256 bytes.
SQUARES = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (4, 2)}
_MAX_TILES = 1 << 31


@dataclass(frozen=True, slots=True)
class TransposeConfig:
    """A configuration of ``kernels/transpose.cu.j2``.

    Attributes
    ----------
    element_bytes : int
        Bytes per element, 1, 2, 4 or 8.
    squares_y, squares_x : int
        Number of squares per tile, down and across. The side of a square is 128 bytes of elements.
    stages : int
        Number of slots for loaded tiles.
    transposed_tiles : int
        Number of slots for transposed tiles.
    warps : int
        Number of warps that transpose.
    raster_group : int
        Number of rows of tiles that are processed column by column.

    Raises
    ------
    ArgumentError
        If a field is invalid.
    """

    element_bytes: int
    squares_y: int
    squares_x: int
    stages: int
    transposed_tiles: int
    warps: int = 4
    raster_group: int = 16
    entry: str = "transpose"

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.element_bytes not in _CUDA_TYPES:
            raise ArgumentError("element_bytes", self.element_bytes, alternatives(_CUDA_TYPES))
        max_squares = 256 // self.side
        for field, value, minimum, limit in (
            ("squares_y", self.squares_y, 1, max_squares),
            ("squares_x", self.squares_x, 1, max_squares),
            ("stages", self.stages, 1, 16),
            ("transposed_tiles", self.transposed_tiles, 1, 16),
            ("warps", self.warps, 1, 31),
            ("raster_group", self.raster_group, 1, 1024),
        ):
            if not minimum <= value <= limit:
                raise ArgumentError(field, value, f"{minimum} to {limit}")

    @property
    def cuda_type(self) -> str:
        return _CUDA_TYPES[self.element_bytes]

    @property
    def side(self) -> int:
        """Number of elements in 128 bytes."""
        return LINE_BYTES // self.element_bytes

    @property
    def tile(self) -> tuple[int, int]:
        """Number of rows and number of columns of a tile."""
        return self.squares_y * self.side, self.squares_x * self.side

    @property
    def in_panel_bytes(self) -> int:
        """Bytes per panel of loaded columns: the columns of one square in all rows of a tile."""
        return self.tile[0] * LINE_BYTES

    @property
    def out_panel_bytes(self) -> int:
        """Bytes per transposed panel: the rows of one square in all columns of a tile."""
        return self.tile[1] * LINE_BYTES

    @property
    def ring(self) -> PipelineSpec:
        """Ring with one tile per stage. Each warp that transposes releases the stage."""
        size = self.squares_x * self.in_panel_bytes
        tile = Operand("tile", size, size, alignment=_PANEL_ALIGNMENT)
        return PipelineSpec(self.stages, (tile,), consumer_arrivals=self.warps)

    @property
    def transposed_offset(self) -> int:
        return self.stages * self.ring.stage_bytes

    @property
    def barriers_offset(self) -> int:
        return (self.stages + self.transposed_tiles) * self.ring.stage_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        rows, columns = self.tile
        return (
            f"ring: {self.stages} tiles of {rows} x {columns} elements, {self.ring.stage_bytes} bytes each, and "
            f"{counted(self.transposed_tiles, 'transposed tile')}; {self.smem_bytes} bytes of shared memory in total",
        )

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def smem_bytes(self) -> int:
        return self.barriers_offset + self.ring.barrier_bytes

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """Return (name, offset, bytes) of each array in dynamic shared memory."""
        size = self.ring.stage_bytes
        return [
            ("tiles", 0, self.stages * size),
            ("transposed tiles", self.transposed_offset, self.transposed_tiles * size),
            ("barriers", self.barriers_offset, self.ring.barrier_bytes),
        ]

    def stage_layout(self) -> list[tuple[str, int]]:
        """Return (description, bytes) of a slot."""
        return [(f"{self.squares_x} panels of {self.tile[0]} rows", self.ring.stage_bytes)]

    def check_target(self, target: Target) -> None:
        """Raise TargetError unless the target has TMA and stmatrix, and ArgumentError if the tiles do not fit."""
        target.require("tma", self.entry)
        target.require("stmatrix", self.entry)
        self.ring.check_fits(target, other_bytes=self.transposed_tiles * self.ring.stage_bytes)


def choose_transpose(element_bytes: int, target: Target) -> TransposeConfig:
    """Return a config with three slots and two transposed tiles, or two and one if two CTAs would not fit on an SM."""
    smem_bytes = target.smem_share_bytes(CTAS_PER_SM)
    larger = TransposeConfig(element_bytes, *SQUARES[element_bytes], 3, 2)
    return larger if larger.smem_bytes <= smem_bytes else replace(larger, stages=2, transposed_tiles=1)


def transpose(src: Any, *, out: Any = None, via: str = "auto", stream: Any = None, backend: str | None = None) -> Any:
    """Copy an array with its last two axes exchanged.

    Parameters
    ----------
    src : array (..., rows, columns)
        The source, with any dtype without Python objects: a CuPy array, a torch tensor, or an object that supports
        DLPack or ``__cuda_array_interface__``. On the emulator, also a NumPy array.
    out : array (..., columns, rows), optional
        The result, with the source's dtype. ``out`` must not share bytes with the source. Default: a new C-ordered
        array.
    via : {"auto", "tma", "plain"}, default "auto"
        How to copy. ``"tma"`` requires elements of 1, 2, 4 or 8 bytes, pitches and rows of both arrays that are
        multiples of 16 bytes, and batch axes that can be merged into one. Otherwise it raises DescriptorError.
        ``"plain"`` uses plain loads and stores. ``"auto"`` uses ``copy`` if TMA cannot transpose the array.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the source's library.
    backend : str, optional
        Where to run: ``"cuda"``, ``"emulator"``, ``"reference"`` or ``"auto"``; see ``marlin_gemm``.

    Returns
    -------
    array
        The transposed array.

    Raises
    ------
    ArgumentError, ArgumentTypeError, DescriptorError, LaunchError, TargetError, CompileError, DriverError, HazardError
        If an argument is invalid or the kernel cannot run; see ``copy``.

    Examples
    --------
    >>> cudatma.transpose(np.arange(6).reshape(2, 3), backend="reference").tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    return run(TRANSPOSE, (src,), out, as_key(via), stream=stream, backend=backend)


class _Problem(NamedTuple):
    src: ArrayInfo
    out: ArrayInfo
    via: str


class Transpose(Movement[_Problem]):
    """Operation of transpose(), with the option ``via``."""

    name: ClassVar[str] = "transpose"

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], resource: Any) -> Checked[_Problem]:
        info, (via,) = described(inputs[0], "src"), options
        check_choice("via", via, VIAS)
        if len(info.shape) < 2:
            raise ArgumentError("src.shape", info.shape, "a tuple of two or more extents")
        shape = exchanged(info).shape
        return checked(_Problem, (info,), check_out(out, info, shape), shape, via)

    def plan(self, problem: _Problem, limits: LaunchLimits) -> tuple[Arguments, ...]:
        return (plan_transpose(problem.src, problem.out, limits, problem.via),)

    def reference(self, problem: _Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        host_array(arrays["out"])[...] = np.swapaxes(host_array(arrays["src"]), -1, -2)


TRANSPOSE = Transpose()


def exchanged(info: ArrayInfo) -> ArrayInfo:
    """Return a view of the array with its last two axes exchanged."""
    (*shape, rows, columns), (*strides, pitch, step) = info.shape, info.strides_bytes
    return replace(info, shape=(*shape, columns, rows), strides_bytes=(*strides, step, pitch))


def plan_transpose(src: ArrayInfo, out: ArrayInfo, limits: LaunchLimits, via: str = "auto") -> Arguments:
    """Return the launch. Raises DescriptorError if ``via`` is "tma" and TMA cannot transpose."""
    if via != "plain":
        try:
            return tile_plan(src, out, limits)
        except DescriptorError:
            if via == "tma":
                raise
    return plan_copy(exchanged(src), out, (0,) * len(src.shape), limits, via=via)


def tile_plan(src: ArrayInfo, out: ArrayInfo, limits: LaunchLimits, config: TransposeConfig | None = None) -> Arguments:
    """Return the launch that transposes tiles by TMA. Raises DescriptorError if TMA cannot transpose."""
    size = src.dtype.itemsize
    if size not in _CUDA_TYPES:
        raise DescriptorError("dtype", str(src.dtype), "1, 2, 4 or 8 bytes wide", "view the array as bytes")
    config = config or choose_transpose(size, limits.target)
    source, destination = _as_batch(src, out)
    rows, columns = config.tile
    # This tile reads the first half of each 256-byte line, and the next tile reads the other half.
    load = _tile_map("src", src, source, (1, rows, config.side), limits, l2_promotion=L2Promotion.B256)
    store = _tile_map("out", out, destination, (1, columns, config.side), limits)
    check_store(store.spec)
    tiles_y, tiles_x = -(-source.shape[1] // rows), -(-source.shape[2] // columns)
    tiles = tiles_x * tiles_y * source.shape[0]
    # place_of() in the template multiplies a row of tiles by a raster group.
    if max(tiles, tiles_x * config.raster_group) >= _MAX_TILES:
        raise DescriptorError(
            "src.shape",
            f"{tiles} tiles",
            "small enough for fewer than 2**31 tiles",
            "split the array into several calls",
        )
    return Arguments(TEMPLATE, config, (load, store, tiles_x, tiles_y, tiles), Sizes(min(limits.ctas, tiles)))


def _tile_map(
    name: str, array: ArrayInfo, batch: ArrayInfo, box: tuple[int, int, int], limits: LaunchLimits, **options: Any
) -> Map:
    """Return a tensor map over a batch. Errors name the axes of the original array."""
    first = len(array.shape) - len(batch.shape)
    names = {f"strides_bytes[{axis}]": f"{name}.strides_bytes[{axis + first}]" for axis in (1, 2)}
    try:
        return tensor_map(name, batch, box, limits, swizzle=Swizzle.B128, **options)
    except DescriptorError as error:
        raise error.renamed(names) from None


def _as_batch(src: ArrayInfo, out: ArrayInfo) -> tuple[ArrayInfo, ArrayInfo]:
    """Return both arrays as (batch, rows, columns) of unsigned elements.

    Raises DescriptorError if there are more batch axes.
    """
    kind = np.dtype(f"uint{8 * src.dtype.itemsize}")
    sizes = zip(src.shape[:-2], src.strides_bytes[:-2], out.strides_bytes[:-2], strict=True)
    axes = tuple(Axis(0, n, n, s, d) for n, s, d in sizes)
    batch, *others = simplify(Window(0, 0, src.dtype.itemsize, axes)).axes
    if others:
        raise DescriptorError(
            "src.strides",
            src.strides_bytes,
            "strides that merge the batch axes of src and out into one axis",
            "transpose each matrix separately",
        )

    def batched(info: ArrayInfo, stride: int) -> ArrayInfo:
        rows, columns = info.strides_bytes[-2:]
        shape = batch.extent, *info.shape[-2:]
        return replace(info, shape=shape, strides_bytes=(stride, rows, columns), dtype=kind)

    return batched(src, batch.source_stride), batched(out, batch.destination_stride)


def dump_configs(target: Target) -> list[TransposeConfig]:
    """Return the configs for dumps and compile checks, or an empty list if the target cannot run them."""
    able = target.has("tma") and target.has("stmatrix")
    return [choose_transpose(size, target) for size in (1, 4)] if able else []
