"""The numbers that one launch hands to a Marlin kernel, besides its tensor maps and pointers. Pure."""

from __future__ import annotations

import ctypes

import numpy as np

from cudatma.dtypes import activation_type
from cudatma.kernels.marlin.staged_tile import StagedTile
from cudatma.kernels.schedule import DivisorStruct, Schedule, ceil_div
from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO

_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64
#: Rows of x of a raster group of tiles, which a wave walks through one column of tiles after the other: L2 then serves
#: both operands.
_RASTER_GROUP_M = 2048


class ProblemStruct(ctypes.Structure):
    """``cudatma::Problem`` of parts/marlin_problem.cuh.j2, member for member."""

    _fields_ = (
        *((name, _U32) for name in ("m", "n", "k", "tiles_m", "tiles_n", "raster_m", "k_iterations")),
        *((name, _U32) for name in ("weight_rows", "weight_row_blocks", "scale_rows", "scale_pitch")),
        *((name, _U32) for name in ("stream_tiles", "stream_units", "stream_extra", "output_vectors", "shares")),
        *((name, _U32) for name in ("prefetch_stages", "scale_offset")),
        ("scale_back", ctypes.c_float),
        *(
            (name, DivisorStruct)
            for name in ("by_k_iterations", "by_raster_group", "by_raster_group_rows", "by_last_rows")
        ),
        ("padding", _U32),
        ("activation_pitch", _U64),
        ("output_pitch", _U64),
    )


def fill_problem(
    problem: ProblemStruct,
    spec: StagedTile,
    plan: Schedule,
    m: int,
    n: int,
    k: int,
    scale_rows: int,
    *,
    programmatic: bool = False,
    scale_exponent: int = 0,
) -> None:
    """Write everything but the pitches, which change from call to call. programmatic: a dependent launch.
    scale_exponent: p of 2^-p, which a fused kernel takes scales times (``PackedWeight.scale_fit``)."""
    problem.m, problem.n, problem.k = m, n, k
    problem.tiles_m, problem.tiles_n, problem.k_iterations = plan.tiles_m, plan.tiles_n, plan.k_iterations
    problem.raster_m = raster_group = min(max(1, _RASTER_GROUP_M // spec.block_m), plan.tiles_m)
    problem.by_k_iterations = DivisorStruct.of(plan.k_iterations)
    problem.by_raster_group = DivisorStruct.of(raster_group * plan.tiles_n)
    problem.by_raster_group_rows = DivisorStruct.of(raster_group)
    problem.by_last_rows = DivisorStruct.of((plan.tiles_m - 1) % raster_group + 1)
    problem.weight_row_blocks = ceil_div(k, 64)
    problem.weight_rows = ceil_div(n, 64) * problem.weight_row_blocks
    problem.scale_rows, problem.scale_pitch = scale_rows, 64 * ceil_div(n, 64)
    problem.stream_tiles = plan.stream_tiles
    problem.stream_units, problem.stream_extra = divmod(plan.stream_units, plan.shares)
    problem.shares = plan.shares
    problem.prefetch_stages = spec.prefetch_stages(k * n // 2) if programmatic else 0
    offset = np.array(-SYMMETRIC_ZERO * 2.0**-scale_exponent, activation_type(spec.dtype).numpy).view(np.uint16)
    problem.scale_offset = int(offset) << 16 | int(offset)
    problem.scale_back = 2.0**scale_exponent
