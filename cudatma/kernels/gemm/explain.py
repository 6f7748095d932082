"""gemm_explain: which version and configuration gemm would run, why, and how long it should take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cudatma.build.kernel import default_target
from cudatma.kernels.explain import Explanation, explained
from cudatma.kernels.gemm.choose import GEMM
from cudatma.kernels.gemm.gemm import checked_operands, problem_of
from cudatma.kernels.gemm.version import chosen_version
from cudatma.kernels.gpu import H200, gpu_of, imagined_gpu


def gemm_explain(a: Any, b: Any, *, version: str | int = "auto") -> Explanation:
    """What ``gemm(a, b, version=version)`` would run, why, and how long it should take. Launches and compiles nothing.

    For host arrays on an imagined H200, or for $CUDATMA_TARGET. Raises as gemm does.
    """
    number, asked_by = chosen_version(version)
    left, right = checked_operands(a, b)
    gpu = imagined_gpu(default_target(), H200.sm_count) if left.device is None else gpu_of(left.device)
    found = explained(GEMM, problem_of(left, right, number), gpu)
    if number:
        decision = replace(found.decision, why=f"{found.decision.why} by {asked_by}")
        found = replace(found, decision=decision)
    return found
