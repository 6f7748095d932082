"""What attention, attention_varlen and attention_decode do besides their checks: launch again what an earlier call
launched, else make the results, launch, and keep the launch for later calls of the same kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from cudatma import context
from cudatma.arrays import ArrayInfo, describe, empty_like_library, with_cupy
from cudatma.build.kernel import debug_scope, default_target, wants_debug
from cudatma.kernels.attention.choose import ATTENTION
from cudatma.kernels.attention.decode_request import DecodeRequest
from cudatma.kernels.attention.plan import HostCounter, plan_attention
from cudatma.kernels.attention.request import Request
from cudatma.kernels.attention.tensors import addressable
from cudatma.kernels.checks import check_backend
from cudatma.kernels.choosing import decide, pinned_scope
from cudatma.kernels.gpu import H200, Gpu, gpu_of, imagined_gpu
from cudatma.kernels.host import host_array
from cudatma.kernels.known_call import KnownCall, Launcher, addresses, call_key
from cudatma.kernels.launch import Launch, PlanCache, Replay
from cudatma.kernels.stream_workspaces import stream_workspace
from cudatma.library_streams import stream_handle, working_on
from cudatma.runtime.streams import order_after_producers
from cudatma.target import Target, detect

R = TypeVar("R", bound=Request | DecodeRequest)
#: (request, result, lse): computes both in host memory.
Reference = Callable[[R, ArrayInfo, ArrayInfo | None], None]
#: (request, result, lse, GPU, target, whether the emulator runs it): the launch, and the bytes of partial sums that it
#: needs of its stream's workspace; None where it needs no workspace.
Planner = Callable[[R, ArrayInfo, ArrayInfo | None, Gpu, Target, bool], tuple[Launch, int | None]]

_PLANS: PlanCache[Launcher] = PlanCache(1024)
#: By their keys.
KNOWN_CALLS: PlanCache[KnownCall] = PlanCache(1024)
context.after_fork(_PLANS, PlanCache.clear)
context.after_fork(KNOWN_CALLS, PlanCache.clear)


@dataclass(frozen=True, slots=True)
class WorkspaceReplay:
    """A launch that needs partial sums or counters of its stream's workspace."""

    replay: Replay
    device: int
    partials_bytes: int

    def run(self, addresses: tuple[int, ...], stream: int) -> None:
        space = stream_workspace(self.device, stream, self.partials_bytes)
        self.replay.run((*addresses, space.partials_pointer, space.flags_pointer), stream)


def argument_indices(names: tuple[str, ...], read: Iterable[str], has_lse: bool) -> list[int | None]:
    """Where a launch's arguments, by name, have the addresses of what is read, the result, lse, partial sums and
    counters; None where there is no such argument."""
    found = {name.removesuffix("_map").removesuffix("_rows"): index for index, name in enumerate(names)}
    counters = found.get("counters", found.get("tile_counter"))
    return [*(found.get(name) for name in (*read, "output", "lse" if has_lse else "", "partials")), counters]


def repeated(
    arrays: tuple[Any, ...], window: Any, options: tuple[Any, ...], backend: str | None, stream: Any
) -> tuple[tuple[Any, ...] | None, Any]:
    """A call's key in KNOWN_CALLS, None where it gets none, and what it gives back if it is like an earlier one."""
    if window is None:
        window = (None, None)
    if backend is not None or type(window) is not tuple:
        return None, None
    if debug_scope.get() is not None or pinned_scope.get() is not None:
        return None, None
    key = call_key(arrays, (*window, *options))
    known = None if key is None else KNOWN_CALLS.get(key)
    return key, None if key is None or known is None else known.run(key[0], arrays, stream)


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
            of_lse = (lse_shape, lse.dtype) if request.has_lse else None
            KNOWN_CALLS.put(key, KnownCall.of(replay, out, shape, (*request.read.values(), result), 3, of_lse))
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


def make_result(
    out: Any, given: ArrayInfo | None, like: ArrayInfo, shape: tuple[int, ...], handle: int | None
) -> tuple[Any, ArrayInfo]:
    """(the array that the caller gets, the same as (batch, length, heads, dim)). given: ``out`` if there is one."""
    if given is not None:
        return out, given
    made = empty_like_library(like, shape, like.dtype, handle)
    return made, addressable(describe(made), "out")


def make_lse(
    is_wanted: bool, like: ArrayInfo, shape: tuple[int, ...], handle: int | None
) -> tuple[Any, ArrayInfo | None]:
    """(the array that the caller gets, the same as an ArrayInfo); nothing where it is not wanted."""
    made = empty_like_library(like, shape, np.float32, handle) if is_wanted else None
    return made, describe(made) if is_wanted else None


def fill_empty(result: ArrayInfo, lse: ArrayInfo | None, sink: ArrayInfo | None, stream: int | None) -> None:
    """Write the results of queries that see no key; on a device on a stream, by its handle."""
    _fill(result, 0.0, stream)
    if lse is not None:
        _fill(lse, -math.inf if sink is None else sink, stream)


def _fill(info: ArrayInfo, value: float | ArrayInfo, stream: int | None) -> None:
    """Write a number, or one for each head, the last dimension but one, to all elements of an array."""
    if info.device is None:
        host_array(info)[...] = host_array(value)[:, None] if isinstance(value, ArrayInfo) else value
        return

    def write(array: Any, of_heads: Any) -> None:
        array[...] = value if of_heads is None else of_heads[:, None]

    owner = value.owner if isinstance(value, ArrayInfo) else None
    if info.kind == "torch":
        with working_on("torch", info.device, stream):
            write(info.owner, owner)
        return

    def of_cupy(cupy: Any) -> None:
        with cupy.cuda.Device(info.device), working_on("cupy", info.device, stream):
            write(cupy.asarray(info.owner), None if owner is None else cupy.asarray(owner))

    with_cupy("cupy.ndarray.fill", of_cupy)
