"""gemm: y = a b in fp16 or bf16. Reads downwards: checks, plan, launch."""

from __future__ import annotations

import sys
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
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.gemm.version import chosen_version
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


def gemm(
    a: Any, b: Any, *, out: Any = None, version: str | int = "auto", backend: str | None = None, stream: Any = None
) -> Any:
    """y = a b with fp32 accumulation, rounded once.

    a: (M, K), b: (K, N), fp16 or bf16, of one library and device: CuPy, torch, DLPack or
    ``__cuda_array_interface__``; NumPy on the emulator. Each is row-major or column-major (a transposed view), and its
    rows or columns start at multiples of 16 bytes. out: (M, N) of their dtype with contiguous rows, made by a's library
    if None. version: ``"auto"``, or 1 to 5, a rung of docs/gemm.md; see version.py for where else it may be set.
    backend: as in marlin_gemm. stream: None is the current stream of a's library. There is no backward pass: tensors
    that require grad raise while torch records.

    Raises ArgumentError, ArgumentTypeError, TargetError (no wgmma), CompileError, DriverError, LaunchError (a first
    call during a graph capture), HazardError (emulator).
    """
    chosen = backend_for("gemm", backend)
    number, _ = chosen_version(version)
    left, right = checked_operands(a, b)
    if (left.device is None) != (chosen != "cuda"):
        allowed = "the host with backend 'emulator' or 'reference', a CUDA device with 'cuda'"
        remedy = device_remedy("cupy.asarray moves it", left.device)
        raise ArgumentError("a.device", place_name(left.device), allowed, remedy)
    handle = 0 if left.device is None else stream_handle(stream, left.kind, left.device)
    if out is None:
        out = empty_like_library(left, (left.shape[0], right.shape[1]), left.dtype.name, handle)
    result = _result(out, left, right)
    if not result.size_elems:
        return out
    if chosen == "reference":
        with np.errstate(all="ignore"):  # as the GPU: infinities and NaNs are results
            values = host_array(left).astype(np.float32) @ host_array(right).astype(np.float32)
            host_array(result)[...] = values.astype(result.dtype)
    elif left.device is None:
        target = default_target()
        spec = decide(GEMM, problem_of(left, right, number), imagined_gpu(target, H200.sm_count)).spec
        plan_gemm(left, right, result, spec, target, H200.sm_count).emulate(target, schedules=1)
    else:
        order_after_producers(handle, left.device, left, right, result)
        _replay(left, right, result, number, left.device, handle).run(_addresses(left, right, result), handle)
    return out


def checked_operands(a: Any, b: Any) -> tuple[ArrayInfo, ArrayInfo]:
    """a and b, as TMA reads them. Raises ArgumentError, ArgumentTypeError."""
    left, right = _operand(a, "a"), _operand(b, "b")
    _check_like(right, "b", left, (left.shape[1], right.shape[1]), f"({left.shape[1]}, N), for a of {left.shape}")
    return left, right


def problem_of(left: ArrayInfo, right: ArrayInfo, version: int = 0) -> Problem:
    """The problem of operands that were checked."""
    layout = "".join("R" if info.strides_bytes[1] == _ELEMENT_BYTES else "C" for info in (left, right))
    return Problem(left.shape[0], right.shape[1], left.shape[1], left.dtype.name, layout, version)


def _replay(left: ArrayInfo, right: ArrayInfo, result: ArrayInfo, version: int, device: int, stream: int) -> Replay:
    """The plan of calls whose arrays lie like these."""
    layouts = tuple([(each.shape, each.strides_bytes) for each in (left, right, result)])
    alignment = result.pointer % _ALIGNMENT
    key = device, left.dtype.name, layouts, alignment, version, wants_debug(None), pinned_scope.get()
    replay = _PLANS.get(key)
    if replay is None:
        gpu, target = gpu_of(device), detect(device)
        spec = decide(GEMM, problem_of(left, right, version), gpu).spec
        launch = plan_gemm(left, right, result, spec, target, gpu.sm_count)
        names = spec.parameter_names
        by_tma = "output_map" in names and launch.args[names.index("output_map")].address == result.pointer
        moving: list[int | None] = [0, 1, names.index("output")]
        moving.append(names.index("output_map") if by_tma else None)
        replay = Replay(launch, launch.loaded(target, device, stream), device, _addresses(left, right, result), moving)
        _PLANS.put(key, replay)
    return replay


def plan_gemm(
    left: ArrayInfo, right: ArrayInfo, result: ArrayInfo, spec: GemmSpec, target: Target, sm_count: int
) -> Launch:
    """The launch for operands that were checked, whose layout is the spec's. Raises TargetError, ArgumentError."""
    spec.check_target(target)
    (m, k), n = left.shape, right.shape[1]
    work = schedule(spec, m, n, k, sm_count)
    a_rows = left if spec.is_a_k_major else _transposed(left)
    b_rows = _transposed(right) if spec.is_b_k_major else right
    pitch = result.strides_bytes[0]
    is_aligned = pitch % _ALIGNMENT == result.pointer % _ALIGNMENT == 0
    by_tma = is_aligned and n % (_ALIGNMENT // _ELEMENT_BYTES) == 0
    values = work_values(work, m, n, k, spec.cluster_m, output_pitch=pitch // _ELEMENT_BYTES, output_vectors=is_aligned)
    values |= {
        "a_pitch": a_rows.strides_bytes[0] // _ELEMENT_BYTES,
        "b_pitch": b_rows.strides_bytes[0] // _ELEMENT_BYTES,
    }
    args: dict[str, Any] = {"a": left, "b": right, "output": result, "problem": pack(spec.problem_members, values)}
    boxes = {"a_map": (a_rows, spec.a_box), "b_map": (b_rows, spec.b_box)}
    # Rows that TMA can write; else the kernel does not look at the map.
    boxes["output_map"] = (result, (64, 64)) if by_tma else boxes["a_map"]
    for name, (rows, box) in boxes.items():
        if name in spec.parameter_names:
            args[name] = TensorMap.from_array(rows, box, axes=(1, 0), swizzle="128B", target=target)
    ordered = tuple([args[name] for name in spec.parameter_names])
    return Launch(spec.template, spec, work.ctas, ordered, (left, right, result), cluster=spec.cluster)


def _addresses(left: ArrayInfo, right: ArrayInfo, result: ArrayInfo) -> tuple[int, ...]:
    """Of a Replay: the result's twice, for a pointer and a tensor map."""
    return left.pointer, right.pointer, result.pointer, result.pointer


def _transposed(info: ArrayInfo) -> ArrayInfo:
    return replace(info, shape=info.shape[::-1], strides_bytes=info.strides_bytes[::-1])


def _operand(array: Any, field: str) -> ArrayInfo:
    """a or b, checked: what TMA asks of rows, or of the columns of a column-major operand."""
    info = describe(array, field)
    if info.dtype.name not in ACTIVATION_TYPES or not info.dtype.isnative:
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), ", ".join(ACTIVATION_TYPES))
    if len(info.shape) != 2 or not info.shape[1 if field == "a" else 0]:
        shape = "(M, K)" if field == "a" else "(K, N)"
        raise ArgumentError(f"{field}.shape", info.shape, f"{shape}, with K of 1 and more")
    if getattr(info.owner, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        remedy = "gemm has no backward pass: call it under torch.no_grad(), or detach the tensor"
        raise ArgumentError(field, "a tensor that requires grad", "one that does not", remedy)
    (rows, columns), (down, across) = info.shape, info.strides_bytes
    if rows == 1:
        is_column_major = columns > 1 and across != _ELEMENT_BYTES
    else:
        is_column_major = down == _ELEMENT_BYTES and (columns == 1 or across != _ELEMENT_BYTES)
    if is_column_major:
        return _transposed(_rows(_transposed(info), field, _ALIGNMENT))
    return _rows(info, field, _ALIGNMENT)


def _result(out: Any, left: ArrayInfo, right: ArrayInfo) -> ArrayInfo:
    """out, checked."""
    info, wanted = describe(out, "out"), (left.shape[0], right.shape[1])
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
        raise ArgumentError(
            f"{field}.strides",
            info.strides_bytes,
            "contiguous rows" if field == "out" else "contiguous rows or columns",
            "copy it",
        )
    if rows > 1 and columns and pitch < dense:
        raise ArgumentError(f"{field}.strides", info.strides_bytes, "rows that do not overlap", "copy it")
    if info.size_elems and (info.pointer % alignment or (rows > 1 and pitch % alignment)):
        got = f"{info.strides_bytes} at {info.pointer:#x}"
        raise ArgumentError(f"{field}.strides", got, f"rows that start at multiples of {alignment} bytes", "copy it")
    return replace(info, strides_bytes=(pitch if rows > 1 else dense, _ELEMENT_BYTES))
