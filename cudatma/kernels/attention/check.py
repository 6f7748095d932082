"""Validate the arguments of attention, attention_varlen and attention_decode, and convert each call into a Problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo, dense_strides, describe
from cudatma.descriptor.rules import STRIDE_LIMIT, TMA_ALIGNMENT_BYTES
from cudatma.errors import ArgumentError, ArgumentTypeError, alternatives
from cudatma.kernels.attention.config import MIN_BOX_ROWS
from cudatma.kernels.attention.problem import (
    CACHE_TYPE,
    HEAD_DIMS,
    OPERAND_TYPES,
    DecodeProblem,
    Layout,
    Layouts,
    Mask,
    Problem,
)
from cudatma.kernels.checks import check_out, check_place, checked_count, checked_flag, real_number
from cudatma.kernels.host import host_array
from cudatma.kernels.operation import Checked

ATTENTION, VARLEN, DECODE = "attention", "attention_varlen", "attention_decode"
#: Maximum softcap. Scales must be below 2**127, so that their products with log2(e) are finite.
_MAX_SOFTCAP, _MAX_NUMBER = 4096, 2.0**127
#: Names of the dimensions in error messages, keyed by the number of dimensions.
_AXES = {4: "(batch, length, heads, dim)", 3: "(total length, heads, dim)"}


def check_attention(
    q: Any,
    k: Any,
    v: Any,
    sink: Any = None,
    *,
    out: Any = None,
    version: str = "",
    **options: Any,
) -> Checked[Problem]:
    """Validate a call to attention(). ``version`` is a name, or "" for any. See _checked() for ``options``.

    Raises ArgumentError or ArgumentTypeError.
    """
    arrays = _operands(ATTENTION, {"q": q, "k": k, "v": v})
    query, key = arrays["q"], arrays["k"]
    others = {"sink": _checked_sink(sink, query, ATTENTION)}
    sizes = query.shape[0], query.shape[1], key.shape[1]
    return _checked(Problem, ATTENTION, arrays, others, out, sizes, version=version, **options)


def check_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    sink: Any = None,
    *,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    out: Any = None,
    **options: Any,
) -> Checked[Problem]:
    """Validate a call to attention_varlen(). Offsets in device memory are not checked.

    See _checked() for ``options``.

    Raises ArgumentError or ArgumentTypeError.
    """
    arrays = _operands(VARLEN, {"q": q, "k": k, "v": v}, rank=3, has_batch=False)
    query = arrays["q"]
    q_offsets = _plain_array(cu_seqlens_q, "cu_seqlens_q", "int32", query, VARLEN)
    k_offsets = _plain_array(cu_seqlens_k, "cu_seqlens_k", "int32", query, VARLEN)
    if len(q_offsets.shape) != 1 or not q_offsets.size_elems:
        raise ArgumentError("cu_seqlens_q.shape", q_offsets.shape, "(sequences + 1,)")
    if k_offsets.shape != q_offsets.shape:
        raise ArgumentError("cu_seqlens_k.shape", k_offsets.shape, f"{q_offsets.shape} (the shape of cu_seqlens_q)")
    lengths = []
    for letter, info, max_length in (("q", q_offsets, max_seqlen_q), ("k", k_offsets, max_seqlen_k)):
        total = arrays[letter].shape[0]
        longest = checked_count(max_length, f"max_seqlen_{letter}", "a nonnegative int")
        if info.device is None:
            _check_offsets(host_array(info), letter, longest, total)
        lengths.append(min(longest, total))
    others = {"cu_seqlens_q": q_offsets, "cu_seqlens_k": k_offsets, "sink": _checked_sink(sink, query, VARLEN)}
    sizes = q_offsets.shape[0] - 1, lengths[0], lengths[1]
    return _checked(Problem, VARLEN, arrays, others, out, sizes, is_varlen=True, **options)


def check_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seqlens: Any,
    page_table: Any = None,
    sink: Any = None,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    out: Any = None,
    **options: Any,
) -> Checked[DecodeProblem]:
    """Validate a call to attention_decode(). Lengths and pages in device memory are not checked.

    See _checked() for ``options``.

    Raises ArgumentError or ArgumentTypeError.
    """
    arrays = _operands(DECODE, {"q": q, "k_cache": k_cache, "v_cache": v_cache}, has_batch=page_table is None)
    query, key = arrays["q"], arrays["k_cache"]
    batch, length, has_fp8_cache = query.shape[0], key.shape[1], key.dtype.name == CACHE_TYPE
    allowed = f"({batch},) for one length per sequence of q"
    lengths = _plain_array(seqlens, "seqlens", "int32", query, DECODE, [(batch,)], allowed)
    table, capacity = None, length
    if page_table is not None:
        table = _plain_array(page_table, "page_table", "int32", query, DECODE)
        if len(table.shape) != 2 or table.shape[0] != batch:
            allowed = f"({batch}, pages per sequence) for one row per sequence of q"
            raise ArgumentError("page_table.shape", table.shape, allowed)
        capacity = length * table.shape[1]
        if has_fp8_cache and length % MIN_BOX_ROWS:
            allowed = f"a shape with a page size that is a multiple of {MIN_BOX_ROWS} keys for a cache of {CACHE_TYPE}"
            raise ArgumentError("k_cache.shape", key.shape, allowed)
    k_factor, k_array = _checked_kv_scale(k_scale, "k_scale", key, query)
    v_factor, v_array = _checked_kv_scale(v_scale, "v_scale", key, query)
    others = {"seqlens": lengths, "page_table": table, "sink": _checked_sink(sink, query, DECODE)}
    if lengths.device is None:
        _check_lengths(lengths, table, key.shape, capacity)
    return _checked(
        DecodeProblem,
        DECODE,
        arrays,
        others | {"k_scale": k_array, "v_scale": v_array},
        out,
        (batch, query.shape[1], capacity),
        causal=True,
        page_size=0 if table is None else length,
        has_fp8_cache=has_fp8_cache,
        k_scale=k_factor,
        v_scale=v_factor,
        k_scale_step=_step(k_array),
        v_scale_step=_step(v_array),
        **options,
    )


def _checked(
    kind: Any,
    function: str,
    arrays: Mapping[str, ArrayInfo],
    others: Mapping[str, ArrayInfo | None],
    out: Any,
    sizes: tuple[int, int, int],
    *,
    causal: Any = False,
    window: Any = None,
    scale: Any = None,
    softcap: Any = None,
    return_lse: Any = False,
    **fields: Any,
) -> Checked[Any]:
    """Run the checks that all functions share, and return the valid call.

    ``kind`` is the class of the problem. ``arrays`` contains q, k and v, and ``others`` the other inputs in the
    operation's order. ``sizes`` contains batch, q_length and k_length. ``fields`` are other fields of the problem.
    """
    q, k, v = arrays.values()
    *outer, length, heads, head_dim = q.shape
    shape = (*q.shape[:-1], v.shape[-1])
    limits = _checked_limits(causal, window)
    factor = head_dim**-0.5 if scale is None else _positive(scale, "scale", "pass None for 1 / sqrt(head dim)")
    cap = _checked_softcap(softcap, factor)
    has_lse = checked_flag(return_lse, "return_lse")
    layouts = [_addressable(info, name) for name, info in arrays.items()]
    if out is None:
        result = None
        layouts.append(_layout(shape, dense_strides(shape, q.dtype), q.dtype))
        if outer and outer[0] > 1 and layouts[3].strides_bytes[0] >= STRIDE_LIMIT:
            raise ArgumentError(
                "q.shape", q.shape, "small enough that the strides between sequences stay below 2**40 bytes"
            )
    else:
        result = describe(out, "out")
        read = {name: info for name, info in {**arrays, **others}.items() if info is not None}
        check_out(result, q.dtype, f"{q.dtype} (the dtype of q)", shape, read, function)
        layouts.append(_addressable(result, "out"))
        if result.size_elems and not layouts[3].is_disjoint:
            allowed = "free of overlaps"
            raise ArgumentError("out.strides", result.strides_bytes, allowed, "omit out or pass another array")
    batch, q_length, k_length = sizes
    is_causal, has_window = limits.kind(q_length, k_length)
    problem = kind(
        batch=batch,
        heads=heads,
        kv_heads=k.shape[-2],
        q_length=q_length,
        k_length=k_length,
        head_dim=head_dim,
        v_head_dim=v.shape[-1],
        dtype=q.dtype.name,
        is_causal=is_causal,
        has_window=has_window,
        has_softcap=cap > 0,
        has_sink=others["sink"] is not None,
        has_lse=has_lse,
        scale=factor,
        softcap=cap,
        limits=limits,
        layouts=Layouts(*layouts),
        **fields,
    )
    lse = (*outer, heads, length) if has_lse else None
    return Checked(problem, (*arrays.values(), *others.values()), result, shape, q.dtype, lse)


def _operands(function: str, arrays: Mapping[str, Any], rank: int = 4, has_batch: bool = True) -> dict[str, ArrayInfo]:
    """Check that q, k and v match each other, and return them by their argument names."""
    is_cache = function == DECODE
    infos = {}
    for name, array in arrays.items():
        info = describe(array, name)
        types = (*OPERAND_TYPES, CACHE_TYPE) if is_cache and name != "q" else tuple(OPERAND_TYPES)
        if info.dtype.name not in types or not info.dtype.isnative:
            raise ArgumentTypeError(f"{name}.dtype", str(info.dtype), alternatives(types))
        if len(info.shape) != rank:
            raise ArgumentError(f"{name}.shape", info.shape, _AXES[rank])
        infos[name] = info
    (_, q), (k_name, k), (v_name, v) = infos.items()
    if k.dtype not in (q.dtype, np.dtype(CACHE_TYPE)):
        raise ArgumentTypeError(f"{k_name}.dtype", str(k.dtype), f"{q.dtype} (the dtype of q)")
    if v.dtype != k.dtype:
        raise ArgumentTypeError(f"{v_name}.dtype", str(v.dtype), f"{k.dtype} (the dtype of {k_name})")
    check_shapes(q.shape, k.shape, v.shape, has_batch=has_batch, is_cache=is_cache)
    for name, info in infos.items():
        check_place(info, name, q, "q", function)
    return infos


def check_shapes(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *, has_batch: bool = True, is_cache: bool = False
) -> None:
    """Raise ArgumentError unless the shapes of q, k and v match each other.

    If ``has_batch``, the first dimension of k and v must equal q's batch. ``is_cache`` selects the parameter names
    k_cache and v_cache instead of k and v for errors.
    """
    *_, heads, dim = q
    *_, kv_heads, k_dim = k
    *cache, v_dim = v
    k_name, v_name = ("k_cache", "v_cache") if is_cache else ("k", "v")
    known = dict.fromkeys(q_dim for q_dim, _ in HEAD_DIMS)
    if dim not in known:
        remedy = f"pad the head dim with zeros, and pass scale={dim} ** -0.5"
        raise ArgumentError("q.shape", tuple(q), f"a shape with a head dim of {alternatives(known)}", remedy)
    if not heads:
        raise ArgumentError("q.shape", tuple(q), "a shape with at least 1 head")
    if k_dim != dim:
        raise ArgumentError(f"{k_name}.shape", tuple(k), f"a shape with a head dim of {dim} (as in q)")
    if not kv_heads or heads % kv_heads:
        remedy = f"pass the axes in the order {_AXES[len(q)]}"
        raise ArgumentError(
            f"{k_name}.shape",
            tuple(k),
            f"a shape with a number of heads that divides {heads} (the number of query heads)",
            remedy,
        )
    if has_batch and k[0] != q[0]:
        remedy = "pass page_table for a paged cache" if is_cache else ""
        raise ArgumentError(f"{k_name}.shape", tuple(k), f"a shape with a batch size of {q[0]} (as in q)", remedy)
    if cache != list(k[:-1]):
        raise ArgumentError(f"{v_name}.shape", tuple(v), f"({', '.join(map(str, k[:-1]))}, dim) to match {k_name}")
    if (dim, v_dim) not in HEAD_DIMS:
        allowed = alternatives(v_dims for q_dim, v_dims in HEAD_DIMS if q_dim == dim)
        raise ArgumentError(
            f"{v_name}.shape", tuple(v), f"a shape with a head dim of {allowed} (q and {k_name} have {dim})"
        )


def _addressable(info: ArrayInfo, field: str) -> Layout:
    """Return the layout of an array. Raises ArgumentError if TMA cannot address the array without a copy."""
    if info.size_elems:
        *outer, across = info.strides_bytes
        if info.shape[-1] > 1 and across != info.dtype.itemsize:
            allowed = "contiguous in the last dimension"
            raise ArgumentError(f"{field}.strides", info.strides_bytes, allowed, "pass a contiguous copy")
        steps = [stride for stride, extent in zip(outer, info.shape, strict=False) if extent > 1]
        if any(stride % TMA_ALIGNMENT_BYTES or not 0 <= stride < STRIDE_LIMIT for stride in steps):
            allowed = f"multiples of {TMA_ALIGNMENT_BYTES} bytes from 0 to 2**40 except in the last dimension"
            raise ArgumentError(f"{field}.strides", info.strides_bytes, allowed, "pass a contiguous copy")
        if info.pointer % TMA_ALIGNMENT_BYTES:
            raise ArgumentError(
                f"{field}.pointer",
                hex(info.pointer),
                f"a multiple of {TMA_ALIGNMENT_BYTES} bytes",
                "pass an aligned copy",
            )
    return _layout(info.shape, info.strides_bytes, info.dtype)


def _layout(shape: tuple[int, ...], strides_bytes: Sequence[int], dtype: np.dtype[Any]) -> Layout:
    """Return a layout with four axes. An axis of one element gets the stride of a dense array."""
    dense = dense_strides(shape, dtype)
    strides = tuple([s if extent > 1 else d for extent, s, d in zip(shape, strides_bytes, dense, strict=True)])
    return Layout(shape, strides) if len(shape) == 4 else Layout((1, *shape), (shape[0] * strides[0], *strides))


def _plain_array(
    array: Any,
    field: str,
    dtype: str,
    q: ArrayInfo,
    function: str,
    shapes: Sequence[tuple[int, ...]] = (),
    allowed: str = "",
    also_allowed: str = "",
) -> ArrayInfo:
    """Check that an array is contiguous and on q's device, and return it.

    ``shapes`` contains the allowed shapes, or is empty to allow any shape. ``allowed`` describes the allowed shapes,
    and ``also_allowed`` the values that the caller may pass instead of an array.
    """
    try:
        info = describe(array, field)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(
            field, error.got, f"{also_allowed}{error.allowed}", f"pass an array of {dtype}"
        ) from None
    if info.dtype != np.dtype(dtype):
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), dtype, "convert the array")
    if shapes and info.shape not in shapes:
        raise ArgumentError(f"{field}.shape", info.shape, allowed)
    if not info.is_contiguous or info.pointer % info.dtype.itemsize:
        raise ArgumentError(f"{field}.strides", info.strides_bytes, "contiguous", "pass a contiguous copy")
    check_place(info, field, q, "q", function)
    return info


def _checked_sink(sink: Any, q: ArrayInfo, function: str) -> ArrayInfo | None:
    if sink is None:
        return None
    heads = q.shape[-2:-1]
    allowed = f"{heads} (one number per query head)"
    return _plain_array(sink, "sink", "float32", q, function, [heads], allowed, "None, or ")


def _checked_kv_scale(scale: Any, field: str, cache: ArrayInfo, q: ArrayInfo) -> tuple[float, ArrayInfo | None]:
    """Return (number, None) for a scale that is a number, or (1, array) for an array that the kernel reads.

    The array must have one element, or one element per head.
    """
    if scale is None:
        return 1.0, None
    if cache.dtype.name != CACHE_TYPE:
        raise ArgumentError(field, "a scale", f"None for a cache of {cache.dtype}")
    if isinstance(scale, Real):
        return _positive(scale, field, "pass None for 1"), None
    heads = cache.shape[2:3]
    allowed = f"{heads} (one number per KV head) or (1,)"
    shapes = [(), (1,), heads]
    return 1.0, _plain_array(scale, field, "float32", q, DECODE, shapes, allowed, "None, a number above 0, or ")


def _step(scales: ArrayInfo | None) -> int:
    """Return the stride between the scales of heads, in elements."""
    return int(scales is not None and scales.size_elems > 1)


def _checked_softcap(softcap: Any, scale: float) -> float:
    """Return softcap in fp32, or 0 for no cap.

    Kernels multiply by scale / softcap and compute tanh with an error of 2**-22. A larger cap would amplify this error.
    """
    if softcap is None:
        return 0.0
    number = real_number(softcap, "softcap")
    if not 0 < number <= _MAX_SOFTCAP:
        raise ArgumentError("softcap", softcap, f"above 0 and at most {_MAX_SOFTCAP}", "pass None for no cap")
    if scale / number >= _MAX_NUMBER:
        raise ArgumentError("softcap", softcap, f"above {scale / _MAX_NUMBER:.3g} (scale / 2**127)")
    return number


def _positive(value: Any, field: str, remedy: str) -> float:
    """Return a positive number rounded to fp32."""
    number = real_number(value, field)
    if not 0 < number < _MAX_NUMBER:
        raise ArgumentError(field, value, "a number above 0 and below 2**127", remedy)
    return number


def _checked_limits(causal: Any, window: Any) -> Mask:
    right = 0 if checked_flag(causal, "causal") else None
    if window is None:
        return Mask(None, right)
    if not isinstance(window, Sequence) or isinstance(window, (str, bytes)):
        raise ArgumentTypeError(
            "window",
            type(window).__name__,
            "None or (left, right)",
            "pass (left, 0) for a window that ends at the query",
        )
    if len(window) != 2:
        raise ArgumentError("window", tuple(window), "a pair (left, right)")
    allowed = "a nonnegative number of keys, or None for all keys"
    sides = [None if side is None else checked_count(side, f"window[{i}]", allowed) for i, side in enumerate(window)]
    return Mask(sides[0], sides[1] if right is None else right)


def _check_offsets(offsets: Any, letter: str, max_length: int, total: int) -> None:
    """Raise ArgumentError unless the offsets in host memory divide the rows of q or k into sequences."""
    field = f"cu_seqlens_{letter}"
    if len(offsets) == 1 and total:
        raise ArgumentError(
            f"{field}.shape", (1,), f"(sequences + 1,) with at least 1 sequence ({letter} has {total} rows)"
        )
    if offsets[0]:
        raise ArgumentError(f"{field}[0]", int(offsets[0]), "0")
    lengths = np.diff(offsets.astype(np.int64))
    for index in np.flatnonzero(lengths < 0)[:1].tolist():
        allowed = f"at least {field}[{index}] = {offsets[index]}"
        raise ArgumentError(f"{field}[{index + 1}]", int(offsets[index + 1]), allowed)
    if offsets[-1] != total:
        raise ArgumentError(f"{field}[{len(offsets) - 1}]", int(offsets[-1]), f"{total} (the length of {letter})")
    if (longest := int(lengths.max(initial=0))) > max_length:
        allowed = f"at least {longest} (the length of sequence {int(lengths.argmax())})"
        raise ArgumentError(f"max_seqlen_{letter}", max_length, allowed)


def _check_lengths(seqlens: ArrayInfo, page_table: ArrayInfo | None, cache: tuple[int, ...], capacity: int) -> None:
    """Raise ArgumentError for a length that exceeds the capacity, or for a page outside the cache."""
    lengths = host_array(seqlens)
    table = None if page_table is None else host_array(page_table)
    pages, page_size = cache[:2]
    if not pages and lengths.any():
        raise ArgumentError("k_cache.shape", cache, "a shape with at least one page unless all seqlens are 0")
    for index, length in enumerate(lengths.tolist()):
        if not 0 <= length <= capacity:
            allowed = f"0 to {capacity} (the capacity of the cache per sequence)"
            raise ArgumentError(f"seqlens[{index}]", length, allowed)
        if table is None:
            continue
        for place, page in enumerate(table[index, : -(-length // page_size) if length else 0].tolist()):
            if not 0 <= page < pages:
                allowed = f"0 to {pages - 1} (the indices of the cache's pages)"
                raise ArgumentError(f"page_table[{index}, {place}]", page, allowed)
