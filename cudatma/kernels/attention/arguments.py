"""Arguments of attention's launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cudatma.descriptor import TiledSpec
from cudatma.dtypes import tma_type
from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import FLAGS, PARTIALS, Arguments, At, Map, Sizes, Value
from cudatma.kernels.attention.request import Request
from cudatma.kernels.attention.spec import AttentionSpec
from cudatma.kernels.attention.tensors import Operand
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
#: Axes whose strides are members of Problem, by the ends of the members' names.
_AXES = {"batch": 0, "pitch": 1, "head": 2}
#: Names of a request's ``operands``.
OPERANDS = ("q", "k", "v", "out")
Arrays = tuple[Operand, Operand, Operand, Operand]


def attention_arguments(request: Request, spec: AttentionSpec, target: Target, sm_count: int) -> Arguments:
    """Return the launch for a request. Raises TargetError, ArgumentError."""
    spec.check_target(target)
    boxes = {"q": spec.q_box, "k": spec.kv_box, "v": spec.kv_box, "out": spec.q_box}
    parameters = parameters_of(spec, dict(zip(OPERANDS, request.operands, strict=True)), boxes)
    return Arguments(spec.template, spec, parameters, sizes_for(request, spec, sm_count)(request))


def parameters_of(
    spec: AttentionSpec, arrays: Mapping[str, Operand], boxes: Mapping[str, tuple[int, int, int, int]]
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


def sizes_for(request: Request, spec: AttentionSpec, sm_count: int) -> Callable[[Request], Sizes]:
    """Return a function that returns the sizes, for every request with the plan_key() of this one."""
    heads, kv_heads, block_m, is_varlen = request.heads, request.kv_heads, spec.block_m, request.sequences is not None
    fixed = {"heads": heads, "by_heads": heads, "by_group": heads // kv_heads}
    packed = packed_for(spec, request.operands, fixed | ({"output_batch": 0} if is_varlen else {}))
    is_causal, has_limits, is_persistent = spec.is_causal, spec.has_upper, spec.is_persistent
    flags_bytes = _COUNTER_BYTES if is_persistent else 0

    def sizes(request: Request) -> Sizes:
        sequences, q_total, k_total = request.sequences, request.q.shape[1], request.k.shape[1]
        if sequences is None:
            batch, q_length, k_length = request.q.shape[0], q_total, k_total
        else:
            batch, q_length, k_length = sequences.count, sequences.max_q, sequences.max_k
        rows, columns = batch * heads, -(-q_length // block_m)
        tiles = rows * columns
        if tiles > MAX_EXTENT:
            raise ArgumentError(
                "q.shape", request.q.shape, f"at most {MAX_EXTENT} tiles of {block_m} queries of a head"
            )
        values = {
            "tiles_m": rows,
            "tiles_n": columns,
            "by_tiles_n": columns,
            "q_length": q_length,
            "k_length": k_length,
            "q_total": q_total,
            "k_total": k_total,
        }
        if is_causal:
            raster_heads, last_group = raster(spec, request)
            values["raster_heads"] = values["by_raster_heads"] = raster_heads
            values["by_raster_tiles"] = raster_heads * columns
            values["last_group"] = last_group
            values["by_last_heads"] = rows - last_group
        if has_limits:
            left, right = request.mask.left, request.mask.right
            diagonal = 0 if is_varlen else k_length - q_length  # each sequence has its own
            values["upper"] = (diagonal + 1 + (FAR if right is None else min(right, FAR))) & 0xFFFFFFFF
            values["lower"] = (diagonal - (FAR if left is None else min(left, FAR))) & 0xFFFFFFFF
        set_scores(values, request.scale, request.softcap)
        struct, fields = packed(values, request.operands)
        grid = min(tiles, sm_count) if is_persistent else tiles
        return Sizes(grid, (struct,), fields, 0, True, 0, flags_bytes)

    return sizes


def raster(spec: AttentionSpec, request: Request) -> tuple[int, int]:
    """(heads of q, of the whole batch, of a raster group of causal tiles; first head of the last group)."""
    kv_bytes = 2 * request.lengths[1] * (spec.head_dim + spec.v_head_dim)
    kv_heads = request.batch * request.kv_heads
    in_group, sharing = min(kv_heads, max(1, _GROUP_BYTES // kv_bytes)), request.heads // request.kv_heads
    return in_group * sharing, max(0, ceil_div(kv_heads, in_group) - _LAST_GROUPS) * in_group * sharing


def set_scores(values: dict[str, Any], scale: float, softcap: float) -> None:
    """Set the members of Problem that make scores of products. softcap: 0 for none."""
    if softcap:
        values["scale_log2"], values["cap_scale"] = softcap * LOG2_E, scale / softcap
    else:
        values["scale_log2"] = scale * LOG2_E


def packed_for(
    spec: AttentionSpec, arrays: Arrays, fixed: Mapping[str, Any]
) -> Callable[[dict[str, Any], Arrays], tuple[bytes, tuple[int, ...]]]:
    """Return a function that packs the struct and the map fields of requests with one plan_key().

    ``arrays`` belong to one of the requests. ``fixed`` holds the members of the struct that are equal in all of them;
    the function gets the others, but for strides, and the arrays of its request.
    """
    fixed, strides = dict(fixed), []
    for member in spec.problem_members:
        name, _, step = member.name.replace("output", "out").rpartition("_")
        if member.name in fixed or name not in OPERANDS or step not in _AXES:
            continue
        place, axis = OPERANDS.index(name), _AXES[step]
        itemsize = arrays[place].dtype.itemsize
        if step == "pitch":
            fixed[member.name] = arrays[place].strides_bytes[axis] // itemsize
        else:
            strides.append((member.name, place, axis, itemsize))
    pack = packer(spec.problem_members, fixed)
    maps = [name.removesuffix("_map").replace("output", "out") for name in spec.parameter_names if "_map" in name]
    places = [OPERANDS.index(name) for name in maps]

    def packed(values: dict[str, Any], arrays: Arrays) -> tuple[bytes, tuple[int, ...]]:
        for member, place, axis, itemsize in strides:
            values[member] = arrays[place].strides_bytes[axis] // itemsize
        fields: list[int] = []
        for place in places:
            fields += _fields(arrays[place])
        return pack(values), tuple(fields)

    return packed


def _map(name: str, info: Operand, box: tuple[int, int, int, int], swizzle: str) -> Map:
    """Return a map of (batch, length, heads, head_dim). Heads are outside of rows in any order of strides."""
    kind = tma_type("uint8" if info.dtype.itemsize == 1 else info.dtype)
    _, _, heads, dim = info.shape
    length, batch, head_bytes, batch_bytes = _fields(info)
    strides = info.strides_bytes[1], head_bytes, batch_bytes
    tma_box = box[3], box[1], box[2], box[0]
    dims = dim, length, heads, batch
    spec = TiledSpec(dtype=kind, dims=dims, strides_bytes=strides, box=tma_box, swizzle=swizzle)  # type: ignore[arg-type]
    return Map(name, spec, (("dim", 1), ("dim", 3), ("stride", 1), ("stride", 2)))


def _fields(info: Operand) -> tuple[int, int, int, int]:
    """Return the sized fields of a map: length, batch, and bytes from one head and from one sequence to the next."""
    batch, length, _, _ = info.shape
    batch_bytes, row, head, _ = info.strides_bytes
    return length, batch, head, batch_bytes if batch > 1 else row
