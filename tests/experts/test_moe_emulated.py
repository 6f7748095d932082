"""marlin_moe on the emulator, against float64 and without hazards."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from moe_cases import LAYERS, check

from cudatma.kernels.experts.moe import MARLIN_MOE, MoeOptions, marlin_moe
from cudatma.kernels.experts.sample import sample
from cudatma.kernels.gpu import imagined_gpu
from cudatma.target import get_target


@pytest.mark.parametrize("name", LAYERS)
def test_the_result(name: str) -> None:
    operands = LAYERS[name].operands()
    out = np.full(operands["x"].shape, np.nan, operands["x"].dtype)
    assert marlin_moe(**operands, out=out, backend="emulator") is out
    check(out, operands)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "target"),
    [
        *product(("route", "skinny_up", "skinny_down", "sum"), ("sm_90a", "sm_120a")),
        *product(("gather", "wgmma_up", "wgmma_down"), ("sm_90a",)),
    ],
)
def test_twenty_schedules_of_ctas_with_several_tiles(kernel: str, target: str) -> None:
    fields = {"tile_m": 16, "tile_n": 128} if "wgmma" in kernel else {"tile_m": 8}
    chosen = sample(kernel, get_target(target), m=20, sm_count=1, **fields)
    assert not chosen.run(schedules=20).hazards
    assert chosen.error() < chosen.limit


def test_kernels_are_chosen_for_every_number_of_tokens() -> None:
    """The configuration of any number of tokens fits the target and the shape."""
    operands = LAYERS["mapped"].operands()
    w1, w2 = operands.pop("w1"), operands.pop("w2")
    inputs = tuple(operands.values())
    problem = MARLIN_MOE.check(inputs, None, MoeOptions("silu_glu", False), (w1, w2)).problem
    for target in ("sm_90a", "sm_120a"):
        gpu, memo = imagined_gpu(get_target(target)), {}
        for m in (1, 2, 7, 8, 30, 64, 256, 4096):
            for _, config in MARLIN_MOE.kernels(problem, MARLIN_MOE.configure(problem.with_m(m), gpu, memo)):
                config.check_target(get_target(target))
