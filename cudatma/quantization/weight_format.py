"""Formats of packed weights: the values that codes of 4 or 8 bits represent.

The value of a weight is the value of its code times the scale of its group times the tensor scale. To add a format, add
an entry to WEIGHT_FORMATS and a template part (ptx_templates/parts/marlin_weights.cuh.j2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentTypeError, QuantizationError, alternatives

#: Exponent bias of the activation types, which are also the types of scales.
_EXPONENT_BIAS = {"float16": 15, "bfloat16": 127}


@dataclass(frozen=True, slots=True, eq=False)
class WeightFormat:
    """A format of packed weights.

    Attributes
    ----------
    name : str
        Name of the format, as in ``PackedWeight.format``.
    title : str
        Name of the format in messages.
    bits : int
        Number of bits per code, 4 or 8.
    group_sizes : tuple of int
        Supported group sizes, in rows per scale. -1 means one scale per column.
    values : ndarray of float32, shape (2**bits,)
        Value of each code.
    zero_code : int
        Code of the value 0, which is also used for padding.
    exponent_bias : int or None
        Exponent bias of a floating-point code, or None for integers. Kernels extract such a code as a 16-bit float
        whose value is too small by a power of two (see ``shift``).
    has_zeros : bool
        Whether a weight may have zero points.
    has_tensor_scale : bool
        Whether a weight has a scale for the whole weight, in addition to the scales of groups.
    has_exact_products : bool
        Whether the product of a code and its scale is exact in fp16 and bf16.
    """

    name: str
    title: str
    bits: int
    group_sizes: tuple[int, ...]
    values: NDArray[np.float32]
    zero_code: int = 0
    exponent_bias: int | None = None
    has_zeros: bool = False
    has_tensor_scale: bool = False
    has_exact_products: bool = False
    _midpoints: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        magnitudes = self.values[: len(self.values) // 2]
        middles = (magnitudes[1:] + magnitudes[:-1]) / np.float32(2)
        # searchsorted() returns the lower code for a midpoint, but ties must round to the even code.
        middles[1::2] = np.nextafter(middles[1::2], np.float32(0))
        object.__setattr__(self, "_midpoints", middles[np.isfinite(middles)])

    @property
    def is_float(self) -> bool:
        """Whether codes are floating-point numbers with a sign."""
        return self.exponent_bias is not None

    @property
    def is_e2m1(self) -> bool:
        """Whether codes are e2m1 numbers, whose bits are reordered in packed weights."""
        return self.is_float and self.bits == 4

    @property
    def default_group_size(self) -> int:
        """Group size of ``quantize`` if the caller does not pass one."""
        return 128 if 128 in self.group_sizes else self.group_sizes[0]

    @property
    def smallest(self) -> float:
        """Smallest nonzero magnitude of a code's value."""
        return float(np.nanmin(np.abs(self.values[self.values != 0])))

    @property
    def largest(self) -> float:
        """Largest magnitude of a code's value."""
        return float(np.nanmax(np.abs(self.values)))

    def shift(self, dtype: str) -> int:
        """Return the exponent e for which a code extracted as an fp16 or bf16 number is 2^-e times the code's value.

        Kernels copy the sign, exponent and mantissa to the corresponding bits of the 16-bit type without adjusting the
        exponent bias.
        """
        return 0 if self.exponent_bias is None else _EXPONENT_BIAS[dtype] - self.exponent_bias

    def bias_correction(self, dtype: str) -> str:
        """Return 2^shift in both halves of a register, as a literal."""
        factor = np.array(2.0 ** self.shift(dtype), activation_type(dtype).numpy).view(np.uint16)
        return f"0x{int(factor):04x}{int(factor):04x}u"

    def scale_exponent(self, scales: NDArray[Any]) -> int:
        """Return the smallest p >= 0 for which every scale times 2^(shift - p) is finite in the type of the scales."""
        if not self.is_float or not scales.size:
            return 0
        bias = _EXPONENT_BIAS[scales.dtype.name]
        mantissa = 10 if bias == _EXPONENT_BIAS["float16"] else 7
        magnitudes = np.unique(scales.view(np.uint16) & np.uint16(0x7FFF))  # Magnitudes are ordered like their bits.
        exponent = max(0, (int(magnitudes[-1]) >> mantissa) + self.shift(scales.dtype.name) - 2 * bias)
        if exponent or self.has_exact_products:
            # The product of a scale and the smallest nonzero code must not underflow.
            values = magnitudes.view(scales.dtype).astype(np.float64)
            products = values * (self.smallest * 2.0**-exponent)
            if (products.astype(scales.dtype) != products).any():
                got = f"magnitudes from {values[values > 0][0]:g} to {values[-1]:g}"
                fp16 = scales.dtype == np.float16
                remedy = "pass bfloat16 scales" if fp16 else "quantize the original weight with cudatma.quantize()"
                allowed = f"large enough that no product with a code underflows in {scales.dtype.name}"
                raise QuantizationError("scales", got, allowed, remedy)
        return exponent

    def nearest(self, values: Any, xp: Any) -> Any:
        """Return the code (float32) of the floating-point number nearest to each value, with ties to even."""
        codes = xp.searchsorted(xp.asarray(self._midpoints), xp.abs(values)).astype(np.float32)
        return codes + xp.where(xp.signbit(values), np.float32(len(self.values) // 2), np.float32(0))

    def check_symmetric(self, symmetric: bool) -> None:
        """Raise QuantizationError if ``symmetric`` is False and the format does not support zero points."""
        if not symmetric and not self.has_zeros:
            raise QuantizationError("symmetric", symmetric, f"True for format {self.name!r}")

    def check_group_size(self, group_size: object) -> None:
        """Raise QuantizationError unless the format allows this group size."""
        if type(group_size) is not int or group_size not in self.group_sizes:
            remedy = "pass -1 for one scale per column" if -1 in self.group_sizes else ""
            allowed = alternatives(self.group_sizes)
            name = "" if self.name == "int4" else f" for format {self.name!r}"
            raise QuantizationError("group_size", repr(group_size), f"{allowed}{name}", remedy)


def _decoded(dtype: Any) -> NDArray[np.float32]:
    """Return the values of all codes of an ml_dtypes type."""
    bits = 4 if dtype is ml_dtypes.float4_e2m1fn else 8
    values: NDArray[np.float32] = np.arange(2**bits, dtype=np.uint8).view(dtype).astype(np.float32)
    return values


_E2M1, _E4M3 = _decoded(ml_dtypes.float4_e2m1fn), _decoded(ml_dtypes.float8_e4m3fn)

#: All formats by name.
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    weight_format.name: weight_format
    for weight_format in (
        WeightFormat(
            "int4", "int4", 4, (32, 64, 128, -1), np.arange(-8, 8, dtype=np.float32), zero_code=8, has_zeros=True
        ),
        WeightFormat("mxfp4", "MXFP4", 4, (32,), _E2M1, exponent_bias=1, has_exact_products=True),
        WeightFormat(
            "nvfp4", "NVFP4", 4, (16,), _E2M1, exponent_bias=1, has_tensor_scale=True, has_exact_products=True
        ),
        WeightFormat("fp8", "fp8 (e4m3)", 8, (128, -1), _E4M3, exponent_bias=7),
        WeightFormat("int8", "int8", 8, (32, 64, 128, -1), np.arange(-128, 128, dtype=np.float32), zero_code=128),
    )
}


def weight_format(name: object) -> WeightFormat:
    """Return the format with this name. Raises ArgumentTypeError if the name is unknown."""
    if not isinstance(name, str) or name not in WEIGHT_FORMATS:
        raise ArgumentTypeError("format", repr(name), ", ".join(map(repr, WEIGHT_FORMATS)))
    return WEIGHT_FORMATS[name]
