"""Configurations that a tuner measures compute what they should, and race with nobody: one of each kind, emulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from marlin_runner import relative_error, run_marlin

from cudatma.kernels.choice import shortlist
from cudatma.kernels.gpu import H200, imagined_gpu
from cudatma.kernels.marlin import gemm as marlin
from cudatma.kernels.marlin.arguments import gemm_arguments
from cudatma.kernels.marlin.choose import MARLIN
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.gemm import marlin_gemm
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.tuning import pinned
from cudatma.quantization import quantize

PROCESSORS = 4
KINDS: dict[str, tuple[str, Callable[[MarlinConfig], bool]]] = {
    "skinny, whole K": ("sm_90a", lambda s: s.version == "skinny" and s.cluster_k == 1),
    "skinny, cluster divides K": ("sm_90a", lambda s: s.version == "skinny" and s.cluster_k == 2),
    "K among warpgroups": ("sm_90a", lambda s: s.version == "wgmma" and s.slice_k == 2),
    "three warpgroups": ("sm_90a", lambda s: s.version == "wgmma" and s.warpgroups == 3),
    "K among warps": ("sm_120a", lambda s: s.version == "mma_sync" and s.slice_k == 4),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", KINDS)
def test_one_of_each_kind(kind: str) -> None:
    layer, m = LinearShape(320, 264, 64, True, "float16"), 20
    target, is_meant = KINDS[kind]
    config = next(
        one.config
        for one in shortlist(MARLIN, Problem(layer, m), imagined_gpu(target, PROCESSORS), 100)
        if is_meant(one.config)
    )
    rng = np.random.default_rng(len(kind))
    weight = quantize(rng.standard_normal((layer.k, layer.n)).astype(np.float32), group_size=64, symmetric=False)
    x = rng.standard_normal((m, layer.k)).astype(np.float16)
    out, report = run_marlin(x, weight, target=target, processors=PROCESSORS, config=config, schedules=2)
    assert not report.hazards
    assert relative_error(out, x, weight) < 1e-3


def test_a_pinned_configuration_is_what_a_gemm_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tuner runs its candidates; here one that is not the cost model's choice."""
    layer, m = LinearShape(512, 136, 128, False, "float16"), 9
    mine = shortlist(MARLIN, Problem(layer, m), H200, 12)[-1].config
    weight = quantize(np.random.default_rng(0).standard_normal((layer.k, layer.n)).astype(np.float32))
    x = np.random.default_rng(1).standard_normal((m, layer.k)).astype(np.float16)
    seen: list[Any] = []

    def watched(problem: Problem, config: Any, *rest: Any) -> Any:
        seen.append(config)
        return gemm_arguments(problem, config, *rest)

    monkeypatch.setattr(marlin, "gemm_arguments", watched)
    with pinned(mine):
        out = marlin_gemm(x, weight, backend="emulator")
    assert [config.in_form("none") for config in seen] == [mine]
    assert relative_error(out, x, weight) < 1e-3
