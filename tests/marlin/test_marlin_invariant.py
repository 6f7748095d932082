"""The instances for batch invariance: they fit every target, and nothing varies that a row's bits depend on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.kernels.gpu import H200, imagined_gpu
from cudatma.kernels.marlin.choose import choose_by_cost
from cudatma.kernels.marlin.problem import GROUP_SIZES, LinearShape, Problem
from cudatma.kernels.schedule import schedule
from cudatma.target import get_target

layers = st.builds(
    LinearShape,
    k=st.integers(1, 40_000),
    n=st.integers(1, 70_000),
    group_size=st.sampled_from(GROUP_SIZES),
    has_zeros=st.booleans(),
    dtype=st.sampled_from(("float16", "bfloat16")),
)


@pytest.mark.parametrize("name", ["sm_90", "sm_90a", "sm_120a"])
@given(layers, st.integers(1, 100_000), st.sampled_from((1, 20, 132)))
def test_one_order_of_additions(name: str, layer: LinearShape, m: int, processors: int) -> None:
    target = get_target(name)
    config = choose_by_cost(Problem(layer, m, True), imagined_gpu(target, processors))
    config.check_target(target)
    work = schedule(config, m, layer.n, layer.k, processors, divide=False)
    assert work.stream_tiles == 0
    assert work.ctas <= processors
    if config.version == "wgmma":
        assert config.slice_k == 1
    else:
        assert config.version == "mma_sync"
        assert config.slice_k == 1
        assert config.scale_on != "accumulator"


@given(layers, st.integers(1, 10_000), st.integers(1, 10_000))
def test_the_kernel_does_not_depend_on_the_tokens(layer: LinearShape, few: int, many: int) -> None:
    kernels = {choose_by_cost(Problem(layer, m, True), H200).template for m in (few, many)}
    assert len(kernels) == 1
