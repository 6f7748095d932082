"""Whether fp16 scales leave room for scale and offset of a weight in one fused multiply-add, and in which form.

A nibble v whose lowest bit is bit b of a half is the subnormal v 2^(b - 24). So fma(v 2^(b - 24), s 2^(24 - b), -8 s)
is (v - 8) s, rounded once: the bits that (v - 8) times s has. It takes an s 2^(24 - b) that is finite. Larger scales
are taken times 2^-p, one p for the whole weight, and sums of products times 2^p; that gives the same bits as long as
no product falls out of fp16's normal range that was in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Form -> b of every second nibble; the others stand four bits up, and none may reach the exponent. As stored: nibbles
#: are masked where they stand. Shifted: two bits up first, one instruction more for eight, for scales up to 2^-6.
FORMS = {"as_stored": 0, "shifted": 2}
_EXPONENT_BIAS, _MANTISSA_BITS = 15, 10
#: Scales from 2^13 on: the product with -8 overflows, and so it should.
_TOO_LARGE = 13 + _EXPONENT_BIAS


@dataclass(frozen=True, slots=True)
class ScaleFit:
    """form: a key of FORMS, the first that fits, or ``"none"``. exponent: p, 0 without a form."""

    form: str = "none"
    exponent: int = 0


def fit_scales(scales: NDArray[Any]) -> ScaleFit:
    """The form for scales of any shape, finite. With p > 0, every |s| 2^-p but 0 has to be 2^-14 or more.

    No form for other types than fp16, and for scales that are all 0, of which nothing can be said.
    """
    if scales.dtype != np.float16:
        return ScaleFit()
    bits = scales.view(np.uint16) & np.uint16(0x7FFF)  # without signs, halves are in the order of their bits
    if not bits.any():
        return ScaleFit()
    # Exponents as they are stored: 0 for subnormals, 1 for 2^-14.
    most, least = (int(bound) >> _MANTISSA_BITS for bound in (bits.max(), bits[bits > 0].min()))
    for form, lowest_bit in FORMS.items():
        # The largest half, 65504, has every mantissa bit set: only exponents matter.
        p = max(0, most + (24 - lowest_bit) - 2 * _EXPONENT_BIAS)
        if p == 0 or (most < _TOO_LARGE and least > p):
            return ScaleFit(form, p)
    return ScaleFit()
