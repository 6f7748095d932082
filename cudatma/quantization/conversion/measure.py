"""How far packed weights are from what they were made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO
from cudatma.quantization.packed import PackedWeight
from cudatma.quantization.unpacking import unpack

#: Rows of K that are compared at once.
_ROWS = 256


def weight_error(weight: NDArray[Any], packed: PackedWeight) -> tuple[float, float]:
    """(largest deviation over the largest weight, sum of deviations over the sum of weights) of a quantized weight
    (N, K), as torch keeps it. The packed weight has no activation order."""
    logical, k = unpack(packed), packed.shape[0]
    size = k if packed.group_size == -1 else packed.group_size
    most = worst = total = deviation = 0.0
    for first in range(0, k, _ROWS):
        group = np.arange(first, min(first + _ROWS, k)) // size
        rows = slice(first, first + len(group))
        zero = SYMMETRIC_ZERO if logical.zeros is None else logical.zeros[group].astype(np.float32)
        values = (logical.q[rows].astype(np.float32) - zero) * logical.scales[group].astype(np.float32)
        wanted = weight[:, rows].T.astype(np.float32)
        most = max(most, float(np.abs(wanted).max()))
        total += float(np.abs(wanted).sum(dtype=np.float64))
        np.abs(np.subtract(values, wanted, out=values), out=values)
        worst = max(worst, float(values.max()))
        deviation += float(values.sum(dtype=np.float64))
    return (worst / most, deviation / total) if most else (0.0, 0.0)


def scale_error(scales: NDArray[Any], dtype: np.dtype[Any]) -> tuple[float, float]:
    """(largest, mean) relative error of scales other than 0 that are rounded to ``dtype``."""
    if scales.dtype == dtype:
        return 0.0, 0.0
    exact = scales.astype(np.float64)
    exact = exact[exact != 0]
    if not exact.size:
        return 0.0, 0.0
    relative = np.abs(exact.astype(dtype).astype(np.float64) - exact) / np.abs(exact)
    return float(relative.max()), float(relative.mean())
