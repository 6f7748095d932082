"""Conversions between integers and floats. Conversions of floats with at most 16 bits are bit-exact.

Source: PTX ISA, "cvt", "cvt.pack", "Alternate Floating-Point Data Formats"; OCP Microscaling Formats for floats of 8, 6
and 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from cudatma.emulator.arithmetic.numeric import canon, canon16, round32, to_bf16
from cudatma.emulator.arithmetic.rounding import directed64
from cudatma.emulator.ptx.types import Array
from cudatma.emulator.ptx.writer import runtime


@dataclass(frozen=True, slots=True)
class Format:
    """Binary floating-point format with a sign bit.

    ``exponent`` and ``mantissa`` are the bit counts of these fields. ``top`` is the bit pattern of the largest finite
    value. ``nan`` is the NaN that conversions write, or ``top`` if the format has no NaN. If ``has_inf`` is true,
    infinity is top + 1.
    """

    exponent: int
    mantissa: int
    top: int
    nan: int
    has_inf: bool = False

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def min_exponent(self) -> int:
        """Return the exponent of the unit in the last place of subnormals."""
        return 2 - (1 << (self.exponent - 1)) - self.mantissa


FORMATS: dict[str, Format] = {
    "f16": Format(5, 10, 0x7BFF, 0x7FFF, True),
    "bf16": Format(8, 7, 0x7F7F, 0x7FFF, True),
    "e4m3": Format(4, 3, 0x7E, 0x7F),
    "e5m2": Format(5, 2, 0x7B, 0x7F, True),
    "e3m2": Format(3, 2, 0x1F, 0x1F),
    "e2m3": Format(2, 3, 0x1F, 0x1F),
    "e2m1": Format(2, 1, 0x7, 0x7),
}


def _whole(scaled: Array, mode: str, negative: Array, random: Array | None) -> Array:
    """Round nonnegative magnitudes to integers. ``mode`` may be rna (ties away) or rs (``random`` is from 0 to 1)."""
    if mode == "rn":
        return np.rint(scaled)
    if mode == "rna":
        return np.floor(scaled + 0.5)
    if mode == "rs" and random is not None:
        result: Array = np.floor(scaled + random)
        return result
    if mode in ("rm", "rp"):
        return np.where(negative == (mode == "rm"), np.ceil(scaled), np.floor(scaled))
    return np.floor(scaled)


@runtime
def encode(a: Array, name: str, mode: str, saturates: bool, random: Array | None = None) -> Array:
    """Convert floats to the bits of a format, as uint16. float64 operands must be exact or rounded to odd."""
    form = FORMATS[name]
    wide = a.astype(np.float64)
    magnitude = np.abs(wide)
    finite = np.where(np.isfinite(magnitude), magnitude, 0.0)
    exponent = np.where(
        finite == 0, form.min_exponent, np.maximum(np.frexp(finite)[1] - 1 - form.mantissa, form.min_exponent)
    )
    negative = np.signbit(wide)
    whole = _whole(np.ldexp(finite, -exponent), mode or "rn", negative, random)
    code = whole.astype(np.int64) + ((exponent - form.min_exponent).astype(np.int64) << form.mantissa)
    if form.has_inf:
        away = (mode in ("", "rn", "rna", "rs")) | (negative == (mode == "rm")) & (mode in ("rm", "rp"))
        over = form.top if saturates else np.where(away, form.top + 1, form.top)
        code = np.where(code > form.top, over, code)
        code = np.where(np.isinf(wide), form.top if saturates else form.top + 1, code)
    else:
        code = np.where((code > form.top) | np.isinf(wide), form.top, code)
    code = code | (negative.astype(np.int64) << (form.bits - 1))
    return np.where(np.isnan(wide), form.nan, code).astype(np.uint16)


@lru_cache(maxsize=16)
def values(name: str) -> Array:
    """Return the float32 value of every bit pattern of a format of at most 8 bits."""
    form = FORMATS[name]
    code = np.arange(1 << form.bits, dtype=np.int64)
    magnitude = code & ((1 << (form.bits - 1)) - 1)
    field, fraction = magnitude >> form.mantissa, magnitude & ((1 << form.mantissa) - 1)
    significand = fraction + np.where(field > 0, 1 << form.mantissa, 0)
    result = np.ldexp(significand.astype(np.float64), np.maximum(field, 1) - 1 + form.min_exponent)
    if form.has_inf:
        result = np.where(magnitude == form.top + 1, np.inf, np.where(magnitude > form.top + 1, np.nan, result))
    elif form.nan > form.top:
        result = np.where(magnitude == form.nan, np.nan, result)
    table: Array = np.where(code >> (form.bits - 1), -result, result).astype(np.float32)
    table.flags.writeable = False
    return table


@runtime
def decode(a: Array, name: str) -> Array:
    """Convert the bits of a format of at most 8 bits to float32. Higher bits of the operands are ignored."""
    table = values(name)
    result: Array = table[a & a.dtype.type(len(table) - 1)]
    return result


@runtime
def bytes_of_lanes(a: Array) -> Array:
    """Return the bytes of all lanes, starting with the lowest byte of each lane."""
    return np.ascontiguousarray(a).view(np.uint8)


@runtime
def nibbles(a: Array) -> Array:
    """Return the low four bits and then the high four bits of each byte."""
    four = a.dtype.type(4)
    return np.stack((a & a.dtype.type(15), a >> four), axis=1).reshape(-1)


@runtime
def join_nibbles(low: Array, high: Array) -> Array:
    result: Array = (low | (high << np.uint16(4))).astype(np.uint8)
    return result


@runtime
def to_ue8m0(a: Array, mode: str, saturates: bool) -> Array:
    """Convert magnitudes to powers of two, rounded down (rz) or up (rp).

    NaN becomes 255, the NaN of the format. Overflow becomes 255, or 254 with .satfinite.
    """
    wide = np.abs(a.astype(np.float64))
    finite = np.where(np.isfinite(wide), wide, 1.0)
    fraction, exponent = np.frexp(finite)
    code = exponent.astype(np.int64) + 126 + ((fraction > 0.5) & (mode == "rp"))
    code = np.where(finite == 0, 0, np.where(np.isinf(wide), 255, np.clip(code, 0, 254 if saturates else 255)))
    code = np.where(np.isinf(wide) & saturates, 254, code)
    return np.where(np.isnan(wide), 255, code).astype(np.uint8)


@runtime
def from_ue8m0(a: Array) -> Array:
    """Convert the bits of ue8m0 to powers of two as float32. 255 becomes NaN."""
    return np.where(a == 255, np.nan, np.ldexp(1.0, a.astype(np.int64) - 127)).astype(np.float32)


@runtime
def to_s2f6(a: Array, relu: bool) -> Array:
    """Convert to signed fixed point with two integer bits and six fraction bits.

    Values are rounded to nearest even and clamped. NaN becomes the largest value.
    """
    scaled = np.rint(a.astype(np.float64) * 64)
    clamped = np.clip(np.where(np.isnan(scaled), 127, scaled), 0 if relu else -128, 127)
    return clamped.astype(np.int8).view(np.uint8)


@runtime
def from_s2f6(a: Array) -> Array:
    result: Array = a.view(np.int8).astype(np.float32) / np.float32(64)
    return result


@runtime
def to_tf32(a: Array, mode: str, saturates: bool = False) -> Array:
    """Round float32 to tf32. ``mode`` is rna (nearest, ties away), rn (nearest even) or rz."""
    bits = a.view(np.uint32)
    if mode == "rz":
        rounded = bits
    elif mode == "rn":
        rounded = bits + np.uint32(0xFFF) + ((bits >> 13) & np.uint32(1))
    else:
        rounded = bits + np.uint32(0x1000)
    rounded = np.where(np.isfinite(a), rounded & np.uint32(0xFFFFE000), bits)
    if saturates:
        over = (rounded & np.uint32(0x7FFFFFFF)) == np.uint32(0x7F800000)
        rounded = np.where(over, (bits & np.uint32(0x80000000)) | np.uint32(0x7F7FE000), rounded)
    return np.where(np.isnan(a), np.uint32(0x7FFFFFFF), rounded)


_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@runtime
def float_to_int(a: Array, mode: str, to: str) -> Array:
    """Round with mode rni, rzi, rmi or rpi, and then clamp to the integer type.

    NaN becomes 0 or, if the source or the result has 64 bits, a value in which only the top bit is set.
    """
    rounded = _INTEGRAL[mode](a.astype(np.float64))
    info = np.iinfo(to)
    over, under = rounded >= float(info.max) + (info.bits < 64), rounded <= float(info.min)
    inside = np.where(over | under | np.isnan(rounded), 0.0, rounded)
    out = np.where(over, info.max, np.where(under, info.min, inside.astype(to))).astype(to)
    if np.isnan(rounded).any():
        is_wide = info.bits == 64 or a.dtype.itemsize == 8
        special = np.array(1 << (info.bits - 1) if is_wide else 0, np.uint64).astype(f"u{info.bits // 8}").view(to)
        out = np.where(np.isnan(rounded), special, out)
    return out


def _odd(a: Array) -> Array:
    """Convert integers to float64. Integers with more than 53 bits are rounded to odd."""
    if a.dtype.itemsize < 8:
        return a.astype(np.float64)
    magnitude = np.where(a < 0, np.uint64(0) - a.view(np.uint64), a.view(np.uint64))
    sticky = (magnitude & np.uint64(0x7FF)) != 0
    cut = ((magnitude >> np.uint64(11)) | sticky.astype(np.uint64)) << np.uint64(11)
    exact = np.where(magnitude >> np.uint64(53), cut, magnitude).astype(np.float64)
    return np.where(a < 0, -exact, exact)


@runtime
def int_to_float(a: Array, mode: str, to: str) -> Array:
    """Convert integers to f32 or f64 values, or to the bits of f16 or bf16."""
    if to in ("f16", "bf16"):
        return encode(_odd(a), to, mode, False)
    if to == "f32":
        return round32(_odd(a), mode)
    near = a.astype(np.float64)
    if mode in ("rn", "") or a.dtype.itemsize < 8:
        return near
    return np.array([directed64(n, Fraction(v), mode) for n, v in zip(near.tolist(), a.tolist(), strict=True)])


@runtime
def float_to_float(a: Array, mode: str, to: str, saturates: bool = False) -> Array:
    """Convert float16, float32 or float64 values to f32 or f64 values, or to the bits of f16 or bf16."""
    is_near = mode in ("rn", "") and not saturates
    if to == "f64":
        return a.astype(np.float64)
    if to == "f32":
        return canon(round32(a, mode) if a.dtype.itemsize == 8 else a.astype(np.float32))
    if to == "f16" and is_near and a.dtype.itemsize <= 4:
        return canon16(a.astype(np.float16)).view(np.uint16)
    if to == "bf16" and is_near and a.dtype.itemsize == 4:
        return to_bf16(a)
    return encode(a, to, mode, saturates)


@runtime
def round_to_integral(a: Array, mode: str) -> Array:
    result: Array = _INTEGRAL[mode](a)
    return result


@runtime
def clamp_int(a: Array, to: str) -> Array:
    """Convert integers and clamp them to the result type."""
    info = np.iinfo(to)
    low = max(int(info.min), int(np.iinfo(a.dtype).min))
    high = min(int(info.max), int(np.iinfo(a.dtype).max))
    return np.clip(a, a.dtype.type(low), a.dtype.type(high)).astype(to)


@runtime
def pack_fields(high: Array, low: Array, upper: Array, bits: int, signed: bool) -> Array:
    """Compute cvt.pack, which clamps two integers to ``bits`` bits each and appends them below ``upper``."""
    low_limit, high_limit = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    mask = np.uint32((1 << bits) - 1)
    a, b = (np.clip(value, low_limit, high_limit).view(np.uint32) & mask for value in (high, low))
    result: Array = (upper << np.uint32(2 * bits)) | (a << np.uint32(bits)) | b
    return result
