"""marlin_moe on the emulator, against float64 and without hazards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from moe_cases import LAYERS, check

from cudatma.kernels.experts.moe import MARLIN_MOE, MoeOptions, marlin_moe
from cudatma.kernels.experts.sample import sample
from cudatma.kernels.gpu import imagined_gpu
from cudatma.target import get_target


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", LAYERS)
def test_the_result(name: str) -> None:
    operands = LAYERS[name].operands()
    out = np.full(operands["x"].shape, np.nan, operands["x"].dtype)
    assert marlin_moe(**operands, out=out, backend="emulator") is out
    check(out, operands)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "target", "fields"),
    [
        ("route", "sm_90a", {}),
        ("gather", "sm_90a", {}),
        ("sum", "sm_90a", {}),
        ("skinny_up", "sm_90a", {}),
        ("skinny_down", "sm_120a", {"k": 128}),
        ("wgmma_up", "sm_90a", {"k": 128, "m": 20, "tile_m": 16, "tile_n": 128}),
    ],
    ids=str,
)
def test_twenty_schedules_of_ctas_with_several_tiles(kernel: str, target: str, fields: dict[str, int]) -> None:
    """Each CTA of a grouped GEMM computes four tiles, and its ring of two stages wraps."""
    chosen = sample(kernel, get_target(target), **{"m": 12, "sm_count": 1} | fields)
    assert not chosen.run(schedules=20).hazards
    assert chosen.error() < chosen.limit


@pytest.mark.parametrize("target", ["sm_90a", "sm_120a"])
def test_the_choice_fits_and_does_not_depend_on_earlier_calls(target: str) -> None:
    operands = LAYERS["mapped"].operands()
    w1, w2 = operands.pop("w1"), operands.pop("w2")
    checked = MARLIN_MOE.check(tuple(operands.values()), None, MoeOptions("silu_glu", False), (w1, w2))
    gpu = imagined_gpu(get_target(target))
    memo: dict[Any, Any] = {}
    kernels = set()
    for m in (64, 8, 1, 2, 7, 4096, 30, 256, 64):
        problem = checked.problem.with_m(m)
        config = MARLIN_MOE.configure(problem, gpu, memo)
        assert config == MARLIN_MOE.configure(problem, gpu, {})
        for template, kernel in MARLIN_MOE.kernels(problem, config):
            kernel.check_target(get_target(target))
            kernels.add((template, kernel))
        for grouped in (config.up, config.down):
            grouped.check_problem(problem)
    assert kernels <= set(MARLIN_MOE.kernels_up_to(checked, 4096, gpu))


def test_sizes_of_another_number_of_tokens_are_those_of_a_new_plan() -> None:
    operands = LAYERS["many_rows"].operands()
    w1, w2 = operands.pop("w1"), operands.pop("w2")
    problem = MARLIN_MOE.check(tuple(operands.values()), None, MoeOptions("silu_glu", False), (w1, w2)).problem
    gpu = imagined_gpu(get_target("sm_90a"))
    config = MARLIN_MOE.configure(problem, gpu, {})
    resident = (132,) * len(config.kernels)
    sizes_of = MARLIN_MOE.sizes_for(problem, config, gpu, resident)
    for m in (70, 71, 500):
        resized = problem.with_m(m)
        assert sizes_of(resized) == tuple(
            launch.sizes for launch in MARLIN_MOE.arguments(resized, config, gpu, resident)
        )


@pytest.mark.parametrize("wrong", [2**32 + 3, -(2**32), 2**31, -(2**31) - 1])
def test_the_high_word_of_an_id_counts(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of host arrays is disabled, as for arrays in device memory."""
    operands = LAYERS["top_1"].operands()
    ids = operands["topk_ids"].astype(np.int64)
    ids[3] = wrong
    monkeypatch.setattr("cudatma.kernels.experts.problem._check_host_ids", lambda *_: None)
    result = marlin_moe(**operands | {"topk_ids": ids}, backend="emulator")
    ids[3] = -1
    check(result, operands | {"topk_ids": ids})
