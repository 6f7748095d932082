"""How attention_decode divides its work, and the launch: a kernel's arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import Arguments, Sizes
from cudatma.kernels.attention.arguments import FAR, OPERANDS, packed_for, parameters_of, set_scores
from cudatma.kernels.attention.decode_request import DecodeRequest
from cudatma.kernels.attention.decode_spec import (
    LEAST_BOX_ROWS,
    AttentionDecode,
    AttentionDecodeFp8,
    AttentionDecodeP1,
)
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
_COUNTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """tiles: of rows, of all sequences and heads of k and v. parts: CTAs of a tile at most. partial_rows: of a tile."""

    spec: AttentionDecode
    tiles: int
    parts: int
    partial_rows: int

    @property
    def partials_bytes(self) -> int:
        """What the parts of all tiles take in the workspace."""
        if self.parts == 1:
            return 0
        return self.tiles * self.parts * self.partial_rows * self.spec.partial_row_bytes()


def decode_spec(request: DecodeRequest, target: Target) -> AttentionDecode:
    """Return the kernel for a request."""
    mask = request.mask
    masks = mask.is_causal, mask.has_window, request.softcap > 0, request.sink is not None
    dims = request.q.shape[3], request.v.shape[3]
    page_size = 0 if request.page_table is None else request.k.shape[1]
    return fitted_spec(request.q.dtype.name, dims, masks, page_size, target, request.has_fp8_cache)


@lru_cache(maxsize=1024)
def fitted_spec(
    dtype: str,
    dims: tuple[int, int],
    masks: tuple[bool, bool, bool, bool],
    page_size: int,
    target: Target,
    has_fp8_cache: bool = False,
) -> AttentionDecode:
    """Return the kernel with the longest ring that fits shared memory.

    ``dims`` holds the head dims of k and of v; ``page_size`` is 0 without pages. Two CTAs share an SM if each has
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
            spec = kind(dtype, *dims, *masks, stages=stages, **rest)
            if spec.smem_bytes <= target.smem_share_bytes(blocks_per_sm):
                if stages >= _ENOUGH_STAGES:
                    return spec
                fitting.append(spec)
                break
    return fitting[0]


def divide(request: DecodeRequest, gpu: Gpu, spec: AttentionDecode | None = None, parts: int = 0) -> DecodeWork:
    """Return the work of a launch: of decode_spec()'s kernel by default, and by default in the fastest ``parts``."""
    spec = spec or decode_spec(request, get_target(gpu.target))
    rows, capacity = request.rows, request.capacity
    tiles = request.q.shape[0] * request.k.shape[2] * ceil_div(rows, spec.block_m)
    if tiles > MAX_EXTENT or capacity > MAX_EXTENT:
        raise ArgumentError("q.shape", request.q.shape, f"at most {MAX_EXTENT} tiles of {spec.block_m} rows and keys")
    partial_rows = min(rows, spec.block_m)
    blocks = ceil_div(capacity, spec.block_n)
    if request.mask.left is not None:
        seen = request.mask.left + 1 + request.q.shape[1]
        blocks = min(blocks, ceil_div(seen, spec.block_n) + 1)
    most = min(blocks, _MOST_PARTS)
    most = min(most, gpu.sm_count * PARTIALS_PER_SM_BYTES // (tiles * partial_rows * spec.partial_row_bytes()))
    if most < 1 or tiles * _COUNTER_BYTES > gpu.sm_count * FLAGS_PER_SM_BYTES:
        most = 1
    chosen = min(parts, most) if parts else _fastest_parts(tiles, blocks, most, spec.loaded_stage_bytes, gpu)
    return DecodeWork(spec, tiles, chosen, partial_rows)


def _fastest_parts(tiles: int, blocks: int, most: int, block_bytes: int, gpu: Gpu) -> int:
    """Return the number of parts, up to ``most``, with the least time where sequences have all keys that they may have.

    The CTAs of the busiest SM load at the SM's part of the memory's rate; then the parts are added up.
    """
    sm_count, rate = gpu.sm_count, gpu.memory_bytes_per_us
    of_sm_bytes = sm_count * block_bytes
    # No division loads fewer bytes; all else grows with the parts.
    least_us = tiles * blocks * block_bytes / rate
    chosen, chosen_us = 1, math.inf
    for parts in range(1, most + 1):
        ctas = -(-tiles * parts // sm_count)
        around_us = ctas * _CTA_US + (parts * _PART_US if parts > 1 else 0.0)
        if least_us + around_us > chosen_us:
            break
        us = ctas * -(-blocks // parts) * of_sm_bytes / rate + around_us
        if us < chosen_us:
            chosen, chosen_us = parts, us
    return chosen


def decode_arguments(request: DecodeRequest, work: DecodeWork, target: Target) -> Arguments:
    """Return the launch for a request. Raises TargetError, ArgumentError."""
    spec = work.spec
    spec.check_target(target)
    arrays = dict(zip(OPERANDS, request.operands, strict=True))
    parameters = parameters_of(spec, arrays, {"k": spec.kv_box, "v": spec.kv_box})
    return Arguments(spec.template, spec, parameters, sizes_for(request, spec)(request, work))


def sizes_for(request: DecodeRequest, spec: AttentionDecode) -> Callable[[DecodeRequest, DecodeWork], Sizes]:
    """Return a function that returns the sizes, for every request with the plan_key() of this one."""
    heads, (page_size, kv_heads), block_m = request.q.shape[2], request.k.shape[1:3], spec.block_m
    group = heads // kv_heads
    fixed = {
        "heads": heads,
        "group": group,
        "kv_heads": kv_heads,
        "by_group": group,
        "by_kv_heads": kv_heads,
        "page_size": page_size,
        "by_page_size": max(1, page_size),
    }
    for name, scale in (("k_scale_step", request.k_scale), ("v_scale_step", request.v_scale)):
        fixed[name] = 0 if isinstance(scale, float) else int(max(scale.shape, default=1) > 1)
    packed = packed_for(spec, request.operands, fixed)

    def sizes(request: DecodeRequest, work: DecodeWork) -> Sizes:
        k_scale, v_scale, partials_bytes = request.k_scale, request.v_scale, work.partials_bytes
        mask, table, queries = request.mask, request.page_table, request.q.shape[1]
        row_tiles = -(-queries * group // block_m)
        values: dict[str, Any] = {
            "q_length": queries * group,
            "k_length": request.capacity,
            "queries": queries,
            "row_tiles": row_tiles,
            "by_row_tiles": row_tiles,
            "partial_rows": work.partial_rows,
            "upper": (1 - queries + (FAR if mask.right is None else 0)) & 0xFFFFFFFF,
            "lower": (-queries - (FAR if mask.left is None else min(mask.left, FAR))) & 0xFFFFFFFF,
            "pages": request.k.shape[0],
            "table_pitch": 0 if table is None else table.shape[1],
            "v_scale": v_scale if isinstance(v_scale, float) else 1.0,
        }
        set_scores(values, request.scale * (k_scale if isinstance(k_scale, float) else 1.0), request.softcap)
        struct, fields = packed(values, request.operands)
        flags_bytes = _COUNTER_BYTES * work.tiles if partials_bytes else 0
        grid = work.tiles, work.parts
        return Sizes(grid, (struct,), fields, 0, _overlaps(request), partials_bytes, flags_bytes)

    return sizes


def _overlaps(request: DecodeRequest) -> bool:
    """Whether the launch is a programmatic dependent. One of a large e4m3 cache takes up to 4 % longer while the kernel
    before it ends; no other one loses, and small ones gain up to 9 %. [H100, attention_overlap.json]"""
    rows = request.q.shape[0] * request.capacity * request.k.shape[2]
    return not request.has_fp8_cache or rows * (request.k.shape[3] + request.v.shape[3]) <= IN_L2_BYTES
