"""attention_varlen: attention of sequences of different lengths that lie one after the other. Reads downwards."""

from __future__ import annotations

from typing import Any

from cudatma import context
from cudatma.arrays import ArrayInfo
from cudatma.backend import backend_for
from cudatma.build.kernel import debug_scope, default_target, wants_debug
from cudatma.kernels.attention.choose import ATTENTION
from cudatma.kernels.attention.plan import plan_attention
from cudatma.kernels.attention.reference import reference
from cudatma.kernels.attention.repeated import KNOWN_CALLS, KnownCall, addresses, argument_indices, extents, known_key
from cudatma.kernels.attention.request import Request
from cudatma.kernels.attention.results import fill_empty, make_lse, make_result
from cudatma.kernels.attention.varlen_request import NAME, check_varlen
from cudatma.kernels.checks import check_backend
from cudatma.kernels.choosing import decide, pinned_scope
from cudatma.kernels.gpu import H200, gpu_of, imagined_gpu
from cudatma.kernels.replay import PlanCache, Replay
from cudatma.library_streams import stream_handle
from cudatma.runtime.streams import order_after_producers
from cudatma.target import detect

_PLANS: PlanCache[Replay] = PlanCache(1024)
context.after_fork(_PLANS, PlanCache.clear)


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
    arrays, key = (q, k, v, cu_seqlens_q, cu_seqlens_k, sink, out), None
    if backend is None and debug_scope.get() is None and pinned_scope.get() is None:
        key = known_key(arrays, window, (max_seqlen_q, max_seqlen_k, causal, scale, softcap, return_lse))
        if key is not None and (known := KNOWN_CALLS.get(key)) is not None:
            done = known.run(key[0], arrays, stream)
            if done is not None:
                return done
    chosen = backend_for(NAME, backend)
    request, shape, given = check_varlen(
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
    check_backend(request.q, "q", chosen)
    return _first(request, shape, out, given, chosen, stream, key)


def _first(
    request: Request,
    shape: tuple[int, ...],
    out: Any,
    given: ArrayInfo | None,
    backend: str,
    stream: Any,
    key: tuple[Any, ...] | None,
) -> Any:
    """A call after its checks; keeps the launch for later calls of the same kind."""
    device = request.q.device
    handle = None if device is None else stream_handle(stream, request.q.kind, device)
    out, result = make_result(out, given, request.q, shape, handle)
    lse_shape = shape[1], shape[0]
    lse, sums = make_lse(request.has_lse, request.q, lse_shape, handle)
    done = (out, lse) if request.has_lse else out
    if not result.size_elems:
        return done
    if backend == "reference":
        reference(request, result, sums)
    elif not request.k.size_elems or not all(request.lengths) or not request.batch:
        fill_empty(result, sums, request.sink, handle)
    elif device is None or handle is None:
        target = default_target()
        spec = decide(ATTENTION, request.problem(), imagined_gpu(target, H200.sm_count)).spec
        plan_attention(request, result, sums, spec, target, H200.sm_count).emulate(target, schedules=1)
    else:
        order_after_producers(handle, device, result, *request.arrays().values())
        replay = _replay(request, result, sums, device, handle)
        replay.run(addresses((*request.read, result, sums)), handle)
        if key is not None:
            dtype = lse.dtype if request.has_lse else None
            KNOWN_CALLS.put(key, KnownCall(replay, shape, lse_shape, dtype, extents((*request.read, result))))
    return done


def _replay(request: Request, result: ArrayInfo, lse: ArrayInfo | None, device: int, stream: int) -> Replay:
    """The plan of calls whose arrays lie like these."""
    layouts = tuple([(info.shape, info.strides_bytes) for info in (*request.arrays().values(), result)])
    asked = request.q.dtype.name, request.scale, request.mask, request.softcap, request.has_lse, request.lengths
    key = device, layouts, asked, wants_debug(None), pinned_scope.get()
    replay = _PLANS.get(key)
    if replay is None:
        gpu, target = gpu_of(device), detect(device)
        spec = decide(ATTENTION, request.problem(), gpu).spec
        launch = plan_attention(request, result, lse, spec, target, gpu.sm_count)
        kernel = launch.loaded(target, device, stream)
        read = ("q_map",), ("k_map",), ("v_map",), ("cu_seqlens_q",), ("cu_seqlens_k",), ("sink",)
        wanted = *read, ("output_rows",), () if lse is None else ("lse",)
        moving = argument_indices(spec.parameter_names, wanted)
        replay = Replay(launch, kernel, device, addresses((*request.read, result, lse)), moving)
        _PLANS.put(key, replay)
    return replay
