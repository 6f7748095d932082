"""Configurations of the dense GEMM that can run a problem, and their predicted times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import ArgumentError, TargetError, quoted
from cudatma.kernels.cost import MIN_STAGES, no_kernel
from cudatma.kernels.family import Family, Option, Times
from cudatma.kernels.gemm.config import MAX_SUMS, PRESETS, VERSIONS, WITH_BLOCK_SCALES, GemmConfig
from cudatma.kernels.gemm.cost import CostModel, cost_model
from cudatma.kernels.gemm.problem import (
    EPILOGUES,
    LAYOUTS,
    OPERAND_TYPES,
    PROBLEM_FIELDS,
    RESULT_TYPES,
    SCALE_BLOCK,
    Problem,
    element_bytes,
    is_fp8,
)
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.schedule import Schedule, ceil_div
from cudatma.target import Target, get_target


class Tile(NamedTuple):
    """Fields of a configuration that the choice ranks.

    Attributes
    ----------
    k : int
        tile_k for 2-byte elements.
    for_last_wave : bool
        Whether the tile is ranked only for products with few waves.
    """

    m: int
    n: int
    warpgroups: int
    k: int = 64
    ctas_per_sm: int = 1
    for_last_wave: bool = False


#: Tiles in order of preference. Among tiles with equal predicted times, the first one wins.
_TILES = (
    Tile(m=64, n=64, k=128, warpgroups=1),
    Tile(m=64, n=64, warpgroups=1),
    Tile(m=64, n=128, warpgroups=1),
    Tile(m=64, n=128, k=128, warpgroups=1),
    Tile(m=64, n=192, warpgroups=1),
    Tile(m=64, n=256, warpgroups=1),
    Tile(m=128, n=64, k=128, warpgroups=2),
    Tile(m=128, n=128, warpgroups=2),
    Tile(m=128, n=192, warpgroups=2),
    Tile(m=128, n=256, warpgroups=2),
    Tile(m=192, n=128, warpgroups=3),
    Tile(m=256, n=128, warpgroups=2),
    Tile(m=256, n=192, warpgroups=2),
    Tile(m=256, n=208, warpgroups=2),
)
#: Tiles for the last wave. The number of columns is a multiple of 16, and each tile is the fastest for at least one
#: product. [benchmarks/results/gemm_tiles*.json]
_TILES_OF = {
    "v3": (
        *_TILES,
        Tile(m=64, n=96, warpgroups=1, for_last_wave=True),
        Tile(m=128, n=80, warpgroups=2, for_last_wave=True),
        Tile(m=128, n=208, warpgroups=2, for_last_wave=True),
        Tile(m=128, n=224, warpgroups=2, for_last_wave=True),
        Tile(m=192, n=96, warpgroups=3, for_last_wave=True),
        Tile(m=192, n=192, warpgroups=3, for_last_wave=True),
    ),
    "v4": (
        *_TILES,
        Tile(m=128, n=224, warpgroups=2, for_last_wave=True),
        Tile(m=256, n=160, warpgroups=2, for_last_wave=True),
    ),
    "v7": (Tile(m=128, n=128, warpgroups=1),),
    "mma_sync": (
        Tile(m=64, n=64, warpgroups=1),
        Tile(m=64, n=128, warpgroups=1),
        Tile(m=128, n=128, k=32, warpgroups=1),
        Tile(m=128, n=128, warpgroups=1),
        Tile(m=128, n=128, warpgroups=1, ctas_per_sm=2),
        Tile(m=128, n=256, k=32, warpgroups=2),
        Tile(m=256, n=128, k=32, warpgroups=2),
        Tile(m=128, n=256, warpgroups=2),
    ),
}
#: Minimum number of waves of 128 x 256 tiles at which idle SMs in the last wave cost little.
_MANY_WAVES = 8
#: Versions from which "auto" chooses, on targets with wgmma and on other targets. No other version is 2% faster for
#: any measured product, with one exception. Version v5 is 10% faster at 256 x 8192 x 28672 on an H100, but the cost
#: model would still choose version v6. [H100, H200]
_LADDER, _LADDER_OF_SCALES, _MMA_SYNC = ("v6", "v7", "v5", "v4", "v3"), ("v5", "v4"), ("mma_sync",)
#: Tiles for clusters that share loads. If rows split L2 sectors, these clusters may use any tile, because they read a
#: shared operand half as often. Otherwise, they use the first of these tiles if TMA reads A's block scales (0.2 to 3%
#: faster than version v4 on an H100), and the second tile if it does not (1 to 3% faster on an H200).
_TILE_OF_CLUSTERS, _WIDE_TILE_OF_CLUSTERS = Tile(m=256, n=128, warpgroups=2), Tile(m=256, n=160, warpgroups=2)
_EVERY_M = np.ones(1, np.bool_)


def times(problem: Problem, ms: NDArray[np.int64], gpu: Gpu) -> Times[GemmConfig]:
    """Return the predicted time of each version's tiles, each with the longest ring that fits in shared memory.

    If the problem names a version, only this version is considered. Otherwise, the wgmma versions compete, or mma_sync
    is used if the target has no wgmma. Raises TargetError if the target lacks a feature of the version or of the
    operands, and ArgumentError if the version has no kernel for the problem.
    """
    configs: list[tuple[GemmConfig, NDArray[np.float64]]] = []
    kind = [getattr(problem, name) for name in PROBLEM_FIELDS]
    for version in _versions(problem, get_target(gpu.target)):
        tiles = _tiles_for(problem, version)
        served = {tile: _serves(problem, tile, ms, gpu) for tile in tiles}
        for tile, config, model in _candidates(version, tiles, gpu, *kind):
            if served[tile].any() and (config.cluster_k == 1 or _is_divided(config, problem)):
                configs.append((config, np.where(served[tile], model(ms, problem).us, np.inf)))
    if not configs:
        raise no_kernel(problem, gpu)
    # A shorter ring loads nothing while a stage is computed, and the cost model ignores this.
    min_stages = min(MIN_STAGES, max([config.stages for config, _ in configs]))
    return [(config, us) for config, us in configs if config.stages >= min_stages]


def _versions(problem: Problem, target: Target) -> tuple[str, ...]:
    """Return the versions to choose from. Raises the errors of times()."""
    version = problem.version
    if problem.block_scales and version and version not in WITH_BLOCK_SCALES:
        allowed = f"{quoted(WITH_BLOCK_SCALES)} for block scales"
        raise ArgumentError("version", version, allowed, 'pass version="auto"')
    if (version and version not in _MMA_SYNC) or problem.block_scales:
        user = "gemm with block scales" if problem.block_scales else f"version {version} of gemm"
        target.require("wgmma", user)
    if is_fp8(problem.dtype) and (version in _MMA_SYNC or not target.has_wgmma):
        target.require("mma_sync_fp8", "gemm with fp8 operands on a target without wgmma")
    if version:
        return (version,)
    if not target.has_wgmma:
        return _MMA_SYNC
    return _LADDER_OF_SCALES if problem.scales_by_tma else _LADDER


def _tiles(version: str) -> tuple[Tile, ...]:
    return _TILES_OF.get(version, _TILES)


def _tiles_for(problem: Problem, version: str) -> tuple[Tile, ...]:
    """Return the tiles of a version that are worth ranking at some M."""
    if version == "v5" and not problem.version and not any(problem.split_rows):
        return (_TILE_OF_CLUSTERS if problem.scales_by_tma else _WIDE_TILE_OF_CLUSTERS,)
    return _tiles(version)


def _serves(problem: Problem, tile: Tile, ms: NDArray[np.int64], gpu: Gpu) -> NDArray[np.bool_]:
    """Return whether the tile is worth ranking at each M.

    A tile for the last wave is ranked for products with few waves whose M exceeds half of the tile's rows.
    """
    if not tile.for_last_wave:
        return _EVERY_M
    has_few_waves = problem.batch * ms * problem.n <= _MANY_WAVES * gpu.sm_count * 128 * 256
    serves = has_few_waves & (tile.m < 2 * np.maximum(ms, 64))
    # Three warpgroups with few columns need more bandwidth than L2 has, unless all CTAs run at the same time and read
    # the same data.
    tiles = problem.batch * ceil_div(ms, tile.m) * ceil_div(problem.n, tile.n)
    return np.asarray(serves & (tiles <= gpu.sm_count) if tile.warpgroups == 3 else serves)


def _is_divided(config: GemmConfig, problem: Problem) -> bool:
    """Return whether CTAs may split the K of a problem."""
    return not problem.batch_invariant and (config.cluster_k - 1) * config.tile_k < problem.k


@lru_cache(maxsize=256)
def _candidates(
    version: str, tiles: tuple[Tile, ...], gpu: Gpu, *kind: Any
) -> list[tuple[Tile, GemmConfig, CostModel]]:
    """Return the configurations of each tile that run on a GPU, with their cost models.

    ``kind`` contains the values of PROBLEM_FIELDS.
    """
    target = get_target(gpu.target)
    configs = (
        (tile, config) for tile in tiles for config in _with_longest_ring(_tile_configs(version, tile, *kind), target)
    )
    return [(tile, config, cost_model(config, gpu)) for tile, config in configs]


def _tile_configs(version: str, tile: Tile, *kind: Any) -> Iterator[GemmConfig]:
    """Yield a version's configurations of a tile with the shortest ring, if the version supports the tile."""
    fields = dict(zip(PROBLEM_FIELDS, kind, strict=True))
    for cluster_k in PRESETS[version].allowed["cluster_k"]:
        with contextlib.suppress(ArgumentError):
            yield GemmConfig.of(
                version,
                **fields,
                tile_m=tile.m,
                tile_n=tile.n,
                tile_k=tile.k * 2 // element_bytes(fields["dtype"]),
                stages=2,
                warpgroups=tile.warpgroups,
                cluster_k=cluster_k,
                ctas_per_sm=tile.ctas_per_sm,
            )


def _with_longest_ring(configs: Iterable[GemmConfig], target: Target) -> Iterator[GemmConfig]:
    """Yield the configurations that run on a target, with the longest ring that fits in shared memory."""
    for config in configs:
        if (stages := config.useful_stages(target)) >= 2:
            with contextlib.suppress(ArgumentError, TargetError):
                config.check_target(target)
                yield replace(config, stages=stages)


def _schedule(config: GemmConfig, problem: Problem, gpu: Gpu) -> Schedule:
    return config.divide_tiles(problem, gpu.sm_count)


GEMM: Family[Problem, GemmConfig] = Family(
    name="gemm",
    config=GemmConfig,
    kernels=tuple(PRESETS),
    read_problem=Problem.from_json,
    times=times,
    schedule=_schedule,
    index=("n", "k", "batch"),
    problem_fields=PROBLEM_FIELDS,
    options=(
        Option("dtype", "float16", tuple(OPERAND_TYPES), "dtype of the operands"),
        Option("layout", "RC", LAYOUTS, "layout of A and of B, each R (row-major) or C (column-major)"),
        Option(
            "out_dtype",
            "",
            ("", *RESULT_TYPES),
            "dtype of the result; default: the dtype of the operands, or bfloat16 for fp8",
        ),
        Option(
            "epilogue", "none", EPILOGUES, "none, or scales and bias (linear), optionally followed by an activation"
        ),
        Option("block_scales", False, (False, True), "fp8 operands have one scale per block of 128 elements of K"),
        Option("scales_by_tma", False, (False, True), "the block scales of A are column-major, as TMA requires"),
        Option("batch", 1, (), "number of matrices"),
    ),
    trial="cudatma.kernels.gemm.sample:GemmTrial",
    versions=VERSIONS,
)


def dump_configs(version: str, target: Target) -> list[GemmConfig]:
    """Return the configurations of a version that dumps and compile checks cover.

    The result contains each tile, layout, dtype and epilogue, and fp8 with block scales if the version supports them.
    """

    def configs(*kind: Any) -> list[GemmConfig]:
        return [config for tile in _tiles(version) for config in _tile_configs(version, tile, *kind)]

    dumped: list[GemmConfig] = []
    tiles: dict[tuple[int, ...], list[GemmConfig]] = {}
    for config in configs("float16", "RC", "", "none", False, False):
        tiles.setdefault((config.tile_m, config.tile_n, config.tile_k, config.ctas_per_sm), []).append(config)
    for index, variants in zip(range(max(len(tiles), 2 * len(LAYOUTS))), cycle(tiles.values())):
        dtype, first = ("float16", "bfloat16")[index % 2], index // 2 % len(LAYOUTS)
        out_dtype, epilogue = ("", "", "float32")[index % 3], (*EPILOGUES, "none")[index % 7]
        config = replace(variants[index % len(variants)], dtype=dtype)
        if config.tile_m * config.tile_n <= MAX_SUMS * 128 * config.warpgroups:  # Larger tiles have no epilogue.
            config = replace(config, out_dtype=out_dtype, epilogue=epilogue)
        layouts = (*LAYOUTS[first:], *LAYOUTS[:first])
        dumped += islice(_with_longest_ring((replace(config, layout=layout) for layout in layouts), target), 1)
    for dtype, blocks, by_tma in (
        ("float8_e4m3fn", False, False),
        ("float8_e5m2", True, False),
        ("float8_e4m3fn", True, True),
    ):
        tile = 2 * SCALE_BLOCK if by_tma else SCALE_BLOCK, SCALE_BLOCK
        fp8_configs = configs(dtype, "RC", "", "linear", blocks, by_tma)
        fp8_configs = [config for config in fp8_configs if (config.tile_m, config.tile_n) == tile]
        dumped += _with_longest_ring(fp8_configs, target)
    return list(dict.fromkeys(dumped))
