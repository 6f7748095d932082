"""Streams and graphs on the fake driver: which workspace a launch of marlin_gemm gets, on which stream results are
allocated, and which streams wait for which."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_driver import build_driver, wrong_cases


@pytest.mark.slow
def test_on_the_fake_driver(tmp_path: Path) -> None:
    build_driver(tmp_path)
    script = Path(__file__).with_name("marlin_on_fake_driver.py")
    assert not (wrong := wrong_cases(script, tmp_path, environment={"CUDATMA_BACKEND": "cuda"})), wrong
