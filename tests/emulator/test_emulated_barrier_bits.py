"""The emulator's barriers have the layout of mbarrier_bits, and come to memory with mbarrier.inval, as an H200's do."""

from __future__ import annotations

import barrier_after_inval as after_inval
import numpy as np
import probe_specs as probes
import pytest
from barrier_states import CASES, STEPS, UNTOUCHED, states
from ptx_of import probe

import cudatma
from cudatma.mbarrier_bits import decode, encode


@pytest.mark.parametrize(("count", "size"), CASES)
def test_each_step_leaves_the_bits_of_its_state(count: int, size: int) -> None:
    out = np.zeros((len(STEPS), 2), np.uint64)
    probe("mbarrier_bits", probes.Plain("mbarrier_bits")).launch(
        "mbarrier_bits", 1, 32, (out, count, size), schedules=1, hazards="off"
    )
    assert (out[:, 0] == UNTOUCHED).all()
    for step, raw, state in zip(STEPS, out[:, 1].tolist(), states(count, size), strict=True):
        assert decode(raw) == state, step
        assert raw == encode(state), step


def test_the_kernel_that_goes_on_after_inval_is_right_without_it() -> None:
    """What tests/runtime/test_mbarrier_bits_gpu.py asks a GPU: its phases end here, where nothing is invalidated."""
    source, out = after_inval.operands()
    cudatma.compile(after_inval.SOURCE, None, target="sm_90a", debug=False, template=True).emulate(
        1, 32, (source, out, 0)
    )
    assert (out[:, 1] == 1).all()
    assert len(after_inval.differences(out.tolist())) == len(after_inval.CASES)  # no states are there


def test_using_a_barrier_after_inval_is_reported() -> None:
    source, out = after_inval.operands()
    with pytest.raises(cudatma.HazardError, match="no mbarrier is initialised"):
        cudatma.compile(after_inval.SOURCE, None, target="sm_90a", debug=False, template=True).emulate(
            1, 32, (source, out, 1)
        )
