"""Directed rounding of float64 arithmetic with exact fractions. Source: PTX ISA, "Floating Point Instructions"."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from cudatma.emulator.ptx.types import Array
from cudatma.emulator.ptx.writer import runtime


def directed64(near: float, exact: Fraction, mode: str) -> float:
    """Round an exact value to float64 in a rounding mode. ``near`` is one of the two neighboring float64 values."""
    upward = mode == "rp" or (mode == "rz" and exact < 0)
    if math.isinf(near):
        inside = math.copysign(math.nextafter(math.inf, 0.0), near)
        return near if (near > 0) == upward else inside
    if upward:
        return math.nextafter(near, math.inf) if Fraction(near) < exact else near
    return math.nextafter(near, -math.inf) if Fraction(near) > exact else near


def _nearest(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _each(plain: Array, operands: tuple[Array, ...], exact: Callable[..., Fraction], mode: str) -> Array:
    """Return directed results where the operands are finite and the exact result is nonzero, otherwise ``plain``."""
    out: Array = plain.copy()
    for k, values in enumerate(zip(*(operand.tolist() for operand in operands), strict=True)):
        if not all(map(math.isfinite, values)):
            continue
        try:
            result = exact(*map(Fraction, values))
        except ZeroDivisionError:
            continue
        if result:
            out[k] = directed64(_nearest(result), result, mode)
    return out


@runtime
def fma64_mode(a: Array, b: Array, c: Array, mode: str) -> Array:
    """Return a * b + c in a rounding mode. In mode "rm", an exact zero sum of opposite terms is -0."""
    product = a * b
    plain = -(-product - c) if mode == "rm" else product + c
    return _each(plain, (a, b, c), lambda x, y, z: x * y + z, mode)


@runtime
def add64_mode(a: Array, b: Array, mode: str) -> Array:
    return fma64_mode(a, np.ones_like(a), b, mode)


@runtime
def mul64_mode(a: Array, b: Array, mode: str) -> Array:
    return _each(a * b, (a, b), lambda x, y: x * y, mode)


@runtime
def div64_mode(a: Array, b: Array, mode: str) -> Array:
    return _each(a / b, (a, b), lambda x, y: x / y, mode)


@runtime
def sqrt64_mode(a: Array, mode: str) -> Array:
    """Return the square root. The square of the rounded root shows whether the root was rounded up or down."""
    out = np.sqrt(a)
    for k, (value, root) in enumerate(zip(a.tolist(), out.tolist(), strict=True)):
        if not math.isfinite(root) or root == 0:
            continue
        square = Fraction(root) ** 2
        if mode == "rp" and square < value:
            out[k] = math.nextafter(root, math.inf)
        elif mode != "rp" and square > value:
            out[k] = math.nextafter(root, 0.0)
    return out
