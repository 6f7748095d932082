"""What attention, attention_varlen and attention_decode do after their checks: make the results, launch, and keep the
launch for later calls of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from cudatma import context
from cudatma.arrays import ArrayInfo
from cudatma.build.kernel import default_target, wants_debug
from cudatma.kernels.attention.choose import ATTENTION
from cudatma.kernels.attention.decode_request import DecodeRequest
from cudatma.kernels.attention.plan import HostCounter, plan_attention
from cudatma.kernels.attention.repeated import (
    KNOWN_CALLS,
    KnownCall,
    Launcher,
    WorkspaceReplay,
    addresses,
    argument_indices,
    extents,
)
from cudatma.kernels.attention.request import Request
from cudatma.kernels.attention.results import fill_empty, make_lse, make_result
from cudatma.kernels.checks import check_backend
from cudatma.kernels.choosing import decide, pinned_scope
from cudatma.kernels.gpu import H200, Gpu, gpu_of, imagined_gpu
from cudatma.kernels.launch import Launch
from cudatma.kernels.replay import PlanCache, Replay
from cudatma.library_streams import stream_handle
from cudatma.runtime.streams import order_after_producers
from cudatma.target import Target, detect

R = TypeVar("R", bound=Request | DecodeRequest)
#: (request, result, lse): computes both in host memory.
Reference = Callable[[R, ArrayInfo, ArrayInfo | None], None]
#: (request, result, lse, GPU, target, whether the emulator runs it): the launch, and the bytes of partial sums that it
#: needs of its stream's workspace; None where it needs no workspace.
Planner = Callable[[R, ArrayInfo, ArrayInfo | None, Gpu, Target, bool], tuple[Launch, int | None]]

_PLANS: PlanCache[Launcher] = PlanCache(1024)
context.after_fork(_PLANS, PlanCache.clear)


def first_call(
    checked: tuple[R, tuple[int, ...], ArrayInfo | None],
    out: Any,
    options: tuple[Any, ...],
    backend: str,
    stream: Any,
    key: tuple[Any, ...] | None,
    reference: Reference[R],
    plan: Planner[R],
) -> Any:
    """The results of a call. checked: the request, the shape of the result, and ``out`` if there is one. options: what
    determines the plan besides what a request holds. key: of the call in KNOWN_CALLS."""
    request, shape, given = checked
    check_backend(request.q, "q", backend)
    device = request.q.device
    handle = None if device is None else stream_handle(stream, request.q.kind, device)
    out, result = make_result(out, given, request.q, shape, handle)
    lse_shape = *shape[:-3], shape[-2], shape[-3]
    lse, sums = make_lse(request.has_lse, request.q, lse_shape, handle)
    done = (out, lse) if request.has_lse else out
    if not result.size_elems:
        return done
    if device is not None and handle is not None:
        order_after_producers(handle, device, result, *request.arrays().values())
    if backend == "reference":
        reference(request, result, sums)
    elif not request.has_keys:
        fill_empty(result, sums, request.sink, handle)
    elif device is None or handle is None:
        target = default_target()
        launch, _ = plan(request, result, sums, imagined_gpu(target, H200.sm_count), target, True)
        launch.emulate(target, schedules=1)
    else:
        replay = _replay(request, result, sums, options, device, handle, plan)
        replay.run(addresses((*request.read.values(), result, sums)), handle)
        if key is not None:
            dtype = lse.dtype if request.has_lse else None
            KNOWN_CALLS.put(key, KnownCall(replay, shape, lse_shape, dtype, extents((*request.read.values(), result))))
    return done


def _replay(
    request: R,
    result: ArrayInfo,
    lse: ArrayInfo | None,
    options: tuple[Any, ...],
    device: int,
    stream: int,
    plan: Planner[R],
) -> Launcher:
    """The plan of calls whose arrays lie like these."""
    layouts = tuple([(info.shape, info.strides_bytes) for info in (*request.arrays().values(), result)])
    asked = request.q.dtype.name, request.scale, request.mask, request.softcap, request.has_lse, options
    key = type(request), device, layouts, asked, wants_debug(None), pinned_scope.get()
    replay = _PLANS.get(key)
    if replay is None:
        target = detect(device)
        launch, partials_bytes = plan(request, result, lse, gpu_of(device), target, False)
        kernel = launch.loaded(target, device, stream)
        moving = argument_indices(launch.spec.parameter_names, request.read, lse is not None)
        bases = addresses((*request.read.values(), result, lse))
        if partials_bytes is not None:
            replay = WorkspaceReplay(Replay(launch, kernel, device, (*bases, 0, 0), moving), device, partials_bytes)
        else:
            replay = Replay(launch, kernel, device, bases, moving[:-2])
        _PLANS.put(key, replay)
    return replay


def planner(version: str = "") -> Planner[Request]:
    """Of attention and attention_varlen."""

    def plan(
        request: Request, result: ArrayInfo, lse: ArrayInfo | None, gpu: Gpu, target: Target, on_host: bool
    ) -> tuple[Launch, int | None]:
        spec = decide(ATTENTION, request.problem(version), gpu).spec
        counter = HostCounter() if on_host else 0
        launch = plan_attention(request, result, lse, spec, target, gpu.sm_count, counter)
        return launch, 0 if spec.is_persistent else None

    return plan
