"""Exact rounding as an independent reference: fractions rounded to binary floats."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

#: (mantissa bits with the hidden one, exponent of the least unit, largest finite value) of each type.
SHAPES = {
    "f64": (53, -1074, Fraction(float(np.finfo(np.float64).max))),
    "f32": (24, -149, Fraction(float(np.finfo(np.float32).max))),
    "f16": (11, -24, Fraction(65504)),
    "bf16": (8, -133, Fraction(255, 128) * 2**127),
}


def rounded(value: Fraction, kind: str, mode: str) -> float:
    """Return a fraction rounded to a float type in mode rn, rz, rm or rp; inf on overflow."""
    mantissa, least, most = SHAPES[kind]
    if value == 0:
        return 0.0
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - mantissa + 1, least)
    whole = {"rz": math.trunc, "rm": math.floor, "rp": math.ceil, "rn": round}[mode](value / unit)
    result = whole * unit
    if abs(result) > most:
        away = mode == "rn" or ((mode == "rp") == (value > 0) and mode != "rz")
        return math.copysign(math.inf if away else float(most), -1 if value < 0 else 1)
    return math.copysign(float(result), -1 if value < 0 else 1)
