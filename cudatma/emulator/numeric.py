"""Float arithmetic as PTX rounds it, on NumPy vectors.

Fused operations are computed in float64 and rounded to odd (Boldo & Melquiond, 2008), after which one more rounding
to float32, float16 or bfloat16 is the correct one. Source: PTX ISA, "Floating Point Instructions", "Half Precision".
"""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from cudatma.emulator.types import Array
from cudatma.emulator.writer import runtime

_TINY32 = np.float32(2.0**-126)


@runtime
def halves(a: Array) -> Array:
    """Both f16 of each 32-bit lane, or a 16-bit lane as f16: (n,) float16."""
    return np.ascontiguousarray(a).view(np.float16)


@runtime
def pairs(a: Array, to: type) -> Array:
    """Both 16-bit integers of each 32-bit lane."""
    return np.ascontiguousarray(a).view(to)


@runtime
def brains(a: Array) -> Array:
    """All bf16 of 16- or 32-bit lanes, as float32."""
    return (np.ascontiguousarray(a).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@runtime
def to_bf16(a: Array) -> Array:
    """float32 to the bits of bf16, to nearest even; NaN becomes 0x7FFF."""
    bits = a.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    result: Array = np.where(np.isnan(a), np.uint16(0x7FFF), rounded)
    return result


@runtime
def flush(a: Array) -> Array:
    """Subnormal float32 become zeros of the same sign (.ftz)."""
    return np.where(np.abs(a) < _TINY32, np.copysign(np.float32(0), a), a)


@runtime
def clamp01(a: Array) -> Array:
    """.sat: to 0..1, NaN to 0."""
    return np.where(np.isnan(a), a.dtype.type(0), np.clip(a, a.dtype.type(0), a.dtype.type(1)))


@runtime
def relu(a: Array) -> Array:
    """.relu: negative values become 0, NaN stays."""
    return np.where(a < 0, a.dtype.type(0), a)


def fma_odd(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float64 rounded to odd. The product of a and b must be exact in float64."""
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
    """float64 to float32: rn, rz, rm (down) or rp (up)."""
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


@runtime
def fma32(a: Array, b: Array, c: Array) -> Array:
    return fma_odd(a, b, c).astype(np.float32)


@runtime
def fma32_mode(a: Array, b: Array, c: Array, mode: str) -> Array:
    return round32(fma_odd(a, b, c), mode)


@runtime
def add32_mode(a: Array, b: Array, mode: str) -> Array:
    return round32(fma_odd(a, np.ones_like(a), b), mode)


@runtime
def mul32_mode(a: Array, b: Array, mode: str) -> Array:
    return round32(a.astype(np.float64) * b.astype(np.float64), mode)


@runtime
def fma16(a: Array, b: Array, c: Array) -> Array:
    """f16 fused multiply-add of float16 vectors."""
    return fma_odd(a, b, c).astype(np.float16)


@runtime
def fma_brain(a: Array, b: Array, c: Array) -> Array:
    """bf16 fused multiply-add of float32 vectors that hold bf16; result as float32 that holds bf16."""
    odd = fma_odd(a, b, c)
    single = round32(odd, "rz")
    inexact = (single.astype(np.float64) != odd) & np.isfinite(single)
    sticky = np.where(inexact, single.view(np.uint32) | np.uint32(1), single.view(np.uint32))
    result: Array = brains(to_bf16(sticky.view(np.float32)))
    return result


@lru_cache(maxsize=1)
def _libm() -> Any:
    library = ctypes.CDLL(ctypes.util.find_library("m") or None)
    library.fma.restype = ctypes.c_double
    library.fma.argtypes = [ctypes.c_double] * 3
    return library.fma


@runtime
def fma64(a: Array, b: Array, c: Array) -> Array:
    """float64 fused multiply-add, by the C library's fma."""
    fma = _libm()
    return np.array([fma(x, y, z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)])


@runtime
def smaller(a: Array, b: Array) -> Array:
    """min: a NaN gives way to the other operand; -0 is below +0."""
    raw = np.dtype(f"u{a.dtype.itemsize}")
    return np.where(a == b, (a.view(raw) | b.view(raw)).view(a.dtype), np.fmin(a, b))


@runtime
def larger(a: Array, b: Array) -> Array:
    """max: a NaN gives way to the other operand; +0 is above -0."""
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
def special_function(name: str, a: Array) -> Array:
    """sin, cos, ex2, lg2, rcp, rsqrt, sqrt, tanh: computed in float64 and rounded once (within PTX's stated error)."""
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
def float_to_int(a: Array, mode: str, to: str) -> Array:
    """Rounded as rni, rzi, rmi, rpi say, then clamped to the integer type; NaN gives 0 (64 bits: the top bit)."""
    wide = a.astype(np.longdouble)
    rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](wide)
    info = np.iinfo(to)
    low, high = np.longdouble(info.min), np.longdouble(info.max)
    inside = np.where(np.isnan(rounded), 0, np.clip(rounded, low, high))
    out = np.where(inside >= high, info.max, np.where(inside <= low, info.min, 0)).astype(to)
    safe = np.where((inside < high) & (inside > low), inside, 0)
    out = np.where((inside < high) & (inside > low), safe.astype(to), out).astype(to)
    if info.bits == 64:
        out = np.where(np.isnan(wide), np.array(1 << 63, np.uint64).astype(to), out)
    return out


@runtime
def int_to_float(a: Array, mode: str, to: str) -> Array:
    """An integer vector as float16, float32 or float64."""
    if mode in ("rn", ""):
        if to == "float16":
            return a.astype(np.float64).astype(np.float16)
        return a.astype(to)
    near = a.astype(to)
    wide, exact = near.astype(np.longdouble), a.astype(np.longdouble)
    return _directed(near, wide, exact, mode)


@runtime
def float_to_float(a: Array, mode: str, to: str) -> Array:
    """Between float16, float32 and float64, in a rounding mode."""
    near = a.astype(to)
    if mode in ("rn", "") or near.dtype.itemsize >= a.dtype.itemsize:
        return near
    return _directed(near, near.astype(np.longdouble), a.astype(np.longdouble), mode)


def _directed(near: Array, wide: Array, exact: Array, mode: str) -> Array:
    inf = near.dtype.type(np.inf)
    floor = np.where(wide > exact, np.nextafter(near, -inf), near)
    ceiling = np.where(wide < exact, np.nextafter(near, inf), near)
    if mode == "rm":
        return floor
    return ceiling if mode == "rp" else np.where(exact < 0, ceiling, floor)


@runtime
def round_to_integral(a: Array, mode: str) -> Array:
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    result: Array = function(a)
    return result


@runtime
def to_tf32(a: Array, mode: str) -> Array:
    """float32 to tf32 bits in 32: rna (nearest, ties away), rn (nearest even) or rz."""
    bits = a.view(np.uint32)
    if mode == "rz":
        rounded = bits
    elif mode == "rn":
        rounded = bits + np.uint32(0xFFF) + ((bits >> 13) & np.uint32(1))
    else:
        rounded = bits + np.uint32(0x1000)
    return np.where(np.isfinite(a), rounded & np.uint32(0xFFFFE000), bits)


_FP8: dict[str, Any] = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@runtime
def to_fp8(a: Array, name: str) -> Array:
    """float32 to 8-bit floats, to nearest even, clamped to the largest finite value (.satfinite); NaN stays NaN."""
    limit = np.float32(448.0 if name == "e4m3" else 57344.0)
    clamped = np.where(np.isnan(a), a, np.clip(a, -limit, limit))
    bits = clamped.astype(_FP8[name]).view(np.uint8)
    return np.where(np.isnan(a), np.uint8(0x7F), bits)


@runtime
def from_fp8(a: Array, name: str) -> Array:
    """8-bit floats as float32."""
    result: Array = np.ascontiguousarray(a).view(_FP8[name]).astype(np.float32)
    return result
