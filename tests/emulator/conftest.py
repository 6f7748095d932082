"""Puts the helpers of these tests, the probes, the subjects of mutants and the TMA cases on the path."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
for folder in (TESTS, TESTS / "emulator", TESTS / "mutants", TESTS / "tma"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
