"""The hot path of marlin_gemm: a call like an earlier one, whose arrays differ in their addresses only.

Reads the few attributes of CuPy arrays and torch tensors that a plan depends on, and nothing else: a full check of
three arrays costs more than the launch.
"""

from __future__ import annotations

import sys
from typing import Any

from cudatma.kernels.marlin.plan import Plan
from cudatma.kernels.stream_workspaces import stream_workspace
from cudatma.library_streams import current_stream, stream_handle, working_on
from cudatma.quantization import PackedWeight

_ELEMENT_BYTES = 2


def call_key(library: str, x: Any, out: Any, bias: Any, demands: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What the plan of a call depends on; None where the arrays are not all of one library, or torch might record
    a gradient. demands: its options."""
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
    plan.run(at, to, add, space, handle)
    return True
