"""Divide a problem into tiles, and assign the tiles to CTAs in waves, by stream-K, or by split-K in a cluster."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, overload

from cudatma.errors import ArgumentError

_U32 = ctypes.c_uint32
#: Maximum number of work units. Their indices have 32 bits on the device, and the sum of two indices must not overflow.
_MAX_UNITS = 2**31 - 1
#: Maximum number of bytes of fp32 partial sums per SM in a workspace, enough for a tile of 128 x 256.
PARTIALS_PER_SM_BYTES = 128 * 256 * 4
#: Number of bytes of flags per SM, enough for 4 CTAs of 16 warp tiles.
FLAGS_PER_SM_BYTES = 4 * 16 * 4


class DivisorStruct(ctypes.Structure):
    """The device struct ``cudatma::Divisor``, which divides numbers below 2^31 by ``d`` with a multiplication.

    [Granlund, Montgomery, "Division by Invariant Integers using Multiplication", theorem 4.2]
    """

    _fields_ = (("multiplier", _U32), ("shift", _U32))


def divisor(d: int) -> tuple[int, int]:
    """Return (multiplier, shift) of a DivisorStruct for 1 <= d < 2^31.

    The multiplier is 2^(31 + shift) / d, rounded up, where 2^shift is at least d.
    """
    shift = (d - 1).bit_length()
    return -(-(1 << (31 + shift)) // d), shift


class TiledConfig(Protocol):
    """Members of a config that whole_tiles() reads.

    Attributes
    ----------
    tile_k : int
        Number of elements of K per stage.
    cluster : int
        Number of CTAs per cluster that share loads.
    cluster_tile_m, cluster_tile_n : int
        Tile size of the cluster.
    cluster_k : int
        Number of CTAs that split K.
    launch_cluster : int
        Number of CTAs per cluster in the launch.
    is_persistent : bool
        Whether a CTA computes several tiles.
    """

    @property
    def tile_k(self) -> int: ...
    @property
    def cluster(self) -> int: ...
    @property
    def cluster_tile_m(self) -> int: ...
    @property
    def cluster_tile_n(self) -> int: ...
    @property
    def cluster_k(self) -> int: ...
    @property
    def launch_cluster(self) -> int: ...


class DividingConfig(TiledConfig, Protocol):
    """Members of a config that schedule() reads.

    Attributes
    ----------
    partial_bytes : int
        Maximum bytes of fp32 sums that one CTA stores in the workspace, or 0 if tiles are never divided.
    loaded_stage_bytes : int
        Bytes that one CTA loads per stage.
    division(others, tiles_m)
        Returns a CTA's one-time cost of dividing tiles, and the time of a stage of a divided tile, both in units of the
        time of a stage of a whole tile. ``others`` is the number of CTAs that share a tile with the CTA that stores it,
        and ``tiles_m`` is the number of rows of tiles.
    """

    @property
    def partial_bytes(self) -> int: ...
    @property
    def loaded_stage_bytes(self) -> int: ...
    def division(self, others: int, tiles_m: int) -> tuple[float, float]: ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """The number of CTAs, and the division of tiles into work ranges.

    Attributes
    ----------
    ctas : int
        Grid size.
    tiles_m, tiles_n : int
        Number of output tiles along M and N. The CTAs of a cluster compute adjacent tiles at the same time.
    k_iterations : int
        Number of stages per tile.
    stream_tiles : int
        Number of tiles whose K is split among all clusters. All other tiles are assigned whole.
    cluster : int
        Number of CTAs per cluster.
    work_ranges : int
        Number of clusters.
    stream_units : int
        Total number of stages of the divided tiles.
    partial_ctas : int
        Number of CTAs with a slot in the workspace, or 0 if no tile is divided.
    """

    ctas: int
    tiles_m: int
    tiles_n: int
    k_iterations: int
    stream_tiles: int
    cluster: int = 1

    @property
    def work_ranges(self) -> int:
        return self.ctas // self.cluster

    @property
    def stream_units(self) -> int:
        return self.stream_tiles * self.k_iterations

    @property
    def partial_ctas(self) -> int:
        return self.ctas if self.stream_tiles else 0


@overload
def ceil_div(a: int, b: int) -> int: ...
@overload
def ceil_div(a: Any, b: Any) -> Any: ...
def ceil_div(a: Any, b: Any) -> Any:
    """Return a / b, rounded up, for ints or arrays of ints."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A division of tiles, and its longest work range.

    Attributes
    ----------
    stream_tiles : int
        Number of tiles whose K is split, or 0 if all tiles are whole.
    whole_stages, divided_stages : int
        Number of stages of the longest work range in whole tiles and in divided tiles.
    others : int
        Maximum number of CTAs that share a divided tile with the CTA that stores it.
    """

    stream_tiles: int
    whole_stages: int
    divided_stages: int
    others: int


def assignments(tiles: int, tiles_m: int, resident: int, k_iterations: int) -> list[Assignment]:
    """Return the possible assignments of tiles to ``resident`` CTAs or clusters.

    All CTAs or clusters run at the same time. Either all tiles are whole, or the tiles of the partial wave are divided,
    together with a full wave or alone (docs/lab/marlin.md, "The partial wave").
    """
    waves, rest = divmod(tiles, resident)

    def divided(stream_tiles: int, whole_waves: int, others: int) -> Assignment:
        stages = ceil_div(stream_tiles * k_iterations, resident)
        return Assignment(stream_tiles, whole_waves * k_iterations, stages, others)

    options = [Assignment(0, ceil_div(tiles, resident) * k_iterations, 0, 0)]
    if rest and waves:
        options.append(divided(rest + resident, waves - 1, 1))
    if rest and (not waves or tiles_m > 1):
        options.append(divided(rest, waves, ceil_div(resident, rest)))
    return options


def shortest(options: list[Assignment], division: Callable[[int], tuple[float, float]]) -> Assignment:
    """Return the first assignment whose longest work range takes the least time.

    ``division`` is DividingConfig.division() as a function of ``others``.
    """

    def stages(option: Assignment) -> float:
        if not option.stream_tiles:
            return option.whole_stages
        once, each = division(option.others)
        return option.whole_stages + option.divided_stages * each + once

    return min(options, key=stages)


def whole_tiles(config: TiledConfig, m: int, n: int, k: int, resident_ctas: int | None = None) -> Schedule:
    """Divide an (m, n, k) problem into tiles, and assign whole tiles to at most ``resident_ctas`` CTAs.

    Raises ArgumentError if K has fewer stages than the CTAs that split it.
    """
    tiles_m, tiles_n = ceil_div(m, config.cluster_tile_m), ceil_div(n, config.cluster_tile_n)
    clusters, k_iterations = tiles_m * tiles_n, ceil_div(k, config.tile_k)
    if k_iterations < config.cluster_k:
        raise ArgumentError("cluster_k", config.cluster_k, f"at most {k_iterations} (the number of stages along K)")
    if resident_ctas is not None:  # Use the fewest clusters that do not add a wave.
        clusters = ceil_div(clusters, ceil_div(clusters, max(1, resident_ctas // config.cluster)))
    return Schedule(clusters * config.launch_cluster, tiles_m, tiles_n, k_iterations, 0, config.cluster)


def schedule(
    config: DividingConfig,
    m: int,
    n: int,
    k: int,
    resident_ctas: int,
    *,
    divide: bool = True,
    eager: bool = False,
) -> Schedule:
    """Split an (m, n, k) problem among ``resident_ctas`` CTAs, in whole clusters, that run at the same time.

    Tiles of full waves are assigned whole. Tiles of the last, partial wave are also assigned whole if dividing them
    does not reduce the time (``config.division()``). Otherwise the K of these tiles is split, together with the K of
    one full wave or, if there are several rows of tiles, alone. The numbers of stages of the work ranges then differ by
    at most one.

    ``divide`` allows tiles to be divided; batch invariance requires False. ``eager`` divides tiles whenever the partial
    sums have fewer bytes than the saved loads.
    """
    if not config.partial_bytes:
        return whole_tiles(config, m, n, k)
    tiles_m, tiles_n = ceil_div(m, config.cluster_tile_m), ceil_div(n, config.cluster_tile_n)
    tiles, k_iterations, cluster = tiles_m * tiles_n, ceil_div(k, config.tile_k), config.cluster
    resident = max(1, resident_ctas // cluster)
    if tiles * k_iterations > _MAX_UNITS:
        raise ArgumentError(
            "m", m, f"small enough that all tiles together have at most {_MAX_UNITS} stages", "split the batch"
        )
    options = assignments(tiles, tiles_m, resident, k_iterations)
    by_bytes = config.partial_bytes // config.loaded_stage_bytes, 1.0
    chosen = shortest(
        options if divide else options[:1], lambda others: by_bytes if eager else config.division(others, tiles_m)
    )
    ranges = min(resident, tiles)
    if chosen.stream_tiles and tiles < resident:
        # Fewer ranges often take no longer, because the longest range stays the same and fewer tiles are divided.
        ranges = ceil_div(tiles * k_iterations, chosen.divided_stages)
    return Schedule(ranges * cluster, tiles_m, tiles_n, k_iterations, chosen.stream_tiles, cluster)
