"""What `make test` leaves to `make test-all`, and that CI runs the latter."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("number", range(10))
def test_all_cases_of_a_sweep_but_some_are_slow(number: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("slow") is None) == (number in (0, 3, 6))


@pytest.mark.parametrize(("target", "leaves_out"), [("test", True), ("test-all", False)])
def test_make_says_what_is_run(target: str, leaves_out: bool) -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    command = ["make", "-n", "--no-print-directory", "USE_SYSTEM=1", target]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-m pytest" in shown
    assert ("not slow" in shown) == leaves_out


def test_ci_runs_everything() -> None:
    assert "\nmake test-all\n" in (ROOT / ".ci" / "run").read_text()
