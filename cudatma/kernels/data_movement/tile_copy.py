"""A pipelined copy of a 2D array, box by box: the config and the public function.

This is the smallest complete kernel: a config, a template, and a function that creates the tensor maps and launches the
kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudatma.arrays import ArrayInfo, describe, place_name
from cudatma.descriptor import check_store
from cudatma.errors import ArgumentError, counted
from cudatma.kernels.arguments import Arguments, Sizes
from cudatma.kernels.checks import check_field_types, checked_count
from cudatma.kernels.data_movement.checks import as_key, check_written, described
from cudatma.kernels.data_movement.movement import LaunchLimits, Movement, checked
from cudatma.kernels.data_movement.plans import tensor_map
from cudatma.kernels.data_movement.ring import BoxRing
from cudatma.kernels.engine import run
from cudatma.kernels.host import host_array
from cudatma.kernels.operation import Checked
from cudatma.kernels.sample import Sample, sample_dtype
from cudatma.target import TARGETS, Target

TEMPLATE = "kernels/tile_copy.cu.j2"


@dataclass(frozen=True, slots=True)
class TileCopyConfig(BoxRing):
    """A configuration of ``kernels/tile_copy.cu.j2``.

    Attributes
    ----------
    element_bytes : int
        Bytes per element, 1, 2, 4 or 8.
    box_rows, box_columns : int
        Number of rows and columns per box, at most 256 each. Rows must be multiples of 16 bytes.
    stages : int
        Number of boxes in flight, at least 2.

    Raises
    ------
    ArgumentError
        If a field is invalid.
    """

    element_bytes: int
    box_rows: int = 64
    box_columns: int = 64
    stages: int = 4
    entry: str = "tile_copy"

    def __post_init__(self) -> None:
        check_field_types(self)
        self.check_box()

    def check_target(self, target: Target) -> None:
        """Raise TargetError unless the target has TMA, and ArgumentError unless the ring fits in shared memory."""
        target.require("tma", "the tile copy")
        self.ring.check_fits(target)


def tile_copy(src: Any, dst: Any, *, stages: int = 4, stream: Any = None, backend: str | None = None) -> Any:
    """Copy a 2D array to another array with TMA.

    Parameters
    ----------
    src, dst : array (rows, columns)
        The source and the result, with the same shape and dtype and on the same device: CuPy arrays, torch tensors, or
        objects that support DLPack or ``__cuda_array_interface__``. The emulator also accepts NumPy arrays. Rows must
        be contiguous, their pitch and length must be multiples of 16 bytes, and elements must have 1, 2, 4 or 8 bytes.
    stages : int, default 4
        Number of boxes in flight, at least 2.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the source's library.
    backend : str, optional
        Where to run: ``"cuda"``, ``"emulator"``, ``"reference"`` or ``"auto"``; see ``marlin_gemm``.

    Returns
    -------
    array
        The result.

    Raises
    ------
    ArgumentError, ArgumentTypeError, DescriptorError, LaunchError, TargetError, CompileError, DriverError, HazardError
        If an argument is invalid or the kernel cannot run; see ``copy``.
    """
    return run(TILE_COPY, (src,), dst, as_key(stages), stream=stream, backend=backend)


class _Problem(NamedTuple):
    src: ArrayInfo
    out: ArrayInfo
    stages: int


class TileCopy(Movement[_Problem]):
    """Operation of tile_copy(), whose option is the number of stages. The result is dst."""

    name: ClassVar[str] = "tile_copy"

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], resource: Any) -> Checked[_Problem]:
        info, into = described(inputs[0], "src"), described(out, "dst")
        if len(info.shape) != 2:
            raise ArgumentError("src.shape", info.shape, "(rows, columns)")
        if (info.shape, info.dtype, info.device) != (into.shape, into.dtype, into.device):
            got, allowed = (f"{array.shape} of {array.dtype} on {place_name(array.device)}" for array in (into, info))
            raise ArgumentError("dst", got, f"{allowed} to match src")
        check_written(into, info, "dst")
        stages = checked_count(options[0], "stages", "an int, at least 2")
        # The reference backend also rejects a ring that fits on no target.
        largest = max(TARGETS.values(), key=lambda target: target.smem_per_block_bytes)
        TileCopyConfig(info.dtype.itemsize, stages=stages).ring.check_fits(largest)
        return checked(_Problem, (info,), into, into.shape, stages)

    def plan(self, problem: _Problem, limits: LaunchLimits) -> tuple[Arguments, ...]:
        return (plan_tiles(problem.src, problem.out, limits, problem.stages),)

    def reference(self, problem: _Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        host_array(arrays["out"])[...] = host_array(arrays["src"])


TILE_COPY = TileCopy()


def plan_tiles(src: ArrayInfo, dst: ArrayInfo, limits: LaunchLimits, stages: int = 4) -> Arguments:
    """Return the launch for two arrays of the same shape and dtype. Raises ArgumentError or DescriptorError."""
    config = TileCopyConfig(src.dtype.itemsize, stages=stages)
    box = config.box_rows, config.box_columns
    load, store = tensor_map("src", src, box, limits), tensor_map("out", dst, box, limits)
    check_store(store.spec)  # A store would write past a row that ends inside a 16-byte chunk.
    tiles_y, tiles_x = -(-src.shape[0] // config.box_rows), -(-src.shape[1] // config.box_columns)
    sizes = Sizes(min(limits.ctas, tiles_x * tiles_y))
    return Arguments(TEMPLATE, config, (load, store, tiles_x, tiles_y), sizes)


def dump_configs(target: Target) -> list[TileCopyConfig]:
    """Return the representative config, or an empty list if the target has no TMA."""
    return [TileCopyConfig(4)] if target.has("tma") else []


def sample(
    target: Target, *, rows: int = 300, columns: int = 200, dtype: str = "float32", stages: int = 4, blocks: int = 2
) -> Sample:
    """Return a copy of a random array with at most ``blocks`` CTAs, for `cudatma emulate tile_copy`."""
    kind = sample_dtype(dtype)
    if min(rows, columns, blocks) < 1:
        raise ArgumentError("rows, columns, blocks", (rows, columns, blocks), "at least 1 each")
    src = np.random.default_rng(0).integers(0, 100, (rows, columns)).astype(kind)
    dst = np.zeros_like(src)
    arrays = {"src": describe(src), "out": describe(dst)}
    planned = plan_tiles(arrays["src"], arrays["out"], LaunchLimits(target, blocks), stages)
    planned.config.check_target(target)
    grid = f"{counted(int(np.prod(planned.sizes.grid)), 'block')} of {planned.config.threads} threads"
    title = f"tile copy, {rows} x {columns} {kind}, {grid}"
    run_once = partial(planned.emulate, target, arrays)
    return Sample(title, planned.kernel(target), run_once, lambda: float((src != dst).mean()), 0.0)
