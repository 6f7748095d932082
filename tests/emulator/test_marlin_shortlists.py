"""Candidates that no table chooses compute what they should, and race with nobody: one of each kind on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from marlin_runner import relative_error, run_marlin

from cudatma.kernels.marlin import emulated, marlin_gemm
from cudatma.kernels.marlin.candidates import candidates
from cudatma.kernels.marlin.config import Feeds, Layer
from cudatma.kernels.marlin.layer import AnyMarlinSpec, resolve_fused
from cudatma.kernels.marlin.problem import schedule
from cudatma.kernels.marlin.spec import MarlinSpec
from cudatma.kernels.marlin.strip_spec import StripSpec
from cudatma.kernels.marlin.tuning import pinned
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.quantization import quantize
from cudatma.target import get_target

PROCESSORS = 4
KINDS: dict[str, Callable[[AnyMarlinSpec], bool]] = {
    "wide strips, two blocks": lambda s: isinstance(s, StripSpec) and s.strips_per_warp == 2 == s.blocks_per_sm,
    "wide strips, a cluster": lambda s: isinstance(s, StripSpec) and s.strips_per_warp == 2 == s.blocks_k,
    "depth among warpgroups, cluster": lambda s: isinstance(s, WgmmaSpec) and s.warpgroups_k == 2 == s.cluster,
    "three warpgroups": lambda s: isinstance(s, WgmmaSpec) and s.warpgroups == 3 and s.block_m == 24,
    "four warpgroups": lambda s: isinstance(s, WgmmaSpec) and s.warpgroups == 4 and s.block_m == 24,
    "one warpgroup, two blocks": lambda s: isinstance(s, WgmmaSpec) and s.consumer_warps == 4 and s.blocks_per_sm == 2,
    "depth among warps, three blocks": lambda s: isinstance(s, MarlinSpec) and s.warps_k == 2 and s.blocks_per_sm == 3,
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", KINDS)
def test_one_of_each_kind(kind: str) -> None:
    layer, m = Layer(320, 264, 64, True, "float16"), 20
    found = candidates(layer, m, get_target("sm_90a"), PROCESSORS, Feeds())
    choice = next(choice for choice in found if KINDS[kind](choice.spec))
    rng = np.random.default_rng(len(kind))
    weight = quantize(rng.standard_normal((layer.k, layer.n)).astype(np.float32), group_size=64, symmetric=False)
    x = rng.standard_normal((m, layer.k)).astype(np.float16)
    out, report = run_marlin(x, weight, processors=PROCESSORS * choice.blocks_per_sm, spec=choice.spec, schedules=2)
    assert not report.hazards
    assert relative_error(out, x, weight) < 1e-3


def test_a_pinned_choice_is_what_a_gemm_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tuner runs its candidates; here whole tiles of a kernel that would divide them."""
    layer, m = Layer(512, 136, 128, False, "float16"), 9
    found = candidates(layer, m, get_target("sm_90a"), 132, Feeds())
    dividing = (one for one in found if schedule(one.spec, m, layer.n, layer.k, 132).stream_tiles)
    choice = replace(next(dividing), divide=False)
    weight = quantize(np.random.default_rng(0).standard_normal((layer.k, layer.n)).astype(np.float32))
    x = np.random.default_rng(1).standard_normal((m, layer.k)).astype(np.float16)
    seen: list[Any] = []

    def watched(spec: Any, *rest: Any, **options: Any) -> Any:
        seen.append((spec, schedule(spec, *rest, **options)))
        return seen[-1][1]

    monkeypatch.setattr(emulated, "schedule", watched)
    with pinned(choice):
        out = marlin_gemm(x, weight, backend="emulator")
    ((spec, work),) = seen
    assert resolve_fused(spec, "none") == choice.spec
    assert work.stream_tiles == 0
    assert relative_error(out, x, weight) < 1e-3
