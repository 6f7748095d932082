"""attention_explain: which version and configuration attention would run, why, and how long it should take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cudatma.backend import backend_for
from cudatma.build.kernel import default_target
from cudatma.errors import ArgumentError
from cudatma.kernels.attention.choose import ATTENTION
from cudatma.kernels.attention.request import check_call
from cudatma.kernels.attention.versions import chosen_version
from cudatma.kernels.checks import check_backend
from cudatma.kernels.explain import Explanation, explained
from cudatma.kernels.gpu import gpu_of, imagined_gpu
from cudatma.kernels.schedule import Schedule, ceil_div


def attention_explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Any = None,
    out: Any = None,
    return_lse: bool = False,
    version: str = "auto",
    backend: str | None = None,
    stream: Any = None,
) -> Explanation:
    """What attention() would run with these arguments, why, and how long it should take. Launches and compiles nothing.

    Host arrays: for an H200, or a GPU of $CUDATMA_TARGET. backend, stream: as attention takes them; they change
    nothing here. Raises as attention does, and ArgumentError where there is nothing to compute.
    """
    name, asked_by = chosen_version(version)
    request, _, _ = check_call(q, k, v, causal, scale, window, softcap, sink, out, return_lse)
    if backend is not None:
        check_backend(request.q, "q", backend_for("attention", backend))
    if not (request.q.size_elems and request.has_keys):
        shapes = request.q.shape, request.k.shape
        raise ArgumentError("q.shape, k.shape", shapes, "a batch and lengths above 0", "nothing is launched here")
    device = request.q.device
    gpu = imagined_gpu(default_target()) if device is None else gpu_of(device)
    problem = request.problem(name)

    def cut(spec: Any) -> Schedule:
        tiles = ceil_div(problem.q_length, spec.block_m), problem.batch * problem.heads
        return Schedule(spec.ctas(problem, gpu.sm_count), *tiles, ceil_div(problem.k_length, spec.block_n), 0)

    found = explained(ATTENTION, problem, gpu, cut=cut)
    if not name:
        return found
    return replace(found, decision=replace(found.decision, why=f"{found.decision.why} by {asked_by}"))
