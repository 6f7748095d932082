"""marlin_explain: which kernel a GEMM would run, why, how long it should take, and what else was considered.

Launches and compiles nothing, and needs no GPU: a target and a number of SMs will do.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from cudatma import context
from cudatma.build.kernel import default_target
from cudatma.deprecation import former_arguments
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError
from cudatma.kernels.candidates import ranked
from cudatma.kernels.explain import Explanation
from cudatma.kernels.gpu import H200, Gpu, gpu_of, imagined_gpu
from cudatma.kernels.marlin.choose import MARLIN, candidates, decide
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.marlin.specs import resolve_fused
from cudatma.kernels.schedule import schedule
from cudatma.kernels.shortlist import Listed
from cudatma.quantization import PackedWeight
from cudatma.target import Target

#: Candidates that an explanation lists.
_LISTED = 8
_MAX_M = 2**31 - 1


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
    if type(m) is not int:
        raise ArgumentTypeError("m", type(m).__name__, "int, rows of x")
    if not 1 <= m <= _MAX_M:
        raise ArgumentError("m", m, f"1 to {_MAX_M} rows")
    if type(batch_invariant) is not bool:
        raise ArgumentTypeError("batch_invariant", type(batch_invariant).__name__, "bool")
    gpu = _gpu(packed, target, sm_count, device)
    problem = Problem(layer, m, batch_invariant)
    form = "none" if packed is None else packed.scale_fit.form
    decision = decide(problem, gpu)
    decision = replace(decision, spec=resolve_fused(decision.spec, form))
    spec, found = decision.spec, candidates(problem, gpu)
    cost = spec.cost(problem, gpu)
    listed = [Listed(resolve_fused(one, form), its) for one, its in islice(ranked(found), _LISTED)]
    if all(one.spec != spec for one in listed):
        listed.append(Listed(spec, cost))
    return Explanation(
        family=MARLIN,
        problem=problem,
        gpu=gpu,
        decision=decision,
        schedule=schedule(spec, m, layer.n, layer.k, gpu.sm_count * spec.blocks_per_sm, divide=not batch_invariant),
        prediction=cost,
        candidates=tuple(listed),
        considered=len(found),
    )


def _layer_of(w: Any) -> tuple[LinearShape, PackedWeight | None]:
    if isinstance(w, LinearShape):
        return w, None
    packed = getattr(w, "weight", w)  # a MarlinLinear's
    if not isinstance(packed, PackedWeight):
        raise ArgumentTypeError("w", type(w).__name__, "PackedWeight, MarlinLinear or LinearShape")
    return LinearShape.of(packed), packed


def _gpu(packed: PackedWeight | None, target: Any, sm_count: int | None, device: int | None) -> Gpu:
    named = target is not None or sm_count is not None
    if named and device is not None:
        raise ArgumentError("device", device, "None with a target or sm_count", "name a GPU or imagine one")
    if named:
        count = H200.sm_count if sm_count is None else sm_count
        if type(count) is not int or count < 1:
            raise ArgumentError("sm_count", sm_count, "1 and more")
        return imagined_gpu(default_target() if target is None else target, count)
    if device is None and packed is not None:
        device = packed.device
    if device is not None:
        return gpu_of(device)
    try:
        return gpu_of(context.current_device())
    except (CudaTmaError, ImportError):
        return imagined_gpu(default_target(), H200.sm_count)
