"""The sm_120a source of a kernel is its sm_90a source, but for comments.

So what ran on an SM90 GPU is the SM120 form too, as far as that GPU can show it. (Marlin's choices for sm_120a differ
from those for sm_90a; they are run by tests/marlin/test_marlin_gpu.py.)
"""

from __future__ import annotations

from typing import Any

import pytest

from cudatma.build.render import render
from cudatma.errors import TargetError
from cudatma.kernels.registry import REGISTRY
from cudatma.target import get_target


def runs_on_sm90(config: Any) -> bool:
    """Whether SM90 has the instructions: not the mma.sync of fp8."""
    try:
        config.check_target(get_target("sm_90a"))
    except TargetError:
        return False
    return True


#: Kernels that dumps show for SM120; SM90 has room for all.
#: Kernels of instructions that SM90 lacks (gather4) have no SM90 form.
JOBS = [
    (entry.template, config)
    for entry in REGISTRY.values()
    if entry.configs("sm_90a")
    for config in entry.configs("sm_120a")
    if runs_on_sm90(config)
]


@pytest.mark.sweep(30)
@pytest.mark.parametrize(("template", "config"), JOBS, ids=lambda value: getattr(value, "entry", None))
def test_same_source(template: str, config: Any) -> None:
    sources = [render(template, config, target) for target in ("sm_90a", "sm_120a")]
    assert sources[0] != sources[1]
    first, second = ([line for line in text.splitlines() if not line.startswith("//")] for text in sources)
    assert len(first) > 20
    assert first == second


def test_every_kernel_is_there() -> None:
    sm120 = {entry.template for entry in REGISTRY.values() if entry.configs("sm_120a") and entry.configs("sm_90a")}
    assert {template for template, _ in JOBS} == sm120
