"""How q, k, v and the result lie in memory: (batch, length, heads, dim), of any strides that TMA can address."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cudatma.arrays import ArrayInfo, dense_strides, describe
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.attention.problem import HEAD_DIMS, OPERAND_TYPES

#: Bytes at whose multiples TMA, and copies of whole vectors, begin; the bytes below which it can step.
ALIGNMENT, STRIDE_LIMIT = 16, 1 << 40
#: What an error calls the dimensions of an array, of which sequences one after the other have no batch.
_AXES = {4: "(batch, length, heads, dim)", 3: "(total length, heads, dim)"}


class Layout(NamedTuple):
    """An operand without its memory: what a problem has in place of an array."""

    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, info: Operand) -> Layout:
        """Return the layout of an array."""
        return cls(info.shape, info.strides_bytes, info.dtype)


Operand: TypeAlias = ArrayInfo | Layout


def operand(array: Any, field: str, rank: int = 4, types: Iterable[str] = OPERAND_TYPES) -> ArrayInfo:
    """q, k or v, of these many dimensions; addressable() has to follow. Raises ArgumentError, ArgumentTypeError."""
    info = describe(array, field)
    if info.dtype.name not in types or not info.dtype.isnative:
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), ", ".join(types))
    if len(info.shape) != rank:
        raise ArgumentError(f"{field}.shape", info.shape, _AXES[rank])
    return info


def plain_array(
    array: Any,
    field: str,
    dtype: str,
    shapes: Sequence[tuple[int, ...]] = (),
    allowed: str = "",
    also_allowed: str = "",
) -> ArrayInfo:
    """Contiguous elements of this type. shapes: one of these, in words ``allowed``; any if there are none.
    also_allowed: what else the caller may pass, for the error of what is no array."""
    try:
        info = describe(array, field)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(field, error.got, f"{also_allowed}{error.allowed}", f"its dtype is {dtype}") from None
    if info.dtype != np.dtype(dtype):
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), dtype, "convert it")
    if shapes and info.shape not in shapes:
        raise ArgumentError(f"{field}.shape", info.shape, allowed)
    if not info.is_contiguous or info.pointer % info.dtype.itemsize:
        raise ArgumentError(f"{field}.strides", info.strides_bytes, "contiguous elements", "copy it")
    return info


def addressable(info: ArrayInfo, field: str) -> ArrayInfo:
    """(batch, length, heads, dim) whose strides a tensor map accepts, also in dimensions of one element, which have
    those of a dense array. (total length, heads, dim), of sequences one after the other, becomes a batch of one.
    ArgumentError where TMA cannot address it: nothing is copied."""
    if info.size_elems:
        *outer, across = info.strides_bytes
        if info.shape[-1] > 1 and across != info.dtype.itemsize:
            allowed = "elements of the last dimension side by side"
            raise ArgumentError(f"{field}.strides", info.strides_bytes, allowed, "copy it")
        steps = [stride for stride, extent in zip(outer, info.shape, strict=False) if extent > 1]
        if any(stride % ALIGNMENT or not 0 <= stride < STRIDE_LIMIT for stride in steps):
            allowed = f"multiples of {ALIGNMENT} bytes from 0 to 2**40, but for the last dimension"
            raise ArgumentError(f"{field}.strides", info.strides_bytes, allowed, "copy it")
        if info.pointer % ALIGNMENT:
            raise ArgumentError(f"{field}.pointer", hex(info.pointer), f"a multiple of {ALIGNMENT} bytes", "copy it")
    shape, given = info.shape, zip(info.shape, info.strides_bytes, dense_strides(info.shape, info.dtype), strict=True)
    strides = tuple([stride if extent > 1 else dense for extent, stride, dense in given])
    if len(shape) == 3:
        shape, strides = (1, *shape), (shape[0] * strides[0], *strides)
    return replace(info, shape=shape, strides_bytes=strides)


def check_shapes(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *, has_batch: bool = True, is_cache: bool = False
) -> None:
    """ArgumentError unless the shapes of q, k and v go together. has_batch: k and v have q's batch as the first
    dimension. is_cache: they are called k_cache and v_cache."""
    *_, heads, dim = q
    *_, kv_heads, k_dim = k
    *of_v, v_dim = v
    k_name, v_name = ("k_cache", "v_cache") if is_cache else ("k", "v")
    known = dict.fromkeys(q_dim for q_dim, _ in HEAD_DIMS)
    if dim not in known:
        remedy = "zeros may fill it up, with scale= as it was"
        raise ArgumentError("q.shape", tuple(q), f"a head dim of {', '.join(map(str, known))}", remedy)
    if not heads:
        raise ArgumentError("q.shape", tuple(q), "heads of 1 and more")
    if k_dim != dim:
        raise ArgumentError(f"{k_name}.shape", tuple(k), f"a head dim of {dim}, as q")
    if not kv_heads or heads % kv_heads:
        remedy = f"axes are {_AXES[len(q)]}"
        raise ArgumentError(f"{k_name}.shape", tuple(k), f"a number of heads that divides the {heads} of q", remedy)
    if has_batch and k[0] != q[0]:
        remedy = "pages need a page_table" if is_cache else ""
        raise ArgumentError(f"{k_name}.shape", tuple(k), f"a batch of {q[0]}, as q", remedy)
    if of_v != list(k[:-1]):
        raise ArgumentError(f"{v_name}.shape", tuple(v), f"({', '.join(map(str, k[:-1]))}, dim), as {k_name}")
    if (dim, v_dim) not in HEAD_DIMS:
        allowed = " or ".join(str(of_v) for of_q, of_v in HEAD_DIMS if of_q == dim)
        raise ArgumentError(f"{v_name}.shape", tuple(v), f"a head dim of {allowed}, for {dim} of q and {k_name}")


def check_disjoint(info: ArrayInfo, field: str) -> None:
    """Raise ArgumentError if elements of a result share memory."""
    if info.size_elems and not is_disjoint(info):
        raise ArgumentError(f"{field}.strides", info.strides_bytes, "elements that do not overlap", "copy it")


def is_disjoint(info: Operand) -> bool:
    """Return whether no elements of an array share memory."""
    span = info.dtype.itemsize
    for stride, extent in sorted(zip(info.strides_bytes, info.shape, strict=True)):
        if extent > 1:
            if stride < span:
                return False
            span = stride * extent
    return True


def resized(
    layouts: Sequence[Operand | None], shapes: Sequence[Any], strides_bytes: Sequence[Any]
) -> tuple[Any, Any, Any, Any] | None:
    """Return the layouts of q, k, v and out in another call; None if addressable() has to look at their strides.

    All arrays have four axes. The layout of out, its shape and its strides are None if the call does not give it.
    """
    q = _with_sizes(layouts[0], shapes[0], strides_bytes[0])
    k = _with_sizes(layouts[1], shapes[1], strides_bytes[1])
    v = _with_sizes(layouts[2], shapes[2], strides_bytes[2])
    if q is None or k is None or v is None:
        return None
    if shapes[3] is None:
        return q, k, v, None
    out = _with_sizes(layouts[3], shapes[3], strides_bytes[3])
    return None if out is None or not is_disjoint(out) else (q, k, v, out)


def _with_sizes(info: Any, shape: Sequence[int], strides_bytes: Sequence[int]) -> Layout | None:
    """Return the layout with another batch and length, and other strides of sequences and heads."""
    batch, length, heads, dim = shape
    sequence, row, head, element = strides_bytes
    if element != info.strides_bytes[3] or (length > 1 and row != info.strides_bytes[1]):
        return None
    if heads == 1:
        head = dim * element
    elif head % ALIGNMENT or not 0 <= head < STRIDE_LIMIT:
        return None
    if batch == 1:
        sequence = length * heads * dim * element
    elif sequence % ALIGNMENT or not 0 <= sequence < STRIDE_LIMIT:
        return None
    return Layout((batch, length, heads, dim), (sequence, info.strides_bytes[1], head, element), info.dtype)


def contiguous(info: Operand, shape: tuple[int, ...]) -> Layout:
    """Return the layout of a contiguous array with another shape."""
    return Layout(shape, dense_strides(shape, info.dtype), info.dtype)
