"""The kernel for few tokens on a card with warps of 64 channels, as the choice of configurations would take it: whole
rows and lone strips, each way to scale. test_marlin_gpu.py has every tile of the table."""

from __future__ import annotations

from typing import Any

import marlin_cases as cases
import pytest
from marlin_cases import Job
from marlin_operands import Options

from cudatma import context
from cudatma.errors import DriverError, TargetError
from cudatma.kernels.marlin import plan, strip_config
from cudatma.kernels.marlin.strip_spec import SCALE_ON, STRIP_CHANNELS
from cudatma.target import detect

pytestmark = pytest.mark.gpu

try:
    detect()
except (DriverError, TargetError, ImportError) as reason:
    pytest.skip(f"no usable GPU: {reason}", allow_module_level=True)

pytest.importorskip("cupy")

OPTIONS = (
    Options(bias=True),
    Options("bfloat16", 32, False),
    Options("float16", 64, False, bias=True),
    Options("bfloat16", -1, False),
)
TOKENS = (1, 8, 13, 16, 29, 32, 70)


@pytest.mark.parametrize("scale_on", SCALE_ON)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: f"{options.dtype}-g{options.group_size}")
@pytest.mark.parametrize("strips", [2, 3, 7])
def test_against_float64(monkeypatch: pytest.MonkeyPatch, strips: int, options: Options, scale_on: str) -> None:
    """As many channels as give each block so many strips on this card, less a tail; K is no multiple of a stage."""
    used = []

    def choose(layer: Any, m: int, target: Any, processors: int, *_: Any, **__: Any) -> Any:
        choice = strip_config.choose_strip(layer, m, target, processors)
        used.append(choice.spec)
        return choice

    monkeypatch.setattr(strip_config, "_VARIANTS", ((2**31 - 1, 2, scale_on),))
    monkeypatch.setattr(plan, "choose", choose)
    channels = STRIP_CHANNELS * strips * context.device(0).multiprocessors - 101
    try:
        outcomes = list(cases.run_job(Job(1000, channels, options, ("tma",), TOKENS)))
    finally:
        cases.free_memory()
    problems = [f"M={m}: {text}" for _, m, outcome in outcomes if (text := outcome.problem(options.dtype))]
    assert not problems, "\n".join(problems)
    assert {(spec.strips, spec.strips_per_warp) for spec in used} == {(strips, 2)}
