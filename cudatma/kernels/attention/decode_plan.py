"""The kernel of attention_decode for a problem, and the sizes of its launch: how the work is divided."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import Sizes
from cudatma.kernels.attention.arguments import COUNTER_BYTES, bounds, struct_and_fields
from cudatma.kernels.attention.decode_spec import (
    LEAST_BOX_ROWS,
    AttentionDecode,
    AttentionDecodeFp8,
    AttentionDecodeP1,
)
from cudatma.kernels.attention.problem import DecodeProblem
from cudatma.kernels.attention.spec import SPEC_FIELDS
from cudatma.kernels.family import MAX_EXTENT
from cudatma.kernels.gpu import IN_L2_BYTES, Gpu
from cudatma.kernels.schedule import FLAGS_PER_SM_BYTES, PARTIALS_PER_SM_BYTES
from cudatma.target import Target

#: (CTAs of an SM, keys of a block): the first that holds so many stages is taken, else the first that holds two.
_SHAPES, _ENOUGH_STAGES, _MOST_STAGES = ((2, 64), (1, 64), (1, 32), (1, 16)), 3, 8
_FP8_SHAPES = ((2, 128), (1, 128), (1, 64))
#: Parts of a sequence's keys at most. Microseconds that adding up takes for each of them, and that an SM takes to begin
#: and end a CTA. [H200, attention_decode of 2 to 1024 tiles]
_MOST_PARTS, _PART_US, _CTA_US = 64, 0.14, 0.4


def decode_spec(problem: DecodeProblem, target: Target) -> AttentionDecode:
    """Return the kernel for a problem."""
    fields = tuple(getattr(problem, name) for name in SPEC_FIELDS)
    return fitted_spec(fields, problem.page_size, target, problem.has_fp8_cache)


@lru_cache(maxsize=1024)
def fitted_spec(
    fields: tuple[Any, ...], page_size: int, target: Target, has_fp8_cache: bool = False
) -> AttentionDecode:
    """Return the kernel with the longest ring that fits shared memory.

    ``fields`` holds the SPEC_FIELDS of the problem; ``page_size`` is 0 without pages. Two CTAs share an SM if each has
    enough stages.
    """
    kind = AttentionDecodeFp8 if has_fp8_cache else AttentionDecode if target.has("wgmma") else AttentionDecodeP1
    fitting: list[AttentionDecode] = []
    for blocks_per_sm, block_n in _FP8_SHAPES if has_fp8_cache else _SHAPES:
        common = math.gcd(page_size, block_n)
        box_rows = block_n if not page_size else common if common >= LEAST_BOX_ROWS else 0
        rest: dict[str, Any] = {"is_paged": page_size > 0, "box_rows": box_rows, "block_n": block_n}
        rest["blocks_per_sm"] = blocks_per_sm
        for stages in range(_MOST_STAGES, 1, -1):
            spec = kind(*fields, **rest | {"stages": stages})
            if spec.smem_bytes <= target.smem_share_bytes(blocks_per_sm):
                if stages >= _ENOUGH_STAGES:
                    return spec
                fitting.append(spec)
                break
    return fitting[0]


def decode_sizes(
    problem: DecodeProblem, spec: AttentionDecode, gpu: Gpu, parts: int = 0
) -> Callable[[DecodeProblem], Sizes]:
    """Return a function that returns the sizes of every problem with the plan_key of this one.

    parts: CTAs that share a tile, as far as blocks and workspace allow; 0 for the fastest number.
    """
    group, page_size, block_m, block_n = problem.group, problem.page_size, spec.block_m, spec.block_n
    fixed = {
        "heads": problem.heads,
        "group": group,
        "kv_heads": problem.kv_heads,
        "by_group": group,
        "by_kv_heads": problem.kv_heads,
        "page_size": page_size,
        "by_page_size": max(1, page_size),
        "k_scale_step": problem.k_scale_step,
        "v_scale_step": problem.v_scale_step,
    }
    pack, row_bytes = struct_and_fields(spec, problem.layouts, fixed), spec.partial_row_bytes()
    partials_bytes, flags_bytes = gpu.sm_count * PARTIALS_PER_SM_BYTES, gpu.sm_count * FLAGS_PER_SM_BYTES
    speed = spec.loaded_stage_bytes, gpu.sm_count, gpu.memory_bytes_per_us

    def divided(problem: DecodeProblem, tiles: int, tile_bytes: int) -> int:
        """Return the parts of a tile, each with partial sums of so many bytes."""
        blocks, left = -(-problem.k_length // block_n), problem.limits.left
        if left is not None:
            blocks = min(blocks, -(-(left + 1 + problem.q_length) // block_n) + 1)
        most = min(blocks, _MOST_PARTS, partials_bytes // (tiles * tile_bytes))
        if most < 1 or tiles * COUNTER_BYTES > flags_bytes:
            return 1
        return min(parts, most) if parts else _fastest_parts(tiles, blocks, most, *speed)

    def sizes(problem: DecodeProblem) -> Sizes:
        layouts, queries, capacity = problem.layouts, problem.q_length, problem.k_length
        rows = queries * group
        row_tiles, partial_rows = -(-rows // block_m), min(rows, block_m)
        tiles, tile_bytes = problem.batch * problem.kv_heads * row_tiles, partial_rows * row_bytes
        if tiles > MAX_EXTENT:
            allowed = f"at most {MAX_EXTENT} tiles of {block_m} rows"
            raise ArgumentError("q.shape", layouts.q.shape, allowed)
        count = divided(problem, tiles, tile_bytes)
        left, right = bounds(problem)
        values: dict[str, Any] = {
            "q_length": rows,
            "k_length": capacity,
            "queries": queries,
            "row_tiles": row_tiles,
            "by_row_tiles": row_tiles,
            "partial_rows": partial_rows,
            "upper": (1 - queries + right) & 0xFFFFFFFF,
            "lower": (-queries - left) & 0xFFFFFFFF,
            "pages": layouts.k.shape[0],
            "table_pitch": capacity // page_size if page_size else 0,
            "v_scale": problem.v_scale,
        }
        struct, fields = pack(values, layouts, problem.scale * problem.k_scale, problem.softcap)
        space = (0, 0) if count == 1 else (tiles * count * tile_bytes, tiles * COUNTER_BYTES)
        return Sizes((tiles, count), (struct,), fields, 0, _overlaps(problem), *space)

    return sizes


@lru_cache(maxsize=4096)
def _fastest_parts(tiles: int, blocks: int, most: int, block_bytes: int, sm_count: int, bytes_per_us: float) -> int:
    """Return the number of parts, up to ``most``, with the least time if each sequence fills its capacity.

    The CTAs of the busiest SM load at the SM's share of the memory's rate; then the parts are added up.
    """
    # No division loads fewer bytes; all else grows with the parts.
    min_us = tiles * blocks * block_bytes / bytes_per_us
    chosen, chosen_us = 1, math.inf
    for parts in range(1, most + 1):
        ctas = -(-tiles * parts // sm_count)
        around_us = ctas * _CTA_US + (parts * _PART_US if parts > 1 else 0.0)
        if min_us + around_us > chosen_us:
            break
        us = ctas * -(-blocks // parts) * sm_count * block_bytes / bytes_per_us + around_us
        if us < chosen_us:
            chosen, chosen_us = parts, us
    return chosen


def _overlaps(problem: DecodeProblem) -> bool:
    """Return whether the launch is a programmatic dependent.

    A launch with a large e4m3 cache takes up to 4 % longer while the kernel before it ends. No other one loses, and
    small ones gain up to 9 %. [H100, attention_overlap.json]
    """
    if not problem.has_fp8_cache:
        return True
    rows = problem.batch * problem.k_length * problem.kv_heads
    return rows * (problem.head_dim + problem.v_head_dim) <= IN_L2_BYTES
