"""Launch arguments of attention, attention_varlen and attention_decode, and the fields that depend on sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from cudatma.descriptor import TiledSpec
from cudatma.dtypes import tma_type
from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import FLAGS, PARTIALS, Arguments, At, Map, Sizes, Value
from cudatma.kernels.attention.config import AttentionConfig
from cudatma.kernels.attention.problem import DecodeProblem, Layout, Layouts, Problem
from cudatma.kernels.family import MAX_EXTENT
from cudatma.kernels.gpu import IN_L2_BYTES, Gpu
from cudatma.kernels.launch_struct import packer
from cudatma.kernels.schedule import FLAGS_PER_SM_BYTES, PARTIALS_PER_SM_BYTES
from cudatma.target import Target

_LOG2_E = 1.4426950408889634
#: A distance larger than any sequence length.
_FAR = 1 << 30
_COUNTER_BYTES = 4
#: Maximum number of bytes of keys and values in a raster group of several heads, and maximum ratio of the last group's
#: number of heads to that of the other groups. [H100, docs/lab/attention.md]
_GROUP_BYTES, _LAST_GROUPS = 4 << 20, 4
#: Maximum number of parts into which a sequence's keys are split, microseconds to add each part, and microseconds to
#: start and end a CTA. [H200, attention_decode with 2 to 1024 tiles]
_MAX_PARTS, _PART_US, _CTA_US = 64, 0.14, 0.4
#: Maps each parameter to its array if their names differ.
_ARRAYS = {"output_rows": "out", "tile_counter": FLAGS, "counters": FLAGS, "partials": PARTIALS}
#: Axes whose strides are members of the struct, by the suffixes of the members' names.
_AXES = {"batch": 0, "pitch": 1, "head": 2}


def launch_arguments(problem: Problem, config: AttentionConfig, target: Target, sizes: Sizes) -> Arguments:
    """Return the launch arguments for a kernel of any of the three functions. Raises TargetError or ArgumentError."""
    config.check_target(target)
    parameters: list[Any] = []
    for name in config.parameter_names:
        if name.endswith("_map"):
            array = _array_of(name)
            box = config.kv_box if array in ("k", "v") else config.q_box
            dtype = "uint8" if array in ("k", "v") and config.kv_bytes == 1 else problem.dtype
            parameters.append(_map(array, getattr(problem.layouts, array), dtype, box, config.swizzle))
        else:
            parameters.append(Value(0) if name == "problem" else At(_ARRAYS.get(name, name)))
    return Arguments(config.template, config, tuple(parameters), sizes)


def attention_sizes(problem: Problem, config: AttentionConfig, sm_count: int) -> Callable[[Problem], Sizes]:
    """Return a function that computes the sizes of any problem with the same plan_key."""
    heads, tile_m, is_varlen = problem.heads, config.tile_m, problem.is_varlen
    fixed = {"heads": heads, "by_heads": heads, "by_group": problem.group}
    pack = _struct_and_fields(config, problem.layouts, fixed | ({"output_batch": 0} if is_varlen else {}))
    is_causal, has_limits, is_persistent = config.is_causal, config.has_upper, config.is_persistent
    flags_bytes = _COUNTER_BYTES if is_persistent else 0

    def sizes(problem: Problem) -> Sizes:
        layouts, q_length, k_length = problem.layouts, problem.q_length, problem.k_length
        rows, columns = problem.batch * heads, -(-q_length // tile_m)
        tiles = rows * columns
        if tiles > MAX_EXTENT:
            allowed = f"small enough for at most {MAX_EXTENT} tiles of {tile_m} queries per head"
            raise ArgumentError("q.shape", layouts.q.shape, allowed)
        values = {"tiles_m": rows, "tiles_n": columns, "q_length": q_length, "k_length": k_length}
        if is_varlen:
            values["q_total"], values["k_total"] = layouts.q.shape[1], layouts.k.shape[1]
        if is_causal:
            raster_heads, last_group = raster(config, problem)
            values["raster_heads"] = values["by_raster_heads"] = raster_heads
            values["by_raster_tiles"] = raster_heads * columns
            values["last_group"] = last_group
            values["by_last_heads"] = rows - last_group
        else:
            values["by_tiles_n"] = columns
        if has_limits:
            left, right = _bounds(problem)
            diagonal = 0 if is_varlen else k_length - q_length  # Each sequence has its own diagonal.
            values["upper"] = (diagonal + 1 + right) & 0xFFFFFFFF
            values["lower"] = (diagonal - left) & 0xFFFFFFFF
        struct, fields = pack(values, layouts, problem.scale, problem.softcap)
        return Sizes(min(tiles, sm_count) if is_persistent else tiles, (struct,), fields, 0, True, 0, flags_bytes)

    return sizes


def decode_sizes(
    problem: DecodeProblem, config: AttentionConfig, gpu: Gpu, parts: int = 0
) -> Callable[[DecodeProblem], Sizes]:
    """Return a function that computes the sizes of any problem with the same plan_key.

    ``parts`` is the number of CTAs that share a tile, limited by the number of blocks and by the workspace, or 0 for
    the fastest number.
    """
    group, page_size, tile_m, tile_n = problem.group, problem.page_size, config.tile_m, config.tile_n
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
    pack, row_bytes = _struct_and_fields(config, problem.layouts, fixed), config.partial_row_bytes
    partials_bytes, flags_bytes = gpu.sm_count * PARTIALS_PER_SM_BYTES, gpu.sm_count * FLAGS_PER_SM_BYTES
    speed = config.loaded_stage_bytes, gpu.sm_count, gpu.memory_bytes_per_us

    def divided(problem: DecodeProblem, tiles: int, tile_bytes: int) -> int:
        """Return the number of parts into which a tile is divided. Each part has ``tile_bytes`` of partial sums."""
        blocks, left = -(-problem.k_length // tile_n), problem.limits.left
        if left is not None:
            blocks = min(blocks, -(-(left + 1 + problem.q_length) // tile_n) + 1)
        max_parts = min(blocks, _MAX_PARTS, partials_bytes // (tiles * tile_bytes))
        if max_parts < 1 or tiles * _COUNTER_BYTES > flags_bytes:
            return 1
        return min(parts, max_parts) if parts else _fastest_parts(tiles, blocks, max_parts, *speed)

    def sizes(problem: DecodeProblem) -> Sizes:
        layouts, queries, capacity = problem.layouts, problem.q_length, problem.k_length
        rows = queries * group
        row_tiles, partial_rows = -(-rows // tile_m), min(rows, tile_m)
        tiles, tile_bytes = problem.batch * problem.kv_heads * row_tiles, partial_rows * row_bytes
        if tiles > MAX_EXTENT:
            allowed = f"small enough for at most {MAX_EXTENT} tiles of {tile_m} rows"
            raise ArgumentError("q.shape", layouts.q.shape, allowed)
        count = divided(problem, tiles, tile_bytes)
        left, right = _bounds(problem)
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
        space = (0, 0) if count == 1 else (tiles * count * tile_bytes, tiles * _COUNTER_BYTES)
        return Sizes((tiles, count), (struct,), fields, 0, _overlaps(problem), *space)

    return sizes


@lru_cache(maxsize=4096)
def _fastest_parts(
    tiles: int, blocks: int, max_parts: int, block_bytes: int, sm_count: int, bytes_per_us: float
) -> int:
    """Return the fastest number of parts, up to ``max_parts``, assuming that each sequence fills its capacity.

    The time is the sum of two terms. The CTAs of the busiest SM load keys and values at this SM's share of the memory
    bandwidth. The partial results are added afterwards.
    """
    # More parts never load fewer bytes, and all other terms grow with the number of parts.
    min_us = tiles * blocks * block_bytes / bytes_per_us
    chosen, chosen_us = 1, math.inf
    for parts in range(1, max_parts + 1):
        ctas = -(-tiles * parts // sm_count)
        around_us = ctas * _CTA_US + (parts * _PART_US if parts > 1 else 0.0)
        if min_us + around_us > chosen_us:
            break
        us = ctas * -(-blocks // parts) * sm_count * block_bytes / bytes_per_us + around_us
        if us < chosen_us:
            chosen, chosen_us = parts, us
    return chosen


def _overlaps(problem: DecodeProblem) -> bool:
    """Return whether to use programmatic dependent launch.

    A launch with a large e4m3 cache takes up to 4% longer if it overlaps with the previous kernel. No other launch
    takes longer, and small launches are up to 9% faster. [H100, docs/lab/attention.md]
    """
    if not problem.has_fp8_cache:
        return True
    rows = problem.batch * problem.k_length * problem.kv_heads
    return rows * (problem.head_dim + problem.v_head_dim) <= IN_L2_BYTES


def _bounds(problem: Problem) -> tuple[int, int]:
    """Return the distances from a query to the first and the last key that it attends to, or _FAR without a limit."""
    left, right = problem.limits
    if left is None or left >= problem.k_length - 1:
        left = _FAR
    if right is None or right >= problem.q_length - 1:
        right = _FAR
    return left, right


def raster(config: AttentionConfig, problem: Problem) -> tuple[int, int]:
    """Return the number of heads per raster group of causal tiles, and the index of the last group's first head.

    The query heads of all sequences are counted.
    """
    group, kv_heads = problem.group, problem.batch * problem.kv_heads
    kv_bytes = 2 * problem.k_length * (config.head_dim + config.v_head_dim)
    in_group = min(kv_heads, max(1, _GROUP_BYTES // kv_bytes))
    return in_group * group, max(0, -(-kv_heads // in_group) - _LAST_GROUPS) * in_group * group


def _struct_and_fields(
    config: AttentionConfig, layouts: Layouts, fixed: Mapping[str, Any]
) -> Callable[[dict[str, Any], Layouts, float, float], tuple[bytes, tuple[int, ...]]]:
    """Return a function that computes the struct's bytes and the size-dependent fields of the tensor maps.

    The function takes a problem's values for the struct members, its layouts, its scale and its softcap. ``fixed``
    contains the members that have the same value in all problems with the same plan_key. ``layouts`` are the layouts
    of one of these problems.
    """
    fixed, strides = dict(fixed), []
    for member in config.problem_members:
        array, _, step = member.name.rpartition("_")
        if member.name in fixed or step not in _AXES or array not in ("q", "k", "v", "output"):
            continue
        place, axis = Layouts._fields.index(_array_of(array)), _AXES[step]
        itemsize = layouts[place].strides_bytes[3]
        if step == "pitch":
            fixed[member.name] = layouts[place].strides_bytes[axis] // itemsize
        else:
            strides.append((member.name, place, axis, itemsize))
    pack = packer(config.problem_members, fixed)
    maps = [Layouts._fields.index(_array_of(name)) for name in config.parameter_names if name.endswith("_map")]

    def packed(values: dict[str, Any], layouts: Layouts, scale: float, softcap: float) -> tuple[bytes, tuple[int, ...]]:
        values["scale_log2"] = (softcap or scale) * _LOG2_E
        if softcap:
            values["cap_scale"] = scale / softcap
        for member, place, axis, itemsize in strides:
            values[member] = layouts[place].strides_bytes[axis] // itemsize
        fields: list[int] = []
        for place in maps:
            fields += _fields(layouts[place])
        return pack(values), tuple(fields)

    return packed


def _array_of(name: str) -> str:
    """Return the name of the array that a tensor map parameter (q_map, k_map, v_map or output_map) covers."""
    return name.removesuffix("_map").replace("output", "out")


def _map(array: str, layout: Layout, dtype: str, box: tuple[int, int, int, int], swizzle: str) -> Map:
    """Return a tensor map over (batch, length, heads, dim). The heads axis always precedes the row axis."""
    _, _, heads, dim = layout.shape
    length, batch, head_bytes, batch_bytes = _fields(layout)
    dims, strides = (dim, length, heads, batch), (layout.strides_bytes[1], head_bytes, batch_bytes)
    tma_box = box[3], box[1], box[2], box[0]
    spec = TiledSpec(dtype=tma_type(dtype), dims=dims, strides_bytes=strides, box=tma_box, swizzle=swizzle)  # type: ignore[arg-type]
    return Map(array, spec, (("dim", 1), ("dim", 3), ("stride", 1), ("stride", 2)))


def _fields(layout: Layout) -> tuple[int, int, int, int]:
    """Return the size-dependent fields of a map: length, batch, stride between heads, and stride between sequences."""
    (batch, length, _, _), (batch_bytes, row, head, _) = layout
    return length, batch, head, batch_bytes if batch > 1 else row
