"""attention_decode: attention of a few new queries to a cache of keys and values. Reads downwards."""

from __future__ import annotations

from typing import Any

from cudatma import context
from cudatma.arrays import ArrayInfo
from cudatma.backend import backend_for
from cudatma.build.kernel import debug_scope, default_target, wants_debug
from cudatma.kernels.attention.decode_plan import HostParts, divide, plan_decode
from cudatma.kernels.attention.decode_reference import decode_reference
from cudatma.kernels.attention.decode_request import NAME, DecodeRequest, check_decode
from cudatma.kernels.attention.repeated import KNOWN_CALLS, KnownCall, addresses, argument_indices, extents, known_key
from cudatma.kernels.attention.results import fill_empty, make_lse, make_result
from cudatma.kernels.attention.workspace_replay import WorkspaceReplay
from cudatma.kernels.checks import check_backend
from cudatma.kernels.gpu import H200, gpu_of, imagined_gpu
from cudatma.kernels.replay import PlanCache, Replay
from cudatma.library_streams import stream_handle
from cudatma.runtime.streams import order_after_producers
from cudatma.target import detect

_PLANS: PlanCache[WorkspaceReplay] = PlanCache(1024)
context.after_fork(_PLANS, PlanCache.clear)


def attention_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seqlens: Any,
    *,
    page_table: Any = None,
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
    Sequences are divided by the capacity; parts are added up in a fixed order: the result is the same bits in every
    call. TMA loads pages whose size has a common divisor of at least 8 with 64; others are copied row by row.

    Raises what attention() raises.
    """
    arrays, key = (q, k_cache, v_cache, seqlens, page_table, sink, out), None
    if backend is None and debug_scope.get() is None:
        key = known_key(arrays, window, (scale, softcap, return_lse))
        if key is not None and (known := KNOWN_CALLS.get(key)) is not None:
            done = known.run(key[0], arrays, stream)
            if done is not None:
                return done
    chosen = backend_for(NAME, backend)
    request, shape, given = check_decode(
        q,
        k_cache,
        v_cache,
        seqlens,
        page_table=page_table,
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
    request: DecodeRequest,
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
    lse_shape = shape[0], shape[2], shape[1]
    lse, sums = make_lse(request.has_lse, request.q, lse_shape, handle)
    done = (out, lse) if request.has_lse else out
    if not result.size_elems:
        return done
    if backend == "reference":
        decode_reference(request, result, sums)
    elif not request.k.size_elems or not request.capacity:
        fill_empty(result, sums, request.sink, handle)
    elif device is None or handle is None:
        target = default_target()
        work = divide(request, imagined_gpu(target, H200.sm_count))
        plan_decode(request, result, sums, work, target, HostParts.of(work)).emulate(target, schedules=1)
    else:
        order_after_producers(handle, device, result, *request.arrays().values())
        replay = _replay(request, result, sums, device, handle)
        replay.run(addresses((*request.read, result, sums)), handle)
        if key is not None:
            dtype = lse.dtype if request.has_lse else None
            KNOWN_CALLS.put(key, KnownCall(replay, shape, lse_shape, dtype, extents((*request.read, result))))
    return done


def _replay(
    request: DecodeRequest, result: ArrayInfo, lse: ArrayInfo | None, device: int, stream: int
) -> WorkspaceReplay:
    """The plan of calls whose arrays lie like these."""
    layouts = tuple([(info.shape, info.strides_bytes) for info in (*request.arrays().values(), result)])
    asked = request.q.dtype.name, request.scale, request.mask, request.softcap, request.has_lse
    key = device, layouts, asked, wants_debug(None)
    replay = _PLANS.get(key)
    if replay is None:
        target, work = detect(device), divide(request, gpu_of(device))
        launch = plan_decode(request, result, lse, work, target)
        kernel = launch.loaded(target, device, stream)
        bases = (*addresses((*request.read, result, lse)), 0, 0)
        moving = _moving(work.spec.parameter_names, lse is not None)
        replay = WorkspaceReplay(Replay(launch, kernel, device, bases, moving), device, work.partials_bytes or None)
        _PLANS.put(key, replay)
    return replay


def _moving(names: tuple[str, ...], has_lse: bool) -> list[int | None]:
    """argument_indices() of what is read, the result, lse, partial sums and counters."""
    read = ("q",), ("k", "k_map"), ("v", "v_map"), ("seqlens",), ("page_table",), ("sink",)
    written = ("output_rows",), ("lse",) if has_lse else (), ("partials",), ("counters",)
    return argument_indices(names, (*read, *written))
