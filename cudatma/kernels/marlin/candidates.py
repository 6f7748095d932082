"""Every configuration worth a try for a layer and a number of tokens, of all kernels. Pure.

Fields run over short lists; what a spec's own rules, the target, the registers or the workspace refuse is left out. The
lists hold more than was ever measured: what is good is for the model (model.py) and the tuner to say.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.marlin.clusters import BLOCKS_K, clusters_at_once
from cudatma.kernels.marlin.layer import AnyMarlinSpec, Choice, Layer, weight_policy
from cudatma.kernels.marlin.problem import ceil_div
from cudatma.kernels.marlin.spec import MarlinSpec
from cudatma.kernels.marlin.strip_config import has_deep_box, ring_stages, strip_serves, strip_ways, tile_tokens
from cudatma.kernels.marlin.strip_spec import MAX_STRIPS, MMA_TOKENS, STRIP_CHANNELS, StripSpec
from cudatma.kernels.marlin.wgmma_config import best_tiles, wgmma_serves
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.kernels.marlin.workspace import has_room
from cudatma.target import KIB, Target

Fields = dict[str, Any]

#: Of one of a multiprocessor's four parts, for the lanes of a warp each; and the most of a thread.
_PARTS, _REGISTERS_PER_PART, _REGISTERS_PER_THREAD = 4, 16384 // 32, 255
#: What a thread wants beside its accumulators.
_WORKING_REGISTERS = 56
_MAX_STAGES = 12
#: A stage is what the last warps still work on when all has arrived.
_STRIP_STAGE_BYTES = 48 * KIB
#: With more tokens the strips' instruction, mma.sync, is the bound, and every strip is read again for each 32 of them.
_STRIP_TOKENS = 64
_STRIP_BLOCK_M, _PORTABLE_BLOCK_M = (8, 16, 32), (8, 16, 32, 64, 128)
#: Of wgmma: tokens are cut into as few tiles as can be, and up to so many more, none shorter than that.
_MOST_TOKENS, _MORE_TILES, _LEAST_TOKENS = 256, 7, 64
#: (warpgroups, warpgroups_k)
_WARPGROUPS = ((1, 1), (2, 1), (3, 1), (1, 2))
#: Registers that setmaxnreg can give 3 or 2 consumer warpgroups with big tiles; 0 leaves them as they are.
_CONSUMER_REGISTERS = (0, 152, 232)
#: (k16 steps of a commit group, groups in flight): the first is taken, which fits any stage; the others are variants.
_PIPELINES = ((1, 3), (2, 1), (2, 3), (1, 1), (4, 1))
#: Of the tiles that the rules rank.
_RULES_BEST = 8
_SCALES: tuple[Fields, ...] = ({"scale_on": "accumulator"}, {"scale_on": "weight"})


def candidates(layer: Layer, m: int, target: Target, multiprocessors: int) -> Iterator[Choice[AnyMarlinSpec]]:
    """One choice for each shape of a tile, of every kernel; each passes check_target().

    variants() has the rest: depth of the pipeline and of the ring.
    """
    if m <= _STRIP_TOKENS:
        yield from _strips(layer, m, target, multiprocessors)
    if target.has_wgmma:
        yield from _wgmma(layer, m, target, multiprocessors)
    yield from _portable(layer, m, target)


def rules_best(layer: Layer, m: int, target: Target, multiprocessors: int) -> Iterator[Choice[AnyMarlinSpec]]:
    """What the rules of each kernel think best: they know more of it than the model, which compares all kernels."""
    if strip_serves(layer, m, target, multiprocessors):
        yield from strip_ways(layer, m, target, multiprocessors)
    if wgmma_serves(_MOST_TOKENS, target):
        yield from best_tiles(layer, m, target, multiprocessors, _RULES_BEST)


def variants(choice: Choice[AnyMarlinSpec], layer: Layer, target: Target) -> Iterator[Choice[AnyMarlinSpec]]:
    """The same tile, otherwise issued or fed."""
    spec = choice.spec
    if isinstance(spec, WgmmaSpec):
        yield from _changed(choice, ({"steps": steps, "in_flight": groups} for steps, groups in _PIPELINES), target)
        yield from _changed(choice, _other_warpgroups(spec), target)
        yield from _changed(choice, _other_rings(spec, layer), target)
    elif isinstance(spec, StripSpec):
        boxes = [{"deep_box": not spec.deep_box}] if layer.k % 64 == 0 else []
        yield from _changed(choice, (*boxes, *_other_rings(spec, layer)), target)
    else:
        yield from _changed(choice, (*_SCALES, *_other_rings(spec, layer)), target)


def _other_warpgroups(spec: WgmmaSpec) -> Iterator[Fields]:
    """Other ways to compute the same channels."""
    for side, deep in _WARPGROUPS:
        if spec.block_n % (64 * side) == 0:
            yield {"warpgroups": side, "stack": spec.block_n // (64 * side), "warpgroups_k": deep}


def _other_rings(spec: AnyMarlinSpec, layer: Layer) -> list[Fields]:
    """Deeper ones for strips only: the others' rings are as deep as can be."""
    if not isinstance(spec, StripSpec):
        return [{"stages": spec.stages - fewer} for fewer in (1, 2)]
    # A ring that comes round at least once.
    depth = ceil_div(layer.k, spec.blocks_k)
    deepest = max(spec.stages, min(_MAX_STAGES, ceil_div(depth, spec.block_k) - 1))
    return [{"stages": spec.stages + more} for more in (1, -1, 2) if spec.stages + more <= deepest]


def _changed(
    choice: Choice[AnyMarlinSpec], changes: Iterable[Mapping[str, Any]], target: Target
) -> Iterator[Choice[AnyMarlinSpec]]:
    for change in changes:
        with contextlib.suppress(ArgumentError):
            changed = replace(choice.spec, **change)
            changed.check_target(target)
            sums = changed.accumulators if isinstance(changed, WgmmaSpec) and not changed.consumer_registers else 0
            if changed != choice.spec and _fits(changed, target, sums):
                yield replace(choice, spec=changed)


def _strips(layer: Layer, m: int, target: Target, multiprocessors: int) -> Iterator[Choice[AnyMarlinSpec]]:
    tiles = (
        (block_m, block_k)
        for block_k in (1024, 512, 256, 128)
        for block_m in dict.fromkeys((tile_tokens(layer, m, block_k), *_token_tiles(_STRIP_BLOCK_M, m)))
    )
    shapes = itertools.product(tiles, _strip_ways(layer.n, target, multiprocessors), (8, 4, 2, 1), (1, 2))
    for (block_m, block_k), (strips, blocks_k), warps_k, blocks in shapes:
        stage_bytes = max(STRIP_CHANNELS * strips * block_k // 2, block_m * block_k * 2)
        if stage_bytes > _STRIP_STAGE_BYTES or block_k * blocks_k >= 2 * max(64, layer.k):
            continue
        if layer.k <= block_k * (blocks_k - 1):
            continue  # a block would have no stage
        if blocks_k > 1 and (blocks > 1 or not _at_once(layer, m, block_m, strips, blocks_k, multiprocessors)):
            continue  # a cluster that waits for others takes twice as long
        fields = _common(layer, m, block_m) | {"strips": strips, "block_k": block_k, "warps_k": warps_k}
        fields |= {"deep_box": has_deep_box(layer, block_m, strips), "blocks_k": blocks_k}
        fields |= {"blocks_per_sm": blocks}
        sums = max(MMA_TOKENS, block_m) * (1 if layer.group_size == -1 else 2)
        depth = ceil_div(layer.k, blocks_k)
        yield from _deepest(StripSpec, fields, target, sums, ring_stages(depth, strips, block_k))


def _strip_ways(n: int, target: Target, multiprocessors: int) -> list[tuple[int, int]]:
    """(strips of a block, blocks that divide the depth) that leave no multiprocessor without a block for sure."""
    total = ceil_div(n, STRIP_CHANNELS)
    blocks_k = BLOCKS_K if target.has("cluster") else BLOCKS_K[:1]
    most = {c: min(MAX_STRIPS, ceil_div(total, max(1, clusters_at_once(c, multiprocessors)))) for c in blocks_k}
    return [(strips, c) for c in blocks_k for strips in range(1, most[c] + 1)]


def _at_once(layer: Layer, m: int, block_m: int, strips: int, blocks_k: int, multiprocessors: int) -> bool:
    clusters = ceil_div(layer.n, STRIP_CHANNELS * strips) * ceil_div(m, block_m)
    return clusters <= clusters_at_once(blocks_k, multiprocessors)


def _wgmma(layer: Layer, m: int, target: Target, multiprocessors: int) -> Iterator[Choice[AnyMarlinSpec]]:
    clusters = [(1, 1), (2, 1), *((1, blocks_k) for blocks_k in BLOCKS_K[1:])]
    shapes = itertools.product(_even_tiles(m), (64, 128, 256), _WARPGROUPS, (1, 2), clusters, _CONSUMER_REGISTERS)
    for block_m, block_k, (warpgroups, warpgroups_k), stack, (cluster, blocks_k), registers in shapes:
        sums = stack * block_m // 2
        if registers and sums <= 64:
            continue  # nobody needs them
        if blocks_k > 1:  # a cluster that waits for others takes twice as long
            tiles = ceil_div(m, block_m) * ceil_div(layer.n, 64 * warpgroups * stack)
            if tiles > clusters_at_once(blocks_k, multiprocessors) or layer.k <= block_k * (blocks_k - 1):
                continue
        fields = _common(layer, m, block_m) | {"block_k": block_k, "stack": stack, "cluster": cluster}
        fields |= {"blocks_k": blocks_k}
        fields |= {"warpgroups": warpgroups, "warpgroups_k": warpgroups_k, "consumer_registers": registers}
        fields |= dict(zip(("steps", "in_flight"), _PIPELINES[0], strict=True))
        # The spec's own rules know what setmaxnreg leaves.
        yield from _deepest(WgmmaSpec, fields, target, 0 if registers else sums)


def _portable(layer: Layer, m: int, target: Target) -> Iterator[Choice[AnyMarlinSpec]]:
    shapes = itertools.product(
        _token_tiles(_PORTABLE_BLOCK_M, m),
        (64, 128, 256),
        (64, 128, 256),
        (2, 4, 8),
        (1, 2),
        (1, 2, 3),
        (0, 232),
    )
    for block_m, block_n, block_k, warps_n, warps_k, blocks, registers in shapes:
        scale_on = "epilogue" if layer.group_size == -1 else "accumulator" if block_m <= 32 else "weight"
        sums = block_m * block_n // (32 * warps_n) * (2 if scale_on == "accumulator" else 1)
        if registers and (blocks > 1 or sums < 128):
            continue
        fields = _common(layer, m, block_m) | {"block_n": block_n, "block_k": block_k, "blocks_per_sm": blocks}
        fields |= {"warps_n": warps_n, "warps_k": warps_k, "scale_on": scale_on, "consumer_registers": registers}
        yield from _deepest(MarlinSpec, fields, target, 0 if registers else sums)


def _common(layer: Layer, m: int, block_m: int) -> Fields:
    return {
        "dtype": layer.dtype,
        "group_size": layer.group_size,
        "has_zeros": layer.has_zeros,
        "block_m": block_m,
        "weight_policy": weight_policy(m, block_m),
    }


def _token_tiles(sizes: tuple[int, ...], m: int) -> list[int]:
    """Those that hold no more than the least that holds all tokens."""
    enough = next((size for size in sizes if size >= m), sizes[-1])
    return [size for size in sizes if size <= enough]


def _even_tiles(m: int) -> list[int]:
    """Sizes of wgmma's token tiles, multiples of 8, that leave little of the last one empty."""
    fewest = ceil_div(m, _MOST_TOKENS)
    sizes = (8 * ceil_div(m, 8 * tiles) for tiles in range(fewest, fewest + _MORE_TILES + 1))
    enough = [size for size in sizes if size >= min(_LEAST_TOKENS, 8 * ceil_div(m, 16))]
    return list(dict.fromkeys([*enough, *(size for size in (_MOST_TOKENS, _MOST_TOKENS // 2) if size < m)]))


def _deepest(
    kind: type[AnyMarlinSpec], fields: Fields, target: Target, accumulators: int, useful: int = _MAX_STAGES
) -> Iterator[Choice[AnyMarlinSpec]]:
    """The choice with as many stages as shared memory holds and a ring can use; nothing where something refuses it.

    accumulators: fp32 sums of a consumer thread, 0 where the spec's rules have looked after registers.
    """
    with contextlib.suppress(ArgumentError, TargetError):
        least: AnyMarlinSpec = kind(**fields, stages=2)
        stage_bytes = replace(least, stages=3).smem_bytes - least.smem_bytes
        blocks = least.blocks_per_sm
        more = (target.smem_share_bytes(blocks) - least.smem_bytes) // stage_bytes
        spec = replace(least, stages=max(2, min(_MAX_STAGES, useful, 2 + more)))
        spec.check_target(target)
        if _fits(spec, target, accumulators):
            yield Choice(spec, blocks)


def _fits(spec: AnyMarlinSpec, target: Target, accumulators: int) -> bool:
    """Whether its blocks stand side by side on a multiprocessor, keep their sums in registers, and find room for their
    partial sums."""
    blocks = spec.blocks_per_sm
    # A block's warps are dealt out to the parts; the fullest limits all.
    warps = ceil_div(spec.threads // 32 * blocks, _PARTS)
    registers = min(_REGISTERS_PER_THREAD, _REGISTERS_PER_PART // warps // 8 * 8)
    return (
        spec.smem_bytes <= target.smem_share_bytes(blocks)
        and (not accumulators or accumulators + _WORKING_REGISTERS <= registers)
        and has_room(spec, blocks)
    )
