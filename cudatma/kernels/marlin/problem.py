"""The numbers that one launch hands to the Marlin kernel: how a problem is cut into tiles and shares. Pure."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from cudatma.errors import ArgumentError
from cudatma.kernels.marlin.spec import MarlinSpec

_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64
#: Units are counted in 32 bits on the device, with room for share arithmetic.
_MAX_UNITS = 2**31 - 1
#: Tokens of a band that is walked through before the next channel tile: both operands of a wave stay in L2.
_RASTER_TOKENS = 2048


class ProblemStruct(ctypes.Structure):
    """``cudatma::Problem`` of parts/marlin_constants.cuh.j2, member for member."""

    _fields_ = (
        *((name, _U32) for name in ("m", "n", "k", "tiles_m", "tiles_n", "raster_m", "k_iterations")),
        *((name, _U32) for name in ("weight_rows", "weight_row_blocks", "scale_rows", "scale_pitch")),
        *((name, _U32) for name in ("stream_tiles", "stream_units", "stream_extra", "output_vectors", "padding")),
        ("activation_pitch", _U64),
        ("output_pitch", _U64),
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """How many blocks work, and which tiles they share.

    blocks: grid size. stream_tiles: tiles whose depth is divided among all blocks; the rest is dealt out whole.
    partial_blocks: blocks that need a slot in the workspace (0: no tile is divided).
    """

    blocks: int
    tiles_m: int
    tiles_n: int
    k_iterations: int
    stream_tiles: int

    @property
    def stream_units(self) -> int:
        return self.stream_tiles * self.k_iterations

    @property
    def partial_blocks(self) -> int:
        return self.blocks if self.stream_tiles else 0


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def schedule(spec: MarlinSpec, m: int, n: int, k: int, resident_blocks: int) -> Schedule:
    """Cut an (m, n, k) problem for ``resident_blocks`` blocks that run at the same time.

    Full waves of tiles are dealt out whole, and so is the rest where dividing it would not pay. Else it is divided by
    depth together with one full wave, so that every block gets the same number of stages and no share is shorter than
    a tile (unless there is less than one wave altogether).
    """
    tiles_m, tiles_n, k_iterations = ceil_div(m, spec.block_m), ceil_div(n, spec.block_n), ceil_div(k, spec.block_k)
    tiles = tiles_m * tiles_n
    if tiles * k_iterations > _MAX_UNITS:
        raise ArgumentError("x.shape[0]", m, f"at most {_MAX_UNITS} stages altogether", "split the batch")
    waves, rest = divmod(tiles, resident_blocks)
    whole_stages = ceil_div(tiles, resident_blocks) * k_iterations
    # Partial sums go out and come in again: that takes about as long as stages of as many bytes.
    division_stages = spec.partial_bytes // (spec.weight_stage_bytes + spec.activation_stage_bytes)
    if whole_stages <= ceil_div(tiles * k_iterations, resident_blocks) + division_stages:
        return Schedule(min(resident_blocks, tiles), tiles_m, tiles_n, k_iterations, 0)
    if waves:
        return Schedule(resident_blocks, tiles_m, tiles_n, k_iterations, rest + resident_blocks)
    # Fewer blocks often take no longer: the longest share stays the same, and fewer tiles are divided.
    units = rest * k_iterations
    blocks = ceil_div(units, ceil_div(units, resident_blocks))
    return Schedule(blocks, tiles_m, tiles_n, k_iterations, rest)


def fill_problem(
    problem: ProblemStruct, spec: MarlinSpec, plan: Schedule, m: int, n: int, k: int, scale_rows: int
) -> None:
    """Write everything but the pitches, which change from call to call."""
    problem.m, problem.n, problem.k = m, n, k
    problem.tiles_m, problem.tiles_n, problem.k_iterations = plan.tiles_m, plan.tiles_n, plan.k_iterations
    problem.raster_m = max(1, _RASTER_TOKENS // spec.block_m)
    problem.weight_row_blocks = ceil_div(k, 64)
    problem.weight_rows = ceil_div(n, 64) * problem.weight_row_blocks
    problem.scale_rows, problem.scale_pitch = scale_rows, 64 * ceil_div(n, 64)
    problem.stream_tiles = plan.stream_tiles
    problem.stream_units, problem.stream_extra = divmod(plan.stream_units, plan.blocks)
