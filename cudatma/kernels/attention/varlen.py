"""attention_varlen: attention of sequences of different lengths that lie one after the other. Reads downwards."""

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
    check_result,
    check_types,
    checked_mask,
    checked_scale,
    checked_sink,
    checked_softcap,
)
from cudatma.kernels.attention.tensors import addressable, check_shapes, operand, plain_array
from cudatma.kernels.checks import check_place, checked_count, checked_flag
from cudatma.kernels.host import host_array

NAME = "attention_varlen"


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
