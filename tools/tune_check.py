"""Whether a candidate's result is correct: compared element by element with a correct one.

Works on NumPy arrays and CuPy arrays alike, some rows at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: Allowed difference of an element: (in units of the result's root mean square, relative to the element). Two kernels
#: may round weight and result differently, and add in another order; a wrong tile differs by about 1.
_ALLOWED = {"float16": (5e-3, 2.0**-10), "bfloat16": (4e-2, 2.0**-7)}
_ROWS = 256


def difference(reference: Any, result: Any) -> str:
    """What is wrong with ``result``, (m, n) of fp16 or bf16; empty if nothing is.

    A NaN is wrong; elements that were never written are NaN. Both arrays of one library and dtype.
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
        wrong += int((~(off <= 1)).sum())  # a NaN is not
    return f"wrong results: {wrong} of {reference.size} elements" if wrong else ""


def values(array: Any) -> Any:
    """fp16 or bf16 as float32. bf16 by its bits: not every CuPy computes with it."""
    if array.dtype.name == "float16":
        return array.astype(np.float32)
    return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
