"""A rival's result against a dense product of the same numbers: a wrong one must not be timed."""

from __future__ import annotations

from typing import Any

#: ||out - reference|| / ||reference||: 16-bit results differ by 1e-2 at most.
TOLERANCE = 2e-2
#: Rows from the front and as many from the end are compared: a kernel goes wrong in its first or its last tile.
ROWS = 16


def check(out: Any, x: Any, weight: Any) -> None:
    """Compare rows of ``out`` (M, N) with ``x`` (M, K) @ ``weight`` (K, N), torch tensors of one 16-bit type.

    Raises ArithmeticError where they differ; a NaN differs.
    """
    rows = sorted({*range(min(ROWS, len(x))), *range(max(0, len(x) - ROWS), len(x))})
    reference = (x[rows] @ weight).float()
    error = float((out[rows].float() - reference).norm() / reference.norm())
    if not error <= TOLERANCE:
        raise ArithmeticError(f"wrong result: relative error {error:.3g}, allowed {TOLERANCE:g}")
