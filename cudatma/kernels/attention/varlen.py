"""attention_varlen: attention of sequences of different lengths that lie one after the other. Reads downwards."""

from __future__ import annotations

from typing import Any

from cudatma.backend import backend_for
from cudatma.kernels.attention.call import first_call, planner, repeated
from cudatma.kernels.attention.reference import reference
from cudatma.kernels.attention.varlen_request import NAME, check_varlen


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
