"""Float arithmetic on NumPy vectors with the rounding of PTX.

Fused operations are computed in float64 with rounding to odd (Boldo & Melquiond, 2008), so that a second rounding to
float32, float16 or bfloat16 is correct. NaN results of f32, f16 and bf16 are canonical (0x7FFFFFFF, 0x7FFF). Source:
PTX ISA, "Floating Point Instructions", "Half Precision", "Mixed Precision".
"""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import lru_cache
from typing import Any

import numpy as np

from cudatma.emulator.ptx.types import Array
from cudatma.emulator.ptx.writer import runtime

_TINY32 = np.float32(2.0**-126)
_TINY16 = np.float16(2.0**-14)
_NAN32 = np.uint32(0x7FFFFFFF).view(np.float32)
_NAN16 = np.uint16(0x7FFF).view(np.float16)
#: 16-bit NaN with which TMA fills elements outside a tensor. fma.oob returns zero for an operand with this value.
_OOB_NAN16 = 0x7FFF


@lru_cache(maxsize=32)
def _zeros(size: int, kind: str) -> Array:
    return np.zeros(size, kind)


@runtime
def canon(a: Array) -> Array:
    """Replace NaNs in a float32 vector with the canonical NaN. A dot product with zeros is the cheapest NaN test."""
    if a.dot(_zeros(a.size, "f4")) == 0:
        return a
    return np.where(np.isnan(a), _NAN32, a)


@runtime
def canon16(a: Array) -> Array:
    """Replace NaNs in a float16 vector with the canonical NaN."""
    if a.dot(_zeros(a.size, "f2")) == 0:
        return a
    return np.where(np.isnan(a), _NAN16, a)


@runtime
def halves(a: Array) -> Array:
    """Return both f16 values of each 32-bit lane, or the f16 value of each 16-bit lane, as float16 of shape (n,)."""
    return np.ascontiguousarray(a).view(np.float16)


@runtime
def singles(a: Array) -> Array:
    """Return both f32 values of each 64-bit lane."""
    return np.ascontiguousarray(a).view(np.float32)


@runtime
def pairs(a: Array, to: type) -> Array:
    """Return both 16-bit integers of each 32-bit lane."""
    return np.ascontiguousarray(a).view(to)


@runtime
def brains(a: Array) -> Array:
    """Return all bf16 values in 16- or 32-bit lanes as float32."""
    return (np.ascontiguousarray(a).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@runtime
def to_bf16(a: Array) -> Array:
    """Round float32 to nearest even and return the bits of bf16. NaN becomes 0x7FFF."""
    bits = a.view(np.uint32)
    rounded: Array = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    if a.dot(_zeros(a.size, "f4")) == 0:
        return rounded
    return np.where(np.isnan(a), np.uint16(0x7FFF), rounded)


@runtime
def flush(a: Array) -> Array:
    """Replace subnormal float32 or float16 values with zeros of the same sign (.ftz)."""
    tiny = _TINY32 if a.dtype.itemsize == 4 else _TINY16
    return np.where(np.abs(a) < tiny, np.copysign(a.dtype.type(0), a), a)


@runtime
def clamp01(a: Array) -> Array:
    """Clamp to the range 0 to 1 (.sat). NaN and -0 become +0."""
    zero = a.dtype.type(0)
    result: Array = np.where(a > zero, np.minimum(a, a.dtype.type(1)), zero)
    return result


@runtime
def relu(a: Array) -> Array:
    """Replace values of at most 0 with +0 (.relu). NaNs do not change."""
    return np.where(a <= 0, a.dtype.type(0), a)


def fma_odd(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c in float64, rounded to odd. The product a * b must be exact in float64."""
    product = a.astype(np.float64) * b.astype(np.float64)
    c = c.astype(np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    nudge = (error != 0) & ((bits & 1) == 0) & np.isfinite(total) & ~np.isnan(error)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(nudge, bits + step, bits).view(np.float64)


def round32(a: Array, mode: str) -> Array:
    """Round float64 to float32. ``mode`` is rn, rz, rm (down) or rp (up)."""
    near = a.astype(np.float32)
    if mode in ("rn", ""):
        return near
    wide = near.astype(np.float64)
    down = np.nextafter(near, np.float32(-np.inf))
    up = np.nextafter(near, np.float32(np.inf))
    floor = np.where(wide > a, down, near)
    ceiling = np.where(wide < a, up, near)
    if mode == "rm":
        return floor
    return ceiling if mode == "rp" else np.where(a < 0, ceiling, floor)


@lru_cache(maxsize=32)
def _rounding_masks(size: int, cut: int, min_exponent: int) -> tuple[Array, ...]:
    """Return vectors of 2**cut - 1, 2**(cut - 1), all bits but the sign, 1, and the float64 bits of 2**min_exponent."""
    values = ((1 << cut) - 1, 1 << (cut - 1), (1 << 63) - 1, 1, (1023 + min_exponent) << 52)
    return tuple(np.full(size, value, np.uint64) for value in values)


def _fused(a: Array, b: Array, c: Array, to: type, cut: int, min_exponent: int) -> Array:
    """Return a * b + c, rounded once to a type with ``cut`` fewer mantissa bits than float64.

    The smallest normal number of the type is 2**min_exponent. The intermediate rounding to float64 affects the result
    only if the sum is halfway between two numbers of the type, or is subnormal and therefore loses more bits.
    """
    total = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    low, half, magnitude, one, normal = _rounding_masks(total.size, cut, min_exponent)
    bits = total.view(np.uint64)
    if np.count_nonzero((bits & low) == half) or np.count_nonzero((bits & magnitude) - one < normal):
        total = fma_odd(a, b, c)
    return total.astype(to)


@runtime
def fma32(a: Array, b: Array, c: Array) -> Array:
    return canon(_fused(a, b, c, np.float32, 29, -126))


@runtime
def fma32_mode(a: Array, b: Array, c: Array, mode: str) -> Array:
    """Return a * b + c in a rounding mode. In mode "rm", an exact zero sum of opposite terms is -0."""
    exact = -fma_odd(-a, b, -c) if mode == "rm" else fma_odd(a, b, c)
    return canon(round32(exact, mode))


@runtime
def add32_mode(a: Array, b: Array, mode: str) -> Array:
    return fma32_mode(a, np.ones_like(a), b, mode)


@runtime
def mul32_mode(a: Array, b: Array, mode: str) -> Array:
    return canon(round32(a.astype(np.float64) * b.astype(np.float64), mode))


@runtime
def div32_mode(a: Array, b: Array, mode: str) -> Array:
    """Return a / b in a rounding mode.

    It is correct to round the float64 quotient because an inexact quotient differs from every float32 by more than the
    rounding error of float64.
    """
    return canon(round32(a.astype(np.float64) / b.astype(np.float64), mode))


@runtime
def sqrt32_mode(a: Array, mode: str) -> Array:
    return canon(round32(np.sqrt(a.astype(np.float64)), mode))


@runtime
def div32_approx(a: Array, b: Array) -> Array:
    """Compute div.approx as a * (1 / b), where divisors above 2^126 count as infinite."""
    return canon(np.where(np.abs(b) > np.float32(2.0**126), a * np.copysign(np.float32(0), b), a / b))


@runtime
def fma16(a: Array, b: Array, c: Array) -> Array:
    """Return the fused multiply-add of float16 vectors."""
    return canon16(_fused(a, b, c, np.float16, 42, -14))


@runtime
def fma_brain(a: Array, b: Array, c: Array) -> Array:
    """Return the fused multiply-add of float32 vectors of bf16 values as float32, which to_bf16() rounds correctly.

    The rounding to float32 affects the result of to_bf16() only if the rounded value is halfway between two bf16
    values.
    """
    near = (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)
    if not np.count_nonzero((near.view(np.uint32) & np.uint32(0xFFFF)) == np.uint32(0x8000)):
        return near
    odd = fma_odd(a, b, c)
    single = round32(odd, "rz")
    inexact = (single.astype(np.float64) != odd) & np.isfinite(single)
    sticky = np.where(inexact, single.view(np.uint32) | np.uint32(1), single.view(np.uint32))
    return sticky.view(np.float32)


@runtime
def mul_brain(a: Array, b: Array) -> Array:
    """Return the product of float32 vectors of bf16 values as float32, which to_bf16() rounds correctly."""
    product = a.astype(np.float64) * b.astype(np.float64)
    near = product.astype(np.float32)
    if not np.count_nonzero(near != product):
        return near
    return fma_brain(a, b, np.full_like(a, -0.0))


@runtime
def oob_zero(result: Array, *operands: Array) -> Array:
    """Replace results with +0 where a 16-bit operand is the NaN that TMA writes outside a tensor (.oob)."""
    special = np.zeros(result.shape, bool)
    for operand in operands:
        special |= np.ascontiguousarray(operand).view(np.uint16) == _OOB_NAN16
    return np.where(special, result.dtype.type(0), result)


@lru_cache(maxsize=1)
def _libm() -> Any:
    library = ctypes.CDLL(ctypes.util.find_library("m") or None)
    library.fma.restype = ctypes.c_double
    library.fma.argtypes = [ctypes.c_double] * 3
    return library.fma


@runtime
def fma64(a: Array, b: Array, c: Array) -> Array:
    """Return the fused multiply-add of float64 vectors, computed by the C library."""
    fma = _libm()
    return np.array([fma(x, y, z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)])


@runtime
def smaller(a: Array, b: Array) -> Array:
    """Compute min. If one operand is a NaN, the result is the other operand. -0 is less than +0."""
    raw = np.dtype(f"u{a.dtype.itemsize}")
    return np.where(a == b, (a.view(raw) | b.view(raw)).view(a.dtype), np.fmin(a, b))


@runtime
def larger(a: Array, b: Array) -> Array:
    """Compute max. If one operand is a NaN, the result is the other operand. +0 is greater than -0."""
    raw = np.dtype(f"u{a.dtype.itemsize}")
    return np.where(a == b, (a.view(raw) & b.view(raw)).view(a.dtype), np.fmax(a, b))


@runtime
def smaller_nan(a: Array, b: Array) -> Array:
    result: Array = np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), smaller(a, b))
    return result


@runtime
def larger_nan(a: Array, b: Array) -> Array:
    result: Array = np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), larger(a, b))
    return result


@runtime
def xor_sign(result: Array, a: Array, b: Array) -> Array:
    """Return the result with the sign of a * b, unless the result is a NaN (.xorsign)."""
    magnitude = np.abs(result)
    return np.where(np.signbit(a) != np.signbit(b), -magnitude, magnitude)


@runtime
def special_function(name: str, a: Array) -> Array:
    """Compute a special function in float64 and round the result once. The error is within the bounds of PTX."""
    wide = a.astype(np.float64)
    if name == "rcp":
        result = 1.0 / wide
    elif name == "rsqrt":
        result = 1.0 / np.sqrt(wide)
    else:
        functions = {"sin": np.sin, "cos": np.cos, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "tanh": np.tanh}
        result = functions[name](wide)
    return result.astype(a.dtype)


@runtime
def upper_word(name: str, a: Array) -> Array:
    """Compute rcp.approx.ftz.f64 or rsqrt.approx.ftz.f64 from the upper 32 bits of the operand.

    The lower 32 bits of the result are 0. Subnormal operands and results become zeros. A NaN result is
    0x7FFFFFFF00000000.
    """
    high = np.uint64(0xFFFFFFFF00000000)
    value = (a.view(np.uint64) & high).view(np.float64)
    tiny = np.finfo(np.float64).smallest_normal
    value = np.where(np.abs(value) < tiny, np.copysign(0.0, value), value)
    result = 1.0 / (value if name == "rcp" else np.sqrt(value))
    result = np.where(np.abs(result) < tiny, np.copysign(0.0, result), result)
    bits = np.where(np.isnan(result), np.uint64(0x7FFFFFFF00000000), result.view(np.uint64) & high)
    rounded: Array = bits.view(np.float64)
    return rounded
