"""The Marlin kernel's source for three specs that together use every part of the template, as text that is reviewed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cudatma.kernels.marlin.plan import TEMPLATE
from cudatma.kernels.marlin.spec import MarlinSpec
from cudatma.render import render
from cudatma.target import get_target

Golden = Callable[[str, str], None]

#: Written out, so that a new tile in the table of configurations moves no golden.
SPECS = {
    # One token, weights streamed by TMA, groups scaled in the accumulators.
    "decode_tma": MarlinSpec(
        "float16", 128, False, 8, 128, 256, 1, 4, 1, 4, scale_on="accumulator", blocks_per_sm=2
    ),
    # Every operand by cp.async, zero points among them, and each stage's depth split over two warps.
    "zeros_cp_async": MarlinSpec(
        "bfloat16", 32, True, 64, 64, 128, 1, 4, 2, 3,
        feed_weight="cp_async", feed_scale="cp_async", feed_activation="cp_async",
    ),
    # Many tokens, whole-column scales in the epilogue, setmaxnreg, activations element by element.
    "wide_column_plain": MarlinSpec(
        "float16", -1, True, 128, 256, 64, 1, 8, 1, 3,
        feed_activation="plain", scale_on="epilogue", weight_policy="evict_normal", consumer_registers=232,
    ),
}  # fmt: skip


@pytest.mark.parametrize("target", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("name", SPECS)
def test_the_source(golden: Golden, name: str, target: str) -> None:
    spec = SPECS[name]
    spec.check_target(get_target(target))
    golden(f"marlin_{name}_{target}.cu", render(TEMPLATE, spec, target))


@pytest.mark.parametrize("name", SPECS)
def test_both_targets_run_the_same_kernel(name: str) -> None:
    """Only the primitives that are at hand differ; so what the SM120 form computes can be checked on another card."""

    def kernel(target: str) -> str:
        _, found, text = render(TEMPLATE, SPECS[name], target).partition("// ---- The problem's types")
        assert found
        return text

    assert kernel("sm_90a") == kernel("sm_120a")
