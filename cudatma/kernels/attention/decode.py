"""attention_decode: attention of a few new queries to a cache of keys and values. Reads downwards."""

from __future__ import annotations

from numbers import Real
from typing import Any

from cudatma.arrays import ArrayInfo
from cudatma.backend import backend_for
from cudatma.kernels.attention.call import first_call, repeated
from cudatma.kernels.attention.decode_plan import HostParts, divide, plan_decode
from cudatma.kernels.attention.decode_request import NAME, DecodeRequest, check_decode
from cudatma.kernels.attention.reference import decode_reference
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.launch import Launch
from cudatma.target import Target


def attention_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seqlens: Any,
    *,
    page_table: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Any = None,
    out: Any = None,
    return_lse: bool = False,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """attention() of new queries to the keys and values of a cache, which hold theirs already.

    q: (batch, q_length, heads, dim), the last queries of each sequence, each of which sees the keys up to its own.
    k_cache: (batch, capacity, kv_heads, dim), v_cache: the same of v_dim; with a page_table (pages, page_size,
    kv_heads, dim): page_table[i, j] is the page of the keys from j page_size on of sequence i. seqlens: (batch,), the
    keys of each sequence, the new ones included. seqlens and page_table are int32, contiguous, and read by the kernel:
    a captured graph sees what they hold when it runs. Of arrays on a device it takes a length below 0 as 0 and one
    beyond the capacity as that; keys and values of a page that the cache does not have are zeros. Entries of pages
    behind a sequence's end are not read. lse is (batch, heads, q_length), the rest as attention() has it.
    Both caches may also be float8_e4m3fn, whatever q is; pages then have a multiple of 8 keys. k_scale, v_scale: what
    their elements are multiplied by, None for 1, a number, or an fp32 array of one element or of one for each of their
    heads, which the kernel reads.
    Sequences are divided by the capacity; parts are added up in a fixed order: the result is the same bits in every
    call. TMA loads pages of a multiple of 8 keys; others are copied row by row.

    Raises what attention() raises.
    """
    k_number, k_array = (k_scale, None) if k_scale is None or isinstance(k_scale, Real) else ("array", k_scale)
    v_number, v_array = (v_scale, None) if v_scale is None or isinstance(v_scale, Real) else ("array", v_scale)
    arrays = q, k_cache, v_cache, seqlens, page_table, sink, k_array, v_array, out
    key, done = repeated(arrays, window, (scale, softcap, return_lse, k_number, v_number), backend, stream)
    if done is not None:
        return done
    chosen = backend_for(NAME, backend)
    checked = check_decode(
        q,
        k_cache,
        v_cache,
        seqlens,
        page_table=page_table,
        k_scale=k_scale,
        v_scale=v_scale,
        scale=scale,
        window=window,
        softcap=softcap,
        sink=sink,
        out=out,
        return_lse=return_lse,
    )
    return first_call(checked, out, (k_number, v_number), chosen, stream, key, decode_reference, _plan)


def _plan(
    request: DecodeRequest, result: ArrayInfo, lse: ArrayInfo | None, gpu: Gpu, target: Target, on_host: bool
) -> tuple[Launch, int | None]:
    """A Planner."""
    work = divide(request, gpu)
    launch = plan_decode(request, result, lse, work, target, HostParts.of(work) if on_host else 0)
    return launch, work.partials_bytes or None
