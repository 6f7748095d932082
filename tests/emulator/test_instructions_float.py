"""Float instructions in every rounding mode and modifier, against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_lines import apply, run
from references import rounded

NAN32, NAN16 = 0x7FFFFFFF, 0x7FFF
DIRECTED = ["rz", "rm", "rp"]


def operands(kind: str, seed: int, count: int) -> list[Any]:
    """Return vectors of 32 finite values of all sizes, including subnormal ones and ones near the largest."""
    rng = np.random.default_rng(seed)
    dtype, span = (np.float32, 140) if kind == "f32" else (np.float64, 1060)
    out = []
    for _ in range(count):
        scale = np.where(rng.random(32) < 0.7, rng.integers(-3, 4, 32), rng.integers(-span, span, 32) * 0.9)
        values = np.ldexp(rng.normal(size=32), scale.astype(int)).astype(dtype)
        values[:4] = [1.0, 3.0, np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal]
        out.append(np.roll(np.where(np.isfinite(values), values, dtype(2)), len(out)))
    return out


def bits(values: Any) -> Any:
    values = np.ascontiguousarray(values)
    return values.view(f"u{values.dtype.itemsize}").tolist()


EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
    "fma": lambda a, b, c: a * b + c,
    "mad": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("mode", ["rn", *DIRECTED])
@pytest.mark.parametrize("name", sorted(EXACT))
def test_every_rounding_mode(name: str, mode: str, kind: str) -> None:
    count = {"rcp": 1, "fma": 3, "mad": 3}.get(name, 2)
    width = f"b{kind[1:]}"
    values = operands(kind, len(name) + ord(name[0]), count)
    if name in ("fma", "mad"):
        with np.errstate(over="ignore"):
            values[2] = -(values[0] * values[1]) * (1 + np.arange(32) % 3 * np.finfo(values[0].dtype).eps)
        values[2] = np.where(np.isfinite(values[2]), values[2], 1).astype(values[0].dtype)
    got = apply(f"{name}.{mode}.{kind}", width, [(width, bits(v)) for v in values]).view(values[0].dtype)
    for k in range(32):
        exact = EXACT[name](*(Fraction(float(v[k])) for v in values))
        wanted = rounded(exact, kind, mode)
        assert float(got[k]) == wanted, (k, [v[k] for v in values])
        if exact:
            assert math.copysign(1, got[k]) == math.copysign(1, wanted)


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("mode", ["rn", *DIRECTED])
def test_square_roots_lie_on_the_right_side(mode: str, kind: str) -> None:
    (a,) = operands(kind, 5, 1)
    a = np.abs(a)
    got = apply(f"sqrt.{mode}.{kind}", f"b{kind[1:]}", [(f"b{kind[1:]}", bits(a))]).view(a.dtype)
    for value, root in zip(a, got, strict=True):
        square, below, above = (
            Fraction(float(r)) ** 2 for r in (root, np.nextafter(root, a.dtype.type(0)), np.nextafter(root, root * 2))
        )
        exact = Fraction(float(value))
        if mode == "rp":
            assert below < exact <= square
        elif mode == "rn":
            assert abs(square - exact) <= min(abs(below - exact), abs(above - exact))
        else:
            assert square <= exact < above


@pytest.mark.parametrize(("kind", "width"), [("f32", 32), ("f64", 64)])
def test_an_exact_zero_sum_is_negative_only_when_rounded_down(kind: str, width: int) -> None:
    dtype = np.float32 if kind == "f32" else np.float64
    a, b = np.full(32, 1.5, dtype), np.full(32, -1.5, dtype)
    for mode, sign in (("rn", 1), ("rz", 1), ("rp", 1), ("rm", -1)):
        got = apply(f"add.{mode}.{kind}", f"b{width}", [(f"b{width}", bits(a)), (f"b{width}", bits(b))]).view(dtype)
        assert (got == 0).all()
        assert (np.copysign(1, got) == sign).all()


@pytest.mark.parametrize("form", ["add", "sub.rz", "mul.rp", "fma.rn", "fma.rm.ftz", "add.ftz"])
def test_f32x2_is_two_f32(form: str) -> None:
    count = 3 if form.startswith("fma") else 2
    halves = [operands("f32", 7 + k, count) for k in range(2)]
    wide = [np.stack((halves[0][k], halves[1][k]), axis=1).reshape(-1).view(np.uint64) for k in range(count)]
    got = apply(f"{form}.f32x2", "b64", [("b64", w.tolist()) for w in wide]).view(np.uint32).reshape(32, 2)
    for part in range(2):
        alone = apply(f"{form}.f32", "b32", [("b32", bits(v)) for v in halves[part]])
        assert (got[:, part] == alone).all()


MAKE_NAN = [
    *("add.f32", "sub.f32", "mul.f32", "div.rn.f32", "fma.rn.f32", "add.rz.f32", "min.NaN.f32", "min.f32"),
    *("add.f16", "mul.f16", "fma.rn.f16", "max.NaN.f16", "add.bf16", "mul.bf16", "fma.rn.bf16", "min.NaN.bf16"),
    *("sqrt.rn.f32", "rcp.approx.f32", "lg2.approx.f32", "sin.approx.f32", "tanh.approx.f16", "ex2.approx.f16"),
]


@pytest.mark.parametrize("form", MAKE_NAN)
def test_nan_results_are_canonical(form: str) -> None:
    width, canonical = ("b32", NAN32) if form.endswith("f32") else ("b16", NAN16)
    special = [0x7F800001, 0xFFC01234, 0xFFFFFFFF] if width == "b32" else [0x7F81, 0xFFC1, 0xFFFF]
    count = (
        3 if form.startswith("fma") else 2 if form.split(".")[0] in ("add", "sub", "mul", "div", "min", "max") else 1
    )
    got = apply(form, width, [(width, (special * 11)[:32])] * count)
    assert set(got.tolist()) == {canonical}


def test_bf16_products_are_rounded_once() -> None:
    """Subnormal products near the midpoint of two bf16: via float32 they would be rounded twice."""
    a = np.array([0x0081] * 32, np.uint16)
    b = np.arange(0x3E80, 0x3E80 + 32, dtype=np.uint16)
    got = apply("mul.bf16", "b16", [("b16", a.tolist()), ("b16", b.tolist())]).view(ml_dtypes.bfloat16)
    for k in range(32):
        exact = Fraction(float(a.view(ml_dtypes.bfloat16)[k])) * Fraction(float(b.view(ml_dtypes.bfloat16)[k]))
        assert float(got[k]) == rounded(exact, "bf16", "rn")


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", *DIRECTED])
def test_mixed_precision(mode: str, kind: str) -> None:
    rng = np.random.default_rng(1)
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    a, b = (rng.normal(size=32).astype(dtype) for _ in range(2))
    c = rng.normal(size=32).astype(np.float32)
    small = [("b16", a.view(np.uint16).tolist()), ("b16", b.view(np.uint16).tolist())]
    fused = apply(f"fma.{mode}.f32.{kind}", "b32", [*small, ("b32", bits(c))]).view(np.float32)
    total = apply(f"sub.{mode}.f32.{kind}", "b32", [small[0], ("b32", bits(c))]).view(np.float32)
    for k in range(32):
        x, y, z = (Fraction(float(v[k])) for v in (a, b, c))
        assert float(fused[k]) == rounded(x * y + z, "f32", mode)
        assert float(total[k]) == rounded(x - z, "f32", mode)


def test_three_operands_absolute_values_and_xor_of_signs() -> None:
    a, b, c = (np.array(v * 8, np.float32) for v in ([-3, 2, np.nan, -0.0], [1, -5, 4, 0.0], [2, np.nan, -6, -1]))
    raw = [("b32", bits(v)) for v in (a, b, c)]
    assert apply("min.f32", "b32", raw).view(np.float32)[:4].tolist() == [-3, -5, -6, -1]
    assert apply("max.abs.f32", "b32", raw).view(np.float32)[:4].tolist() == [3, 5, 6, 1]
    assert apply("max.NaN.f32", "b32", raw).tolist()[1:3] == [NAN32, NAN32]
    got = apply("min.xorsign.abs.f32", "b32", raw[:2]).view(np.float32)[:4]
    assert got.tolist() == [-1, -2, 4, -0.0]
    assert math.copysign(1, got[3]) == -1
    halves = [("b16", bits(v.astype(np.float16))) for v in (a, b)]
    assert apply("max.xorsign.abs.f16", "b16", halves).view(np.float16)[:3].tolist() == [-3, -5, 4]


def test_out_of_bounds_nan_makes_a_product_zero() -> None:
    a, b = [0x3C00, NAN16, 0x4000, 0x7E00] * 8, [0x4200, 0x3C00, NAN16, 0x3C00] * 8
    got = apply("fma.rn.oob.f16", "b16", [("b16", a), ("b16", b), ("b16", [0x3C00] * 32)])
    assert got.tolist()[:4] == [0x4400, 0, 0, NAN16]


def test_relu_and_sat_of_halves() -> None:
    a = np.array([-2, -0.0, 0.5, 3, np.nan, np.inf, -np.inf, 1] * 4, np.float16)
    raw = [("b16", bits(a)), ("b16", bits(np.ones(32, np.float16))), ("b16", [0] * 32)]
    assert apply("fma.rn.relu.f16", "b16", raw).tolist()[:8] == [0, 0, 0x3800, 0x4200, NAN16, 0x7C00, 0, 0x3C00]
    assert apply("fma.rn.sat.f16", "b16", raw).tolist()[:8] == [0, 0, 0x3800, 0x3C00, 0, 0x3C00, 0, 0x3C00]


def test_flush_to_zero_of_operands_and_results() -> None:
    tiny = np.array([1e-40, -1e-40, 2e-38, 1.0] * 8, np.float32)
    half = np.full(32, 0.5, np.float32)
    got = apply("mul.ftz.f32", "b32", [("b32", bits(tiny)), ("b32", bits(half))]).view(np.float32)[:4]
    assert got.tolist() == [0.0, -0.0, 0.0, 0.5]
    assert np.signbit(got).tolist() == [False, True, False, False]
    small = np.array([3e-5, 1e-4, 6e-5, 1] * 8, np.float16)
    got16 = apply("add.ftz.f16", "b16", [("b16", bits(small)), ("b16", [0] * 32)]).view(np.float16)
    assert got16.tolist()[:4] == [0, float(np.float16(1e-4)), 0, 1]


def test_gross_reciprocals_of_the_upper_word() -> None:
    a = np.array([1.0, 3.0, -4.0, 0.0, np.inf, 5e-324, np.nan, 1e-300] * 4)
    got = apply("rcp.approx.ftz.f64", "b64", [("b64", bits(a))])
    assert (got & np.uint64(0xFFFFFFFF) == 0).all()
    values = got.view(np.float64)
    assert np.abs(values[:3] * a[:3] - 1).max() < 2.0**-19
    assert values[3:6].tolist() == [math.inf, 0.0, math.inf]
    assert int(got[6]) == 0x7FFFFFFF00000000


def test_approximate_division_by_the_very_large() -> None:
    a = np.array([1.0, 1e38, np.inf, 6.0] * 8, np.float32)
    b = np.array([2.0**127, -(2.0**127), 2.0**127, 3.0] * 8, np.float32)
    raw = [("b32", bits(a)), ("b32", bits(b))]
    got = apply("div.approx.f32", "b32", raw)
    assert got.tolist()[:4] == [0, 0x80000000, NAN32, 0x40000000]
    full = apply("div.full.f32", "b32", raw).view(np.float32)
    assert abs(full[1] * 2.0**127 / -1e38 - 1) < 1e-6


def test_packed_comparisons_join_with_a_predicate() -> None:
    a = np.array([1, 2, np.nan, 4] * 16, np.float16).view(np.uint32)
    b = np.array([2, 2, 3, 3] * 16, np.float16).view(np.uint32)
    body = "setp.eq.u32 %p3, %r3, 1; setp.lt.and.f16x2 %p1|%p2, %r1, %r2, %p3; setp.geu.f16x2 %p4|%p5, %r1, %r2;"
    body += "".join(f"selp.u32 %r{20 + k}, 1, 0, %p{p};" for k, p in enumerate((1, 2, 4, 5)))
    flags = [1, 1, 0, 0] * 8
    got = run(body, ["b32"] * 4, [("b32", a.tolist()), ("b32", b.tolist()), ("b32", flags)])
    low, high = a.view(np.float16)[0::2] < b.view(np.float16)[0::2], a.view(np.float16)[1::2] < b.view(np.float16)[1::2]
    assert got[0].tolist() == (low & np.array(flags, bool)).astype(int).tolist()
    assert got[1].tolist() == (high & np.array(flags, bool)).astype(int).tolist()
    assert got[2].tolist() == (~low).astype(int).tolist()
    assert got[3].tolist() == (~high).astype(int).tolist()
    packed = apply("set.lt.f16x2.f16x2", "b32", [("b32", a.tolist()), ("b32", b.tolist())])
    assert packed.tolist() == [
        (0x3C00 if x else 0) | (0x3C00 if y else 0) << 16 for x, y in zip(low, high, strict=True)
    ]
