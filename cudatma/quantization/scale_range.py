"""Whether one fused multiply-add can apply scale and offset of a weight without changing bits, and in which form.

A nibble v whose lowest bit is bit b of a half, above it zeros, is the subnormal v 2^(b - u); u is 24 for fp16 and 133
for bf16. Hence fma(v 2^(b - u), s 2^(u - b), -8 s) is (v - 8) s, rounded once: the bits that (v - 8) times s has. In
bf16 bit 7 is the lowest of the exponent; the smallest normals continue where subnormals end, so that bits 0 to 7 form
one number. s 2^(u - b) has to be finite. Larger scales are multiplied by 2^-p, with one p for the whole weight, and the
sums of products by 2^p. The result has the same bits unless a weight, product or sum leaves the normal range of its
type in only one of the two computations. bf16 fits nearly every weight, fp16 scales within a factor of 32 or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Form -> b of every second nibble; the other nibbles are four bits higher. "as_stored": nibbles are masked in place.
#: "shifted": they are first shifted up by two bits, one more instruction for eight values, for scales up to 2^-6.
FORMS = {"as_stored": 0, "shifted": 2}
#: By type. Nibbles may also fill the exponent's lowest bit, which continues the mantissa.
_MANTISSA_BITS = {"float16": 10, "bfloat16": 7}
_EXPONENT_BIAS = {"float16": 15, "bfloat16": 127}
#: The higher of two nibbles ends that many bits above b.
_NIBBLES_BITS = 8
#: 2^p, which sums are multiplied by, is an fp32 number.
_MOST_EXPONENT = 126
#: How far scales times 2^-p stay above the least normal number, in powers of two. fp32 sums have the exponents of
#: bf16; with this margin, products with activations down to 2^-64 are normal there too.
_MARGIN = {"float16": 0, "bfloat16": 64}


@dataclass(frozen=True, slots=True)
class ScaleFit:
    """form: a key of FORMS, the first that fits, or ``"none"``. exponent: p, 0 without a form."""

    form: str = "none"
    exponent: int = 0


def fit_scales(scales: NDArray[Any]) -> ScaleFit:
    """The form for scales of any shape, fp16 or bf16, finite. With p > 0, every |s| 2^-p but 0 has to be normal,
    in bf16 2^-62 or more.

    No form for other types, and for scales that are all 0, of which nothing can be said.
    """
    if scales.dtype.name not in _MANTISSA_BITS:
        return ScaleFit()
    mantissa, bias = _MANTISSA_BITS[scales.dtype.name], _EXPONENT_BIAS[scales.dtype.name]
    bits = scales.view(np.uint16) & np.uint16(0x7FFF)  # without signs, halves are in the order of their bits
    if not bits.any():
        return ScaleFit()
    # Exponents as they are stored: 0 for subnormals, 1 for the least normal numbers, 2 bias for the largest.
    most, least = (int(bound) >> mantissa for bound in (bits.max(), bits[bits > 0].min()))
    for form, lowest_bit in FORMS.items():
        if lowest_bit + _NIBBLES_BITS > mantissa + 1:
            continue
        # The largest number has every mantissa bit set: only exponents matter.
        p = max(0, most + (bias + mantissa - 1 - lowest_bit) - 2 * bias)
        # A product with -8 that overflows should go on doing so.
        if p == 0 or (most + 3 <= 2 * bias and least > p + _MARGIN[scales.dtype.name] and p <= _MOST_EXPONENT):
            return ScaleFit(form, p)
    return ScaleFit()
