"""The kernel of attention_decode for a problem, how it divides the work, and the launch arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import Arguments, Sizes
from cudatma.kernels.attention.arguments import COUNTER_BYTES, bounds, parameters_of, struct_and_fields
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
from cudatma.kernels.schedule import FLAGS_PER_SM_BYTES, PARTIALS_PER_SM_BYTES, ceil_div
from cudatma.target import Target, get_target

#: (CTAs of an SM, keys of a block): the first that holds so many stages is taken, else the first that holds two.
_SHAPES, _ENOUGH_STAGES, _MOST_STAGES = ((2, 64), (1, 64), (1, 32), (1, 16)), 3, 8
_FP8_SHAPES = ((2, 128), (1, 128), (1, 64))
#: Parts of a sequence's keys at most. Microseconds that adding up takes for each of them, and that an SM takes to begin
#: and end a CTA. [H200, attention_decode of 2 to 1024 tiles]
_MOST_PARTS, _PART_US, _CTA_US = 64, 0.14, 0.4


class DecodeWork(NamedTuple):
    """The division of a launch.

    tiles: tiles of rows of all sequences and heads of k and v. parts: CTAs per tile at most. partial_rows: rows of a
    tile in the workspace.
    """

    spec: AttentionDecode
    tiles: int
    parts: int
    partial_rows: int

    @property
    def partials_bytes(self) -> int:
        """Workspace for the parts of all tiles."""
        if self.parts == 1:
            return 0
        return self.tiles * self.parts * self.partial_rows * self.spec.partial_row_bytes()


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


def divide(problem: DecodeProblem, gpu: Gpu, spec: AttentionDecode | None = None, parts: int = 0) -> DecodeWork:
    """Return the work of a launch: of decode_spec()'s kernel by default, and by default in the fastest ``parts``."""
    spec = spec or decode_spec(problem, get_target(gpu.target))
    rows, capacity, block_m = problem.q_length * problem.group, problem.k_length, spec.block_m
    tiles = problem.batch * problem.kv_heads * -(-rows // block_m)
    if tiles > MAX_EXTENT:
        allowed = f"at most {MAX_EXTENT} tiles of {block_m} rows"
        raise ArgumentError("q.shape", problem.layouts.q.shape, allowed)
    partial_rows = min(rows, block_m)
    blocks = ceil_div(capacity, spec.block_n)
    left = problem.limits.left
    if left is not None:
        seen = left + 1 + problem.q_length
        blocks = min(blocks, ceil_div(seen, spec.block_n) + 1)
    most = min(blocks, _MOST_PARTS)
    most = min(most, gpu.sm_count * PARTIALS_PER_SM_BYTES // (tiles * partial_rows * spec.partial_row_bytes()))
    if most < 1 or tiles * COUNTER_BYTES > gpu.sm_count * FLAGS_PER_SM_BYTES:
        most = 1
    if not parts:
        parts = _fastest_parts(tiles, blocks, most, spec.loaded_stage_bytes, gpu.sm_count, gpu.memory_bytes_per_us)
    return DecodeWork(spec, tiles, min(parts, most), partial_rows)


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


def decode_arguments(problem: DecodeProblem, work: DecodeWork, target: Target) -> Arguments:
    """Return the launch for a problem. Raises TargetError, ArgumentError."""
    spec = work.spec
    spec.check_target(target)
    return Arguments(spec.template, spec, parameters_of(problem, spec), sizes_for(problem, spec)(problem, work))


def sizes_for(problem: DecodeProblem, spec: AttentionDecode) -> Callable[[DecodeProblem, DecodeWork], Sizes]:
    """Return a function that returns the sizes of every problem with the plan_key of this one."""
    group, page_size, block_m = problem.group, problem.page_size, spec.block_m
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
    pack = struct_and_fields(spec, problem.layouts, fixed)

    def sizes(problem: DecodeProblem, work: DecodeWork) -> Sizes:
        layouts, queries, capacity = problem.layouts, problem.q_length, problem.k_length
        (left, right), row_tiles, partials_bytes = bounds(problem), -(-queries * group // block_m), work.partials_bytes
        values: dict[str, Any] = {
            "q_length": queries * group,
            "k_length": capacity,
            "queries": queries,
            "row_tiles": row_tiles,
            "by_row_tiles": row_tiles,
            "partial_rows": work.partial_rows,
            "upper": (1 - queries + right) & 0xFFFFFFFF,
            "lower": (-queries - left) & 0xFFFFFFFF,
            "pages": layouts.k.shape[0],
            "table_pitch": capacity // page_size if page_size else 0,
            "v_scale": problem.v_scale,
        }
        struct, fields = pack(values, layouts, problem.scale * problem.k_scale, problem.softcap)
        flags_bytes = COUNTER_BYTES * work.tiles if partials_bytes else 0
        grid = work.tiles, work.parts
        return Sizes(grid, (struct,), fields, 0, _overlaps(problem), partials_bytes, flags_bytes)

    return sizes


def _overlaps(problem: DecodeProblem) -> bool:
    """Return whether the launch is a programmatic dependent.

    A launch with a large e4m3 cache takes up to 4 % longer while the kernel before it ends. No other one loses, and
    small ones gain up to 9 %. [H100, attention_overlap.json]
    """
    if not problem.has_fp8_cache:
        return True
    rows = problem.batch * problem.k_length * problem.kv_heads
    return rows * (problem.head_dim + problem.v_head_dim) <= IN_L2_BYTES
