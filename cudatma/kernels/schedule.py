"""How a problem is cut into tiles, and tiles into the work ranges of CTAs: waves, stream-K, cluster split-K. Pure."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

from cudatma.errors import ArgumentError

_U32 = ctypes.c_uint32
#: Units are counted in 32 bits on the device, with room for share arithmetic.
_MAX_UNITS = 2**31 - 1
#: Most fp32 partial sums that the CTAs of one SM leave in a workspace: a tile of 128 x 256.
PARTIALS_PER_SM_BYTES = 128 * 256 * 4
#: Room for the flags of one SM's CTAs: up to 4 CTAs of 16 warp tiles.
FLAGS_PER_SM_BYTES = 4 * 16 * 4


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


class TiledSpec(Protocol):
    """What a spec tells of its tile.

    block_m, block_n, block_k: of one CTA and one stage. cluster: CTAs side by side in N. cluster_k: CTAs that divide K.
    launch_cluster: CTAs of a cluster of the launch. partial_bytes: fp32 sums that one CTA may leave in the workspace, 0
    where tiles are never divided. warp_tiles: parts of a tile that have a flag of their own there. loaded_stage_bytes:
    what one CTA loads for a stage. division(others): in stages of whole tiles, what dividing tiles costs a CTA once,
    and what a stage of a divided tile takes; others: CTAs that share a tile with the one that stores it.
    """

    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def block_k(self) -> int: ...
    @property
    def cluster(self) -> int: ...
    @property
    def cluster_k(self) -> int: ...
    @property
    def launch_cluster(self) -> int: ...
    @property
    def partial_bytes(self) -> int: ...
    @property
    def warp_tiles(self) -> int: ...
    @property
    def loaded_stage_bytes(self) -> int: ...
    def division(self, others: int) -> tuple[float, float]: ...


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
    def work_ranges(self) -> int:
        return self.blocks // self.cluster

    @property
    def stream_units(self) -> int:
        return self.stream_tiles * self.k_iterations

    @property
    def partial_blocks(self) -> int:
        return self.blocks if self.stream_tiles else 0


def fits_workspace(spec: TiledSpec, ctas_per_sm: int) -> bool:
    """Whether a workspace holds the partial sums and flags of so many CTAs on every SM."""
    partials, flags = ctas_per_sm * spec.partial_bytes, ctas_per_sm * spec.warp_tiles * 4
    return partials <= PARTIALS_PER_SM_BYTES and flags <= FLAGS_PER_SM_BYTES


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


def longest_range(tiles: int, resident: int, depth: int) -> Longest:
    """Of so many tiles of ``depth`` stages, for ``resident`` blocks or clusters at a time."""
    waves, rest = divmod(tiles, resident)
    divided = ceil_div((rest + min(waves, 1) * resident) * depth, resident)
    others = 1 if waves else ceil_div(resident, tiles)
    return Longest(ceil_div(tiles, resident) * depth, max(0, waves - 1) * depth, divided, others)


def schedule(
    spec: TiledSpec,
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
    longest = longest_range(tiles, resident, k_iterations)
    by_bytes = spec.partial_bytes // spec.loaded_stage_bytes, 1.0
    once, each = by_bytes if eager else spec.division(longest.others)
    if not divide or longest.whole <= longest.before + longest.divided * each + once:
        shares, stream_tiles = min(resident, tiles), 0
    elif tiles >= resident:
        shares, stream_tiles = resident, tiles % resident + resident
    else:
        # Fewer shares often take no longer: the longest stays the same, and fewer tiles are divided.
        shares, stream_tiles = ceil_div(tiles * k_iterations, longest.divided), tiles
    return Schedule(shares * cluster, tiles_m, tiles_n, k_iterations, stream_tiles, cluster)
