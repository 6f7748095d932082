"""The numbers that one launch hands to the Marlin kernel: how a problem is cut into tiles and shares. Pure."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.marlin.stage import StagedTile
from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO

_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64
#: Units are counted in 32 bits on the device, with room for share arithmetic.
_MAX_UNITS = 2**31 - 1
#: Rows of x of a raster group of tiles, which a wave walks through channel by channel: L2 then serves both operands.
_RASTER_GROUP_M = 2048


class DivisorStruct(ctypes.Structure):
    """``cudatma::Divisor``: what divides 0 .. 2^31 - 1 by ``d`` with a multiplication.

    [Granlund, Montgomery, "Division by Invariant Integers using Multiplication", theorem 4.2]
    """

    _fields_ = (("multiplier", _U32), ("shift", _U32))

    @classmethod
    def of(cls, d: int) -> DivisorStruct:
        """For 1 <= d < 2^31. The multiplier is 2^(31 + shift) / d, rounded up; 2^shift is at least d."""
        shift = (d - 1).bit_length()
        return cls(ceil_div(1 << (31 + shift), d), shift)


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


@dataclass(frozen=True, slots=True)
class Schedule:
    """How many blocks work, and which tiles they share.

    blocks: grid size. A tile is what a cluster of ``cluster`` blocks computes at a time, side by side in N.
    stream_tiles: tiles whose depth is divided among all clusters; the rest is dealt out whole.
    shares: clusters. partial_blocks: blocks that need a slot in the workspace (0: no tile is divided).
    """

    blocks: int
    tiles_m: int
    tiles_n: int
    k_iterations: int
    stream_tiles: int
    cluster: int = 1

    @property
    def shares(self) -> int:
        return self.blocks // self.cluster

    @property
    def stream_units(self) -> int:
        return self.stream_tiles * self.k_iterations

    @property
    def partial_blocks(self) -> int:
        return self.blocks if self.stream_tiles else 0


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Longest:
    """Stages of the longest share. whole: where every tile is dealt out whole. before, divided: where the tiles that
    fill no wave are divided, together with a full wave if there is one: of whole tiles, and of divided ones. others:
    blocks that then share a tile with the one that stores it."""

    whole: int
    before: int
    divided: int
    others: int


def longest_share(tiles: int, resident: int, depth: int) -> Longest:
    """Of so many tiles of ``depth`` stages, for ``resident`` blocks or clusters at a time."""
    waves, rest = divmod(tiles, resident)
    divided = ceil_div((rest + min(waves, 1) * resident) * depth, resident)
    others = 1 if waves else ceil_div(resident, tiles)
    return Longest(ceil_div(tiles, resident) * depth, max(0, waves - 1) * depth, divided, others)


def schedule(
    spec: StagedTile,
    m: int,
    n: int,
    k: int,
    resident_blocks: int,
    *,
    divide: bool = True,
    eager: bool = False,
) -> Schedule:
    """Cut an (m, n, k) problem for ``resident_blocks`` blocks (whole clusters of them) that run at the same time.

    Full waves of tiles are dealt out whole, and so is the rest where dividing it would not pay (``spec.division()``).
    Else it is divided by depth together with one full wave, so that every cluster gets the same number of stages and no
    share is shorter than a tile (unless there is less than one wave altogether). divide: False deals every tile out
    whole, as batch invariance wants. eager: divide as soon as partial sums are fewer bytes than what is saved, as small
    problems want that are to show it.
    """
    if not spec.partial_bytes:  # a block, or a cluster, a tile, in waves where there are more
        if ceil_div(k, spec.block_k) < spec.cluster_k:
            raise ArgumentError("spec.cluster_k", spec.cluster_k, f"at most {ceil_div(k, spec.block_k)}, K's stages")
        return Schedule(
            ceil_div(m, spec.block_m) * ceil_div(n, spec.block_n) * spec.launch_cluster,
            ceil_div(m, spec.block_m),
            ceil_div(n, spec.block_n),
            ceil_div(k, spec.block_k),
            0,
        )
    cluster = spec.cluster
    resident = max(1, resident_blocks // cluster)
    tiles_m, tiles_n = ceil_div(m, spec.block_m), ceil_div(n, spec.block_n * cluster)
    tiles, k_iterations = tiles_m * tiles_n, ceil_div(k, spec.block_k)
    if tiles * k_iterations > _MAX_UNITS:
        raise ArgumentError("x.shape[0]", m, f"at most {_MAX_UNITS} stages altogether", "split the batch")
    longest = longest_share(tiles, resident, k_iterations)
    once, each = StagedTile.division(spec, longest.others) if eager else spec.division(longest.others)
    if not divide or longest.whole <= longest.before + longest.divided * each + once:
        shares, stream_tiles = min(resident, tiles), 0
    elif tiles >= resident:
        shares, stream_tiles = resident, tiles % resident + resident
    else:
        # Fewer shares often take no longer: the longest stays the same, and fewer tiles are divided.
        shares, stream_tiles = ceil_div(tiles * k_iterations, longest.divided), tiles
    return Schedule(shares * cluster, tiles_m, tiles_n, k_iterations, stream_tiles, cluster)


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
