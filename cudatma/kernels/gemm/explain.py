"""gemm_explain: which version and configuration gemm would run, why, and how long it should take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cudatma.backend import backend_for
from cudatma.build.kernel import default_target
from cudatma.kernels.checks import check_backend
from cudatma.kernels.explain import Explanation, explained
from cudatma.kernels.gemm.arrange import copied
from cudatma.kernels.gemm.choose import GEMM
from cudatma.kernels.gemm.request import check_call
from cudatma.kernels.gemm.versions import chosen_version
from cudatma.kernels.gpu import gpu_of, imagined_gpu


def gemm_explain(
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
) -> Explanation:
    """What gemm() would run with these arguments, why, and how long it should take. Launches and compiles nothing.

    Host arrays: for an H200, or a GPU of $CUDATMA_TARGET; the predicted time is the kernel's, without copies in
    front of it. backend, stream: as gemm takes them; they change nothing here. Raises as gemm does, and
    ArgumentError for a result without elements.
    """
    number, asked_by = chosen_version(version)
    request, _, _ = check_call(a, b, out, bias, alpha, beta, activation, out_dtype, a_scale, b_scale, batch_invariant)
    if backend is not None:
        check_backend(request.a, "a", backend_for("gemm", backend))
    device = request.a.device
    gpu = imagined_gpu(default_target()) if device is None else gpu_of(device)
    problem = request.problem(number)
    found = explained(GEMM, problem, gpu, cut=lambda spec: spec.schedule(problem, gpu.sm_count))
    why = found.decision.why + (f" by {asked_by}" if number else "")
    why += f"; {told}" if (told := copied(request)) else ""
    return replace(found, decision=replace(found.decision, why=why))
