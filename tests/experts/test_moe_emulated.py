"""marlin_moe on the emulator, against float64 and without hazards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from moe_cases import LAYERS, check

from cudatma.kernels.experts.moe import MARLIN_MOE, MoeOptions, marlin_moe
from cudatma.kernels.experts.sample import sample
from cudatma.kernels.gpu import imagined_gpu
from cudatma.target import get_target


def checked_call(name: str, **options: Any) -> Any:
    operands = LAYERS[name].operands()
    inputs = tuple([operands[field] for field in MARLIN_MOE.inputs])
    return MARLIN_MOE.check(inputs, None, MoeOptions(**options), (operands["w1"], operands["w2"]))


@pytest.mark.sweep(3)
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
        ("route", "sm_90a", {"ctas": 8}),
        ("sum", "sm_90a", {}),
        ("skinny_up", "sm_90a", {}),
        ("skinny_up", "sm_90a", {"direct": True}),
        ("skinny_down", "sm_120a", {"k": 128}),
        ("skinny_down", "sm_120a", {"direct": True}),
        ("wgmma_up", "sm_90a", {"k": 128, "m": 20}),
    ],
    ids=str,
)
def test_twenty_schedules_of_ctas_with_several_tiles(kernel: str, target: str, fields: dict[str, Any]) -> None:
    """Each CTA of a grouped GEMM computes several tiles, and its ring of two stages wraps."""
    chosen = sample(kernel, get_target(target), **{"m": 12, "sm_count": 1} | fields)
    assert not chosen.run(schedules=20).hazards
    assert chosen.error() < chosen.limit


@pytest.mark.parametrize("target", ["sm_90a", "sm_120a"])
def test_the_choice_fits_and_does_not_depend_on_earlier_calls(target: str) -> None:
    checked = checked_call("mapped")
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
    problem = checked_call("many_rows").problem
    gpu = imagined_gpu(get_target("sm_90a"))
    config = MARLIN_MOE.configure(problem, gpu, {})
    resident = (132,) * len(config.kernels)
    sizes_of = MARLIN_MOE.sizes_for(problem, config, gpu, resident)
    for m in (70, 71, 500):
        resized = problem.with_m(m)
        assert sizes_of(resized) == tuple(
            launch.sizes for launch in MARLIN_MOE.arguments(resized, config, gpu, resident)
        )


def test_the_high_word_of_an_id_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of host arrays is disabled, as for arrays in device memory."""
    operands = LAYERS["top_1"].operands()
    ids = operands["topk_ids"].astype(np.int64)
    ids[3:7, 0] = 2**32 + 1, -(2**32), 2**31, -(2**31) - 1
    monkeypatch.setattr("cudatma.kernels.experts.problem._check_host_ids", lambda *_: None)
    result = marlin_moe(**operands | {"topk_ids": ids}, backend="emulator")
    ids[3:7] = -1
    check(result, operands | {"topk_ids": ids})


@pytest.mark.parametrize("target", ["sm_90a", pytest.param("sm_120a", marks=pytest.mark.slow)])
def test_other_tokens_do_not_change_the_bits_of_a_batch_invariant_result(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDATMA_TARGET", target)
    operands = replace(LAYERS["many_rows"], m=50, k=128, intermediate=64, experts=2).operands()
    whole = marlin_moe(**operands, batch_invariant=True, backend="emulator")
    check(whole, operands)
    tokens = slice(0, 1)
    part = {name: operands[name][tokens] for name in ("x", "topk_weights", "topk_ids")}
    alone = marlin_moe(**operands | part, batch_invariant=True, backend="emulator")
    np.testing.assert_array_equal(alone.view(np.uint16), whole[tokens].view(np.uint16))


@pytest.mark.parametrize("target", ["sm_90a", "sm_120a"])
def test_batch_invariant_kernels_add_in_the_same_order(target: str) -> None:
    gpu = imagined_gpu(get_target(target))
    checked = checked_call("many_rows", batch_invariant=True)
    orders = set()
    for m in (1, 2, 7, 8, 30, 64, 200, 1000, 5000):
        config = MARLIN_MOE.configure(checked.problem.with_m(m), gpu, {})
        for each in (config.up, config.down):
            # Only the skinny kernel applies scales to the sums of a stage.
            orders.add((each.version, each.slice_k, each.tile_k if each.is_skinny else 0))
    assert len(orders) == 1
