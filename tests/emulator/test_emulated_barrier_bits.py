"""The emulator's barriers lie in shared memory with the layout that mbarrier_bits has, whatever is done to them."""

from __future__ import annotations

import numpy as np
import probe_specs as probes
import pytest
from barrier_states import CASES, STEPS, states
from ptx_of import probe

from cudatma.mbarrier_bits import decode, encode


@pytest.mark.parametrize(("count", "size"), CASES)
def test_each_step_leaves_the_bits_of_its_state(count: int, size: int) -> None:
    out = np.zeros(len(STEPS), np.uint64)
    probe("mbarrier_bits", probes.Plain("mbarrier_bits")).launch(
        "mbarrier_bits", 1, 32, (out, count, size), schedules=1, hazards="off"
    )
    for step, raw, state in zip(STEPS, out.tolist(), states(count, size), strict=True):
        assert decode(raw) == state, step
        assert raw == encode(state), step
