"""Tensor copies that the hardware stops. The rules are in ``descriptor.access``; here they become BoxError."""

from __future__ import annotations

from collections.abc import Sequence

from cudatma.descriptor.access import REDUCE_TYPES, check_traps, check_write_traps
from cudatma.descriptor.spec import TiledSpec
from cudatma.emulator.async_copy.tensor_box import BoxError, MapSpec
from cudatma.errors import DescriptorError
from cudatma.layout import Swizzle

#: Modes that name four rows of a two-dimensional tensor. [PTX ISA, cp.async.bulk.tensor; sm_100 and up]
FOUR_ROWS = ("tile::gather4", "tile::scatter4")


def check_load(spec: MapSpec, coords: Sequence[int], mode: str) -> None:
    """A load or a prefetch. mode: ``"tile"`` or ``"im2col"``, the instruction's. Raises BoxError."""
    _check_instruction(spec, coords, mode)
    try:
        check_traps(spec, coords[:2] if mode in FOUR_ROWS else coords)
    except DescriptorError as error:
        raise BoxError(str(error)) from error


def check_store(spec: MapSpec, coords: Sequence[int], mode: str, operation: str) -> None:
    """A store, or a reduction where ``operation`` names one. Raises BoxError."""
    _check_instruction(spec, coords, mode)
    if operation and spec.dtype.name not in REDUCE_TYPES[operation]:
        raise BoxError(f"reduction .{operation} on a tensor map of {spec.dtype.name}")
    if spec.swizzle is Swizzle.B128_ATOM_32B_FLIP_8B:
        raise BoxError("a store through a 128B_ATOM_32B_FLIP_8B map")
    try:
        for row in coords[1:] if mode in FOUR_ROWS else ():
            check_write_traps(spec, (coords[0], row))
        if mode not in FOUR_ROWS:
            check_write_traps(spec, coords)
    except DescriptorError as error:
        raise BoxError(str(error)) from error


def _check_instruction(spec: MapSpec, coords: Sequence[int], mode: str) -> None:
    """Rank and mode of the instruction are the map's."""
    if mode in FOUR_ROWS:
        if not isinstance(spec, TiledSpec) or spec.rank != 2 or spec.box[1] != 1:
            raise BoxError(f".{mode} wants a tiled map of rank 2 whose box is one row high")
        coords, mode = coords[:2], "tile"
    if len(coords) != spec.rank:
        raise BoxError(f"{len(coords)} coordinates for a tensor map of rank {spec.rank}")
    is_tiled = isinstance(spec, TiledSpec)
    if is_tiled != (mode == "tile"):
        raise BoxError(f"{'a tiled' if is_tiled else 'an im2col'} tensor map in mode .{mode}")
