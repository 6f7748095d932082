"""Arguments of attention's launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cudatma.arrays import ArrayInfo
from cudatma.descriptor import TiledSpec
from cudatma.dtypes import tma_type
from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import FLAGS, PARTIALS, Arguments, At, Map, Sizes, Value
from cudatma.kernels.attention.request import Request
from cudatma.kernels.attention.spec import AttentionSpec
from cudatma.kernels.family import MAX_EXTENT
from cudatma.kernels.launch_struct import packer
from cudatma.kernels.schedule import ceil_div
from cudatma.target import Target

LOG2_E = 1.4426950408889634
#: A distance beyond every length.
FAR = 1 << 30
#: Most bytes of keys and values of a raster group of several heads, and how many times as many heads the last group may
#: have. [H100, docs/performance/log.md]
_GROUP_BYTES, _LAST_GROUPS = 4 << 20, 4


#: Parameters that are arrays, and the names of the arrays.
_ARRAYS = {"output_rows": "out", "tile_counter": FLAGS, "counters": FLAGS, "partials": PARTIALS}
_COUNTER_BYTES = 4


def attention_arguments(request: Request, spec: AttentionSpec, target: Target, sm_count: int) -> Arguments:
    """Return the launch for a request. Raises TargetError, ArgumentError."""
    spec.check_target(target)
    boxes = {"q": spec.q_box, "k": spec.kv_box, "v": spec.kv_box, "out": spec.q_box}
    parameters = parameters_of(spec, {"q": request.q, "k": request.k, "v": request.v, "out": request.out}, boxes)
    sizes = attention_sizes(request, spec, sm_count, packer(spec.problem_members))
    return Arguments(spec.template, spec, parameters, sizes)


def parameters_of(
    spec: AttentionSpec, arrays: Mapping[str, ArrayInfo], boxes: Mapping[str, tuple[int, int, int, int]]
) -> tuple[Any, ...]:
    """Return the parameters of a kernel, of which maps have these boxes."""
    parameters: list[Any] = []
    for name in spec.parameter_names:
        array = name.removesuffix("_map").replace("output", "out")
        if name.endswith("_map"):
            parameters.append(_map(array, arrays[array], boxes[array], spec.swizzle))
        else:
            parameters.append(Value(0) if name == "problem" else At(_ARRAYS.get(name, name)))
    return tuple(parameters)


def attention_sizes(
    request: Request, spec: AttentionSpec, sm_count: int, pack: Callable[[Mapping[str, Any]], bytes]
) -> Sizes:
    """Return the sizes of the launch."""
    tiles = request.batch * request.heads * ceil_div(request.lengths[0], spec.block_m)
    if tiles > MAX_EXTENT:
        raise ArgumentError(
            "q.shape", request.q.shape, f"at most {MAX_EXTENT} tiles of {spec.block_m} queries of a head"
        )
    arrays = {"q": request.q, "k": request.k, "v": request.v, "output": request.out}
    values = _values(request, spec) | stride_values(arrays)
    if request.sequences:  # they begin where the kernel reads
        values["output_batch"] = 0
    fields: list[int] = []
    for name in spec.parameter_names:
        if name.endswith("_map"):
            fields += map_fields(arrays[name.removesuffix("_map")])
    return Sizes(
        min(tiles, sm_count) if spec.is_persistent else tiles,
        (pack(values),),
        tuple(fields),
        programmatic=True,
        flags_bytes=_COUNTER_BYTES if spec.is_persistent else 0,
    )


def raster(spec: AttentionSpec, request: Request) -> tuple[int, int]:
    """(heads of q, of the whole batch, of a raster group of causal tiles; first head of the last group)."""
    kv_bytes = 2 * request.lengths[1] * (spec.head_dim + spec.v_head_dim)
    kv_heads = request.batch * request.kv_heads
    in_group, sharing = min(kv_heads, max(1, _GROUP_BYTES // kv_bytes)), request.heads // request.kv_heads
    return in_group * sharing, max(0, ceil_div(kv_heads, in_group) - _LAST_GROUPS) * in_group * sharing


def _values(request: Request, spec: AttentionSpec) -> dict[str, Any]:
    """Members of the kernels' Problem, all but strides."""
    raster_heads, last_group = raster(spec, request)
    q_length, k_length = request.lengths
    is_varlen = request.sequences is not None
    rows, columns = request.batch * request.heads, ceil_div(q_length, spec.block_m)
    left, right = request.mask.left, request.mask.right
    diagonal = 0 if is_varlen else k_length - q_length  # each sequence has its own
    values: dict[str, Any] = {
        "tiles_m": rows,
        "tiles_n": columns,
        "raster_heads": raster_heads,
        "last_group": last_group,
        "by_tiles_n": columns,
        "by_raster_tiles": raster_heads * columns,
        "by_raster_heads": raster_heads,
        "by_last_heads": rows - last_group,
        "q_length": q_length,
        "k_length": k_length,
        "heads": request.heads,
        "q_total": request.q.shape[1],
        "k_total": request.k.shape[1],
        "by_heads": request.heads,
        "by_group": request.heads // request.kv_heads,
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


def _map(name: str, info: ArrayInfo, box: tuple[int, int, int, int], swizzle: str) -> Map:
    """Return a map of (batch, length, heads, head_dim). Heads are outside of rows in any order of strides."""
    kind = tma_type("uint8" if info.dtype.itemsize == 1 else info.dtype)
    _, _, heads, dim = info.shape
    length, batch, head_bytes, batch_bytes = map_fields(info)
    strides = info.strides_bytes[1], head_bytes, batch_bytes
    tma_box = box[3], box[1], box[2], box[0]
    dims = dim, length, heads, batch
    spec = TiledSpec(dtype=kind, dims=dims, strides_bytes=strides, box=tma_box, swizzle=swizzle)  # type: ignore[arg-type]
    return Map(name, spec, (("dim", 1), ("dim", 3), ("stride", 1), ("stride", 2)))


def map_fields(info: ArrayInfo) -> tuple[int, int, int, int]:
    """Return the sized fields of a map: length, batch, and bytes from one head and from one sequence to the next."""
    batch, length, heads, _ = info.shape
    batch_bytes, row, head, _ = info.strides_bytes
    return length, batch, head if heads > 1 else row, batch_bytes if batch > 1 else row
