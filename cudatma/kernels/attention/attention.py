"""attention and attention_varlen: softmax(scale q k^T) v in fp16 or bf16. They read downwards: checks, plan, launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.backend import backend_for
from cudatma.errors import ArgumentError
from cudatma.kernels.attention.call import first_call, planner, repeated
from cudatma.kernels.attention.reference import reference
from cudatma.kernels.attention.request import (
    Request,
    Sequences,
    check_call,
    check_result,
    check_types,
    checked_mask,
    checked_scale,
    checked_sink,
    checked_softcap,
)
from cudatma.kernels.attention.tensors import addressable, check_shapes, operand, plain_array
from cudatma.kernels.attention.versions import chosen_version
from cudatma.kernels.checks import check_place, checked_count, checked_flag
from cudatma.kernels.host import host_array
from cudatma.kernels.version import naming

NAME = "attention_varlen"


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Any = None,
    out: Any = None,
    return_lse: bool = False,
    version: str = "auto",
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """softmax(scale q k^T) v for each head by itself, in fp32, rounded once; with return_lse (the result, lse).

    q: (batch, q_length, heads, dim), k: (batch, k_length, kv_heads, dim), v: (batch, k_length, kv_heads, v_dim), all
    fp16 or all bf16, of one library and device: CuPy, torch, DLPack or ``__cuda_array_interface__``; NumPy on the
    emulator. heads is a multiple of kv_heads: neighbors share a head of k and v. dim is 32, 64, 96, 128, 192 or 256,
    v_dim the same, or 128 for 192. Elements of the last dimension lie side by side, the other strides are multiples of
    16 bytes: a transposed view is read as it is.
    causal: query i sees keys up to i + k_length - q_length: the last query sees all. window: (left, right): it sees
    keys from ``left`` before that one to ``right`` behind it, None for all. A query that sees no key has a result of
    zeros and an lse of -inf, or of its head's sink.
    scale: above 0, None: 1 / sqrt(dim). softcap: logits x become softcap tanh(x / softcap).
    sink: (heads,) in fp32, for each head the logit of one more key, which all its queries see and whose value is zero.
    out: (batch, q_length, heads, v_dim), made by q's library if None. lse: (batch, heads, q_length) in fp32, the
    logarithm of the sum of the exponentials of a query's logits.
    version: ``"auto"``, or one of docs/attention.md; see kernels/version.py for where else it may be set. backend: as
    in marlin_gemm. stream: None is the current stream of q's library. The result is the same bits in every call. There
    is no backward pass: tensors that require grad raise while torch records.

    Raises ArgumentError, ArgumentTypeError, TargetError (no kernel for the GPU), CompileError, DriverError,
    LaunchError, HazardError (emulator).
    """
    number, asked_by = chosen_version(version)
    options = causal, scale, softcap, return_lse, number
    key, done = repeated((q, k, v, sink, out), window, options, backend, stream)
    if done is not None:
        return done
    chosen = backend_for("attention", backend)
    checked = check_call(q, k, v, causal, scale, window, softcap, sink, out, return_lse)
    with naming(asked_by):
        return first_call(checked, out, (number,), chosen, stream, key, reference, planner(number))


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Any = None,
    out: Any = None,
    return_lse: bool = False,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """attention() of sequences of different lengths, each by itself; on a GPU by version a3, on SM120 by p1.

    q: (total_q, heads, dim), k: (total_k, kv_heads, dim), v: (total_k, kv_heads, v_dim). Sequence i has the rows
    cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q, and so on: int32 arrays of one element more than there are sequences,
    which begin with 0, never fall, and end with the total. max_seqlen_q, max_seqlen_k: no sequence is longer. On a
    device the kernel reads the offsets: it limits them to the totals and lengths to the longest; rows of the result
    that belong to no sequence then are not written. lse is (heads, total_q). The rest as attention() has it.

    Raises what attention() raises.
    """
    options = max_seqlen_q, max_seqlen_k, causal, scale, softcap, return_lse
    key, done = repeated((q, k, v, cu_seqlens_q, cu_seqlens_k, sink, out), window, options, backend, stream)
    if done is not None:
        return done
    chosen = backend_for(NAME, backend)
    checked = check_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        sink=sink,
        out=out,
        return_lse=return_lse,
    )
    return first_call(checked, out, checked[0].lengths, chosen, stream, key, reference, planner())


def check_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    *,
    causal: Any = False,
    scale: Any = None,
    window: Any = None,
    softcap: Any = None,
    sink: Any = None,
    out: Any = None,
    return_lse: Any = False,
) -> tuple[Request, tuple[int, ...], ArrayInfo | None]:
    """The request, the shape of the result, and ``out`` if there is one. Lengths are compared in host memory only.
    Raises ArgumentError, ArgumentTypeError."""
    named = {name: operand(array, name, 3) for name, array in (("q", q), ("k", k), ("v", v))}
    check_types(named)
    shapes = [info.shape for info in named.values()]
    check_shapes(shapes[0], shapes[1], shapes[2], has_batch=False)
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    found = {name: plain_array(array, name, "int32") for name, array in offsets.items()}
    for name, info in (named | found).items():
        check_place(info, name, named["q"], "q", NAME)
    named = {name: addressable(info, name) for name, info in named.items()}
    of_q, of_k = found.values()
    if len(of_q.shape) != 1 or not of_q.size_elems:
        raise ArgumentError("cu_seqlens_q.shape", of_q.shape, "(sequences + 1,)")
    if of_k.shape != of_q.shape:
        raise ArgumentError("cu_seqlens_k.shape", of_k.shape, f"{of_q.shape}, as cu_seqlens_q")
    whole = "an int from 0 on"
    longest = [checked_count(max_seqlen_q, "max_seqlen_q", whole), checked_count(max_seqlen_k, "max_seqlen_k", whole)]
    for letter, info, most, shape in zip("qk", (of_q, of_k), longest, shapes, strict=False):
        if info.device is None:
            _check_offsets(host_array(info), letter, most, shape[0])
    longest = [min(most, shape[0]) for most, shape in zip(longest, shapes, strict=False)]
    request = Request(
        named["q"],
        named["k"],
        named["v"],
        factor := checked_scale(scale, shapes[0][-1]),
        checked_mask(causal, window, *longest),
        checked_softcap(softcap, factor),
        checked_flag(return_lse, "return_lse"),
        Sequences(of_q, of_k, *longest),
        checked_sink(sink, named["q"], NAME),
    )
    result = *shapes[0][:2], shapes[2][-1]
    return request, result, None if out is None else check_result(out, result, request.arrays(), NAME)


def _check_offsets(offsets: Any, letter: str, most: int, total: int) -> None:
    field = f"cu_seqlens_{letter}"
    if len(offsets) == 1 and total:
        raise ArgumentError(f"{field}.shape", (1,), f"(sequences + 1,), for {letter} has {total} rows")
    if offsets[0]:
        raise ArgumentError(f"{field}[0]", int(offsets[0]), "0")
    lengths = np.diff(offsets.astype(np.int64))
    for index in np.flatnonzero(lengths < 0)[:1].tolist():
        allowed = f"{offsets[index]} and more, as {field}[{index}]"
        raise ArgumentError(f"{field}[{index + 1}]", int(offsets[index + 1]), allowed)
    if offsets[-1] != total:
        raise ArgumentError(f"{field}[{len(offsets) - 1}]", int(offsets[-1]), f"{total}, the length of {letter}")
    if (longest := int(lengths.max(initial=0))) > most:
        allowed = f"{longest} and more, the length of sequence {int(lengths.argmax())}"
        raise ArgumentError(f"max_seqlen_{letter}", most, allowed)
