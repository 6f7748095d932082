"""gemm: y = a b^T in fp16 or bf16. Reads downwards: checks, plan, launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cudatma import context
from cudatma.arrays import ArrayInfo, describe, empty_like_library, overlaps, place_name
from cudatma.backend import backend_for, device_remedy
from cudatma.build.kernel import default_target, wants_debug
from cudatma.descriptor import TensorMap
from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.choosing import decide, pinned_scope
from cudatma.kernels.gemm.choose import GEMM
from cudatma.kernels.gemm.problem import Problem
from cudatma.kernels.gemm.wgmma import WgmmaSpec
from cudatma.kernels.gpu import H200, gpu_of, imagined_gpu
from cudatma.kernels.host import host_array
from cudatma.kernels.launch import Launch
from cudatma.kernels.launch_struct import pack
from cudatma.kernels.replay import PlanCache, Replay
from cudatma.kernels.schedule import schedule
from cudatma.kernels.work_struct import work_values
from cudatma.library_streams import stream_handle
from cudatma.runtime.streams import order_after_producers
from cudatma.target import Target, detect

_ELEMENT_BYTES, _ALIGNMENT = 2, 16
_PLANS: PlanCache[Replay] = PlanCache(1024)
context.after_fork(_PLANS, PlanCache.clear)


def gemm(a: Any, b: Any, *, out: Any = None, stream: Any = None, backend: str | None = None) -> Any:
    """y = a b^T with fp32 accumulation, rounded once.

    a: (M, K), b: (N, K), fp16 or bf16, of one library and device: CuPy, torch, DLPack or
    ``__cuda_array_interface__``; NumPy on the emulator. Rows are contiguous and start at multiples of 16 bytes. out:
    (M, N) of their dtype, made by a's library if None. stream: None is the current stream of a's library. backend: as
    in marlin_gemm.

    Raises ArgumentError, ArgumentTypeError, TargetError (no wgmma), CompileError, DriverError, LaunchError (a first
    call during a graph capture), HazardError (emulator).
    """
    chosen = backend_for("gemm", backend)
    left, right = _operand(a, "a"), _operand(b, "b")
    _check_like(right, "b", left, (right.shape[0], left.shape[1]), f"(N, {left.shape[1]}), for a of {left.shape}")
    if (left.device is None) != (chosen != "cuda"):
        allowed = "the host with backend 'emulator' or 'reference', a CUDA device with 'cuda'"
        remedy = device_remedy("cupy.asarray moves it", left.device)
        raise ArgumentError("a.device", place_name(left.device), allowed, remedy)
    handle = 0 if left.device is None else stream_handle(stream, left.kind, left.device)
    if out is None:
        out = empty_like_library(left, (left.shape[0], right.shape[0]), left.dtype.name, handle)
    result = _result(out, left, right)
    if not result.size_elems:
        return out
    if chosen == "reference":
        with np.errstate(all="ignore"):  # as the GPU: infinities and NaNs are results
            values = host_array(left).astype(np.float32) @ host_array(right).astype(np.float32).T
            host_array(result)[...] = values.astype(result.dtype)
    elif left.device is None:
        target = default_target()
        spec = decide(GEMM, _problem(left, right), imagined_gpu(target, H200.sm_count)).spec
        plan_gemm(left, right, result, spec, target).emulate(target, schedules=1)
    else:
        order_after_producers(handle, left.device, left, right, result)
        addresses = left.pointer, right.pointer, result.pointer
        _replay(left, right, result, left.device, handle).run(addresses, handle)
    return out


def _replay(left: ArrayInfo, right: ArrayInfo, result: ArrayInfo, device: int, stream: int) -> Replay:
    """The plan of calls whose arrays lie like these."""
    layouts = tuple([(each.shape, each.strides_bytes) for each in (left, right, result)])
    key = device, left.dtype.name, layouts, result.pointer % _ALIGNMENT, wants_debug(None), pinned_scope.get()
    replay = _PLANS.get(key)
    if replay is None:
        spec, target = decide(GEMM, _problem(left, right), gpu_of(device)).spec, detect(device)
        launch = plan_gemm(left, right, result, spec, target)
        bases = left.pointer, right.pointer, result.pointer
        replay = Replay(launch, launch.loaded(target, device, stream), device, bases, launch.moving)
        _PLANS.put(key, replay)
    return replay


def plan_gemm(left: ArrayInfo, right: ArrayInfo, result: ArrayInfo, spec: WgmmaSpec, target: Target) -> Launch:
    """The launch for operands that were checked, one CTA a tile. Raises TargetError, ArgumentError."""
    spec.check_target(target)
    (m, k), n = left.shape, right.shape[0]
    work = schedule(spec, m, n, k, H200.sm_count)
    a_map, b_map = (
        TensorMap.from_array(info, (rows, spec.block_k), swizzle="128B", target=target)
        for info, rows in ((left, spec.block_m), (right, spec.block_n))
    )
    pitch = result.strides_bytes[0]
    is_aligned = pitch % _ALIGNMENT == result.pointer % _ALIGNMENT == 0
    values = work_values(work, m, n, k, spec.block_m, output_pitch=pitch // _ELEMENT_BYTES, output_vectors=is_aligned)
    args = (a_map, b_map, result, pack(spec.problem_members, values))
    return Launch(spec.template, spec, work.ctas, args, (left, right, result))


def _problem(left: ArrayInfo, right: ArrayInfo) -> Problem:
    return Problem(left.shape[0], right.shape[0], left.shape[1], left.dtype.name)


def _operand(array: Any, field: str) -> ArrayInfo:
    """a or b, checked: what TMA asks of rows."""
    info = describe(array, field)
    if info.dtype.name not in ACTIVATION_TYPES or not info.dtype.isnative:
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), ", ".join(ACTIVATION_TYPES))
    if len(info.shape) != 2 or not info.shape[1]:
        raise ArgumentError(f"{field}.shape", info.shape, "(rows, K), with K of 1 and more")
    return _rows(info, field, _ALIGNMENT)


def _result(out: Any, left: ArrayInfo, right: ArrayInfo) -> ArrayInfo:
    """out, checked."""
    info, wanted = describe(out, "out"), (left.shape[0], right.shape[0])
    _check_like(info, "out", left, wanted, f"(M, N) = {wanted}")
    if info.readonly:
        raise ArgumentError("out", "a read-only array", "a writable array")
    if overlaps(info, left) or overlaps(info, right):
        raise ArgumentError("out", "memory that overlaps an operand", "memory of its own")
    return _rows(info, "out", _ELEMENT_BYTES)


def _check_like(info: ArrayInfo, field: str, left: ArrayInfo, shape: tuple[int, ...], allowed: str) -> None:
    """Raise unless an array has this shape, and a's dtype and device."""
    if info.dtype != left.dtype:
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), f"{left.dtype}, as a")
    if info.shape != shape:
        raise ArgumentError(f"{field}.shape", info.shape, allowed)
    if info.device != left.device:
        raise ArgumentError(f"{field}.device", place_name(info.device), f"{place_name(left.device)}, where a is")


def _rows(info: ArrayInfo, field: str, alignment: int) -> ArrayInfo:
    """The array with strides in dimensions of one element as if it were dense. ArgumentError unless its rows are
    contiguous, do not overlap and start at multiples of the alignment."""
    (rows, columns), (pitch, step) = info.shape, info.strides_bytes
    dense = columns * _ELEMENT_BYTES
    if info.size_elems and columns > 1 and step != _ELEMENT_BYTES:
        raise ArgumentError(f"{field}.strides", info.strides_bytes, "contiguous rows", "make it contiguous")
    if rows > 1 and columns and pitch < dense:
        raise ArgumentError(f"{field}.strides", info.strides_bytes, "rows that do not overlap", "copy it")
    if info.size_elems and (info.pointer % alignment or (rows > 1 and pitch % alignment)):
        got = f"{info.strides_bytes} at {info.pointer:#x}"
        raise ArgumentError(f"{field}.strides", got, f"rows that start at multiples of {alignment} bytes", "copy it")
    return replace(info, strides_bytes=(pitch if rows > 1 else dense, _ELEMENT_BYTES))
