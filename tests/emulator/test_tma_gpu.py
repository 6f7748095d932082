"""Random TMA operations outside the captures: GPU and emulator agree in every byte, traps included."""

from __future__ import annotations

from pathlib import Path

import pytest
from capture_tma import Capture, on_gpu
from compare_tma import difference
from tma_cases import cases
from tma_direct import answer

pytestmark = pytest.mark.gpu
#: A trap costs its process, about a second.
TRAPS = 24


@pytest.mark.parametrize("seed", [101, 102])
def test_the_emulator_does_what_the_gpu_does(seed: int, tmp_path: Path) -> None:
    capture = Capture(list(cases(1500, seed)), tmp_path, TRAPS)
    on_gpu(capture, jobs=4)
    asked = [case | {"answer": capture.answers[case["n"]]} for case in capture.asked]
    asked = [case for case in asked if case["answer"]["result"] != "skipped"]
    assert len(asked) > 1400
    found = {case["n"]: difference(case, answer(case)) for case in asked}
    assert {n: what for n, what in found.items() if what} == {}
