"""Prefetch an array, or a window of an array, into L2. The operation does not signal its completion.

[PTX ISA, cp.async.bulk.prefetch, cp.async.bulk.prefetch.tensor]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import Arguments, At, Sizes
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.data_movement.checks import as_key, described
from cudatma.kernels.data_movement.configs import coordinates
from cudatma.kernels.data_movement.copy import check_window, part_of
from cudatma.kernels.data_movement.movement import LaunchLimits, Movement, layout
from cudatma.kernels.data_movement.plans import tensor_map
from cudatma.kernels.data_movement.ring import SLOT_BYTES, THREADS
from cudatma.kernels.data_movement.window import Axis, Window, carried, choose_box, simplify, tile_counts
from cudatma.kernels.engine import run
from cudatma.kernels.operation import Checked
from cudatma.target import Target

TEMPLATE = "kernels/prefetch.cu.j2"


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    """A configuration of ``kernels/prefetch.cu.j2``.

    Attributes
    ----------
    rank : int
        Number of axes of the tensor map, 1 to 5, or 0 for a run of bytes.
    segment_bytes : int
        Bytes per segment of a run, a multiple of 16.

    Raises
    ------
    ArgumentError
        If a field is invalid.
    """

    rank: int
    segment_bytes: int = SLOT_BYTES
    entry: str = "prefetch"

    def __post_init__(self) -> None:
        check_field_types(self)
        if not 0 <= self.rank <= 5:
            raise ArgumentError("rank", self.rank, "0 to 5")
        if self.segment_bytes < TMA_ALIGNMENT_BYTES or self.segment_bytes % TMA_ALIGNMENT_BYTES:
            raise ArgumentError("segment_bytes", self.segment_bytes, f"a multiple of {TMA_ALIGNMENT_BYTES}")

    @property
    def at(self) -> str:
        """Names of the coordinates."""
        return coordinates(self.rank)

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def smem_bytes(self) -> int:
        return 0

    def check_target(self, target: Target) -> None:
        """Raise TargetError unless the target has TMA."""
        target.require("tma", self.entry)


def prefetch(
    src: Any,
    *,
    offset: Sequence[int] | None = None,
    shape: Sequence[int] | None = None,
    stream: Any = None,
    backend: str | None = None,
) -> None:
    """Prefetch an array, or a window of an array, into L2 without waiting for completion.

    Parameters
    ----------
    src : array
        The array; see ``copy``. If the window is one run of bytes, only complete 16-byte chunks are prefetched.
        Otherwise, the address and the pitches must be multiples of 16 bytes, and rows must be contiguous.
    offset, shape : sequence of int, optional
        The window; see ``copy``. It must be inside the source.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the source's library.
    backend : str, optional
        Where to run; see ``marlin_gemm``. The emulator checks the addresses; ``"reference"`` does nothing.

    Raises
    ------
    ArgumentError, ArgumentTypeError, DescriptorError, LaunchError, TargetError, CompileError, DriverError, HazardError
        If an argument is invalid, if TMA cannot read the window, or if the kernel cannot run; see ``copy``.
    """
    run(PREFETCH, (src,), None, as_key(offset, shape), stream=stream, backend=backend)


class _Problem(NamedTuple):
    src: ArrayInfo
    starts: tuple[int, ...]
    extents: tuple[int, ...]


class Prefetch(Movement[_Problem]):
    """Operation of prefetch(), with the options offset and shape and no result."""

    name: ClassVar[str] = "prefetch"

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], resource: Any) -> Checked[_Problem]:
        info, (offset, shape) = described(inputs[0], "src"), options
        window = check_window(info, offset, shape, None)
        return Checked(_Problem(layout(info), *window), (info,), None, None, None)

    def plan(self, problem: _Problem, limits: LaunchLimits) -> tuple[Arguments, ...]:
        """Return the launch, or an empty tuple for a run without a complete 16-byte chunk.

        Raises DescriptorError if TMA cannot read the window.
        """
        src = problem.src
        part = part_of(src, problem.starts, problem.extents)
        if not part.size_elems:
            return ()
        axes = tuple(Axis(0, n, n, s, s) for n, s in zip(part.shape, part.strides_bytes, strict=True))
        window = simplify(Window(part.pointer, part.pointer, part.dtype.itemsize, axes))
        if window.is_one_run:
            first = -(-window.source // TMA_ALIGNMENT_BYTES) * TMA_ALIGNMENT_BYTES
            nbytes = (window.source + window.nbytes - first) // TMA_ALIGNMENT_BYTES * TMA_ALIGNMENT_BYTES
            if nbytes <= 0:
                return ()
            grid = min(limits.ctas, -(-nbytes // SLOT_BYTES))
            return (Arguments(TEMPLATE, PrefetchConfig(0), (At("src", first - src.pointer), nbytes), Sizes(grid)),)
        window = carried(window) if window.is_dense else window
        extents = tuple(axis.extent for axis in window.axes)
        box = choose_box(extents, window.itemsize, SLOT_BYTES)
        strides = tuple(axis.source_stride for axis in window.axes)
        source = replace(
            part,
            pointer=window.source,
            shape=extents,
            strides_bytes=strides,
            dtype=np.dtype(f"uint{8 * window.itemsize}"),
        )
        tiles = tile_counts(extents, box)
        places = [value for pair in zip(reversed(box), reversed(tiles), strict=True) for value in pair]
        load = tensor_map("src", source, box, limits, offset_bytes=window.source - src.pointer)
        sizes = Sizes(min(limits.ctas, prod(tiles)))
        return (Arguments(TEMPLATE, PrefetchConfig(len(box)), (load, *places, prod(tiles)), sizes),)

    def reference(self, problem: _Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        """Do nothing, because a prefetch has no result."""


PREFETCH = Prefetch()


def dump_configs(target: Target) -> list[PrefetchConfig]:
    """Return the configs for dumps and compile checks, or an empty list if the target cannot run them."""
    return [PrefetchConfig(3)] if target.has("tma") else []
