"""Puts the helpers of these tests, the probes' specs and the TMA cases on the path."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent, Path(__file__).parent.parent / "tma"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
