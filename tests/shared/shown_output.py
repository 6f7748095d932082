"""Comparison of a program's output with a block of a page."""

from __future__ import annotations

import re

#: Parts that differ between releases of NVRTC or between runs: lines and registers of PTX, shared-memory addresses,
#: counts and times.
_VARIES = re.compile(r"PTX line \d+|%\w+|(?:address|mbarrier at) 0x\w+|\d+ (?:steps|times)|[\d.]+ m?s\b")


def comparable(output: str) -> str:
    """Return an output without numbers that vary and without white space, because lines may be wrapped."""
    return re.sub(r"\s", "", _VARIES.sub("#", " ".join(output.split())))
