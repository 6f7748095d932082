"""Choose the version and the configuration of attention for a problem."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.attention.config import (
    MIN_BOX_ROWS,
    PRESETS,
    VERSIONS,
    AttentionConfig,
    AttentionPreset,
)
from cudatma.kernels.attention.problem import (
    DUMPED_OPTIONS,
    HEAD_DIMS,
    OPERAND_TYPES,
    OPTIONS,
    PROBLEM_FIELDS,
    DecodeProblem,
    KernelOption,
    Problem,
)
from cudatma.kernels.cost import no_kernel, runs
from cudatma.kernels.family import Family, Option, SizeNames, Times
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.schedule import Schedule, ceil_div
from cudatma.target import Target, get_target

#: Maximum number of useful stages. Two are enough, because keys and values have separate rings.
_MAX_STAGES = 4
#: Versions from which "auto" chooses, on targets with wgmma and on other targets. Among versions with equal predicted
#: times, the first one is chosen.
_LADDER, _MMA_SYNC = ("a4", "a3", "a2", "a1"), ("mma_sync",)
#: Preferred and maximum number of stages of attention_decode(). A tile with enough stages is preferred over a tile with
#: two stages. More stages than the maximum bring no gain.
_ENOUGH_DECODE_STAGES, _MAX_DECODE_STAGES = 3, 8
#: Representative page sizes: no pages, less than a block, one block, and a size that cannot be divided into boxes.
_DUMPED_PAGES, _DUMPED_FP8_PAGES = (0, 16, 64, 5), (0, 16, 64, 8)


def _tiles(problem: Problem, versions: Iterable[str]) -> list[AttentionConfig]:
    """Return every tile of these versions that may run the problem, with the shortest ring."""
    configs = []
    given = {name: getattr(problem, name) for name in PROBLEM_FIELDS}
    for version in versions:
        preset, allowed = PRESETS[version], PRESETS[version].allowed
        if _lacking(preset, problem):
            continue
        given["is_varlen"] = problem.is_varlen and True in allowed["is_varlen"]
        given["version"] = version
        for tile in preset.tiles[problem.head_dim, problem.v_head_dim]:
            if tile.m in allowed["tile_m"]:
                for q_stages in reversed(allowed["q_stages"]):
                    given |= {"stages": allowed["stages"][0], "q_stages": q_stages, "ctas_per_sm": tile.ctas_per_sm}
                    # A tile with capped scores may need more registers than a thread has.
                    with contextlib.suppress(ArgumentError):
                        configs.append(AttentionConfig(tile_m=tile.m, tile_n=tile.n, **given))
    return configs


def _lacking(preset: AttentionPreset, problem: Problem) -> list[KernelOption]:
    """Return the options of the problem that a version does not support."""
    return [option for option in OPTIONS if getattr(problem, option.field) not in preset.allowed[option.field]]


def _with_longest_ring(config: AttentionConfig, target: Target) -> AttentionConfig | None:
    """Return the config with the longest ring that fits in shared memory, or None if two stages do not fit.

    Versions without a producer keep two stages, so that several CTAs share an SM.
    """
    smem_bytes = target.smem_share_bytes(config.ctas_per_sm)
    if config.producer_warps:
        return config.with_longest_ring(smem_bytes, _MAX_STAGES)
    return config if config.smem_bytes <= smem_bytes else None


def _pays(config: AttentionConfig, problem: Problem, target: Target) -> bool:
    """Return whether a config is worth ranking.

    If several versions support the problem, a persistent version replaces a3's tiles of several warpgroups, because a3
    was slower in most of 48 measured calls and up to 4.5% faster in only 4 of them. [H100] A config with one slot of
    queries is ranked only if two slots would not fit in shared memory.
    """
    if config.is_persistent:
        return config.q_stages > 1 or not runs(replace(config, q_stages=2), problem, target)
    return config.version != "a3" or bool(problem.version) or config.warpgroups == 1 or problem.is_varlen


def times(problem: Problem, ms: NDArray[np.int64], gpu: Gpu) -> Times[AttentionConfig]:
    """Return the predicted time of each version's tiles, each with the longest ring that fits in shared memory.

    The problem may name a version. Otherwise, all wgmma versions compete, or mma_sync is used if the target has no
    wgmma. Raises TargetError if the target lacks a feature of the version, and ArgumentError if the version has no
    kernel for the problem.
    """
    target = get_target(gpu.target)
    versions = (problem.version,) if problem.version else _LADDER if target.has_wgmma else _MMA_SYNC
    for option in _lacking(PRESETS[versions[0]], problem):
        got = "an array" if option.parameters else "a value"
        raise ArgumentError(option.name, got, f"None for version {problem.version}", 'pass version="auto"')
    tiles = _tiles(problem, versions)
    for feature in tiles[0].features:
        target.require(feature, f"version {problem.version} of attention" if problem.version else "attention")
    able = (tile for tile in tiles if _pays(tile, problem, target) and runs(tile, problem, target))
    configs = [config for tile in able if (config := _with_longest_ring(tile, target)) is not None]
    if not configs:
        raise no_kernel(problem, gpu)
    return [(config, np.asarray(config.cost_at(ms, problem, gpu).us)) for config in configs]


def _schedule(config: AttentionConfig, problem: Problem, gpu: Gpu) -> Schedule:
    tiles = ceil_div(problem.q_length, config.tile_m), problem.batch * problem.heads
    return Schedule(config.ctas(problem, gpu.sm_count), *tiles, ceil_div(problem.k_length, config.tile_n), 0)


ATTENTION: Family[Problem, AttentionConfig] = Family(
    name="attention",
    config=AttentionConfig,
    kernels=VERSIONS.names,
    read_problem=Problem.from_json,
    times=times,
    schedule=_schedule,
    with_m=Problem.with_queries,
    shape=Problem.shape,
    index=("keys", "n", "head_dim", "heads", "kv_heads", "batch"),
    problem_fields=PROBLEM_FIELDS,
    options=(
        Option("dtype", "bfloat16", tuple(OPERAND_TYPES), "dtype of q, k, v and the result"),
        Option("is_causal", False, (False, True), "each query attends only to keys up to its own position"),
        Option("batch", 1, (), "sequences"),
        Option("heads", 1, (), "number of query heads"),
        Option("kv_heads", 0, (), "number of KV heads, or 0 for the number of query heads"),
    ),
    trial="cudatma.kernels.attention.sample:AttentionTrial",
    versions=VERSIONS,
    sizes=SizeNames("number of queries", "head dimension", "number of keys"),
)


def decode_config(problem: DecodeProblem, target: Target, version: str = "") -> AttentionConfig:
    """Return the configuration for a problem of attention_decode(), which does not depend on sizes.

    ``version`` is the name of a version, or "" for any.
    """
    if not version:
        version = "decode_fp8" if problem.has_fp8_cache else "decode" if target.has_wgmma else "decode_mma_sync"
    fields = tuple(getattr(problem, name) for name in PROBLEM_FIELDS)
    return _decode_config(version, fields, problem.page_size, target)


@lru_cache(maxsize=1024)
def _decode_config(version: str, fields: tuple[Any, ...], page_size: int, target: Target) -> AttentionConfig:
    """Return the first tile whose ring has enough stages, or the first tile that fits if no ring has enough stages.

    ``fields`` contains the values of PROBLEM_FIELDS. ``page_size`` is the number of keys per page, or 0 without pages.
    """
    given = dict(zip(PROBLEM_FIELDS, fields, strict=True))
    fitting: list[AttentionConfig] = []
    for tile in PRESETS[version].tiles[given["head_dim"], given["v_head_dim"]]:
        common = math.gcd(page_size, tile.n)
        config = AttentionConfig(
            version=version,
            tile_m=tile.m,
            tile_n=tile.n,
            ctas_per_sm=tile.ctas_per_sm,
            is_paged=page_size > 0,
            box_rows=common if common >= MIN_BOX_ROWS else 0,
            **given,
        )
        longest = config.with_longest_ring(target.smem_share_bytes(tile.ctas_per_sm), _MAX_DECODE_STAGES)
        fitting += [] if longest is None else [longest]
    return next((config for config in fitting if config.stages >= _ENOUGH_DECODE_STAGES), fitting[0])


def dump_configs(version: str, target: Target) -> list[AttentionConfig]:
    """Return the configs of a version for dumps and compile checks.

    For each pair of head dims, the result contains every other tile, or one tile if the version has no producer. The
    configs cycle through DUMPED_OPTIONS.
    """
    preset = PRESETS[version]
    if preset.is_decode:
        return _decode_dump_configs(version, target)
    dumped: list[AttentionConfig] = []
    for index, (head_dim, v_head_dim) in enumerate(HEAD_DIMS):
        dtype = tuple(OPERAND_TYPES)[index % 2]
        problem = Problem.of(q_length=1024, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)
        tiles = {(config.tile_m, config.tile_n): config for config in _tiles(problem, [version])}
        chosen = list(tiles.values())
        chosen = chosen[index % 2 :: 2] or chosen
        if not chosen[0].reallocates_registers:
            chosen = [chosen[index % len(chosen)]]
        for number, config in enumerate(chosen):
            options = dumped_options(index + number)
            options |= {option.field: False for option in OPTIONS if True not in preset.allowed[option.field]}
            with contextlib.suppress(ArgumentError, TargetError):
                longest = _with_longest_ring(replace(config, **options), target)
                if longest is not None:
                    longest.check(problem, target)
                    dumped.append(longest)
    # Variable-length sequences change only a few lines of the kernel, so only every fourth config has them.
    return dumped + [replace(config, is_varlen=True) for config in dumped[::4] if True in preset.allowed["is_varlen"]]


def _decode_dump_configs(version: str, target: Target) -> list[AttentionConfig]:
    """Return configs that cover each pair of head dims, each set of options and each load path of a version."""
    is_fp8, dumped = PRESETS[version].kv_bytes == 1, []
    for index, (head_dim, v_head_dim) in enumerate(HEAD_DIMS):
        dtype = tuple(OPERAND_TYPES)[index % 2]
        page_size = (_DUMPED_FP8_PAGES if is_fp8 else _DUMPED_PAGES)[(index + index // 4) % 4]
        options = dumped_options(index) | {"page_size": page_size, "has_fp8_cache": is_fp8}
        problem = DecodeProblem.of(q_length=1, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, **options)
        config = decode_config(problem, target)
        dumped += [config] if config.version == version else []
    return dumped


def dumped_options(index: int) -> dict[str, Any]:
    """Return the fields that ``DUMPED_OPTIONS[index % len(DUMPED_OPTIONS)]`` sets."""
    names = DUMPED_OPTIONS[index % len(DUMPED_OPTIONS)]
    return {option.field: option.name in names for option in OPTIONS}
