"""Shapes, dtypes and devices of the operators' results, with the checks that the operators make of their tensors.

torch.compile and torch.export call these functions with tensors that have no memory and whose sizes may be symbols.
"""

from __future__ import annotations

from typing import Any

import torch

from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, ArgumentTypeError, QuantizationError
from cudatma.kernels.attention.tensors import check_heads
from cudatma.kernels.gemm.problem import ACTIVATIONS, OPERAND_TYPES, RESULT_TYPES, default_result
from cudatma.quantization.layout_v1 import BLOCK, BLOCK_BYTES, blocks, group_count
from cudatma.quantization.packed import check_group_size


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
) -> Any:
    check_group_size(group_size)
    if _name(scales.dtype) not in ACTIVATION_TYPES:
        raise ArgumentTypeError("scales.dtype", _name(scales.dtype), ", ".join(ACTIVATION_TYPES))
    rows = (group_count(k, group_size), blocks(n) * BLOCK)
    _check_part("qweight", qweight, torch.uint8, (blocks(n) * blocks(k), BLOCK_BYTES))
    _check_part("scales", scales, scales.dtype, rows)
    if zeros is not None:
        _check_part("zeros", zeros, torch.uint8, rows)
    if perm is not None:
        _check_part("perm", perm, torch.int32, (k,))
    _check_like("x", x, scales, "the weight")
    if not x.dim() or x.shape[-1] != k:
        raise ArgumentError("x.shape", tuple(x.shape), f"(..., {k})", "the last dimension is the weight's")
    if bias is not None:
        _check_like("bias", bias, scales, "the weight")
        _check_shape("bias", bias, (n,))
    _check_gradients(x=x, scales=scales, bias=bias)
    return x.new_empty((*x.shape[:-1], n))


def marlin_gemm_out(*operands: Any, out: Any, **options: Any) -> None:
    _check_out(out, marlin_gemm(*operands, **options))


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
            raise ArgumentError(f"{field}.shape", tuple(matrix.shape), "a matrix, or a batch of matrices")
    _check_like("b", b, a, "a")
    if b.shape[-2] != a.shape[-1]:
        raise ArgumentError("b.shape", tuple(b.shape), f"(.., {a.shape[-1]}, N), for a of {tuple(a.shape)}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ArgumentError("activation", activation, f"None, {', '.join(ACTIVATIONS)}")
    dtype = getattr(torch, default_result(_name(a.dtype))) if out_dtype is None else out_dtype
    if _name(dtype) not in RESULT_TYPES:
        raise ArgumentTypeError("out_dtype", _name(dtype), ", ".join(RESULT_TYPES))
    if bias is not None:
        if bias.dtype != dtype:
            raise ArgumentTypeError("bias.dtype", _name(bias.dtype), f"{_name(dtype)}, as the result")
        _check_shape("bias", bias, (b.shape[-1],))
    for field, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        if scale is not None and scale.dtype != torch.float32:
            raise ArgumentTypeError(f"{field}.dtype", _name(scale.dtype), "float32")
    _check_gradients(a=a, b=b, bias=bias, a_scale=a_scale, b_scale=b_scale)
    return a.new_empty((*_batch(a, b), a.shape[-2], b.shape[-1]), dtype=dtype)


def gemm_out(a: Any, b: Any, *, out: Any, beta: float = 0.0, **options: Any) -> None:
    _check_out(out, gemm(a, b, out_dtype=out.dtype, **options))


def attention(q: Any, k: Any, v: Any, *, sink: Any = None, **options: Any) -> Any:
    _check_ranks(4, q=q, k=k, v=v)
    check_heads(_shape(q), _shape(k), _shape(v))
    _check_sink(sink, q)
    if k.shape[0] != q.shape[0]:
        raise ArgumentError("k.shape", tuple(k.shape), f"a batch of {q.shape[0]}, as q")
    if v.shape[0] != k.shape[0] or v.shape[1] != k.shape[1]:
        allowed = f"a batch of {k.shape[0]} and a length of {k.shape[1]}, as k"
        raise ArgumentError("v.shape", tuple(v.shape), allowed)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def attention_out(q: Any, k: Any, v: Any, *, out: Any, **options: Any) -> None:
    _check_out(out, attention(q, k, v, **options))


def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *, sink: Any = None, **options: Any
) -> Any:
    _check_ranks(3, q=q, k=k, v=v)
    check_heads(_shape(q), _shape(k), _shape(v))
    _check_sink(sink, q)
    if v.shape[0] != k.shape[0]:
        raise ArgumentError("v.shape", tuple(v.shape), f"a length of {k.shape[0]}, as k")
    _check_offsets(q, 1, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    _check_shape("cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape))
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def attention_varlen_out(*arrays: Any, out: Any, **options: Any) -> None:
    _check_out(out, attention_varlen(*arrays, **options))


def attention_decode(
    q: Any, k_cache: Any, v_cache: Any, seqlens: Any, *, page_table: Any = None, sink: Any = None, **options: Any
) -> Any:
    _check_ranks(4, q=q, k_cache=k_cache, v_cache=v_cache)
    check_heads(_shape(q), _shape(k_cache), _shape(v_cache), ("k_cache", "v_cache"))
    _check_sink(sink, q)
    if v_cache.shape[0] != k_cache.shape[0] or v_cache.shape[1] != k_cache.shape[1]:
        raise ArgumentError("v_cache.shape", tuple(v_cache.shape), f"{tuple(k_cache.shape[:2])} in front, as k_cache")
    if page_table is None and k_cache.shape[0] != q.shape[0]:
        remedy = "pages need a page_table"
        raise ArgumentError("k_cache.shape", tuple(k_cache.shape), f"a batch of {q.shape[0]}, as q", remedy)
    _check_offsets(q, 1, seqlens=seqlens)
    _check_shape("seqlens", seqlens, (q.shape[0],))
    if page_table is not None:
        _check_offsets(q, 2, page_table=page_table)
        if page_table.shape[0] != q.shape[0]:
            raise ArgumentError("page_table.shape", tuple(page_table.shape), f"a batch of {q.shape[0]}, as q")
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1]))


def attention_decode_out(*arrays: Any, out: Any, **options: Any) -> None:
    _check_out(out, attention_decode(*arrays, **options))


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(tensor: Any) -> tuple[Any, ...]:
    """With the head dim as a number: kernels are compiled for it."""
    return *tensor.shape[:-1], int(tensor.shape[-1])


def _check_part(field: str, tensor: Any, dtype: Any, shape: tuple[Any, ...]) -> None:
    """QuantizationError unless a tensor of a weight has this dtype and shape."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        got = f"{_name(tensor.dtype)} {tuple(tensor.shape)}"
        raise QuantizationError(field, got, f"{_name(dtype)} {shape}", "use pack() to build it")


def _check_like(field: str, tensor: Any, other: Any, name: str) -> None:
    """ArgumentError or ArgumentTypeError unless two tensors share dtype and device."""
    if tensor.dtype != other.dtype:
        raise ArgumentTypeError(f"{field}.dtype", _name(tensor.dtype), f"{_name(other.dtype)}, as {name}")
    if tensor.device != other.device:
        raise ArgumentError(f"{field}.device", str(tensor.device), f"{other.device}, where {name} is")


def _check_shape(field: str, tensor: Any, shape: tuple[Any, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ArgumentError(f"{field}.shape", tuple(tensor.shape), str(shape))


def _check_out(out: Any, result: Any) -> None:
    _check_like("out", out, result, "the operands")
    _check_shape("out", out, tuple(result.shape))
    _check_gradients(out=out)


def _check_ranks(rank: int, **tensors: Any) -> None:
    first, its = next(iter(tensors.items()))
    if _name(its.dtype) not in ACTIVATION_TYPES:
        raise ArgumentTypeError(f"{first}.dtype", _name(its.dtype), ", ".join(ACTIVATION_TYPES))
    for field, tensor in tensors.items():
        _check_like(field, tensor, its, first)
        if tensor.dim() != rank:
            raise ArgumentError(f"{field}.shape", tuple(tensor.shape), f"{rank} dimensions")
    _check_gradients(**tensors)


def _check_offsets(q: Any, rank: int, **tensors: Any) -> None:
    for field, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise ArgumentTypeError(f"{field}.dtype", _name(tensor.dtype), "int32")
        if tensor.dim() != rank:
            raise ArgumentError(f"{field}.shape", tuple(tensor.shape), f"{rank} dimension{'s' if rank > 1 else ''}")
        if tensor.device != q.device:
            raise ArgumentError(f"{field}.device", str(tensor.device), f"{q.device}, where q is")


def _check_sink(sink: Any, q: Any) -> None:
    if sink is None:
        return
    if sink.dtype != torch.float32:
        raise ArgumentTypeError("sink.dtype", _name(sink.dtype), "float32", "convert it")
    _check_shape("sink", sink, (q.shape[-2],))
    if sink.device != q.device:
        raise ArgumentError("sink.device", str(sink.device), f"{q.device}, where q is")
    _check_gradients(sink=sink)


def _check_gradients(**tensors: Any) -> None:
    if torch.is_grad_enabled():
        for field, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                remedy = "cudatma has no backward pass: call it under torch.no_grad(), or detach the tensor"
                raise ArgumentError(field, "a tensor that requires grad", "one that does not", remedy)


def _batch(a: Any, b: Any) -> tuple[Any, ...]:
    """The batch of a product: that of both, or of the one that is no single matrix."""
    batches = [matrix.shape[0] for matrix in (a, b) if matrix.dim() == 3]
    several = [batch for batch in batches if batch != 1]
    if len(several) == 2 and several[0] != several[1]:
        raise ArgumentError("b.shape", tuple(b.shape), f"a batch of {a.shape[0]}, as a, or of one matrix")
    return tuple(several[:1] or batches[:1])
