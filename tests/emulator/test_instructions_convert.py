"""cvt between all types, against exact fractions, Python's integers and ml_dtypes."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_lines import apply, run
from references import SHAPES, rounded

SMALL = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28.0),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0),
}
NUMPY: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}


def bits(values: Any) -> Any:
    values = np.ascontiguousarray(values)
    return values.view(f"u{values.dtype.itemsize}").tolist()


def samples(kind: str, seed: int) -> Any:
    """Return 32 values of a float type, of all sizes, including ties of the narrower types."""
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
