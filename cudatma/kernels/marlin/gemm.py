"""marlin_gemm: y = x W + bias with W in int4. From top to bottom: a known call, else checks, plan, launch."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable
from typing import Any

import numpy as np

from cudatma import context
from cudatma.arrays import empty_like_library
from cudatma.backend import backend_for, device_remedy
from cudatma.build.kernel import debug_scope, debugging, wants_debug
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.choosing import pinned_scope
from cudatma.kernels.host import host_array
from cudatma.kernels.known_call import library_of_tensor
from cudatma.kernels.launch import PlanCache
from cudatma.kernels.marlin.operands import Rows, check_bias, check_input, check_output, check_weight
from cudatma.kernels.marlin.permute_columns import ArrangedPlan, needs_arranging
from cudatma.kernels.marlin.plan import Plan, WeightAddresses
from cudatma.kernels.marlin.problem import LinearShape
from cudatma.kernels.stream_workspaces import stream_workspace
from cudatma.kernels.workspace import MarlinWorkspace, check_workspace
from cudatma.library_streams import current_stream, stream_handle, working_on
from cudatma.quantization import PackedWeight
from cudatma.runtime.streams import order_after_producers

#: Attachments of a weight: the plans of its shape and format, and the addresses of its arrays.
_PLANS, _ADDRESSES = "plans", "addresses"
#: A decoding engine meets a few hundred batch sizes; a plan takes about 5 KB.
_MAX_PLANS = 2048
_ELEMENT_BYTES = 2
#: A plan is valid for addresses with the same remainder modulo this.
_ALIGNMENT = 16
#: Plans by shape and format; they are freed with the last such weight.
_SHARED_PLANS: weakref.WeakValueDictionary[Hashable, PlanCache[Plan]] = weakref.WeakValueDictionary()


def marlin_gemm(
    x: Any,
    w: PackedWeight,
    out: Any = None,
    bias: Any = None,
    stream: Any = None,
    *,
    backend: str | None = None,
    workspace: MarlinWorkspace | None = None,
    programmatic: bool = False,
    batch_invariant: bool = False,
    debug: bool | None = None,
) -> Any:
    """y = x W + bias, W int4, with fp32 accumulation; the same bits every time.

    x: (..., K) fp16 or bf16, the weight's dtype: CuPy, torch, DLPack or ``__cuda_array_interface__``, on the weight's
    device. Where its base or pitch is no multiple of 16 bytes, and where the weight was quantized in activation order,
    a second kernel copies it to the workspace first.
    w: PackedWeight on that device (``w.to_device()``). out: (..., N) of x's dtype, returned; made by x's library if
    None, on the stream of the launch: to read it on another stream, order the two. bias: (N,) or None. stream: None is
    the current stream of x's library. It waits for a stream that ``__cuda_array_interface__`` names.
    backend: ``"cuda"``; for host arrays ``"emulator"`` (the generated kernel itself, slowly, its hazards raised) or
    ``"reference"`` (NumPy); ``"auto"``: the GPU, or the emulator where there is none, as a BackendWarning says.
    None: $CUDATMA_BACKEND, else auto.
    workspace: partial sums and copied activations of this call, kept by the caller while a captured graph uses it.
    None: the stream's own, in a capture that of the graph's branch, which is freed with the graph (workspace_bytes()).
    programmatic: launch as a programmatic dependent of the kernel before it. Activations, workspace and out are touched
    only once that kernel has ended; the weight is read before: that kernel must not write it.
    batch_invariant: a row's bits do not depend on M, at some cost in speed (choose.py).
    There is no backward pass: tensors that require grad raise while torch records.
    debug: run kernels whose waits end and say what they waited for (docs/debugging.md); the call waits for their end.
    None: what ``cudatma.debugging()`` or, at the first call of a kind, $CUDATMA_DEBUG says.

    Raises ArgumentError, ArgumentTypeError (shapes, dtypes, devices, layouts, overlap), LaunchError (a first call
    inside a graph capture), TargetError, CompileError, DriverError, HazardError (emulator); nothing is launched then.
    PipelineHang (debug).
    """
    demands = (programmatic, batch_invariant)
    if debug is not None:
        with debugging(debug):
            return _first(x, check_weight(w), out, bias, stream, backend, workspace, *demands)
    plain = backend is None and workspace is None
    plain = plain and programmatic.__class__ is bool and batch_invariant.__class__ is bool
    library = library_of_tensor(x) if plain and debug_scope.get() is None and pinned_scope.get() is None else ""
    if library and w.__class__ is PackedWeight:
        if out is None:
            out = new_result(library, x, w.shape[1], stream)
        key = call_key(library, x, out, bias, demands)
        known = w.attachments.get(_PLANS)
        plan = None if known is None else known.get(key)
        if plan is not None and run_again(plan, w, library, x, out, bias, stream):
            return out
    return _first(x, check_weight(w), out, bias, stream, backend, workspace, *demands)


def _first(
    x: Any,
    w: PackedWeight,
    out: Any,
    bias: Any,
    stream: Any,
    backend: str | None,
    workspace: MarlinWorkspace | None,
    programmatic: bool,
    batch_invariant: bool,
) -> Any:
    """A call with full checks; keeps a plan for later calls of the same kind."""
    for field, flag in (("programmatic", programmatic), ("batch_invariant", batch_invariant)):
        if type(flag) is not bool:
            raise ArgumentTypeError(field, type(flag).__name__, "bool")
    chosen = backend_for("marlin_gemm", backend)
    if chosen != "cuda":
        return _on_host(x, w, out, bias, chosen, batch_invariant)
    rows = check_input(x, w)
    device = rows.info.device
    if device is None:
        remedy = device_remedy("cupy.asarray moves it; w.to_device() the weight")
        raise ArgumentError("x.device", "the host", "a CUDA device", remedy)
    handle = stream_handle(stream, rows.info.kind, device)
    if out is None:
        out = empty_like_library(rows.info, (*rows.info.shape[:-1], w.shape[1]), w.dtype, handle)
    target = check_output(out, rows, w)
    addend = None if bias is None else check_bias(bias, w, target.info)
    space = None if workspace is None else check_workspace(workspace, device)
    if rows.rows == 0:
        return out
    context.require_no_fork()
    order_after_producers(handle, device, rows.info, target.info, addend)
    plan = _plan(w, rows, target, programmatic, batch_invariant, handle, space)
    if plan.needs_workspace:
        space = stream_workspace(device, handle, plan.partials_bytes) if space is None else space
        space.require_room(plan.spec, plan.schedule)
    bias_address = 0 if addend is None else addend.pointer
    plan.run(w.attachments[_ADDRESSES], rows.info.pointer, target.info.pointer, bias_address, space, handle)
    library = library_of_tensor(x)
    # A repeated call looks at no address: a plan for rows off 16 bytes would serve aligned ones too, but slower.
    if library and rows.info.pointer % 16 == 0 and debug_scope.get() is None and pinned_scope.get() is None:
        key = call_key(library, x, out, bias, (programmatic, batch_invariant))
        if key is not None:
            _plans(w).put(key, plan)
    return out


def _plan(
    w: PackedWeight,
    x: Rows,
    out: Rows,
    programmatic: bool,
    batch_invariant: bool,
    handle: int,
    space: MarlinWorkspace | None,
) -> Plan:
    layout = (x.info.device, x.rows, x.pitch_bytes, x.is_aligned, out.pitch_bytes)
    key = (*layout, programmatic, batch_invariant, wants_debug(None), pinned_scope.get())
    plan = _plans(w).get(key)
    if plan is None:
        if needs_arranging(w, x):
            used = stream_workspace(x.info.device or 0, handle, 0) if space is None else space
            plan = ArrangedPlan(w, x, out, programmatic, batch_invariant, handle, used)
        else:
            plan = Plan(w, x, out, programmatic, batch_invariant, handle)
        _plans(w).put(key, plan)
    return plan


def _plans(w: PackedWeight) -> PlanCache[Plan]:
    """Return the plans of this weight's shape and format, which all such weights on its device share."""
    plans: PlanCache[Plan] | None = w.attachments.get(_PLANS)
    if plans is None:
        addresses = WeightAddresses.of(w)
        misalignment = tuple(address % _ALIGNMENT for address in addresses)
        key = (w.device, LinearShape.of(w), w.scale_fit, w.perm is None, misalignment)
        plans = _SHARED_PLANS.setdefault(key, PlanCache(_MAX_PLANS))
        context.after_fork(plans, PlanCache.clear)
        w.attachments[_ADDRESSES] = addresses
        w.attachments[_PLANS] = plans
    return plans


def _on_host(
    x: Any,
    w: PackedWeight,
    out: Any,
    bias: Any,
    backend: str,
    batch_invariant: bool,
) -> Any:
    """The result on the CPU: by the emulator, or as fp32 products of the dequantized weight, rounded once."""
    rows = check_input(x, w)
    if rows.info.device is not None:
        raise ArgumentError("x.device", f"device {rows.info.device}", f"the host with backend {backend!r}")
    if out is None:
        out = empty_like_library(rows.info, (*rows.info.shape[:-1], w.shape[1]), w.dtype)
    target = check_output(out, rows, w)
    addend = None if bias is None else check_bias(bias, w, target.info)
    if rows.rows and backend == "emulator":
        from cudatma.kernels.marlin.emulated import emulated_gemm  # only this backend needs the emulator

        emulated_gemm(rows, w, target, addend, batch_invariant=batch_invariant)
    elif rows.rows:
        with np.errstate(all="ignore"):  # as the GPU: infinities and NaNs are results
            values = host_array(rows.info).astype(np.float32) @ w.dequantize(dtype=np.float32)
            if addend is not None:
                values += host_array(addend).astype(np.float32)
            host_array(target.info)[...] = values.astype(target.info.dtype)
    return out


def call_key(library: str, x: Any, out: Any, bias: Any, demands: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What the plan of a call depends on; None where the arrays are not all of one library, or torch might record
    a gradient. demands: its options. Reads the few attributes of CuPy arrays and torch tensors that a plan depends on,
    and nothing else: a full check of three arrays costs more than the launch."""
    kind = type(x)
    if kind is not type(out) or (bias is not None and kind is not type(bias)):
        return None
    if library == "cupy":
        bias_facts = None if bias is None else (bias.shape, bias.strides, bias.dtype, bias.data.device_id)
        return (library, x.shape, x.strides, x.dtype, x.data.device_id, out.shape, out.strides, out.dtype,
                out.data.device_id, bias_facts, demands)  # fmt: skip
    if x.requires_grad or out.requires_grad or (bias is not None and bias.requires_grad):
        return None
    bias_facts = None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device)
    return (library, x.shape, x.stride(), x.dtype, x.device, out.shape, out.stride(), out.dtype, out.device, bias_facts,
            demands)  # fmt: skip


def new_result(library: str, x: Any, n: int, stream: Any) -> Any:
    """An uninitialized result (..., n) on x's device, allocated on the stream of the launch; None where one call cannot
    make it (another device is current)."""
    if library == "torch":
        if not x.is_cuda or not x.dim():
            return None
        if stream is None:
            return x.new_empty((*x.shape[:-1], n))
        device = x.device.index
        with working_on(library, device, stream_handle(stream, library, device)):
            return x.new_empty((*x.shape[:-1], n))
    cupy = sys.modules["cupy"]
    device = x.data.device_id
    if not x.ndim or device != cupy.cuda.runtime.getDevice():
        return None
    if stream is None:
        return cupy.empty((*x.shape[:-1], n), x.dtype)
    with working_on(library, device, stream_handle(stream, library, device)):
        return cupy.empty((*x.shape[:-1], n), x.dtype)


def run_again(plan: Plan, w: PackedWeight, library: str, x: Any, out: Any, bias: Any, stream: Any) -> bool:
    """Launch a plan whose key the call matched; False, and nothing is launched, where the full checks have to look.

    Alignment and overlap are all that addresses can still get wrong.
    """
    if library == "cupy":
        at, to, add = x.data.ptr, out.data.ptr, 0 if bias is None else bias.data.ptr
    else:
        at, to, add = x.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()
    end = to + plan.out_extent
    clash = at < end and to < at + plan.x_extent
    if bias is not None:
        clash = clash or add % _ELEMENT_BYTES != 0 or (add < end and to < add + _ELEMENT_BYTES * w.shape[1])
    if (at | to) & 15 or clash:
        # They say what is wrong, that views of one buffer lie side by side, or that x has to be copied first.
        return False
    handle = current_stream(library, plan.device) if stream is None else stream_handle(stream, library, plan.device)
    space = stream_workspace(plan.device, handle, plan.partials_bytes) if plan.needs_workspace else None
    plan.run(w.attachments[_ADDRESSES], at, to, add, space, handle)
    return True
