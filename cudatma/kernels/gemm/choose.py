"""The configurations of the dense GEMM that may serve a problem, and their predicted times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import cycle, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.cost import LEAST_STAGES, no_kernel
from cudatma.kernels.family import Family, Option, Times
from cudatma.kernels.gemm import p1
from cudatma.kernels.gemm.cost import CostModel
from cudatma.kernels.gemm.problem import (
    EPILOGUES,
    KIND_FIELDS,
    LAYOUTS,
    OPERAND_TYPES,
    RESULT_TYPES,
    SCALE_BLOCK,
    Problem,
    element_bytes,
    is_fp8,
    kernel_name,
)
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.gemm.versions import CHOICE, VERSIONS
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.schedule import ceil_div
from cudatma.target import Target, get_target

#: Number of waves of tiles of 128 x 256 from which idle SMs in the last wave cost little.
_MANY_WAVES = 8
#: (block_m, block_n, block_k, warpgroups). Among tiles with equal predicted times the first one is chosen.
_TILES = (
    (64, 64, 128, 1), (64, 64, 64, 1), (64, 128, 64, 1), (64, 128, 128, 1), (64, 192, 64, 1), (64, 256, 64, 1),
    (128, 64, 128, 2), (128, 128, 64, 2), (128, 192, 64, 2), (128, 256, 64, 2), (192, 128, 64, 3), (256, 128, 64, 2),
    (256, 192, 64, 2), (256, 208, 64, 2),
)  # fmt: skip
#: A product of few waves may also take one of these, which may leave fewer SMs idle in the last wave, by version: of
#: all multiples of 16 columns those that are the fastest for some product. [benchmarks/results/gemm_tiles*.json]
_LAST_WAVE_TILES: dict[int | str, tuple[tuple[int, ...], ...]] = {
    3: ((64, 96, 64, 1), (128, 80, 64, 2), (128, 208, 64, 2), (128, 224, 64, 2), (192, 96, 64, 3), (192, 192, 64, 3)),
    4: ((128, 224, 64, 2), (256, 160, 64, 2)),
}
#: Versions with tiles of their own.
_TILES_OF: dict[int | str, tuple[tuple[int, ...], ...]] = {7: ((128, 128, 64, 1),), "p1": p1.TILES}
#: The versions that "auto" chooses from on targets with wgmma, and on others. No other version is 2 % faster for a
#: measured product, except that version 5 is 10 % faster at 256 x 8192 x 28672 on an H100; the cost model would take
#: version 6 all the same. [H100, H200]
_LADDER, _MMA_SYNC = (6, 7, 5, 4, 3), ("p1",)
#: Clusters may use every tile where rows split sectors, because they read a shared operand half as often. Elsewhere
#: they use the first tile if TMA reads A's block scales (0.2 to 3 % faster than version 4 on an H100), else the second
#: one (1 to 3 % faster on an H200).
_CLUSTERS, _TILE_OF_CLUSTERS, _WIDE_TILE_OF_CLUSTERS = 5, (256, 128, 64, 2), (256, 160, 64, 2)
_LADDER_OF_SCALES = (_CLUSTERS, 4)
_EVERY_M = np.ones(1, np.bool_)


def times(problem: Problem, ms: NDArray[np.int64], gpu: Gpu) -> Times[GemmSpec]:
    """Return ``Family.times``: each tile of each version, with as deep a ring as shared memory holds.

    The problem may name a version. Otherwise the ladder's versions compete, or p1 on targets without wgmma. Raises
    TargetError if the target lacks a feature of the version or of the operands, and ArgumentError if the version has no
    kernel for the problem.
    """
    found: list[tuple[GemmSpec, NDArray[np.float64]]] = []
    kind = [getattr(problem, name) for name in KIND_FIELDS]
    for version in _versions(problem, get_target(gpu.target)):
        tiles = _tiles_for(problem, version)
        served = {tile: _serves(problem, version, tile, ms, gpu) for tile in tiles}
        for tile, spec, model in _candidates(version, tiles, gpu, *kind):
            if served[tile].any() and (spec.cluster_k == 1 or _is_divided(spec, problem)):
                found.append((spec, np.where(served[tile], model(ms, problem).us, np.inf)))
    if not found:
        raise no_kernel(problem, gpu)
    # A ring of fewer stages loads nothing while one is computed, which the cost model does not count.
    least_stages = min(LEAST_STAGES, max([spec.stages for spec, _ in found]))
    return [(spec, us) for spec, us in found if spec.stages >= least_stages]


def _versions(problem: Problem, target: Target) -> tuple[int | str, ...]:
    """Return the versions to choose from. Raises as times() does."""
    if problem.block_scales and problem.version and not VERSIONS[problem.version].scales_blocks:
        able = ", ".join(str(version) for version, kind in VERSIONS.items() if kind.scales_blocks)
        raise ArgumentError("version", problem.version, f"{able} for scales of blocks", 'version="auto"')
    if (problem.version and problem.version not in _MMA_SYNC) or problem.block_scales:
        target.require(
            "wgmma", "gemm with scales of blocks" if problem.block_scales else f"version {problem.version} of gemm"
        )
    if is_fp8(problem.dtype) and (problem.version == "p1" or not target.has_wgmma):
        target.require("mma_sync_fp8", "gemm of fp8 without wgmma")
    if problem.version:
        return (problem.version,)
    ladder = _LADDER_OF_SCALES if problem.scales_by_tma else _LADDER
    return ladder if target.has_wgmma else _MMA_SYNC


def _every_tile(version: int | str) -> tuple[tuple[int, ...], ...]:
    return _TILES_OF.get(version, (*_TILES, *_LAST_WAVE_TILES.get(version, ())))


def _tiles_for(problem: Problem, version: int | str) -> tuple[tuple[int, ...], ...]:
    """Return the tiles of a version that are worth ranking at some M."""
    if version == _CLUSTERS and not problem.version and not any(problem.split_rows):
        return (_TILE_OF_CLUSTERS if problem.scales_by_tma else _WIDE_TILE_OF_CLUSTERS,)
    return _every_tile(version)


def _serves(
    problem: Problem, version: int | str, tile: tuple[int, ...], ms: NDArray[np.int64], gpu: Gpu
) -> NDArray[np.bool_]:
    """Return at which M the tile is worth ranking.

    A tile for the last wave serves products of few waves whose M is more than half of its rows.
    """
    block_m, block_n, _, warpgroups, *_ = tile
    if tile not in _LAST_WAVE_TILES.get(version, ()):
        return _EVERY_M
    has_few_waves = problem.batch * ms * problem.n <= _MANY_WAVES * gpu.sm_count * 128 * 256
    serves = has_few_waves & (block_m < 2 * np.maximum(ms, 64))
    # Three warpgroups on few columns read more than L2 sends, unless all CTAs run at once and read the same.
    tiles = problem.batch * ceil_div(ms, block_m) * ceil_div(problem.n, block_n)
    return np.asarray(serves & (tiles <= gpu.sm_count) if warpgroups == 3 else serves)


def _is_divided(spec: GemmSpec, problem: Problem) -> bool:
    """Return whether CTAs may divide K of a problem."""
    return not problem.batch_invariant and (spec.cluster_k - 1) * spec.block_k < problem.k


@lru_cache(maxsize=256)
def _candidates(
    version: int | str, tiles: tuple[tuple[int, ...], ...], gpu: Gpu, *kind: Any
) -> list[tuple[tuple[int, ...], GemmSpec, CostModel]]:
    """Return the instances of each tile that run on a GPU, with their cost models.

    ``kind``: the values of KIND_FIELDS.
    """
    target = get_target(gpu.target)
    instances = ((tile, spec) for tile in tiles for spec in _with_longest_ring(_of_tile(version, tile, *kind), target))
    return [(tile, spec, spec.cost_model(gpu)) for tile, spec in instances]


def _of_tile(version: int | str, tile: tuple[int, ...], dtype: str, layout: str, *kind: Any) -> Iterator[GemmSpec]:
    """Yield a version's instances of a tile with the shortest ring; none if the version does not have the tile.

    The tile is for elements of two bytes.
    """
    block_m, block_n, block_k, warpgroups, *others = tile
    block_k = block_k * 2 // element_bytes(dtype)
    with contextlib.suppress(ArgumentError):
        spec = VERSIONS[version](dtype, layout, block_m, block_n, block_k, 2, warpgroups, *kind, *others)
        divided: list[dict[str, Any]] = [{"cluster_k": parts} for parts in spec.allowed.get("cluster_k", ())]
        yield from [replace(spec, **change) for change in divided] or [spec]


def _with_longest_ring(specs: Iterable[GemmSpec], target: Target) -> Iterator[GemmSpec]:
    """Yield the specs that run on a target, with the longest ring that fits shared memory."""
    for spec in specs:
        if (stages := spec.most_stages(target)) >= 2:
            with contextlib.suppress(ArgumentError, TargetError):
                spec.check_target(target)
                yield replace(spec, stages=stages)


GEMM: Family[Problem, GemmSpec] = Family(
    name="gemm",
    kernels={kernel_name(version): kind for version, kind in VERSIONS.items()},
    read_problem=Problem.from_json,
    times=times,
    index=("n", "k", "batch"),
    spec_fields=KIND_FIELDS,
    options=(
        Option("dtype", "float16", tuple(OPERAND_TYPES), "of operands"),
        Option("layout", "RC", LAYOUTS, "A and B, each row-major or column-major"),
        Option("out_dtype", "", ("", *RESULT_TYPES), "of the result, by default the operands', bfloat16 for fp8"),
        Option("epilogue", "none", EPILOGUES, "what is applied to the sums: alpha, beta, bias, scales, an activation"),
        Option("block_scales", False, (False, True), "fp8: a scale for each block of 128 of K"),
        Option("scales_by_tma", False, (False, True), "A's are column-major, as TMA reads them"),
        Option("batch", 1, (), "matrices"),
    ),
    trial="cudatma.kernels.gemm.sample:GemmTrial",
    versions=CHOICE,
)


def dump_specs(version: int | str, target: Target) -> list[GemmSpec]:
    """Return the instances of a version that dumps and compile checks cover.

    Each tile occurs once, and each layout, dtype and epilogue, and fp8 with block scales if the version supports them.
    """

    def instances(*kind: Any) -> list[GemmSpec]:
        return [spec for tile in _every_tile(version) for spec in _of_tile(version, tile, *kind)]

    found: list[GemmSpec] = []
    tiles: dict[tuple[int, ...], list[GemmSpec]] = {}
    for spec in instances("float16", "RC", "", "none", False, False):
        tiles.setdefault((spec.block_m, spec.block_n, spec.block_k, spec.blocks_per_sm), []).append(spec)
    for index, same in zip(range(max(len(tiles), 2 * len(LAYOUTS))), cycle(tiles.values())):
        dtype, first = ("float16", "bfloat16")[index % 2], index // 2 % len(LAYOUTS)
        out_dtype, epilogue = ("", "", "float32")[index % 3], (*EPILOGUES, "none")[index % 7]
        spec = replace(same[index % len(same)], dtype=dtype)
        if spec.block_m * spec.block_n <= GemmSpec.most_sums * 128 * spec.warpgroups:  # others have no epilogue
            spec = replace(spec, out_dtype=out_dtype, epilogue=epilogue)
        layouts = (*LAYOUTS[first:], *LAYOUTS[:first])
        found += islice(_with_longest_ring((replace(spec, layout=layout) for layout in layouts), target), 1)
    for dtype, blocks, by_tma in (
        ("float8_e4m3fn", False, False),
        ("float8_e5m2", True, False),
        ("float8_e4m3fn", True, True),
    ):
        tile = 2 * SCALE_BLOCK if by_tma else SCALE_BLOCK, SCALE_BLOCK
        specs = instances(dtype, "RC", "", "linear", blocks, by_tma)
        found += _with_longest_ring((spec for spec in specs if (spec.block_m, spec.block_n) == tile), target)
    return list(dict.fromkeys(found))


v1_specs, v2_specs, v3_specs, v4_specs, v5_specs, v6_specs, v7_specs, p1_specs = (
    partial(dump_specs, version) for version in VERSIONS
)
