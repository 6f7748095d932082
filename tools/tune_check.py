"""Compare a candidate's result with a correct result, element by element.

The functions work on NumPy and CuPy arrays, a few rows at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: Allowed difference of an element, as a multiple of the result's root mean square and relative to the element. Two
#: kernels may round the weight and the result differently, and add in a different order. The error of a wrong tile is
#: about 1.
_ALLOWED = {"float16": (5e-3, 2.0**-10), "bfloat16": (4e-2, 2.0**-7)}
_ROWS = 256


def difference(reference: Any, result: Any) -> str:
    """Describe the error of ``result``, an fp16 or bf16 array of shape (m, n). Return "" for a correct result.

    A NaN is an error. Elements that were never written are NaN. Both arrays must have the same library and dtype.
    """
    if reference.shape != result.shape:
        return f"its shape is {result.shape}, not {reference.shape}"
    absolute, relative = _ALLOWED[reference.dtype.name]
    rows = range(0, reference.shape[0], _ROWS)
    total = sum(float((values(reference[row : row + _ROWS]) ** 2).sum(dtype=np.float64)) for row in rows)
    scale = absolute * (total / max(1, reference.size)) ** 0.5
    wrong = 0
    for row in rows:
        expected, got = values(reference[row : row + _ROWS]), values(result[row : row + _ROWS])
        off = abs(got - expected) / (scale + relative * abs(expected) + np.float32(1e-30))
        wrong += int((~(off <= 1)).sum())  # a NaN compares as False
    return f"wrong results: {wrong} of {reference.size} elements" if wrong else ""


def values(array: Any) -> Any:
    """Convert fp16 or bf16 to float32. bf16 is converted bitwise, because some versions of CuPy do not support it."""
    if array.dtype.name == "float16":
        return array.astype(np.float32)
    return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
