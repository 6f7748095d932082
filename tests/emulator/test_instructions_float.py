"""Float instructions and conversions in every rounding mode and modifier, against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from instruction_table import current, missing, section
from ptx_lines import apply, run
from references import SHAPES, rounded

from cudatma.emulator.instructions import coverage
from cudatma.emulator.ptx import forms
from cudatma.emulator.ptx.forms import REFUSED

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


SMALL = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28.0),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0),
}
NUMPY: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}


def samples(kind: str, seed: int) -> Any:
    """32 values of a float type: of all sizes, with ties of the narrower types among them."""
    rng = np.random.default_rng(seed)
    values = np.ldexp(rng.integers(-4096, 4096, 32).astype(float) / 2048, rng.integers(-30, 20, 32))
    values[:6] = [0.0, -0.0, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -(2.0**-24), 65519.9]
    return values.astype(NUMPY[kind])


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(("to", "source"), [("f16", "f32"), ("f16", "f64"), ("bf16", "f64"), ("f32", "f64")])
def test_narrower_floats_in_every_mode(to: str, source: str, mode: str) -> None:
    values = samples(source, 3)
    got = apply(f"cvt.{mode}.{to}.{source}", f"b{16 if to != 'f32' else 32}", [(f"b{source[1:]}", bits(values))])
    for value, result in zip(values, got.view(NUMPY[to]), strict=True):
        wanted = rounded(Fraction(float(value)), to, mode)
        assert float(result) == wanted
        assert math.copysign(1, result) == math.copysign(1, value)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("to", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("source", ["s64", "u64", "u32", "s16"])
def test_integers_to_floats_in_every_mode(source: str, to: str, mode: str) -> None:
    rng = np.random.default_rng(5)
    width, signed = int(source[1:]), source[0] == "s"
    raw = [int(v) >> int(s) for v, s in zip(rng.integers(0, 2**63, 32), rng.integers(0, 63, 32), strict=True)]
    raw[:4] = [2**width - 1, 2 ** (width - 1), (1 << width) - 1025, 2**width - 2**11 + 1]
    raw = [v & ((1 << width) - 1) for v in raw]
    numbers = [v - (1 << width) if signed and v >> (width - 1) else v for v in raw]
    result = {"f16": "b16", "bf16": "b16", "f32": "b32", "f64": "b64"}[to]
    got = apply(f"cvt.{mode}.{to}.{source}", result, [(f"b{width}", raw)]).view(NUMPY[to])
    assert [float(v) for v in got] == [rounded(Fraction(n), to, mode) for n in numbers]


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("to", ["s8", "u8", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("source", ["f16", "bf16", "f32", "f64"])
def test_floats_to_integers_round_then_clamp(source: str, to: str, mode: str) -> None:
    values = np.array(
        [0.5, 1.5, 2.5, -0.5, -1.5, 1e5, -1e5, np.nan, np.inf, -np.inf, 3e38, -3e38, 127.5, 255.5, -128.5]
    )
    with np.errstate(over="ignore"):
        values = np.resize(values, 32).astype(NUMPY[source])
    width, signed = int(to[1:]), to[0] == "s"
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)
    container = max(width, 16)
    got = apply(f"cvt.{mode}.{to}.{source}", f"b{container}", [(f"b{source.strip('bf')}", bits(values))])
    step = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    for value, result in zip(values.tolist(), got.tolist(), strict=True):
        if math.isnan(value):
            wanted = (1 << (width - 1)) - (1 << width) * signed if source == "f64" or width == 64 else 0
        else:
            wanted = max(low, min(high, step(value))) if math.isfinite(value) else (high if value > 0 else low)
        assert result == wanted & ((1 << container) - 1), value


@pytest.mark.parametrize("name", sorted(SMALL))
def test_small_floats_round_as_the_formats_say(name: str) -> None:
    dtype, top = SMALL[name]
    rng = np.random.default_rng(8)
    with np.errstate(over="ignore"):
        ties = (rng.integers(-255, 256, 64) / 64 * top / 2).astype(np.float32)
    values = np.where(rng.random(64) < 0.5, ties, (rng.normal(size=64) * top).astype(np.float32)).astype(np.float32)
    values[:4] = [np.inf, -np.inf, top * 4, -top * 4]
    a, b = values[:32], values[32:]
    if name == "e2m1":
        body = ".reg .b8 %e1; cvt.rn.satfinite.e2m1x2.f32 %e1, %r1, %r2; mov.b32 %r20, {%e1, %e1, %e1, %e1};"
        (packed,) = run(body, ["b32"], [("b32", bits(a)), ("b32", bits(b))])
        codes = np.stack((packed >> 4 & 15, packed & 15)).astype(np.uint8)
    else:
        packed = apply(f"cvt.rn.satfinite.{name}x2.f32", "b16", [("b32", bits(a)), ("b32", bits(b))])
        codes = np.stack((packed >> 8, packed & 255)).astype(np.uint8)
    wanted = np.clip(np.stack((a, b)), -top, top).astype(dtype).view(np.uint8)
    assert (codes == wanted).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m3"])
@pytest.mark.parametrize("pair", ["f16x2", "bf16x2"])
def test_pairs_of_halves_to_small_floats_and_back(name: str, pair: str) -> None:
    dtype, top = SMALL[name]
    half: Any = np.float16 if pair == "f16x2" else ml_dtypes.bfloat16
    values = (np.random.default_rng(4).normal(size=64) * top / 3).astype(half)
    packed = apply(f"cvt.rn.satfinite.relu.{name}x2.{pair}", "b16", [("b32", values.view(np.uint32).tolist())])
    wanted = np.clip(values.astype(np.float32), 0, top).astype(dtype)
    assert (packed.view(np.uint8) == wanted.view(np.uint8)).all()
    back = apply(f"cvt.rn.f16x2.{name}x2", "b32", [("b16", packed.tolist())]).view(np.float16)
    assert (back.astype(np.float64) == wanted.astype(np.float64)).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m3"])
def test_every_small_float_becomes_f16(name: str) -> None:
    count = 64 if name in ("e3m2", "e2m3") else 256
    codes = np.resize(np.arange(count, dtype=np.uint8), 256)
    for part in codes.reshape(4, 64):
        got = apply(f"cvt.rn.f16x2.{name}x2", "b32", [("b16", part.view(np.uint16).tolist())]).view(np.float16)
        wanted = part.view(SMALL[name][0]).astype(np.float16)
        assert np.array_equal(got, wanted, equal_nan=True)
        assert (got.view(np.uint16)[np.isnan(got)] == 0x7FFF).all()


def test_nan_to_small_floats() -> None:
    nan = [("b32", [0x7FC00000] * 32)] * 2
    wanted = {"e4m3": 0x7F7F, "e5m2": 0x7F7F, "e3m2": 0x1F1F, "e2m3": 0x1F1F}
    for name, code in wanted.items():
        assert set(apply(f"cvt.rn.satfinite.{name}x2.f32", "b16", nan).tolist()) == {code}


@pytest.mark.parametrize("to", ["f16", "bf16"])
def test_satfinite_keeps_large_values_finite(to: str) -> None:
    a = [0x7F7FFFFF, 0xFF800000, 0x7FC00000, 0x3F800000] * 8
    got = apply(f"cvt.rn.satfinite.{to}.f32", "b16", [("b32", a)]).tolist()[:4]
    top, one = (0x7BFF, 0x3C00) if to == "f16" else (0x7F7F, 0x3F80)
    assert got == [top, top | 0x8000, 0x7FFF, one]
    plain = apply(f"cvt.rz.{to}.f32", "b16", [("b32", a)]).tolist()[:2]
    assert plain == [top, {"f16": 0xFC00, "bf16": 0xFF80}[to]]


@pytest.mark.parametrize(("kind", "dropped"), [("f16", 13), ("bf16", 16)])
def test_stochastic_rounding_adds_the_random_bits(kind: str, dropped: int) -> None:
    rng = np.random.default_rng(6)
    a, b = (rng.integers(0x3F000000, 0x40000000, 32, dtype=np.uint32) for _ in range(2))
    noise = rng.integers(0, 2**32, 32, dtype=np.uint32)
    got = apply(f"cvt.rs.{kind}x2.f32", "b32", [("b32", v.tolist()) for v in (a, b, noise)])
    mask = np.uint32((1 << dropped) - 1)
    for values, fields, results in ((a, noise >> 16, got >> 16), (b, noise, got)):
        carried = (values + (fields & mask)) & ~mask
        wanted = carried.view(np.float32).astype(NUMPY[kind]).view(np.uint16)
        assert (wanted == (results & np.uint32(0xFFFF))).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_stochastic_rounding_of_four_values(name: str) -> None:
    """Without noise it cuts; the two neighbours are the only results; the largest noise carries where it can."""
    dtype, top = SMALL[name]
    rng = np.random.default_rng(7)
    values = [(rng.normal(size=32) * top / 4).astype(np.float32) for _ in range(4)]
    width = "b16" if name == "e2m1" else "b32"
    to = "%h20" if name == "e2m1" else "%r20"
    body = f"cvt.rs.satfinite.{name}x4.f32 {to}, {{%r1, %r2, %r3, %r4}}, %r5;"
    size, keep = (4, 15) if name == "e2m1" else (8, 63 if name in ("e3m2", "e2m3") else 255)
    for noise in (0, 0xFFFFFFFF):
        (got,) = run(body, [width], [("b32", bits(v)) for v in values] + [("b32", [noise] * 32)])
        for place, source in enumerate(values):
            codes = (got.astype(np.uint32) >> (size * (3 - place)) & keep).astype(np.uint8)
            result = codes.view(dtype).astype(np.float64)
            clipped = np.clip(source.astype(np.float64), -top, top)
            if noise == 0:
                assert (np.abs(result) <= np.abs(clipped)).all()
            else:
                assert (np.abs(result) >= np.abs(clipped) - top * 2.0**-8).all()
                assert (np.abs(result) >= np.abs(clipped)).mean() > 0.9
            nearest = clipped.astype(dtype).astype(np.float64)
            assert (np.abs(result - clipped) <= 2.01 * np.maximum(np.abs(nearest) / 4, 2.0**-2 * top / 4)).all()


def test_scale_formats() -> None:
    values = np.array([1.0, 1.5, 2.0, 0.0, 2.0**-127, 2.0**-130, 3e38, np.inf, np.nan, -4.0] + [1.0] * 22, np.float32)
    raw = [("b32", bits(values))] * 2
    down = apply("cvt.rz.satfinite.ue8m0x2.f32", "b16", raw) & 255
    up = apply("cvt.rp.satfinite.ue8m0x2.f32", "b16", raw) >> 8
    assert down.tolist()[:10] == [127, 127, 128, 0, 0, 0, 254, 254, 255, 129]
    assert up.tolist()[:10] == [127, 128, 128, 0, 0, 0, 254, 254, 255, 129]
    back = apply("cvt.rn.bf16x2.ue8m0x2", "b32", [("b16", [0x7F00, 0xFE80, 0xFF01] * 10 + [0, 0])])
    pairs = back.view(ml_dtypes.bfloat16).astype(np.float64)[:6]
    assert pairs[:5].tolist() == [2.0**-127, 1.0, 2.0, 2.0**127, 2.0**-126]
    assert math.isnan(pairs[5])


def test_fixed_point_with_scales() -> None:
    a = np.array([1.0, -2.0, 1.9999, 5.0, -5.0, 0.0078125, 0.0234375, np.nan] * 4, np.float32)
    got = apply("cvt.rn.satfinite.s2f6x2.f32", "b16", [("b32", bits(a)), ("b32", bits(a))])
    assert (got & 255).astype(np.uint8).view(np.int8).tolist()[:8] == [64, -128, 127, 127, -128, 0, 2, 127]
    scaled = apply(
        "cvt.rn.satfinite.scaled::n2::ue8m0.s2f6x2.f32",
        "b16",
        [("b32", bits(a)), ("b32", bits(a)), ("b16", [0x8080] * 32)],
    )
    assert (scaled >> 8).astype(np.uint8).view(np.int8).tolist()[:5] == [32, -64, 64, 127, -128]
    back = apply("cvt.rn.scaled::n2::ue8m0.bf16x2.s2f6x2", "b32", [("b16", [0x40C0] * 32), ("b16", [0x807F] * 32)])
    assert back.view(ml_dtypes.bfloat16).astype(np.float64)[:2].tolist() == [-1.0, 2.0]


@pytest.mark.parametrize(("kind", "width"), [("u16", 16), ("s8", 8), ("u4", 4), ("s2", 2)])
def test_cvt_pack_clamps_and_keeps_the_rest(kind: str, width: int) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-300, 300, 32).astype(np.int32) * (200 if width == 16 else 1) for _ in range(2))
    c = rng.integers(0, 2**32, 32, dtype=np.uint32)
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if kind[0] == "s" else (0, (1 << width) - 1)
    raw = [("b32", bits(a)), ("b32", bits(b))]
    if width == 16:
        got = apply(f"cvt.pack.sat.{kind}.s32", "b32", raw)
    else:
        got = apply(f"cvt.pack.sat.{kind}.s32.b32", "b32", [*raw, ("b32", c.tolist())])
    mask = (1 << width) - 1
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        fields = (max(low, min(high, x)) & mask) << width | max(low, min(high, y)) & mask
        assert result == (fields | (z << 2 * width if width < 16 else 0)) & 0xFFFFFFFF


def test_tf32_saturates_and_its_nan_is_canonical() -> None:
    a = [0x7F7FFFFF, 0xFF800000, 0xFFC00001, 0x3F801000] * 8
    assert apply("cvt.rn.satfinite.tf32.f32", "b32", [("b32", a)]).tolist()[:4] == [
        0x7F7FE000,
        0xFF7FE000,
        0x7FFFFFFF,
        0x3F800000,
    ]


def test_shapes_of_the_references() -> None:
    """The reference's largest values are the types' own."""
    assert float(SHAPES["bf16"][2]) == float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    assert float(SHAPES["f16"][2]) == float(np.finfo(np.float16).max)


#: Forms that are refused, by the part of the opcode that makes them so.
LEFT_OUT = ("cp_mask", "im2col::w", "cta_group::1")


@pytest.mark.parametrize("chapter", sorted(forms.FORMS))
def test_every_form_is_emulated(chapter: str) -> None:
    refused = {form: why for form in forms.forms(chapter) if (why := missing(form))}
    unexpected = {form: why for form, why in refused.items() if not any(part in form for part in LEFT_OUT)}
    assert not unexpected


def test_the_document_is_up_to_date() -> None:
    assert current() == section(), "run `python tests/emulator/instruction_table.py`"


@pytest.mark.parametrize("opcode", ["add.fast.f32 r1, r2, r3", "ld.shared.nearby.b32 r1, [r2]", "bar.sync.now 0"])
def test_a_modifier_that_does_not_exist_is_named(opcode: str) -> None:
    (found,) = coverage(forms.module_of(opcode)).missing
    assert "modifier `" in str(found[1])
    assert "PTX line 6" in str(found[1])


@pytest.mark.parametrize("root", sorted(REFUSED))
def test_what_is_not_emulated_says_why(root: str) -> None:
    (found,) = coverage(forms.module_of(f"{root}.something.b32 r1, r2")).missing
    assert f"`{root}` is not supported" in str(found[1])


def test_expansion() -> None:
    assert list(forms.expand("a{,.x}.{f,g} {r1..3}, {r7}")) == [
        "a.f {r1, r2, r3}, {r7}",
        "a.g {r1, r2, r3}, {r7}",
        "a.x.f {r1, r2, r3}, {r7}",
        "a.x.g {r1, r2, r3}, {r7}",
    ]
