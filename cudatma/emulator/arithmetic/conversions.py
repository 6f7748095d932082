"""Conversions among integers and floats of 16, 32 and 64 bits. Source: PTX ISA, "cvt", "cvt.pack"."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from cudatma.emulator.arithmetic.numeric import canon, canon16, round32, to_bf16
from cudatma.emulator.arithmetic.rounding import directed64
from cudatma.emulator.arithmetic.small_floats import encode
from cudatma.emulator.ptx.types import Array
from cudatma.emulator.ptx.writer import runtime

_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@runtime
def float_to_int(a: Array, mode: str, to: str) -> Array:
    """Rounded as rni, rzi, rmi, rpi say, then clamped to the integer type.

    NaN gives 0, or the top bit where the source or the result has 64 bits.
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
    """Integers as float64; those of more than 53 bits are cut there, with a last bit that says that they were."""
    if a.dtype.itemsize < 8:
        return a.astype(np.float64)
    magnitude = np.where(a < 0, np.uint64(0) - a.view(np.uint64), a.view(np.uint64))
    sticky = (magnitude & np.uint64(0x7FF)) != 0
    cut = ((magnitude >> np.uint64(11)) | sticky.astype(np.uint64)) << np.uint64(11)
    exact = np.where(magnitude >> np.uint64(53), cut, magnitude).astype(np.float64)
    return np.where(a < 0, -exact, exact)


@runtime
def int_to_float(a: Array, mode: str, to: str) -> Array:
    """An integer vector as f32 or f64 values, or the bits of f16 or bf16."""
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
    """float16, float32 and float64 values as f32 or f64 values, or as the bits of f16 or bf16."""
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
    """Saturating integer conversion."""
    info = np.iinfo(to)
    low = max(int(info.min), int(np.iinfo(a.dtype).min))
    high = min(int(info.max), int(np.iinfo(a.dtype).max))
    return np.clip(a, a.dtype.type(low), a.dtype.type(high)).astype(to)


@runtime
def pack_fields(high: Array, low: Array, upper: Array, bits: int, signed: bool) -> Array:
    """cvt.pack: two int32 clamped to so many bits below the low bits of ``upper``."""
    least, most = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    mask = np.uint32((1 << bits) - 1)
    a, b = (np.clip(value, least, most).view(np.uint32) & mask for value in (high, low))
    result: Array = (upper << np.uint32(2 * bits)) | (a << np.uint32(bits)) | b
    return result
