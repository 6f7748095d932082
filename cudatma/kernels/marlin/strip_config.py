"""Which instance of the kernel for few tokens serves a problem: rules, and what of them was measured on an H200.

docs/performance/marlin_strip.md holds the measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cudatma.errors import ArgumentError
from cudatma.kernels.marlin.clusters import BLOCKS_K, clusters_at_once
from cudatma.kernels.marlin.layer import Choice, Layer, weight_policy
from cudatma.kernels.marlin.problem import ceil_div
from cudatma.kernels.marlin.strip_spec import MAX_STRIPS, MMA_TOKENS, STRIP_CHANNELS, StripSpec, least_tokens
from cudatma.kernels.marlin.strip_times import strip_us
from cudatma.target import KIB, Target

#: Multiprocessors of the card that dumps are made for: an H200's.
_PROCESSORS = 132
#: More tokens than that are bound by mma.sync, not by the weight's bytes.
_MOST_TOKENS = 32
#: A ring of fewer stages stands still while one is worked on.
_LEAST_STAGES, _MAX_STAGES = 3, 12
#: Bytes of weights that a block's ring has under way. More delay the first stage, and win nothing.
_RING_WEIGHT_BYTES = 64 * KIB
_DEPTHS = (1024, 512, 256, 128)
#: Most bytes of weights (for depths of more than _SHORT_DEPTH), and of activations, in one stage: a stage is what the
#: last warps work on when all has arrived.
_STAGE_WEIGHT_BYTES, _STAGE_ACTIVATION_BYTES, _SHORT_DEPTH = 28 * KIB, 32 * KIB, 256
#: A cluster's block takes at least two stages of its part of the depth, unless they are as short as that.
_SHORT_PART = 512
#: Consumer warps of a block; where each takes an eighth of a stage's depth.
_MOST_WARPS, _MOST_DEEP_WARPS = 12, 8
#: With so many tokens and depths of a group, a group's sums beside those of the whole depth leave no registers for two
#: blocks whose warps divide the depth: ptxas spills 250 to 440 bytes of a thread. One that did took 76 us at (3584,
#: 37888), where 28 would do. [H200]
_WHOLE_DEPTH_TOKENS, _WHOLE_DEPTH_GROUP = 32, 64
_SMEM_FOR_TWO_BYTES = 192 * KIB


def strip_serves(layer: Layer, m: int, target: Target, multiprocessors: int) -> bool:
    """Whether this kernel can take ``m`` tokens and fill the card."""
    if m > _MOST_TOKENS or not target.has("mma_sync") or not target.has("tma"):
        return False
    # Of few channels clusters divide the depth. Without, half of the card would stand by: better to divide tiles.
    return target.has("cluster") or 2 * ceil_div(layer.n, STRIP_CHANNELS) >= multiprocessors


def choose_strip(layer: Layer, m: int, target: Target, multiprocessors: int) -> Choice[StripSpec]:
    """The spec for ``m`` tokens on a card that strip_serves(). Deterministic; looks at no device."""
    found = strip_ways(layer, m, target, multiprocessors)
    if not found:
        raise ArgumentError("target", target.name, "a target whose shared memory holds a ring of this kernel")
    best = found[0]
    best.spec.check_target(target)
    return best


def ring_stages(k: int, strips: int, block_k: int) -> int:
    """Stages of a ring that is as deep as is of use for ``k`` depths; shared memory may hold fewer."""
    wanted = max(_LEAST_STAGES, ceil_div(_RING_WEIGHT_BYTES, STRIP_CHANNELS * strips * block_k // 2))
    # Not all of the depth at once either, for the same reason.
    iterations = ceil_div(k, block_k)
    return min(wanted, _MAX_STAGES, max(iterations - 1, min(iterations, _LEAST_STAGES), 2))


def has_deep_box(layer: Layer, block_m: int, strips: int) -> bool:
    """Whether one box should bring a stage's activations. Of eight tokens, for several strips, a box for each 64 depths
    is up to 2 % ahead; fewer come by no other way."""
    return layer.k % 64 == 0 and (strips == 1 or block_m != MMA_TOKENS)


def tile_tokens(layer: Layer, m: int, block_k: int) -> int:
    """Tokens of a tile: as few as a box may bring, which spares shared memory and its banks."""
    if m > MMA_TOKENS // 2 or layer.k % 64:
        return next((size for size in (8, 16) if m <= size), 32)
    return max(least_tokens(block_k), 1 << (m - 1).bit_length())


def strip_ways(layer: Layer, m: int, target: Target, multiprocessors: int) -> list[Choice[StripSpec]]:
    """The rules' choice for each number of blocks that may divide the depth, the fastest first, as strip_times.py
    says."""
    found: list[tuple[float, Choice[StripSpec]]] = []
    for way in _ways(layer.n, target, multiprocessors):
        if (choice := _fitting(way, layer, m, target)) is not None:
            shape = (choice.spec.block_m, way.strips, choice.spec.block_k, way.blocks_k)
            found.append((strip_us(layer.k, layer.n, *shape, way.waves), choice))
    return [choice for _, choice in sorted(found, key=lambda pair: pair[0])]


@dataclass(frozen=True, slots=True)
class _Way:
    """Strips of a block, blocks that divide the depth, and waves of blocks, one behind the other."""

    strips: int
    blocks_k: int
    waves: int


def _ways(n: int, target: Target, multiprocessors: int) -> Iterator[_Way]:
    """As few strips a block as its limit allows: for the whole depth, and for each number of blocks that divide it."""
    strips = ceil_div(n, STRIP_CHANNELS)
    waves = ceil_div(strips, multiprocessors * MAX_STRIPS)
    yield _Way(ceil_div(strips, multiprocessors * waves), 1, waves)
    for blocks_k in BLOCKS_K[1:] if target.has("cluster") else ():
        # Clusters that have to wait for others take twice as long.
        at_once = clusters_at_once(blocks_k, multiprocessors)
        if at_once and (each := ceil_div(strips, at_once)) <= MAX_STRIPS:
            yield _Way(each, blocks_k, 1)


def _fitting(way: _Way, layer: Layer, m: int, target: Target) -> Choice[StripSpec] | None:
    """The best division of a stage whose ring is as deep as is of use, if one fits."""
    # A second block fills the pause between two waves, where shared memory has room for its ring.
    blocks = 2 if way.waves > 1 and target.smem_per_sm_bytes >= _SMEM_FOR_TWO_BYTES else 1
    budget, depth = target.smem_share_bytes(blocks), ceil_div(layer.k, way.blocks_k)

    def with_ring(block_k: int, warps_k: int) -> StripSpec | None:
        """None where no ring fits."""
        block_m, wanted = tile_tokens(layer, m, block_k), ring_stages(depth, way.strips, block_k)
        spec = StripSpec(
            layer.dtype, layer.group_size, layer.has_zeros, block_m, way.strips, block_k, warps_k, wanted,
            weight_policy(m, block_m), blocks, has_deep_box(layer, block_m, way.strips), way.blocks_k,
        )  # fmt: skip
        rings = (replace(spec, stages=n) for n in range(wanted, 1, -1))
        return next((one for one in rings if one.smem_bytes <= budget), None)

    for block_k, warps_k in _divisions(layer, way, m, blocks):
        enough = min(_LEAST_STAGES, ceil_div(depth, block_k))
        chosen = with_ring(block_k, warps_k)
        if chosen is not None and chosen.stages >= max(2, enough):
            return Choice(chosen, blocks)
    return None


def _divisions(layer: Layer, way: _Way, m: int, blocks: int) -> list[tuple[int, int]]:
    """(block_k, warps_k), best first: warps enough to hide latencies, each with as much depth of a stage as fits.
    Fewer where blocks meet as well."""
    found = []
    tokens = tile_tokens(layer, m, _DEPTHS[0])
    whole_depth = blocks > 1 and tokens >= _WHOLE_DEPTH_TOKENS and layer.group_size >= _WHOLE_DEPTH_GROUP
    for warps_k in (1,) if whole_depth else (8, 4, 2, 1) if way.blocks_k == 1 else (4, 2, 1):
        if way.strips * warps_k > (_MOST_DEEP_WARPS if warps_k == 8 else _MOST_WARPS):
            continue
        for block_k in _DEPTHS:
            depth = ceil_div(layer.k, way.blocks_k)
            if ceil_div(layer.k, block_k) < way.blocks_k:
                continue  # a block without a stage
            if block_k >= 2 * max(_DEPTHS[-1], depth) or (way.blocks_k > 1 and block_k > max(_SHORT_PART, depth // 2)):
                continue
            if block_k < max(64 * warps_k, layer.group_size) or tokens * block_k * 2 > _STAGE_ACTIVATION_BYTES:
                continue
            if STRIP_CHANNELS * way.strips * block_k // 2 <= _STAGE_WEIGHT_BYTES or block_k <= _SHORT_DEPTH:
                found.append((block_k, warps_k))
    return found


def dump_specs(target: Target) -> list[StripSpec]:
    """The instances that stand for all in dumps and compile checks: each number of strips, and each feature once."""
    large, small = Layer(8192, 28672, 128, False, "float16"), Layer(4096, 4096, 128, False, "float16")
    middle, square = replace(small, n=12288), replace(large, n=8192)
    cases = [(layer, 1) for layer in (small, square, middle, large)] + [(small, 16), (small, 32), (large, 16)]
    cases += [
        (replace(large, n=57344), 1),
        (replace(square, dtype="bfloat16", has_zeros=True), 16),
        (replace(middle, group_size=32, has_zeros=True), 16),
        (replace(middle, group_size=64, dtype="bfloat16"), 32),
        (replace(large, group_size=-1, has_zeros=True), 8),
        (replace(small, n=1024), 1),
        (replace(small, k=13824, n=5120, dtype="bfloat16"), 16),
        (replace(small, k=8192, n=1280, has_zeros=True), 32),
    ]
    cases = [(layer, m) for layer, m in cases if strip_serves(layer, m, target, _PROCESSORS)]
    return list(dict.fromkeys(choose_strip(layer, m, target, _PROCESSORS).spec for layer, m in cases))
