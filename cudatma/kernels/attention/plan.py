"""The launch of attention: which arguments a version's kernel gets for a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.descriptor import TensorMap
from cudatma.errors import ArgumentError
from cudatma.kernels.attention.request import Request
from cudatma.kernels.attention.spec import AttentionSpec
from cudatma.kernels.family import MAX_EXTENT
from cudatma.kernels.launch import Launch
from cudatma.kernels.launch_struct import pack
from cudatma.kernels.schedule import DivisorStruct, ceil_div
from cudatma.target import Target

LOG2_E = 1.4426950408889634
#: A distance beyond every length.
FAR = 1 << 30
#: Most bytes of keys and values of a raster group of several heads, and how many times as many heads the last group may
#: have. [H100, docs/performance/log.md]
_GROUP_BYTES, _LAST_GROUPS = 4 << 20, 4


@dataclass(frozen=True, slots=True)
class HostCounter:
    """In host memory, how many tiles persistent CTAs have taken: zero before and after a launch."""

    taken: np.ndarray[Any, np.dtype[np.uint32]] = field(default_factory=lambda: np.zeros(1, np.uint32))


def plan_attention(
    request: Request,
    result: ArrayInfo,
    lse: ArrayInfo | None,
    spec: AttentionSpec,
    target: Target,
    sm_count: int,
    tile_counter: int | HostCounter = 0,
) -> Launch:
    """The launch for a request. result: (batch, q_length, heads, v_head_dim); lse: (batch, heads, q_length) without
    gaps, or None. tile_counter: where persistent CTAs count the tiles that they have taken, four bytes that are zero
    before and after the launch. Raises TargetError, ArgumentError."""
    spec.check_target(target)
    problem = request.problem(spec.version)
    if spec.tiles(problem) > MAX_EXTENT:
        raise ArgumentError(
            "q.shape", request.q.shape, f"at most {MAX_EXTENT} tiles of {spec.block_m} queries of a head"
        )
    counter = describe(tile_counter.taken) if isinstance(tile_counter, HostCounter) else tile_counter
    arrays = {"q": request.q, "k": request.k, "v": request.v, "output": result}
    values = _values(request, spec)
    values |= stride_values(arrays)
    if request.sequences:  # they begin where the kernel reads
        values["output_batch"] = 0
    args: dict[str, Any] = {"output_rows": result, "lse": 0 if lse is None else lse, "tile_counter": counter}
    args |= {name: info for name, info in request.arrays().items() if name in spec.parameter_names}
    args["problem"] = pack(spec.problem_members, values)
    boxes = {"q": spec.q_box, "k": spec.kv_box, "v": spec.kv_box, "output": spec.q_box}
    for name, box in boxes.items():
        if f"{name}_map" in spec.parameter_names:
            args[f"{name}_map"] = tensor_map(arrays[name], box, spec.swizzle, target)
    ordered = tuple([args[name] for name in spec.parameter_names])
    written = [info for info in (result, lse, counter) if isinstance(info, ArrayInfo)]
    touched = (*written, *request.arrays().values())
    return Launch(spec.template, spec, spec.ctas(problem, sm_count), ordered, touched, programmatic=True)


def raster(spec: AttentionSpec, request: Request) -> tuple[int, int]:
    """(heads of q, of the whole batch, of a raster group of causal tiles; first head of the last group)."""
    kv_bytes = 2 * request.lengths[1] * (spec.head_dim + spec.v_head_dim)
    kv_heads = request.batch * request.kv_heads
    in_group, sharing = min(kv_heads, max(1, _GROUP_BYTES // kv_bytes)), request.heads // request.kv_heads
    return in_group * sharing, max(0, ceil_div(kv_heads, in_group) - _LAST_GROUPS) * in_group * sharing


def _values(request: Request, spec: AttentionSpec) -> dict[str, Any]:
    """Members of the kernels' Problem, all but strides."""
    raster_heads, last_group = raster(spec, request)
    problem = request.problem(spec.version)
    is_varlen = request.sequences is not None
    rows, columns = problem.batch * problem.heads, ceil_div(problem.q_length, spec.block_m)
    left, right = request.mask.left, request.mask.right
    diagonal = 0 if is_varlen else problem.k_length - problem.q_length  # each sequence has its own
    values: dict[str, Any] = {
        "tiles_m": rows,
        "tiles_n": columns,
        "raster_heads": raster_heads,
        "last_group": last_group,
        "by_tiles_n": DivisorStruct.of(columns),
        "by_raster_tiles": DivisorStruct.of(raster_heads * columns),
        "by_raster_heads": DivisorStruct.of(raster_heads),
        "by_last_heads": DivisorStruct.of(rows - last_group),
        "q_length": problem.q_length,
        "k_length": problem.k_length,
        "heads": problem.heads,
        "q_total": request.q.shape[1],
        "k_total": request.k.shape[1],
        "by_heads": DivisorStruct.of(problem.heads),
        "by_group": DivisorStruct.of(problem.group),
        "upper": (diagonal + 1 + (FAR if right is None else min(right, FAR))) & 0xFFFFFFFF,
        "lower": (diagonal - (FAR if left is None else min(left, FAR))) & 0xFFFFFFFF,
    }
    return values | score_values(request.scale, request.softcap)


def stride_values(arrays: Mapping[str, ArrayInfo]) -> dict[str, int]:
    """Members of Problem: elements from one batch, row and head of each array to the next."""
    values: dict[str, int] = {}
    for name, info in arrays.items():
        batch, row, head, element = info.strides_bytes
        values |= {f"{name}_batch": batch // element, f"{name}_pitch": row // element, f"{name}_head": head // element}
    return values


def score_values(scale: float, softcap: float) -> dict[str, float]:
    """Members of Problem: what makes scores of products. softcap: 0 for none."""
    if not softcap:
        return {"scale_log2": scale * LOG2_E}
    return {"scale_log2": softcap * LOG2_E, "cap_scale": scale / softcap}


def tensor_map(
    info: ArrayInfo,
    box: tuple[int, int, int, int],
    swizzle: str,
    target: Target,
) -> TensorMap:
    """Of (batch, length, heads, head_dim), heads outside of rows whatever the order of their strides."""
    # The launch keeps the array. An axis of one element may have any stride: TMA gets one that it takes.
    strides = tuple(
        step if extent > 1 else 16 for extent, step in zip(info.shape[:3], info.strides_bytes[:3], strict=True)
    )
    info = replace(info, owner=None, strides_bytes=(*strides, info.strides_bytes[3]))
    kind = "uint8" if info.dtype.itemsize == 1 else None
    return TensorMap.from_array(info, box, dtype=kind, axes=(3, 1, 2, 0), swizzle=swizzle, target=target)
