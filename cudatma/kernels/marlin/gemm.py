"""marlin_gemm: y = x W + bias with W in int4. Reads downwards: a known call, else checks, plan, launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cudatma.arrays import empty_like_library, stream_handle
from cudatma.backend import backend_for
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.marlin.config import Feeds, parse_feeds
from cudatma.kernels.marlin.host import host_array
from cudatma.kernels.marlin.operands import Rows, check_bias, check_input, check_output, check_weight
from cudatma.kernels.marlin.plan import Plan
from cudatma.kernels.marlin.repeated import call_key, library_of_tensor, new_result, run_again
from cudatma.kernels.marlin.workspace import MarlinWorkspace, check_workspace, stream_workspace
from cudatma.quantization import PackedWeight

#: Plans that a weight keeps: decoding meets a few hundred batch sizes, each plan takes some 5 KB.
_MAX_PLANS = 2048


def marlin_gemm(
    x: Any,
    w: PackedWeight,
    out: Any = None,
    bias: Any = None,
    stream: Any = None,
    *,
    feed: str | Mapping[str, str] = "tma",
    backend: str | None = None,
    workspace: MarlinWorkspace | None = None,
    programmatic: bool = False,
) -> Any:
    """y = x W + bias, W int4, with fp32 accumulation; the same bits every time.

    x: (..., K) fp16 or bf16, the weight's dtype: CuPy, torch, DLPack or ``__cuda_array_interface__``, on the weight's
    device. Its base must be aligned to 16 bytes; a pitch that is no multiple of 16 bytes is served by plain loads.
    w: PackedWeight on that device (``w.to_device()``). out: (..., N) of x's dtype, returned; made by x's library if
    None. bias: (N,) or None. stream: None is the current stream of x's library.
    feed: ``"tma"`` or ``"cp_async"`` for all operands, or a mapping with weight, scale, activation.
    backend: ``"cuda"``; for host arrays ``"emulator"`` (the generated kernel itself, slowly, its hazards raised) or
    ``"reference"`` (NumPy); ``"auto"``: the card, or the emulator where there is none, as a BackendWarning says.
    None: $CUDATMA_BACKEND, else auto.
    workspace: partial sums for this launch; None: the stream's own. A graph should be launched on the stream that it
    was captured on, or be given a workspace of its own.
    programmatic: launch as a programmatic dependent of the kernel before it. Activations, workspace and out are touched
    only once that kernel has ended; the weight is read before, so that kernel must not be the one that writes it.

    Raises ArgumentError, ArgumentTypeError (shapes, dtypes, devices, layouts, overlap), LaunchError (a first call
    inside a graph capture), TargetError, CompileError, DriverError, HazardError (emulator); nothing is launched then.
    """
    plain = backend is None and workspace is None and type(feed) is str and type(programmatic) is bool
    library = library_of_tensor(x) if plain else ""
    if library and type(w) is PackedWeight and w.attachments:
        if out is None:
            out = new_result(library, x, w.shape[1])
        key = call_key(library, x, out, bias, feed, programmatic)  # type: ignore[arg-type]
        plan = None if key is None else w.attachments.get(key)
        if plan is not None:
            return run_again(plan, w, library, x, out, bias, stream)
    return _first(x, check_weight(w), out, bias, stream, feed, backend, workspace, programmatic)


def _first(
    x: Any,
    w: PackedWeight,
    out: Any,
    bias: Any,
    stream: Any,
    feed: str | Mapping[str, str],
    backend: str | None,
    workspace: MarlinWorkspace | None,
    programmatic: bool,
) -> Any:
    """A call with full checks; leaves a plan behind for the next one like it."""
    feeds = parse_feeds(feed)
    if type(programmatic) is not bool:
        raise ArgumentTypeError("programmatic", type(programmatic).__name__, "bool")
    chosen = backend_for("marlin_gemm", backend, stacklevel=3)
    if chosen != "cuda":
        return _on_host(x, w, out, bias, feeds, chosen)
    rows = check_input(x, w)
    device = rows.info.device
    if device is None:
        raise ArgumentError("x.device", "the host", "a CUDA device", "cupy.asarray moves it; w.to_device() the weight")
    if out is None:
        out = empty_like_library(rows.info, (*rows.info.shape[:-1], w.shape[1]), w.dtype)
    target = check_output(out, rows, w)
    bias_pointer = 0 if bias is None else check_bias(bias, w, target.info).pointer
    handle = stream_handle(stream, rows.info.kind, device)
    space = None if workspace is None else check_workspace(workspace, device)
    if rows.rows == 0:
        return out
    space = stream_workspace(device, handle) if space is None else space
    plan = _plan(w, rows, target, feeds, programmatic, device, handle)
    space.require_room(plan.spec, plan.schedule)
    plan.run(rows.info.pointer, target.info.pointer, bias_pointer, space, handle)
    library = library_of_tensor(x)
    key = call_key(library, x, out, bias, feed, programmatic) if library and type(feed) is str else None
    if key is not None:
        _keep(w, key, plan)
    return out


def _plan(w: PackedWeight, x: Rows, out: Rows, feeds: Feeds, programmatic: bool, device: int, handle: int) -> Plan:
    key = (device, x.rows, x.pitch_bytes, out.pitch_bytes, feeds, programmatic)
    plan = w.attachments.get(key)
    if plan is None:
        plan = Plan(w, x, out, feeds, programmatic, handle)
        _keep(w, key, plan)
    return plan


def _keep(w: PackedWeight, key: tuple[Any, ...], plan: Plan) -> None:
    if len(w.attachments) >= _MAX_PLANS:
        w.attachments.clear()
    w.attachments[key] = plan


def _on_host(x: Any, w: PackedWeight, out: Any, bias: Any, feeds: Feeds, backend: str) -> Any:
    """The result on the CPU: by the emulator, or as fp32 products of the dequantised weight, rounded once."""
    rows = check_input(x, w)
    if rows.info.device is not None:
        raise ArgumentError("x.device", f"device {rows.info.device}", f"the host with backend {backend!r}")
    if out is None:
        out = empty_like_library(rows.info, (*rows.info.shape[:-1], w.shape[1]), w.dtype)
    target = check_output(out, rows, w)
    addend = None if bias is None else check_bias(bias, w, target.info)
    if rows.rows and backend == "emulator":
        from cudatma.kernels.marlin.emulated import emulated_gemm  # only this backend needs the emulator

        emulated_gemm(rows, w, target, addend, feeds)
    elif rows.rows:
        values = host_array(rows.info).astype(np.float32) @ w.dequantize(np.float32)
        if addend is not None:
            values += host_array(addend).astype(np.float32)
        host_array(target.info)[...] = values.astype(target.info.dtype)
    return out
