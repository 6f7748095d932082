"""Fake kernels, which check an operator's tensors and return an empty result with the correct metadata.

torch.compile and torch.export call these functions with tensors that have no memory and may have symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, ArgumentTypeError, QuantizationError, quoted
from cudatma.kernels.attention.check import check_shapes
from cudatma.kernels.attention.problem import CACHE_TYPE
from cudatma.kernels.checks import check_gradient
from cudatma.kernels.gemm.problem import ACTIVATIONS, OPERAND_TYPES, RESULT_TYPES, default_result, product_batch
from cudatma.pipeline import align_up
from cudatma.quantization.experts import GATES
from cudatma.quantization.layout_v1 import BLOCK, part_shapes
from cudatma.quantization.weight_format import weight_format


def marlin_gemm(
    x: Any,
    qweight: Any,
    scales: Any,
    zeros: Any,
    perm: Any,
    bias: Any,
    k: int,
    n: int,
    group_size: int,
    batch_invariant: bool = False,
    format: str = "int4",
    tensor_scale: Any = None,
) -> Any:
    kind = weight_format(format)
    kind.check_group_size(group_size)
    if _name(scales.dtype) not in ACTIVATION_TYPES:
        raise ArgumentTypeError("scales.dtype", _name(scales.dtype), ", ".join(ACTIVATION_TYPES))
    shapes = part_shapes(k, n, group_size, kind.bits)
    _check_part("qweight", qweight, torch.uint8, shapes)
    _check_part("scales", scales, scales.dtype, shapes)
    if zeros is not None:
        if not kind.has_zeros:
            raise QuantizationError("zeros", "zero points", f"None for format {format!r}")
        _check_part("zeros", zeros, torch.uint8, shapes)
    if perm is not None:
        _check_part("perm", perm, torch.int32, shapes)
    if tensor_scale is not None:
        check_tensor_scale(tensor_scale, scales, format)
    _check_like("x", x, scales, "the weight")
    if not x.dim() or x.shape[-1] != k:
        raise ArgumentError(
            "x.shape", tuple(x.shape), f"(..., {k})", "pass a tensor whose last dimension is the weight's K"
        )
    if bias is not None:
        _check_like("bias", bias, scales, "the weight")
        _check_shape("bias", bias, (n,))
    _check_gradients(x=x, scales=scales, bias=bias)
    return x.new_empty((*x.shape[:-1], n))


def check_tensor_scale(
    tensor_scale: Any, scales: Any, format: str, field: str = "tensor_scale", shape: tuple[int, ...] = ()
) -> None:
    """Raise an error unless a tensor is a valid tensor scale for weights of this format."""
    if not weight_format(format).has_tensor_scale:
        remedy = f"multiply the scales by {field}"
        raise QuantizationError(field, "a tensor", f"None for format {format!r}", remedy)
    if tensor_scale.dtype != torch.float32:
        raise ArgumentTypeError(f"{field}.dtype", _name(tensor_scale.dtype), "float32", "convert the tensor")
    _check_shape(field, tensor_scale, shape)
    if not tensor_scale.is_contiguous():
        raise ArgumentError(f"{field}.strides", tuple(tensor_scale.stride()), "contiguous (C order)")
    _check_device(field, tensor_scale, scales, "the weight")
    _check_gradients(**{field: tensor_scale})


def marlin_moe(
    x: Any,
    topk_weights: Any,
    topk_ids: Any,
    w1: Any,
    w1_scales: Any,
    w1_zeros: Any,
    w2: Any,
    w2_scales: Any,
    w2_zeros: Any,
    experts: int,
    intermediate: int,
    w1_group_size: int,
    w2_group_size: int,
    *,
    expert_map: Any = None,
    format: str = "int4",
    w1_tensor_scale: Any = None,
    w2_tensor_scale: Any = None,
    bias1: Any = None,
    bias2: Any = None,
    activation: str = "silu_glu",
) -> Any:
    if activation not in GATES:
        raise ArgumentError("activation", activation, quoted(GATES))
    if x.dim() != 2:
        raise ArgumentError("x.shape", tuple(x.shape), "(tokens, K)")
    k = x.shape[1]
    kind = weight_format(format)
    for name, parts, rows, columns, size, tensor_scale in (
        ("w1", (w1, w1_scales, w1_zeros), k, 2 * intermediate, w1_group_size, w1_tensor_scale),
        ("w2", (w2, w2_scales, w2_zeros), intermediate, k, w2_group_size, w2_tensor_scale),
    ):
        kind.check_group_size(size)
        if tensor_scale is not None:
            check_tensor_scale(
                tensor_scale, parts[1], format, f"{name}_tensor_scale", (experts, 2 if name == "w1" else 1)
            )
        shapes = part_shapes(rows, experts * align_up(columns, BLOCK), size, kind.bits)
        dtypes = {"qweight": torch.uint8, "scales": x.dtype, "zeros": torch.uint8}
        for (part, dtype), tensor in zip(dtypes.items(), parts, strict=True):
            if tensor is not None:
                _check_part(f"{name}_{part}", tensor, dtype, {f"{name}_{part}": shapes[part]})
                _check_device(f"{name}_{part}", tensor, x, "x")
    _check_ranks(2, x=x)
    for name, tensor, types in (
        ("topk_weights", topk_weights, (torch.float32,)),
        ("topk_ids", topk_ids, (torch.int32, torch.int64)),
    ):
        if tensor.dtype not in types:
            raise ArgumentTypeError(f"{name}.dtype", _name(tensor.dtype), " or ".join(map(_name, types)))
        _check_shape(name, tensor, (x.shape[0], topk_ids.shape[-1]))
        _check_device(name, tensor, x, "x")
    if expert_map is not None:
        _check_offsets(x, 1, expert_map=expert_map)
    for name, bias, columns in (("bias1", bias1, 2 * intermediate), ("bias2", bias2, k)):
        if bias is not None:
            _check_like(name, bias, x, "x")
            _check_shape(name, bias, (experts, columns))
    tensors = {"topk_weights": topk_weights, "w1_scales": w1_scales, "w2_scales": w2_scales}
    _check_gradients(**tensors, bias1=bias1, bias2=bias2)
    return x.new_empty((x.shape[0], k))


def gemm(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    alpha: float = 1.0,
    activation: str | None = None,
    out_dtype: Any = None,
    a_scale: Any = None,
    b_scale: Any = None,
    batch_invariant: bool = False,
) -> Any:
    for field, matrix in (("a", a), ("b", b)):
        if _name(matrix.dtype) not in OPERAND_TYPES:
            raise ArgumentTypeError(f"{field}.dtype", _name(matrix.dtype), ", ".join(OPERAND_TYPES))
        if matrix.dim() not in (2, 3):
            raise ArgumentError(f"{field}.shape", tuple(matrix.shape), "a tuple of 2 or 3 extents")
    _check_like("b", b, a, "a")
    batch = product_batch(a.shape, b.shape)
    if activation is not None and activation not in ACTIVATIONS:
        raise ArgumentError("activation", activation, f"None, {quoted(ACTIVATIONS)}")
    dtype = getattr(torch, default_result(_name(a.dtype))) if out_dtype is None else out_dtype
    if _name(dtype) not in RESULT_TYPES:
        raise ArgumentTypeError("out_dtype", _name(dtype), ", ".join(RESULT_TYPES))
    if bias is not None:
        if bias.dtype != dtype:
            raise ArgumentTypeError("bias.dtype", _name(bias.dtype), f"{_name(dtype)} (the dtype of the result)")
        _check_shape("bias", bias, (b.shape[-1],))
    for field, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        if scale is not None and scale.dtype != torch.float32:
            raise ArgumentTypeError(f"{field}.dtype", _name(scale.dtype), "float32")
    _check_gradients(a=a, b=b, bias=bias, a_scale=a_scale, b_scale=b_scale)
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]), dtype=dtype)


def gemm_out(a: Any, b: Any, *, out: Any, beta: float = 0.0, **options: Any) -> None:
    _check_out(out, gemm(a, b, out_dtype=out.dtype, **options))


def attention(q: Any, k: Any, v: Any, *, sink: Any = None, **options: Any) -> Any:
    _check_ranks(4, q=q, k=k, v=v)
    check_shapes(_shape(q), _shape(k), _shape(v))
    _check_sink(sink, q)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *, sink: Any = None, **options: Any
) -> Any:
    _check_ranks(3, q=q, k=k, v=v)
    check_shapes(_shape(q), _shape(k), _shape(v), has_batch=False)
    _check_sink(sink, q)
    _check_offsets(q, 1, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    _check_shape("cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape))
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def attention_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seqlens: Any,
    *,
    page_table: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    sink: Any = None,
    **options: Any,
) -> Any:
    if _name(k_cache.dtype) == CACHE_TYPE:
        _check_ranks(4, q=q)
        _check_ranks(4, (CACHE_TYPE,), k_cache=k_cache, v_cache=v_cache)
        _check_device("k_cache", k_cache, q, "q")
    else:
        _check_ranks(4, q=q, k_cache=k_cache, v_cache=v_cache)
    check_shapes(_shape(q), _shape(k_cache), _shape(v_cache), has_batch=page_table is None, is_cache=True)
    _check_kv_scales(k_cache, k_scale=k_scale, v_scale=v_scale)
    _check_sink(sink, q)
    _check_offsets(q, 1, seqlens=seqlens)
    _check_shape("seqlens", seqlens, (q.shape[0],))
    if page_table is not None:
        _check_offsets(q, 2, page_table=page_table)
        if page_table.shape[0] != q.shape[0]:
            raise ArgumentError(
                "page_table.shape", tuple(page_table.shape), f"({q.shape[0]}, pages) for the batch size of q"
            )
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1]))


def into(fake: Callable[..., Any]) -> Callable[..., None]:
    """Return the fake kernel for the ``out`` variant. ``out`` must match the result of ``fake``."""

    def check(*operands: Any, out: Any, **options: Any) -> None:
        _check_out(out, fake(*operands, **options))

    return check


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(tensor: Any) -> tuple[Any, ...]:
    """Return the shape with the head dimension as a plain int, because a kernel is compiled for one head dimension."""
    return *tensor.shape[:-1], int(tensor.shape[-1])


def _check_part(field: str, tensor: Any, dtype: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise QuantizationError unless a weight's tensor has this dtype and the shape in ``shapes``."""
    shape = shapes[field]
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        got = f"{_name(tensor.dtype)} {tuple(tensor.shape)}"
        raise QuantizationError(
            field, got, f"a tensor with dtype {_name(dtype)} and shape {shape}", "create the tensors with pack()"
        )


def _check_like(field: str, tensor: Any, other: Any, name: str) -> None:
    """Raise ArgumentError or ArgumentTypeError unless two tensors have the same dtype and device."""
    if tensor.dtype != other.dtype:
        raise ArgumentTypeError(f"{field}.dtype", _name(tensor.dtype), f"{_name(other.dtype)} (the dtype of {name})")
    _check_device(field, tensor, other, name)


def _check_device(field: str, tensor: Any, other: Any, name: str) -> None:
    if tensor.device != other.device:
        raise ArgumentError(f"{field}.device", str(tensor.device), f"{other.device} (the device of {name})")


def _check_shape(field: str, tensor: Any, shape: tuple[Any, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ArgumentError(f"{field}.shape", tuple(tensor.shape), str(shape))


def _check_out(out: Any, result: Any) -> None:
    _check_like("out", out, result, "the operands")
    _check_shape("out", out, tuple(result.shape))
    _check_gradients(out=out)


def _check_ranks(rank: int, types: Iterable[str] = ACTIVATION_TYPES, /, **tensors: Any) -> None:
    first_field, reference = next(iter(tensors.items()))
    if _name(reference.dtype) not in types:
        raise ArgumentTypeError(f"{first_field}.dtype", _name(reference.dtype), ", ".join(types))
    for field, tensor in tensors.items():
        _check_like(field, tensor, reference, first_field)
        if tensor.dim() != rank:
            raise ArgumentError(f"{field}.shape", tuple(tensor.shape), f"a tuple of {rank} extents")
    _check_gradients(**tensors)


def _check_offsets(q: Any, rank: int, **tensors: Any) -> None:
    for field, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise ArgumentTypeError(f"{field}.dtype", _name(tensor.dtype), "int32")
        if tensor.dim() != rank:
            raise ArgumentError(
                f"{field}.shape", tuple(tensor.shape), f"a tuple of {rank} extent{'s' if rank > 1 else ''}"
            )
        _check_device(field, tensor, q, "q")


def _check_sink(sink: Any, q: Any) -> None:
    if sink is None:
        return
    if sink.dtype != torch.float32:
        raise ArgumentTypeError("sink.dtype", _name(sink.dtype), "float32", "convert the tensor")
    _check_shape("sink", sink, (q.shape[-2],))
    _check_device("sink", sink, q, "q")
    _check_gradients(sink=sink)


def _check_kv_scales(cache: Any, **scales: Any) -> None:
    for field, scale in scales.items():
        if scale is None:
            continue
        if _name(cache.dtype) != CACHE_TYPE:
            raise ArgumentError(field, "a scale", f"None for a {_name(cache.dtype)} cache")
        if scale.dtype != torch.float32:
            raise ArgumentTypeError(f"{field}.dtype", _name(scale.dtype), "float32", "convert the tensor")
        if tuple(scale.shape) not in ((), (1,)):
            _check_shape(field, scale, (cache.shape[-2],))
        _check_device(field, scale, cache, "k_cache")
        _check_gradients(**{field: scale})


def _check_gradients(**tensors: Any) -> None:
    for field, tensor in tensors.items():
        check_gradient(tensor, field, "cudatma")
