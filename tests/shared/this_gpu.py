"""The GPU on which the tests run, and CuPy. Modules that import this module are skipped if either is missing."""

from __future__ import annotations

import pytest

from cudatma.errors import DriverError, TargetError
from cudatma.target import detect

try:
    TARGET = detect()
except (DriverError, TargetError, ImportError) as reason:
    pytest.skip(f"no usable GPU: {reason}", allow_module_level=True)

cupy = pytest.importorskip("cupy")
