"""The registry's kernels as subjects: small launches in which rings wrap, and CTAs take several tiles and share one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from attention_subjects import attention_subjects
from data_movement_subjects import call_of, data_movement_subjects
from gemm_builders import config as gemm_config
from marlin_builders import mma_sync, skinny, wgmma
from path_subjects import path_subjects
from subject import Subject

from cudatma.arrays import ArrayInfo
from cudatma.descriptor import TensorMap
from cudatma.kernels.arguments import Arguments
from cudatma.kernels.data_movement.ragged_copy import TEMPLATE as RAGGED_COPY
from cudatma.kernels.data_movement.ragged_copy import RaggedCopy, RaggedCopyConfig
from cudatma.kernels.data_movement.tile_copy import TEMPLATE as TILE_COPY
from cudatma.kernels.data_movement.tile_copy import TileCopyConfig
from cudatma.kernels.engine import host_workspace
from cudatma.kernels.gemm.config import PRESETS, GemmConfig
from cudatma.kernels.gemm.sample import gemm_call
from cudatma.kernels.host import host_bytes
from cudatma.kernels.marlin.arguments import gemm_arguments
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.gemm import MARLIN_GEMM, MarlinOptions, weight_of
from cudatma.kernels.schedule import schedule
from cudatma.mutants.mutant import Call
from cudatma.quantization import PackedWeight, quantize
from cudatma.target import get_target

_TARGET = "sm_90a"
#: Variant -> fields of its config. Each has a tile of its own; together they have every load path and scaling once.
_MMA_SYNC: dict[str, dict[str, Any]] = {
    "tma": {"scale_on": "accumulator", "slice_k": 2, "tile_k": 128},
    "tma_zeros": {"dtype": "bfloat16", "group_size": 64, "has_zeros": True, "tile_k": 64},
    "tma_setmaxnreg": {"tile_m": 8, "tile_n": 256, "warps_n": 8, "consumer_registers": 232, "group_size": -1},
    "cp_async": {"weight_load_path": "cp_async", "scale_load_path": "cp_async", "activation_load_path": "cp_async"},
    "mixed": {"scale_load_path": "cp_async", "scale_on": "accumulator"},
}
#: The same for the wgmma kernel.
_WGMMA: dict[str, dict[str, Any]] = {
    "plain": {"tile_k": 128},
    "cluster": {"tile_k": 128, "cluster_n": 2, "has_zeros": True},
    "setmaxnreg": {"tile_k": 128, "warpgroups": 2, "consumer_registers": 232, "group_size": -1, "mmas_per_commit": 1},
    "fused": {"tile_k": 128, "warpgroups": 2, "scale_form": "as_stored"},
    # Rows for two of three CTAs, whose parts of K are 4 stages each.
    "cluster_k": {"tile_k": 128, "cluster_k": 3},
    "pingpong": {"tile_k": 128, "pingpong": True},
}
_SKINNY: dict[str, dict[str, Any]] = {
    "even": {"tile_n": 64, "slice_k": 2},
    "odd_zeros": {"tile_n": 32, "slice_k": 1, "has_zeros": True, "dtype": "bfloat16"},
    # Tiles of four rows, which the mma's columns repeat.
    "small_m": {"tile_m": 4, "tile_n": 32, "slice_k": 2, "deep_box": True},
    # Two N tiles for three CTAs, whose parts of K are 5, 5 and 6 stages: each ring wraps twice.
    "cluster": {"tile_n": 64, "slice_k": 2, "cluster_k": 3, "stages": 2},
}
#: (M, N, K) of each kernel, small: there are a hundred mutants of each. M makes several tiles of the wgmma kernel: a
#: wrong arrival count then adds up to a phase. Its K is short, or the ring would order the staging of one tile before
#: that of the next. The skinny GEMM's ring has to wrap within the one tile of a CTA.
_SIZES = {"mma_sync": (13, 256, 512), "wgmma": (29, 128, 512), "skinny": (13, 64, 1024)}
#: Where the CTAs of a cluster divide K: the ring of each wraps more than once.
_DIVIDED_SIZES = {"wgmma": (29, 64, 1536), "skinny": (13, 64, 2048)}
_WORK_RANGES = 3


def mma_sync_spec(variant: str) -> MarlinConfig:
    """A small tile of the mma.sync kernel with a short ring."""
    fields: dict[str, Any] = {
        "tile_m": 16,
        "tile_n": 64,
        "tile_k": 64,
        "warps_n": 2,
        "slice_k": 1,
        "stages": 2,
        **_MMA_SYNC[variant],
    }
    return mma_sync(**fields)


def wgmma_spec(variant: str) -> MarlinConfig:
    """A small tile of the wgmma kernel with a short ring."""
    fields: dict[str, Any] = {
        "tile_m": 16,
        "stages": 2,
        **_WGMMA[variant],
    }
    return wgmma(**fields)


def skinny_spec(variant: str) -> MarlinConfig:
    """Few N tiles of the skinny GEMM with a short ring."""
    fields: dict[str, Any] = {
        "tile_m": 16,
        "tile_k": 128,
        "stages": 3,
        **_SKINNY[variant],
    }
    return skinny(**fields)


@lru_cache(maxsize=16)
def _operands(config: MarlinConfig) -> tuple[Any, PackedWeight]:
    """(activations, packed weight)."""
    m, n, k = (_SIZES if config.cluster_k == 1 else _DIVIDED_SIZES)[config.version]
    random = np.random.default_rng(7)
    weight = random.normal(size=(k, n)).astype(np.float32) * 0.05
    packed = quantize(weight, group_size=config.group_size, symmetric=not config.has_zeros, dtype=config.dtype)
    return random.normal(size=(m, k)).astype(packed.scales.dtype), packed


def _marlin_call(config: MarlinConfig) -> Callable[[], Call]:
    def make() -> Call:
        x, w = _operands(config)
        m, n, k = len(x), w.shape[1], w.shape[0]
        out = np.zeros((m, n), x.dtype)
        # Ping-pong warpgroups take several tiles each.
        ranges = 1 if getattr(config, "pingpong", False) else _WORK_RANGES
        work = schedule(config, m, n, k, ranges * config.cluster, eager=True)
        checked = MARLIN_GEMM.check((x, None), out, MarlinOptions(True, False), w)
        arguments = gemm_arguments(checked.problem, config, work, get_target(_TARGET))
        arrays = MARLIN_GEMM.named(checked) | weight_of(w).arrays | host_workspace(arguments.sizes)
        # As after another kernel of a programmatic chain, which writes the activations.
        return _call(arguments, arrays, produced=(x,), keep=(out, w))

    return make


def _call(arguments: Arguments, arrays: dict[str, ArrayInfo], produced: tuple[Any, ...], keep: Any) -> Call:
    """A call with these arguments, as after a kernel that wrote some of the arrays."""
    config = arguments.config
    return Call(
        config.entry,
        arguments.sizes.grid,
        config.threads,
        tuple(arguments.filled(arrays)),
        cluster=arguments.cluster if arguments.cluster > 1 else None,
        shared_bytes=config.smem_bytes,
        arrays=tuple(host_bytes(info) for info in arrays.values()),
        options=(("produced_by_previous", produced),),
        keep=(keep, arrays),
    )


def _gemm_call(config: GemmConfig) -> Callable[[], Call]:
    """Tiles whose rings of two stages wrap four times, in which a wrong arrival count adds up to a phase; two tiles for
    each warpgroup or group of them of a persistent CTA or cluster, which stores each by TMA in as many parts as it has
    buffers."""

    def make() -> Call:
        tiles = 2 * config.consumer_warps // (4 * config.warpgroups)
        m, n, k = tiles * config.cluster_tile_m - 5, config.tile_n - 8, 640
        random = np.random.default_rng(7)
        a, b = (random.standard_normal(shape, np.float32).astype(np.float16) for shape in ((m, k), (n, k)))
        out = np.zeros((m, n), np.float32 if config.out_dtype else np.float16)
        arguments, arrays = gemm_call(config, get_target(_TARGET), config.launch_cluster, a, b.T, out)
        return _call(arguments, arrays, produced=(a, b), keep=(a, b, out))

    return make


def _tile_copy_call(config: TileCopyConfig) -> Callable[[], Call]:
    def make() -> Call:
        tiles_x, tiles_y = 3, 4
        shape = (tiles_y * config.box_rows - 3, tiles_x * config.box_columns)
        source = np.arange(shape[0] * shape[1], dtype=np.uint32).reshape(shape)
        destination = np.zeros_like(source)
        box = (config.box_rows, config.box_columns)
        maps = [TensorMap.from_array(array, box, encoder="codec") for array in (source, destination)]
        return Call(
            config.entry, 2, 64, (*maps, tiles_x, tiles_y), shared_bytes=config.smem_bytes, arrays=(source, destination)
        )

    return make


def _ragged_copy_call(config: RaggedCopyConfig) -> Callable[[], Call]:
    def make() -> Call:
        shapes = ((3, 16), (17, 24), (8, 8), (20, 40), (1, 16), (9, 32))
        sources = [np.full(shape, i + 1, np.uint16) for i, shape in enumerate(shapes)]
        destinations = [np.zeros_like(source) for source in sources]
        copy = RaggedCopy(sources, destinations, backend="emulator", config=config, target=get_target(_TARGET))
        return call_of(*copy.on_host(2))

    return make


def registry_subjects() -> list[Subject]:
    """Every kernel of the registry, in each of its variants."""
    configs: list[tuple[str, MarlinConfig]] = [
        (f"marlin_mma_sync/{variant}", mma_sync_spec(variant)) for variant in _MMA_SYNC
    ]
    configs += [(f"marlin_wgmma/{variant}", wgmma_spec(variant)) for variant in _WGMMA]
    configs += [(f"marlin_skinny/{variant}", skinny_spec(variant)) for variant in _SKINNY]
    subjects = [Subject(name, config.template, config, _marlin_call(config), _TARGET) for name, config in configs]
    for version in PRESETS:
        gemm = gemm_config(version)
        gemm = replace(gemm, out_dtype="float32") if gemm.stores_by_tma else gemm
        subjects.append(Subject(f"gemm_{version}/small", gemm.template, gemm, _gemm_call(gemm), _TARGET))
    copy = TileCopyConfig(4, box_rows=8, box_columns=16, stages=2)
    subjects.append(Subject("tile_copy/2d", TILE_COPY, copy, _tile_copy_call(copy), _TARGET))
    ragged = RaggedCopyConfig(2, box_rows=8, box_columns=16, stages=2, maps=2)
    subjects.append(Subject("ragged_copy/2d", RAGGED_COPY, ragged, _ragged_copy_call(ragged), _TARGET))
    return [*subjects, *attention_subjects(), *path_subjects(), *data_movement_subjects()]
