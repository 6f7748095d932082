"""marlin_explain: which kernel a GEMM would run, why, how long it should take, and what else was considered.

Launches and compiles nothing, and needs no GPU: a target and a number of SMs will do.
"""

from __future__ import annotations

from typing import Any

from cudatma import context
from cudatma.build.kernel import default_target
from cudatma.deprecation import former_arguments
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError
from cudatma.kernels.explain import Explanation, explained
from cudatma.kernels.gpu import Gpu, gpu_of, imagined_gpu
from cudatma.kernels.marlin.choose import MARLIN, resolve_fused
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.quantization import PackedWeight
from cudatma.target import Target


@former_arguments(multiprocessors="sm_count")
def marlin_explain(
    w: Any,
    m: int,
    *,
    target: str | Target | None = None,
    sm_count: int | None = None,
    device: int | None = None,
    batch_invariant: bool = False,
) -> Explanation:
    """What marlin_gemm would run for M rows of x, why, and how long that should take. Launches and compiles nothing.

    w: PackedWeight, MarlinLinear, or a LinearShape where there are no weights; only weights show whether scale and
    offset are one multiply-add (``_fused`` or ``_shifted`` in the entry). batch_invariant: as in marlin_gemm.
    The GPU is the weight's device, or ``device``; or an imagined one: ``target`` and ``sm_count`` (132, an H200's,
    unless given). With none of them: the first GPU of this machine, else an H200 is imagined ($CUDATMA_TARGET names
    another target).

    Raises ArgumentError, ArgumentTypeError, TargetError; DriverError or LaunchError for a device that is not there.
    """
    layer, packed = _layer_of(w)
    if type(batch_invariant) is not bool:
        raise ArgumentTypeError("batch_invariant", type(batch_invariant).__name__, "bool")
    gpu = _gpu(packed, target, sm_count, device)
    problem = Problem(layer, m, batch_invariant)
    form = "none" if packed is None else packed.scale_fit.form
    return explained(MARLIN, problem, gpu, launched=lambda spec: resolve_fused(spec, form), divide=not batch_invariant)


def _layer_of(w: Any) -> tuple[LinearShape, PackedWeight | None]:
    if isinstance(w, LinearShape):
        return w, None
    packed = getattr(w, "weight", w)  # a MarlinLinear's
    if not isinstance(packed, PackedWeight):
        got = f"{type(w).__module__}.{type(w).__qualname__}"
        allowed = "PackedWeight, cudatma.MarlinLinear or LinearShape"
        raise ArgumentTypeError("w", got, allowed, "describe a torch module by LinearShape")
    return LinearShape.of(packed), packed


def _gpu(packed: PackedWeight | None, target: Any, sm_count: int | None, device: int | None) -> Gpu:
    named = target is not None or sm_count is not None
    if named and device is not None:
        raise ArgumentError("device", device, "None with a target or sm_count", "name a GPU or imagine one")
    if named:
        if sm_count is not None and (type(sm_count) is not int or sm_count < 1):
            raise ArgumentError("sm_count", sm_count, "1 and more")
        return imagined_gpu(default_target() if target is None else target, sm_count)
    if device is None and packed is not None:
        device = packed.device
    if device is not None:
        return gpu_of(device)
    try:
        return gpu_of(context.current_device())
    except (CudaTmaError, ImportError):
        return imagined_gpu(default_target())
