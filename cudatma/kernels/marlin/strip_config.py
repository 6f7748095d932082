"""Which instance of the kernel for few tokens serves a problem: rules, and what of them was measured on an H200.

docs/performance/marlin_strip.md holds the measurements.
"""

from __future__ import annotations

from dataclasses import replace

from cudatma.errors import ArgumentError
from cudatma.kernels.marlin.layer import Choice, Feeds, Layer
from cudatma.kernels.marlin.problem import ceil_div
from cudatma.kernels.marlin.strip_spec import MAX_STRIPS, STRIP_CHANNELS, StripSpec
from cudatma.target import Target

KIB = 1024
#: Multiprocessors of the card that dumps are made for: an H200's.
_PROCESSORS = 132
#: More tokens than that are bound by mma.sync, not by the weight's bytes.
_MOST_TOKENS = 32
#: Where the target has wgmma, wide strips with so many tokens are its business.
_WGMMA_TOKENS, _WGMMA_STRIPS = 16, 4
#: A ring of fewer stages stands still while one is worked on.
_LEAST_STAGES, _MAX_STAGES = 3, 12
_DEPTHS = (1024, 512, 256, 128)
#: Most bytes of weights, and of activations, in one stage: a stage is what the last warps work on when all has arrived.
_STAGE_BYTES = 32 * KIB
_SMEM_FOR_TWO_BYTES = 192 * KIB
#: What the system keeps of a multiprocessor's shared memory for each block. [CUDA C++ Programming Guide]
_SMEM_PER_BLOCK_OVERHEAD = KIB


def strip_serves(layer: Layer, m: int, target: Target, multiprocessors: int, feeds: Feeds) -> bool:
    """Whether this kernel takes ``m`` tokens: it has no other feed than TMA."""
    if not feeds.all_tma or m > _MOST_TOKENS or not target.has("mma_sync") or not target.has("tma"):
        return False
    if 2 * ceil_div(layer.n, STRIP_CHANNELS) < multiprocessors:
        return False  # half of the card would stand by: better to divide the depth among blocks
    narrow = m <= _WGMMA_TOKENS or _strips(layer.n, multiprocessors)[0] < _WGMMA_STRIPS
    return narrow or not target.has_wgmma


def choose_strip(layer: Layer, m: int, target: Target, multiprocessors: int) -> Choice[StripSpec]:
    """The spec for ``m`` tokens on a card that strip_serves(). Deterministic; looks at no device."""
    strips, waves = _strips(layer.n, multiprocessors)
    # A second block fills the pause between two waves, where shared memory has room for its ring.
    blocks = 2 if waves > 1 and target.smem_per_sm_bytes >= _SMEM_FOR_TWO_BYTES else 1
    block_m = 8 if m <= 8 else 16 if m <= 16 else 32
    budget = min(target.smem_per_block_bytes, target.smem_per_sm_bytes // blocks - _SMEM_PER_BLOCK_OVERHEAD)

    def stages(block_k: int, warps_k: int) -> int:
        """As many as fit and are of use; 0: not even two."""
        useful = max(2, min(_MAX_STAGES, ceil_div(layer.k, block_k)))
        fitting = (n for n in range(useful, 1, -1) if spec(block_k, warps_k, n).smem_bytes <= budget)
        return next(fitting, 0)

    def spec(block_k: int, warps_k: int, stages: int) -> StripSpec:
        # Weights that several token tiles read should stay in L2.
        policy = "evict_first" if m <= block_m else "evict_normal"
        return StripSpec(
            layer.dtype, layer.group_size, layer.has_zeros, block_m, strips, block_k, warps_k, stages, policy, blocks
        )  # fmt: skip

    for block_k, warps_k in _divisions(layer, strips, block_m):
        enough = min(_LEAST_STAGES, ceil_div(layer.k, block_k))
        if (most := stages(block_k, warps_k)) >= max(2, enough):
            chosen = spec(block_k, warps_k, most)
            chosen.check_target(target)
            return Choice(chosen, blocks)
    raise ArgumentError("target", target.name, "a target whose shared memory holds a ring of this kernel")


def _divisions(layer: Layer, strips: int, block_m: int) -> list[tuple[int, int]]:
    """(block_k, warps_k), best first: warps enough to hide latencies, each with as much depth of a stage as fits."""
    found = []
    for warps_k in (8, 4, 2, 1):
        if strips * warps_k > (8 if warps_k == 8 else 16):
            continue
        for block_k in _DEPTHS:
            stage_bytes = max(STRIP_CHANNELS * strips * block_k // 2, block_m * block_k * 2)
            if block_k >= max(64 * warps_k, layer.group_size) and stage_bytes <= _STAGE_BYTES:
                found.append((block_k, warps_k))
    return found


def _strips(n: int, multiprocessors: int) -> tuple[int, int]:
    """Strips of a block, and the waves of blocks that cover the weight: as few as a block's limit allows."""
    strips = ceil_div(n, STRIP_CHANNELS)
    waves = ceil_div(strips, multiprocessors * MAX_STRIPS)
    return ceil_div(strips, multiprocessors * waves), waves


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
    ]
    cases = [(layer, m) for layer, m in cases if strip_serves(layer, m, target, _PROCESSORS, Feeds())]
    return list(dict.fromkeys(choose_strip(layer, m, target, _PROCESSORS).spec for layer, m in cases))
