"""gemm: c = a b in fp16, bf16 or fp8. Reads downwards: checks, plan, launch; then the same in NumPy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from cudatma import context
from cudatma.arrays import ArrayInfo, dense_strides, describe, empty_like_library
from cudatma.backend import backend_for
from cudatma.build.kernel import debug_scope, default_target, wants_debug
from cudatma.kernels.checks import check_backend
from cudatma.kernels.choosing import decide, pinned_scope
from cudatma.kernels.gemm.choose import GEMM
from cudatma.kernels.gemm.matrices import ALIGNMENT
from cudatma.kernels.gemm.plan import OPTIONAL, arranged, plan_gemm
from cudatma.kernels.gemm.problem import NUMPY, SCALE_BLOCK
from cudatma.kernels.gemm.request import Request, check_call
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.gemm.versions import chosen_version
from cudatma.kernels.gpu import H200, gpu_of, imagined_gpu
from cudatma.kernels.host import host_array
from cudatma.kernels.known_call import KnownCall, addresses, call_key
from cudatma.kernels.launch import Launch, PlanCache, Replay
from cudatma.kernels.version import naming
from cudatma.library_streams import stream_handle
from cudatma.runtime.streams import order_after_producers
from cudatma.target import detect

_PLANS: PlanCache[Replay] = PlanCache(1024)
#: By their keys.
_KNOWN_CALLS: PlanCache[KnownCall] = PlanCache(1024)
context.after_fork(_PLANS, PlanCache.clear)
context.after_fork(_KNOWN_CALLS, PlanCache.clear)


def gemm(
    a: Any,
    b: Any,
    *,
    out: Any = None,
    bias: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation: str | None = None,
    out_dtype: Any = None,
    a_scale: Any = None,
    b_scale: Any = None,
    batch_invariant: bool = False,
    version: str | int = "auto",
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """c = activation(alpha a_scale b_scale a b + beta c + bias), summed in fp32 and rounded once.

    a: (M, K) or (batch, M, K), b: (K, N) or (batch, K, N), where one matrix may serve the whole batch. Both fp16, bf16
    or one type of fp8 (float8_e4m3fn, float8_e5m2), of one library and device: CuPy, torch, DLPack or
    ``__cuda_array_interface__``; NumPy on the emulator. The kernels read row-major and column-major operands whose rows
    or columns start at multiples of 16 bytes, of fp8 a row-major a and a column-major b. Operands that lie otherwise
    are copied first, which gemm_explain() tells, and which a CUDA graph cannot capture. wgmma adds fp8 products with
    fewer bits than fp32 has; with scales of blocks only within each 128 of K.
    out: c, (M, N) or (batch, M, N) with contiguous rows, made by a's library if None; ``beta`` needs it.
    out_dtype: fp16, bf16 or fp32; None: out's, else a's, for fp8 bf16. bias: (N,), of that dtype.
    activation: None, "relu", "gelu" (by erf), "gelu_tanh" or "silu".
    a_scale, b_scale: a number, a fp32 array of one, or of rows (M,) and columns (N,); for fp8 on SM90 also of blocks,
    (M, ceil(K / 128)) and (ceil(K / 128), ceil(N / 128)), for a batch with the batch in front if they differ. TMA
    reads those of a where neighboring rows' lie side by side and each block's start at a multiple of 16 bytes.
    batch_invariant: the bits of a row do not depend on M. version: ``"auto"``, 1 to 7, or ``"p1"``, as docs/gemm.md has
    them, and where else it may be set. backend: as in marlin_gemm. stream: None is the current stream of
    a's library. There is no backward pass: tensors that require grad raise while torch records.

    Raises ArgumentError, ArgumentTypeError, TargetError (no kernel for the GPU), CompileError, DriverError, LaunchError
    (in a graph capture: a first call, or a copy), HazardError (emulator).
    """
    number, asked_by = chosen_version(version)
    arrays, options = (a, b, a_scale, b_scale, bias, out), (alpha, beta, activation, out_dtype, batch_invariant, number)
    key = None
    if backend is None and debug_scope.get() is None and pinned_scope.get() is None:
        key = call_key(arrays, options)
        if key is not None and (known := _KNOWN_CALLS.get(key)) is not None:
            done = known.run(key[0], arrays, stream)
            if done is not None:
                return done
    with naming(asked_by):
        return _first(arrays, options, backend, stream, key)


def _first(
    arrays: tuple[Any, ...], options: tuple[Any, ...], backend: str | None, stream: Any, key: tuple[Any, ...] | None
) -> Any:
    """A call with full checks; keeps the launch for later calls of the same kind."""
    chosen = backend_for("gemm", backend)
    a, b, a_scale, b_scale, bias, out = arrays
    *checked, number = options
    alpha, beta, activation, out_dtype, batch_invariant = checked
    request, shape, result = check_call(
        a, b, out, bias, alpha, beta, activation, out_dtype, a_scale, b_scale, batch_invariant
    )
    check_backend(request.a, "a", chosen)
    device = request.a.device
    handle = 0 if device is None else stream_handle(stream, request.a.kind, device)
    if result is None:
        out = empty_like_library(request.a, shape, NUMPY[request.out_dtype], handle)
        made = describe(out)
        matrices = request.batch, *request.sizes[:2]
        result = replace(made, shape=matrices, strides_bytes=dense_strides(matrices, made.dtype))
    if not result.size_elems:
        return out
    if chosen == "reference":
        reference(request, result)
    elif device is None:
        target, ready = default_target(), arranged(request, chosen, None)
        spec = decide(GEMM, ready.problem(number), imagined_gpu(target, H200.sm_count)).spec
        plan_gemm(ready, result, spec, target, H200.sm_count).emulate(target, schedules=1)
    else:
        order_after_producers(handle, device, result, *request.arrays().values())
        ready = arranged(request, chosen, handle)
        replay = _replay(ready, result, number, device, handle)
        replay.run(addresses((*ready.read.values(), result, result)), handle)
        # A known call looks at no address but those of these arrays, and finds what TMA reads at multiples of 16 bytes.
        # At other addresses TMA could read scales of blocks that it cannot read here.
        scales = request.scales.a if request.scales.of_blocks else None
        is_aligned = result.pointer % ALIGNMENT == 0 and (scales is None or scales.pointer % ALIGNMENT == 0)
        if key is not None and ready is request and is_aligned:
            by_tma = 3 if request.has_scales_for_tma else 2
            _KNOWN_CALLS.put(key, KnownCall.of(replay, out, shape, (*request.read.values(), result), by_tma))
    return out


def _replay(request: Request, result: ArrayInfo, version: int | str, device: int, stream: int) -> Replay:
    """The plan of calls whose arrays lie like these."""
    arrays = request.arrays() | {"out": result}
    layouts = tuple([(name, info.shape, info.strides_bytes) for name, info in arrays.items()])
    asked = request.alpha, request.beta, request.activation, request.batch_invariant, version
    kinds = request.a.dtype.name, request.out_dtype, result.pointer % ALIGNMENT, request.has_scales_for_tma
    key = device, layouts, asked, kinds, wants_debug(None), pinned_scope.get()
    replay = _PLANS.get(key)
    if replay is None:
        gpu, target = gpu_of(device), detect(device)
        spec = decide(GEMM, request.problem(version), gpu).spec
        launch = plan_gemm(request, result, spec, target, gpu.sm_count)
        kernel = launch.loaded(target, device, stream)
        bases = addresses((*request.read.values(), result, result))
        replay = Replay(launch, kernel, device, bases, _moving(spec, launch, result))
        _PLANS.put(key, replay)
    return replay


def _moving(spec: GemmSpec, launch: Launch, result: ArrayInfo) -> list[int | None]:
    """The indices of the launch's arguments that hold the addresses of what is read, and of the result, for a pointer
    and for a tensor map; None for those that it does not have or read."""
    given = dict(zip(spec.parameter_names, launch.args, strict=True))
    if "output_map" in given and given["output_map"].address != result.pointer:
        given["output_map"] = 0  # a map that the kernel does not look at
    names_of = {name: (name, f"{name}_map") for name in ("a", "b", "a_scale")}
    wanted = [names_of.get(name, (name,)) for name in ("a", "b", *OPTIONAL, "output", "output_map")]
    used = [next((name for name in names if given.get(name, 0) != 0), None) for names in wanted]
    return [None if name is None else spec.parameter_names.index(name) for name in used]


def reference(request: Request, result: ArrayInfo) -> None:
    """Write the result. request, result: in host memory."""
    with np.errstate(all="ignore"):  # as the GPU: infinities and NaNs are results
        out, (_, n, k) = host_array(result), request.sizes
        a, b = (host_array(info).astype(np.float32) for info in (request.a, request.b))
        scales = [np.ones((1, 1), np.float32) if one is None else host_array(one) for one in request.scales.arrays]
        scales = [one.reshape(1, 1) if one.size == 1 else one for one in scales]
        if request.scales.of_blocks:
            a_blocks, b_blocks = (_repeated(one, -1) for one in scales)
            a = a * a_blocks[..., :k]
            b = b * _repeated(b_blocks[..., :n], -2)[..., :k, :]
            values = np.float32(request.alpha) * (a @ b)
        else:
            values = np.float32(request.alpha) * (a @ b) * scales[0].reshape(-1, 1) * scales[1].reshape(1, -1)
        if request.beta:
            values += np.float32(request.beta) * out.astype(np.float32)
        if request.bias is not None:
            values += host_array(request.bias).astype(np.float32)
        out[...] = _activated(values, request.activation).astype(out.dtype)


def _repeated(scales: Any, axis: int) -> Any:
    """Each scale for the elements of its block."""
    return np.repeat(scales, SCALE_BLOCK, axis=axis)


def _activated(x: Any, name: str | None) -> Any:
    if name == "relu":
        return np.where(x < 0, np.float32(0), x)
    if name == "gelu":
        scaled = np.float32(0.5) * x * (1 + np.vectorize(math.erf, otypes=[np.float32])(x * np.float32(math.sqrt(0.5))))
        return np.where(np.isneginf(x), np.float32(0), scaled)  # the limit, as the kernels have it
    if name == "gelu_tanh":
        return (
            np.float32(0.5) * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
        )
    return x / (1 + np.exp(-x)) if name == "silu" else x
