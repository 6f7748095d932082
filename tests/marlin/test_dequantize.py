"""The kernel that makes a packed weight dense: PackedWeight.dequantize() bit for bit, and nothing is written around
it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cudatma
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.marlin.dequantize import DequantizeConfig, dense_pitch_bytes, on_host, sample
from cudatma.quantization import PackedWeight, pack
from cudatma.target import get_target

POISON = 0xFFFF
SM90A = get_target("sm_90a")


def packed(
    k: int, n: int, dtype: str, group_size: int, zeros: bool = False, act_order: bool = False, wild: bool = False
) -> PackedWeight:
    """Random integers; wild: scales from the least to the greatest, negative and zero ones among them."""
    random = np.random.default_rng((k, n, group_size % 7))
    groups = 1 if group_size == -1 else -(-k // group_size)
    kind = activation_type(dtype).numpy
    scales = random.uniform(0.01, 0.03, (groups, n)).astype(kind)
    if wild:
        bits = random.integers(0, 1 << 16, (groups, n), np.uint16).view(kind)
        with np.errstate(invalid="ignore"):
            scales = np.where(np.isfinite(bits), bits, scales)
    offsets = random.integers(0, 17, (groups, n)) if zeros else None
    perm = random.permutation(k) if act_order else None
    return pack(random.integers(0, 16, (k, n), np.uint8), scales, offsets, group_size=group_size, perm=perm)


def dense(w: PackedWeight, *, target: Any = SM90A, ctas: int = 132, changes: Any = None, **options: Any) -> Any:
    """(K, N) as the kernel leaves it, in a buffer that is poisoned before, next to and after it."""
    k, n = w.shape
    width = dense_pitch_bytes(n) // 2
    buffer = np.full((k + 2, width + 8), POISON, np.uint16)
    out = buffer[1 : k + 1, :n].view(activation_type(w.dtype).numpy)
    planned, arrays = on_host(w, out, resident=ctas)
    if changes:
        planned, arrays = on_host(w, out, config=replace(planned.config, **changes), resident=ctas)
    report = planned.emulate(target, arrays, **({"schedules": 1} | options))
    assert report.is_clean or options.get("hazards") == "collect"
    assert "out_of_bounds" not in report.kinds
    outside = np.ones(buffer.shape, bool)
    outside[1 : k + 1, :width] = False
    assert (buffer[outside] == POISON).all()
    return out


def assert_same_bits(out: Any, w: PackedWeight) -> None:
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out.view(np.uint16), w.dequantize(dtype=w.dtype).view(np.uint16))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("dtype", "group_size", "zeros", "act_order"),
    [
        ("float16", 32, False, False),
        ("bfloat16", 32, True, True),
        ("bfloat16", 64, False, True),
        ("float16", 64, True, False),
        ("float16", 128, True, True),
        ("bfloat16", 128, False, False),
        ("bfloat16", -1, True, False),
        ("float16", -1, False, True),
    ],
)
def test_bit_for_bit(dtype: str, group_size: int, zeros: bool, act_order: bool) -> None:
    w = packed(130, 77, dtype, group_size, zeros, act_order)
    assert_same_bits(dense(w, ctas=1), w)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_of_every_kind(dtype: str) -> None:
    """Subnormal products are kept, those beyond the type become infinite, zeros have the sign of the scale."""
    w = packed(64, 256, dtype, 32, zeros=True, wild=True)
    assert_same_bits(dense(w), w)


@pytest.mark.slow
@pytest.mark.parametrize(("act_order", "target"), [(True, "sm_90a"), (False, "sm_120a")])
def test_clean_in_many_schedules(act_order: bool, target: str) -> None:
    """The ring wraps, each warp's buffers are used several times, and a block walks over the edge of N."""
    w = packed(200, 136, "float16", 32, zeros=True, act_order=act_order)
    chosen = get_target(target)
    out = dense(w, target=chosen, ctas=1, schedules=6, changes={"warps": 2, "stages": 2})
    assert_same_bits(out, w)


@pytest.mark.parametrize(("k", "n"), [(1, 1), (63, 8), (65, 257), (64, 64)])
def test_small_and_odd_shapes(k: int, n: int) -> None:
    for act_order in (False, True):
        w = packed(k, n, "bfloat16", 64, True, act_order)
        assert_same_bits(dense(w), w)


def test_a_hostile_order_writes_nothing_outside() -> None:
    w = packed(64, 64, "float16", 64, act_order=True)
    w.perm[[0, 5]] = (-1, 2**31 - 1)
    dense(w, hazards="collect")  # two rows at one place are a race


def test_the_public_function() -> None:
    w = packed(130, 76, "float16", 64, True, True)
    out = cudatma.dequantize(w, backend="emulator")
    assert (out.shape, out.dtype, out.strides[0]) == ((130, 76), np.float16, 160)
    assert_same_bits(out, w)
    assert_same_bits(cudatma.dequantize(w, backend="reference"), w)
    wide = np.zeros((130, 88), np.float16)
    given = wide[:, :76]
    assert cudatma.dequantize(w, out=given, backend="emulator") is given
    assert_same_bits(given, w)


W = packed(64, 40, "float16", 32)


@pytest.mark.parametrize(
    ("out", "error", "field"),
    [
        (np.empty((64, 40), np.float32), ArgumentTypeError, "out.dtype"),
        (np.empty((40, 64), np.float16), ArgumentError, "out.shape"),
        (np.empty((40, 64), np.float16).T, ArgumentError, "out.strides"),
        (np.empty((64, 44), np.float16)[:, :40], ArgumentError, "out.strides"),
        (np.empty((64, 80), np.float16)[:, ::2], ArgumentError, "out.strides"),
        (np.empty((65, 48), np.float16)[:64, 4:44], ArgumentError, "out.pointer"),
        (np.broadcast_to(np.float16(0), (64, 40)), ArgumentError, "out"),
        ([[1.0]], ArgumentTypeError, "out"),
    ],
)
def test_what_is_refused(out: Any, error: type[Exception], field: str) -> None:
    with pytest.raises(error) as caught:
        cudatma.dequantize(W, out=out, backend="emulator")
    assert caught.value.field == field  # type: ignore[attr-defined]


def test_what_else_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="PackedWeight"):
        cudatma.dequantize(np.zeros((4, 4)))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"w\.device"):
        cudatma.dequantize(W, backend="cuda")
    for field, value in (("group_size", 16), ("warps", 5), ("stages", 0)):
        with pytest.raises(ArgumentError) as caught:
            DequantizeConfig(**{"dtype": "float16", "group_size": 64, "has_zeros": False, field: value})
        assert caught.value.field == field


@pytest.mark.parametrize("options", [{}, {"permute": 1, "zeros": 1, "group_size": 32, "k": 72, "n": 136}], ids=str)
def test_the_sample(options: dict[str, Any]) -> None:
    made = sample(SM90A, **options)
    assert made.run(schedules=1).is_clean
    assert made.error() == 0
