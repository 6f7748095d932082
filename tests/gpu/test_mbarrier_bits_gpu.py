"""What a card's mbarriers really hold. The failure's text is the table to correct cudatma/mbarrier_bits.py by; once it
passes, the card's compute capability goes into VERIFIED_ON there."""

from __future__ import annotations

import probe_specs as probes
import pytest
from barrier_states import CASES, STEPS, states

from cudatma.build import default_target, load_kernel
from cudatma.mbarrier_bits import decode, encode

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("count", "size"), CASES)
def test_the_layout_is_the_cards(count: int, size: int) -> None:
    cupy = pytest.importorskip("cupy")
    kernel = load_kernel("probes/mbarrier_bits.cu.j2", probes.Plain("mbarrier_bits"), default_target(), debug=False)
    out = cupy.zeros(len(STEPS), cupy.uint64)
    kernel.launch(1, 32, (out, count, size))
    lines = []
    for step, raw, state in zip(STEPS, out.get().tolist(), states(count, size), strict=True):
        lines.append(f"{step:28s} is {raw:#018x}, expected {encode(state):#018x}; {decode(raw)} for {state}")
    wrong = [
        line
        for line, raw, state in zip(lines, out.get().tolist(), states(count, size), strict=True)
        if raw != encode(state)
    ]
    assert not wrong, f"count {count}, bytes {size}:\n" + "\n".join(lines)
