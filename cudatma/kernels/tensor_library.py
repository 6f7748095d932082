"""Whose array an argument is, for calls like an earlier one: without a look at its shape, its device or its memory."""

from __future__ import annotations

import sys
from typing import Any

#: CuPy's array class and torch's, once they have been seen.
_libraries: dict[type, str] = {}


def library_of_tensor(x: Any) -> str:
    """``"cupy"``, ``"torch"``, or ``""`` for an array that only the full checks can read."""
    kind = type(x)
    known = _libraries.get(kind)
    if known is None:
        modules = sys.modules
        if "cupy" in modules and kind is modules["cupy"].ndarray:
            known = "cupy"
        elif "torch" in modules and kind is modules["torch"].Tensor:
            known = "torch"
        else:
            return ""
        _libraries[kind] = known
    return known
