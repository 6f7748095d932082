"""Every arithmetic instruction against Python integers and exact fractions."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_lines import apply

EDGES = {
    32: [0, 1, 2, 31, 32, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x00FF00FF, 0x12345678],
    64: [0, 1, 63, 64, 2**63 - 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF],
    16: [0, 1, 15, 16, 0x7FFF, 0x8000, 0xFFFF, 0x1234],
}


def lanes(bits: int, seed: int) -> list[int]:
    """32 values: edges, and random ones."""
    rng = np.random.default_rng(seed)
    edges = EDGES[bits]
    return [
        edges[int(rng.integers(len(edges)))]
        if rng.random() < 0.6
        else int(rng.integers(0, 2**bits, dtype=np.uint64))
        if bits < 64
        else int(rng.integers(0, 2**63, dtype=np.uint64)) * 2 + 1
        for _ in range(32)
    ]


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def s32(f: Callable[..., int]) -> Callable[..., int]:
    return lambda *v: f(*(signed(x, 32) for x in v))


INTEGER: list[tuple[str, str, list[str], Callable[..., int]]] = [
    ("add.u32", "b32", ["b32", "b32"], lambda a, b: a + b),
    ("sub.s64", "b64", ["b64", "b64"], lambda a, b: a - b),
    ("add.sat.s32", "b32", ["b32", "b32"], s32(lambda a, b: max(-(2**31), min(2**31 - 1, a + b)))),
    ("mul.lo.u32", "b32", ["b32", "b32"], lambda a, b: a * b),
    ("mul.hi.u32", "b32", ["b32", "b32"], lambda a, b: a * b >> 32),
    ("mul.hi.s32", "b32", ["b32", "b32"], s32(lambda a, b: a * b >> 32)),
    ("mul.hi.u64", "b64", ["b64", "b64"], lambda a, b: a * b >> 64),
    ("mul.wide.s32", "b64", ["b32", "b32"], s32(lambda a, b: a * b)),
    ("mul.wide.u16", "b32", ["b16", "b16"], lambda a, b: a * b),
    ("mad.lo.s32", "b32", ["b32", "b32", "b32"], lambda a, b, c: a * b + c),
    ("mad.wide.u32", "b64", ["b32", "b32", "b64"], lambda a, b, c: a * b + c),
    ("mul24.lo.u32", "b32", ["b32", "b32"], lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    ("div.s32", "b32", ["b32", "b32"], s32(lambda a, b: truncated(a, b) if b else -1)),
    ("rem.s32", "b32", ["b32", "b32"], s32(lambda a, b: a - b * truncated(a, b) if b else -1)),
    ("rem.u64", "b64", ["b64", "b64"], lambda a, b: a % b if b else -1),
    ("div.u16", "b16", ["b16", "b16"], lambda a, b: a // b if b else -1),
    ("div.u64", "b64", ["b64", "b64"], lambda a, b: a // b if b else -1),
    ("sad.u32", "b32", ["b32", "b32", "b32"], lambda a, b, c: abs(a - b) + c),
    ("min.s32", "b32", ["b32", "b32"], s32(min)),
    ("max.u64", "b64", ["b64", "b64"], max),
    ("add.u16x2", "b32", ["b32", "b32"], lambda a, b: (a + b & 0xFFFF) | ((a >> 16) + (b >> 16) & 0xFFFF) << 16),
    ("max.u16x2", "b32", ["b32", "b32"], lambda a, b: max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16),
    ("abs.s32", "b32", ["b32"], s32(abs)),
    ("neg.s64", "b64", ["b64"], lambda a: -a),
    ("not.b32", "b32", ["b32"], lambda a: ~a),
    ("cnot.b32", "b32", ["b32"], lambda a: int(a == 0)),
    ("and.b64", "b64", ["b64", "b64"], lambda a, b: a & b),
    ("shl.b32", "b32", ["b32", "b32"], lambda a, b: a << b if b < 32 else 0),
    ("shr.u64", "b64", ["b64", "b32"], lambda a, b: a >> b if b < 64 else 0),
    ("shr.s32", "b32", ["b32", "b32"], lambda a, b: signed(a, 32) >> min(b, 31)),
    ("shr.u16", "b16", ["b16", "b32"], lambda a, b: a >> min(b, 16)),
    ("shf.l.wrap.b32", "b32", ["b32", "b32", "b32"], lambda a, b, c: (b << 32 | a) << (c & 31) >> 32),
    ("shf.r.clamp.b32", "b32", ["b32", "b32", "b32"], lambda a, b, c: (b << 32 | a) >> min(c, 32)),
    ("popc.b64", "b32", ["b64"], lambda a: a.bit_count()),
    ("clz.b32", "b32", ["b32"], lambda a: 32 - a.bit_length()),
    ("brev.b32", "b32", ["b32"], lambda a: int(f"{a:032b}"[::-1], 2)),
    ("bfind.u32", "b32", ["b32"], lambda a: a.bit_length() - 1),
    ("bfind.s32", "b32", ["b32"], s32(lambda a: (a if a >= 0 else ~a).bit_length() - 1)),
    ("bfe.u32", "b32", ["b32", "b32", "b32"], lambda a, b, c: a >> (b & 255) & ((1 << (c & 255)) - 1)),
    ("szext.clamp.s32", "b32", ["b32", "b32"], lambda a, n: sign_extended(a, n)),
    ("bmsk.clamp.b32", "b32", ["b32", "b32"], lambda a, b: ((1 << min(b, 32)) - 1) << min(a, 32)),
    (
        "dp4a.u32.u32",
        "b32",
        ["b32", "b32", "b32"],
        lambda a, b, c: c + sum((a >> s & 255) * (b >> s & 255) for s in (0, 8, 16, 24)),
    ),
    ("cvt.s64.s32", "b64", ["b32"], s32(lambda a: a)),
    ("cvt.u16.u32", "b16", ["b32"], lambda a: a),
    ("cvt.sat.s8.s32", "b16", ["b32"], s32(lambda a: max(-128, min(127, a)))),
    ("cvt.sat.u16.s32", "b16", ["b32"], s32(lambda a: max(0, min(65535, a)))),
]


def sign_extended(a: int, n: int) -> int:
    n = min(n, 32)
    if n == 0:
        return 0
    field = a & ((1 << n) - 1)
    return field - (1 << n) if field >> (n - 1) else field


@pytest.mark.parametrize("case", INTEGER, ids=lambda case: case[0])
def test_integer_instructions(case: Any) -> None:
    opcode, result, kinds, reference = case
    values = [lanes(int(kind[1:]), 7 * k + len(opcode)) for k, kind in enumerate(kinds)]
    got = apply(opcode, result, list(zip(kinds, values, strict=True)))
    mask = (1 << int(result[1:])) - 1
    assert got.tolist() == [reference(*row) & mask for row in zip(*values, strict=True)]


@settings(max_examples=25, deadline=None)
@given(table=st.integers(0, 255), seed=st.integers(0, 1000))
def test_lop3_is_its_truth_table(table: int, seed: int) -> None:
    a, b, c = (lanes(32, seed + k) for k in range(3))
    got = apply("lop3.b32", "b32", [("b32", a), ("b32", b), ("b32", c)], hex(table))
    for x, y, z, result in zip(a, b, c, got.tolist(), strict=True):
        wanted = sum((table >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | (z >> i & 1)) & 1) << i for i in range(32))
        assert result == wanted


@settings(max_examples=20, deadline=None)
@given(selector=st.integers(0, 0xFFFF), seed=st.integers(0, 1000))
def test_prmt_with_constant_and_with_register_selector(selector: int, seed: int) -> None:
    a, b = lanes(32, seed), lanes(32, seed + 1)
    fixed = apply("prmt.b32", "b32", [("b32", a), ("b32", b)], str(selector))
    moving = apply("prmt.b32", "b32", [("b32", a), ("b32", b), ("b32", [selector] * 32)])
    wanted = []
    for x, y in zip(a, b, strict=True):
        pool, out = (x | y << 32).to_bytes(8, "little"), 0
        for k in range(4):
            field = selector >> (4 * k) & 15
            byte = pool[field & 7]
            out |= ((255 if byte & 128 else 0) if field & 8 else byte) << (8 * k)
        wanted.append(out)
    assert fixed.tolist() == moving.tolist() == wanted


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10000))
def test_bfi(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = lanes(32, seed), lanes(32, seed + 1)
    start, length = rng.integers(0, 40, 32).tolist(), rng.integers(0, 40, 32).tolist()
    got = apply("bfi.b32", "b32", [("b32", a), ("b32", b), ("b32", start), ("b32", length)])
    wanted = []
    for x, y, p, n in zip(a, b, start, length, strict=True):
        mask = ((1 << n) - 1) << p & 0xFFFFFFFF
        wanted.append((y & ~mask | x << p & mask) & 0xFFFFFFFF)
    assert got.tolist() == wanted


def single(values: Any) -> list[int]:
    return np.asarray(values, np.float32).view(np.uint32).tolist()


def round_fraction(value: Fraction, mantissa: int, least: int, mode: str) -> Fraction:
    """Round a fraction to a float format, given its mantissa bits and the exponent of its smallest unit, without
    overflow.
    """
    if value == 0:
        return value
    exponent = math.floor(math.log2(abs(value)) + 1e-12)
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - mantissa + 1, least)
    scaled = value / unit
    whole = {"rz": math.trunc, "rm": math.floor, "rp": math.ceil, "rn": round}[mode](scaled)
    return whole * unit


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["fma", "add", "mul"])
def test_float_rounding_is_exact(name: str, mode: str) -> None:
    rng = np.random.default_rng(11)
    for scale in (1, 1e-3, 2.0**-70):
        a, b = (rng.normal(size=32).astype(np.float32) * np.float32(scale) for _ in range(2))
        c = (-(a.astype(np.float64) * b) * (1 + rng.integers(-3, 4, 32) * 2.0**-24)).astype(np.float32)
        values = {"fma": [a, b, c], "add": [a, (c if scale != 1 else b)], "mul": [a, b]}[name]
        got = apply(f"{name}.{mode}.f32", "b32", [("b32", single(v)) for v in values]).view(np.float32)
        for k in range(32):
            x = [Fraction(float(v[k])) for v in values]
            exact = x[0] * x[1] + x[2] if name == "fma" else x[0] + x[1] if name == "add" else x[0] * x[1]
            assert Fraction(float(got[k])) == round_fraction(exact, 24, -149, mode), (k, scale)


@pytest.mark.parametrize(("kind", "mantissa", "least"), [("f16x2", 11, -24), ("bf16x2", 8, -133)])
@pytest.mark.parametrize("name", ["fma.rn", "add", "mul", "sub"])
def test_packed_halves(name: str, kind: str, mantissa: int, least: int) -> None:
    dtype = np.float16 if kind == "f16x2" else ml_dtypes.bfloat16
    rng = np.random.default_rng(3)
    count = 3 if name.startswith("fma") else 2
    values = [rng.normal(size=64).astype(dtype) for _ in range(count)]
    raw = [("b32", v.view(np.uint32).tolist()) for v in values]
    got = apply(f"{name}.{kind}", "b32", raw).view(dtype)
    for k in range(64):
        x = [Fraction(float(v[k])) for v in values]
        exact = {
            "fma.rn": lambda x=x: x[0] * x[1] + x[2],
            "add": lambda x=x: x[0] + x[1],
            "mul": lambda x=x: x[0] * x[1],
            "sub": lambda x=x: x[0] - x[1],
        }[name]()
        assert Fraction(float(got[k])) == round_fraction(exact, mantissa, least, "rn")


def test_double_fma_is_fused() -> None:
    a = np.full(32, 1 + 2.0**-30)
    got = apply(
        "fma.rn.f64", "b64", [("b64", a.view(np.uint64).tolist())] * 2 + [("b64", (-a * a).view(np.uint64).tolist())]
    )
    exact = Fraction(float(a[0])) ** 2 - Fraction(float((a * a)[0]))
    assert float(got.view(np.float64)[0]) == float(exact) != 0


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_float_to_integer_clamps_and_rounds(mode: str) -> None:
    values = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, np.nan, np.inf, -np.inf, 1e-9, 123.75] * 3, np.float32)[
        :32
    ]
    got = apply(f"cvt.{mode}.s32.f32", "b32", [("b32", single(values))]).view(np.int32)
    rounding = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    for value, result in zip(values.tolist(), got.tolist(), strict=True):
        if math.isnan(value):
            wanted = 0
        else:
            wanted = max(
                -(2**31), min(2**31 - 1, rounding(value) if math.isfinite(value) else int(math.copysign(2**40, value)))
            )
        assert result == wanted


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("ex2", lambda x: 2.0**x),
        ("lg2", math.log2),
        ("rcp", lambda x: 1 / x),
        ("rsqrt", lambda x: x**-0.5),
        ("sin", math.sin),
        ("tanh", math.tanh),
    ],
)
def test_special_functions(name: str, function: Any) -> None:
    values = np.linspace(0.1, 3, 32).astype(np.float32)
    got = apply(f"{name}.approx.f32", "b32", [("b32", single(values))]).view(np.float32)
    wanted = np.array([function(float(v)) for v in values])
    assert np.abs(got - wanted).max() <= 2e-7 * np.abs(wanted).max()


def test_min_max_of_zeros_and_nan() -> None:
    a = single([0.0, -0.0, np.nan, 1.0] * 8)
    b = single([-0.0, 0.0, 2.0, np.nan] * 8)
    low = apply("min.f32", "b32", [("b32", a), ("b32", b)]).tolist()[:4]
    high = apply("max.f32", "b32", [("b32", a), ("b32", b)]).tolist()[:4]
    assert low == single([-0.0, -0.0, 2.0, 1.0])
    assert high == single([0.0, 0.0, 2.0, 1.0])


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_eight_bit_floats(fp8: str) -> None:
    dtype = ml_dtypes.float8_e4m3fn if fp8 == "e4m3" else ml_dtypes.float8_e5m2
    values = np.random.default_rng(2).normal(size=(2, 32)).astype(np.float32) * 300
    got = apply(f"cvt.rn.satfinite.{fp8}x2.f32", "b16", [("b32", single(values[0])), ("b32", single(values[1]))])
    top = 448 if fp8 == "e4m3" else 57344
    wanted = np.clip(values, -top, top).astype(dtype).view(np.uint8)
    assert (got.view(np.uint8).reshape(32, 2) == wanted[::-1].T).all()


def test_tf32_rounds_away_from_zero_at_ties() -> None:
    bits = [0x3F800FFF, 0x3F801000, 0x3F801001, 0xBF801000] * 8
    got = apply("cvt.rna.tf32.f32", "b32", [("b32", bits)]).tolist()[:4]
    assert got == [0x3F800000, 0x3F802000, 0x3F802000, 0xBF802000]
