"""Choose how one multiply-add applies a weight's scale and offset with the same bits as a subtraction and a product.

A nibble v whose lowest bit is bit b of a half, with zeros above the nibble, is the subnormal number v 2^(b - u). The
constant u is 24 for fp16 and 133 for bf16. Therefore, fma(v 2^(b - u), s 2^(u - b), -8 s) is (v - 8) s, rounded once,
and is bitwise identical to the product of (v - 8) and s. In bf16, bit 7 is the lowest bit of the exponent. The smallest
normal numbers continue where the subnormal numbers end, so bits 0 to 7 form one number.

s 2^(u - b) must be finite. If it is not, all scales of the weight are multiplied by 2^-p, and the sums of products are
multiplied by 2^p. The result is bitwise identical unless a weight, product or sum leaves the normal range of its type
in only one of the two computations. In bf16, nearly every weight has a form. In fp16, a weight has a form if its scales
are within a factor of 32 of each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Value of b in each form, for every second nibble. The other nibbles are four bits higher. "as_stored" masks nibbles
#: in place. "shifted" first shifts nibbles left by two bits. This form takes one more instruction per eight values and
#: supports scales up to 2^-6.
FORMS = {"as_stored": 0, "shifted": 2}
#: Number of mantissa bits of each type. Nibbles may also extend into the lowest bit of the exponent.
_MANTISSA_BITS = {"float16": 10, "bfloat16": 7}
_EXPONENT_BIAS = {"float16": 15, "bfloat16": 127}
#: Number of bits from b to the end of the higher of two nibbles.
_NIBBLES_BITS = 8
#: Upper bound on p, because sums are multiplied by 2^p, which must be an fp32 number.
_MAX_EXPONENT = 126
#: Minimum distance, in powers of two, from the smallest normal number to scales times 2^-p. fp32 sums have the exponent
#: range of bf16. With this margin, products with activations down to 2^-64 are also normal in fp32.
_MARGIN = {"float16": 0, "bfloat16": 64}


@dataclass(frozen=True, slots=True)
class ScaleFit:
    """The form in which kernels may apply scales with one multiply-add.

    Attributes
    ----------
    form : str
        The first key of FORMS that is possible, or ``"none"``.
    exponent : int
        The exponent p, or 0 if there is no form.
    """

    form: str = "none"
    exponent: int = 0


def fit_scales(scales: NDArray[Any]) -> ScaleFit:
    """Return the form for finite fp16 or bf16 scales of any shape.

    If p > 0, every nonzero |s| 2^-p must be normal, and at least 2^-62 in bf16. Scales of other types, and
    scales that are all 0, have no form.
    """
    if scales.dtype.name not in _MANTISSA_BITS:
        return ScaleFit()
    mantissa, bias = _MANTISSA_BITS[scales.dtype.name], _EXPONENT_BIAS[scales.dtype.name]
    bits = scales.view(np.uint16) & np.uint16(0x7FFF)  # Without signs, fp16 numbers have the same order as their bits.
    if not bits.any():
        return ScaleFit()
    # Stored exponents are 0 for subnormals, 1 for the smallest normal numbers, and 2 * bias for the largest numbers.
    largest, smallest = (int(bound) >> mantissa for bound in (bits.max(), bits[bits > 0].min()))
    for form, lowest_bit in FORMS.items():
        if lowest_bit + _NIBBLES_BITS > mantissa + 1:
            continue
        # The largest number has every mantissa bit set, so only exponents matter.
        p = max(0, largest + (bias + mantissa - 1 - lowest_bit) - 2 * bias)
        # A product with -8 that overflows must still overflow.
        if p == 0 or (largest + 3 <= 2 * bias and smallest > p + _MARGIN[scales.dtype.name] and p <= _MAX_EXPONENT):
            return ScaleFit(form, p)
    return ScaleFit()
