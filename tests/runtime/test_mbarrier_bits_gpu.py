"""What a GPU's mbarriers really hold. A failure's text is the table to correct cudatma/mbarrier_bits.py by; once it
passes, the compute capability of the GPU goes into VERIFIED_ON there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import probe_configs as probes
import pytest
from barrier_after_inval import differences
from barrier_states import CASES, H200, STEPS, UNTOUCHED, states

from cudatma.build.kernel import default_target, load_kernel
from cudatma.mbarrier_bits import decode, encode

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")
WORKER = Path(__file__).with_name("after_inval_worker.py")
#: Seconds: compilation, start, and some tenths of a second on the GPU.
PATIENCE = 120


def answers(count: int, size: int) -> list[list[int]]:
    """Of each step what a plain load sees of the live barrier, and the state after inval."""
    kernel = load_kernel("probes/mbarrier_bits.cu.j2", probes.Plain("mbarrier_bits"), default_target(), debug=False)
    out = cupy.zeros((len(STEPS), 2), cupy.uint64)
    kernel.launch(1, 32, (out, count, size))
    found: list[list[int]] = out.get().tolist()
    return found


@pytest.mark.parametrize(("count", "size"), [*CASES, *(case for case in H200 if case not in CASES)])
def test_the_layout_is_the_gpus(count: int, size: int) -> None:
    lines, wrong = [], False
    for step, (_, raw), state in zip(STEPS, answers(count, size), states(count, size), strict=True):
        wrong |= raw != encode(state)
        lines.append(f"{step:28s} is {raw:#018x}, expected {encode(state):#018x}; {decode(raw)} for {state}")
    assert not wrong, f"count {count}, bytes {size}:\n" + "\n".join(lines)


def test_a_plain_load_of_a_live_barrier_sees_what_was_there_before() -> None:
    """The emulator has it so; nothing else relies on it."""
    assert [hex(live) for live, _ in answers(4, 1024)] == [hex(UNTOUCHED)] * len(STEPS)


def test_a_barrier_goes_on_after_inval() -> None:
    """Nobody promises it, and hang reports do not need it: they read a barrier once, when nobody uses it any more."""
    tests = WORKER.parents[1]
    path = os.pathsep.join([str(tests.parent), str(tests / "shared"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(WORKER)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert not differences(found), "\n".join(differences(found))
