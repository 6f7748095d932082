"""attention: softmax(scale q k^T) v in fp16 or bf16. Reads downwards: checks, plan, launch."""

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
from cudatma.kernels.attention.request import Request, check_call
from cudatma.kernels.attention.results import fill_empty, make_lse, make_result
from cudatma.kernels.attention.version import chosen_version
from cudatma.kernels.attention.workspace_replay import WorkspaceReplay
from cudatma.kernels.checks import check_backend
from cudatma.kernels.choosing import decide, pinned_scope
from cudatma.kernels.gpu import H200, gpu_of, imagined_gpu
from cudatma.kernels.replay import PlanCache, Replay
from cudatma.library_streams import stream_handle
from cudatma.runtime.streams import order_after_producers
from cudatma.target import detect

_PLANS: PlanCache[WorkspaceReplay] = PlanCache(1024)
context.after_fork(_PLANS, PlanCache.clear)


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
    number, _ = chosen_version(version)
    arrays, key = (q, k, v, sink, out), None
    if backend is None and debug_scope.get() is None and pinned_scope.get() is None:
        key = known_key(arrays, window, (causal, scale, softcap, return_lse, number))
        if key is not None and (known := KNOWN_CALLS.get(key)) is not None:
            done = known.run(key[0], arrays, stream)
            if done is not None:
                return done
    chosen = backend_for("attention", backend)
    request, shape, given = check_call(q, k, v, causal, scale, window, softcap, sink, out, return_lse)
    check_backend(request.q, "q", chosen)
    return _first(request, shape, out, given, number, chosen, stream, key)


def _first(
    request: Request,
    shape: tuple[int, ...],
    out: Any,
    given: ArrayInfo | None,
    version: str,
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
        reference(request, result, sums)
    elif not request.lengths[1]:
        fill_empty(result, sums, request.sink, handle)
    elif device is None or handle is None:
        target = default_target()
        spec = decide(ATTENTION, request.problem(version), imagined_gpu(target, H200.sm_count)).spec
        plan_attention(request, result, sums, spec, target, H200.sm_count).emulate(target, schedules=1)
    else:
        order_after_producers(handle, device, result, *request.arrays().values())
        replay = _replay(request, result, sums, version, device, handle)
        replay.run(addresses((*request.read, result, sums)), handle)
        if key is not None:
            dtype = lse.dtype if request.has_lse else None
            KNOWN_CALLS.put(key, KnownCall(replay, shape, lse_shape, dtype, extents((*request.read, result))))
    return done


def _replay(
    request: Request, result: ArrayInfo, lse: ArrayInfo | None, version: str, device: int, stream: int
) -> WorkspaceReplay:
    """The plan of calls whose arrays lie like these."""
    layouts = tuple([(info.shape, info.strides_bytes) for info in (*request.arrays().values(), result)])
    asked = request.q.dtype.name, request.scale, request.mask, request.softcap, request.has_lse, version
    key = device, layouts, asked, wants_debug(None), pinned_scope.get()
    replay = _PLANS.get(key)
    if replay is None:
        gpu, target = gpu_of(device), detect(device)
        spec = decide(ATTENTION, request.problem(version), gpu).spec
        launch = plan_attention(request, result, lse, spec, target, gpu.sm_count, tile_counter=0)
        kernel = launch.loaded(target, device, stream)
        bases, moving = addresses((*request.read, result, lse)), _moving(spec.parameter_names, lse is not None)
        found = Replay(launch, kernel, device, (*bases, 0, 0), moving)
        replay = WorkspaceReplay(found, device, 0 if spec.is_persistent else None)
        _PLANS.put(key, replay)
    return replay


def _moving(names: tuple[str, ...], has_lse: bool) -> list[int | None]:
    """argument_indices() of what is read, the result, lse, partial sums, of which there are none, and counters."""
    written = ("output_rows", "output_map"), ("lse",) if has_lse else (), (), ("tile_counter",)
    return argument_indices(names, (("q", "q_map"), ("k", "k_map"), ("v", "v_map"), ("sink",), *written))
