"""The numbers that one launch passes to a Marlin kernel, besides its tensor maps and pointers. Pure.

Every member that ``cudatma::Problem`` may have is in ``MEMBERS``. ``problem_members`` of a spec are those that its
kernel reads, and ``problem_values()`` computes them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from cudatma.dtypes import activation_type
from cudatma.kernels.launch_struct import Member
from cudatma.kernels.schedule import DivisorStruct, Schedule, ceil_div
from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO

#: Rows of x of a raster group of tiles, which a wave walks through one column of tiles after the other: L2 then serves
#: both operands.
_RASTER_GROUP_M = 2048

MEMBERS = (
    Member("m", "u32", "rows of the activations and of the result"),
    Member("n", "u32", "columns of the weight and of the result"),
    Member("k", "u32", "columns of the activations, rows of the weight"),
    Member("tiles_m", "u32", "output tiles along M"),
    Member("tiles_n", "u32", "output tiles along N, each of one CTA or cluster"),
    Member("raster_m", "u32", "rows of tiles of a raster group"),
    Member("k_iterations", "u32", "stages that one tile takes"),
    Member("work_ranges", "u32", "what the work is divided into: one range a cluster, or a CTA without clusters"),
    Member("stream_tiles", "u32", "the first tiles, which are divided among all work ranges"),
    Member("stream_stages", "u32", "stages of them in every work range ..."),
    Member("stream_extra", "u32", "... and the number of ranges that have one more: the first ones"),
    Member("weight_rows", "u32", "64 x 64 blocks of packed weights"),
    Member("weight_row_blocks", "u32", "of them, blocks along K"),
    Member("scale_rows", "u32", "groups of scales along K"),
    Member("scale_pitch", "u32", "columns of a row of scales, padded"),
    Member("output_vectors", "u32", "1: every row of the result is aligned to 16 bytes"),
    Member("prefetch_stages", "u32", "stages whose weights a dependent launch loads before it waits"),
    Member("scale_offset", "u32", "-8 2^-p in both halves: scales are multiplied by it"),
    Member("scale_back", "float", "2^p: sums are multiplied by it"),
    Member("by_k_iterations", "Divisor", "divides by k_iterations"),
    Member("by_raster_group", "Divisor", "divides by the tiles of a raster group"),
    Member("by_raster_group_rows", "Divisor", "divides by raster_m"),
    Member("by_last_rows", "Divisor", "divides by the rows of tiles of the last raster group"),
    Member("activation_pitch", "u64", "elements from one row to the next"),
    Member("output_pitch", "u64", "elements from one row to the next"),
)
#: What parts/schedule.cuh.j2 reads.
RASTER = ("tiles_m", "tiles_n", "raster_m", "by_raster_group", "by_raster_group_rows", "by_last_rows")
STREAM_K = ("k_iterations", "work_ranges", "stream_tiles", "stream_stages", "stream_extra", "by_k_iterations", *RASTER)
#: What parts/epilogue.cuh.j2 reads.
RESULT = ("m", "n", "output_vectors", "output_pitch")


class ProblemSpec(Protocol):
    """What the numbers depend on, of a spec."""

    @property
    def dtype(self) -> str: ...
    @property
    def block_m(self) -> int: ...
    def prefetch_stages(self, weight_bytes: int) -> int: ...


def members(names: Iterable[str]) -> tuple[Member, ...]:
    """The members of these names, in the order of ``MEMBERS``."""
    wanted = set(names)
    return tuple(member for member in MEMBERS if member.name in wanted)


def problem_values(
    spec: ProblemSpec,
    plan: Schedule,
    m: int,
    n: int,
    k: int,
    scale_rows: int,
    *,
    activation_pitch: int = 0,
    output_pitch: int = 0,
    output_vectors: bool = False,
    programmatic: bool = False,
    scale_exponent: int = 0,
) -> dict[str, Any]:
    """Every member's value by name.

    activation_pitch, output_pitch: elements. output_vectors: whether the result's rows are aligned to 16 bytes.
    programmatic: a dependent launch. scale_exponent: p of 2^-p, which a fused kernel takes scales times
    (``PackedWeight.scale_fit``).
    """
    raster_m, weight_row_blocks = min(max(1, _RASTER_GROUP_M // spec.block_m), plan.tiles_m), ceil_div(k, 64)
    stream_stages, stream_extra = divmod(plan.stream_units, plan.shares)
    offset = np.array(-SYMMETRIC_ZERO * 2.0**-scale_exponent, activation_type(spec.dtype).numpy).view(np.uint16)
    return {
        "m": m,
        "n": n,
        "k": k,
        "tiles_m": plan.tiles_m,
        "tiles_n": plan.tiles_n,
        "raster_m": raster_m,
        "k_iterations": plan.k_iterations,
        "work_ranges": plan.shares,
        "stream_tiles": plan.stream_tiles,
        "stream_stages": stream_stages,
        "stream_extra": stream_extra,
        "weight_rows": ceil_div(n, 64) * weight_row_blocks,
        "weight_row_blocks": weight_row_blocks,
        "scale_rows": scale_rows,
        "scale_pitch": 64 * ceil_div(n, 64),
        "output_vectors": int(output_vectors),
        "prefetch_stages": spec.prefetch_stages(k * n // 2) if programmatic else 0,
        "scale_offset": int(offset) << 16 | int(offset),
        "scale_back": 2.0**scale_exponent,
        "by_k_iterations": DivisorStruct.of(plan.k_iterations),
        "by_raster_group": DivisorStruct.of(raster_m * plan.tiles_n),
        "by_raster_group_rows": DivisorStruct.of(raster_m),
        "by_last_rows": DivisorStruct.of((plan.tiles_m - 1) % raster_m + 1),
        "activation_pitch": activation_pitch,
        "output_pitch": output_pitch,
    }
