"""The GPU that the tests run on, and CuPy. Test modules that import this are skipped without them."""

from __future__ import annotations

import pytest

from cudatma.errors import DriverError, TargetError
from cudatma.target import detect

try:
    TARGET = detect()
except (DriverError, TargetError, ImportError) as reason:
    pytest.skip(f"no usable GPU: {reason}", allow_module_level=True)

cupy = pytest.importorskip("cupy")
