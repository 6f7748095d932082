"""mma.sync of every served type against matrices put together element by element as the PTX ISA's figures say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_lines import kernel

Place = Callable[[int, int], tuple[int, int]]


def a16(lane: int, i: int) -> tuple[int, int]:
    """m16n8k16, 16-bit: row = group for i in 0, 1, 4, 5, else group + 8; column = 2 thread + (i & 1), + 8 from 4 on."""
    return lane // 4 + (0 if i in (0, 1, 4, 5) else 8), lane % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)


def b16(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 * 2 + (i & 1) + (8 if i >= 2 else 0), lane // 4


def a8(lane: int, i: int) -> tuple[int, int]:
    """m16n8k32, 8-bit: row = group for i < 4 and 8 <= i < 12, column = 4 thread + (i & 3), + 16 from i = 8."""
    return lane // 4 + (0 if i < 4 or 8 <= i < 12 else 8), lane % 4 * 4 + (i & 3) + (16 if i >= 8 else 0)


def b8(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 * 4 + (i & 3) + (16 if i >= 4 else 0), lane // 4


def a32(lane: int, i: int) -> tuple[int, int]:
    """m16n8k8, tf32: a0 (g, t), a1 (g + 8, t), a2 (g, t + 4), a3 (g + 8, t + 4)."""
    return lane // 4 + 8 * (i & 1), lane % 4 + 4 * (i >> 1)


def b32(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 + 4 * i, lane // 4


def c4(lane: int, i: int) -> tuple[int, int]:
    return lane // 4 + 8 * (i >> 1), lane % 4 * 2 + (i & 1)


def fragment(matrix: Any, place: Place, count: int, width: int) -> Any:
    """(registers, 32) raw words of ``width`` bytes."""
    out = np.zeros((32, count), matrix.dtype)
    for lane in range(32):
        for i in range(count):
            out[lane, i] = matrix[place(lane, i)]
    return np.ascontiguousarray(out).view(f"u{width}").T.copy()


def run(opcode: str, a: Any, b: Any, c: Any, width: int = 4) -> Any:
    """(registers, 32) raw results of one mma on raw fragments; c and d have the same registers."""
    letter, bits = ("%r", 32) if width == 4 else ("%d", 64)
    lines = [f"mul.wide.u32 %d62, %r63, {width};"]
    names: list[list[str]] = []
    at = 1
    for k, part in enumerate((a, b, c)):
        names.append([f"{letter}{at + i}" for i in range(len(part))])
        lines.append(f"ld.param.u64 %d61, [p{k}];\nadd.u64 %d61, %d61, %d62;")
        lines += [f"ld.global.b{bits} {name}, [%d61+{32 * width * i}];" for i, name in enumerate(names[-1])]
        at += len(part)
    to = [f"{letter}{at + i}" for i in range(len(c))]
    groups = ", ".join("{" + ", ".join(group) + "}" for group in (to, *names))
    lines.append(f"{opcode} {groups};")
    lines.append("ld.param.u64 %d61, [p3];\nadd.u64 %d61, %d61, %d62;")
    lines += [f"st.global.b{bits} [%d61+{32 * width * i}], {name};" for i, name in enumerate(to)]
    out = np.zeros_like(c)
    assert kernel("\n".join(lines)).launch("k", 1, 32, (a, b, c, out)).is_clean
    return out


CASES: list[tuple[str, Any, tuple[int, int, int], Place, int, Place, int]] = [
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", np.float16, (16, 8, 16), a16, 8, b16, 4),
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", ml_dtypes.bfloat16, (16, 8, 16), a16, 8, b16, 4),
    ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", np.float16, (16, 8, 8), a16, 4, b16, 2),
    ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", np.float32, (16, 8, 8), a32, 4, b32, 2),
    ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", ml_dtypes.float8_e4m3fn, (16, 8, 32), a8, 16, b8, 8),
    ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", np.int8, (16, 8, 32), a8, 16, b8, 8),
    ("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32", np.uint8, (16, 8, 32), a8, 16, b8, 8),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ".".join(case[0].split(".")[3:]))
def test_products(case: Any) -> None:
    opcode, dtype, (m, n, k), a_place, a_count, b_place, b_count = case
    rng = np.random.default_rng(4)
    is_integer = np.dtype(dtype).kind in "iu"
    low = 0 if dtype == np.uint8 else -8
    a, b = (rng.integers(low, 9, shape).astype(dtype) for shape in ((m, k), (k, n)))
    c = rng.integers(-50, 50, (m, n)).astype(np.int32 if is_integer else np.float32)
    parts = [fragment(a, a_place, a_count, 4), fragment(b, b_place, b_count, 4), fragment(c, c4, 4, 4)]
    got = run(opcode, *parts)
    wanted = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(c.dtype)
    assert (got == fragment(wanted, c4, 4, 4)).all()


def test_half_accumulators() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.integers(-4, 5, (16, 16)).astype(np.float16), rng.integers(-4, 5, (16, 8)).astype(np.float16)
    c = rng.integers(-50, 50, (16, 8)).astype(np.float16)
    parts = [fragment(a, a16, 8, 4), fragment(b, b16, 4, 4), fragment(c, c4, 4, 4)]
    got = run("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", *parts)
    wanted = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(np.float16)
    assert (got == fragment(wanted, c4, 4, 4)).all()


def test_doubles() -> None:
    rng = np.random.default_rng(4)
    a, b, c = rng.normal(size=(8, 4)), rng.normal(size=(4, 8)), rng.normal(size=(8, 8))
    parts = [
        fragment(a, lambda lane, i: (lane // 4, lane % 4), 1, 8),
        fragment(b, lambda lane, i: (lane % 4, lane // 4), 1, 8),
        fragment(c, lambda lane, i: (lane // 4, lane % 4 * 2 + i), 2, 8),
    ]
    got = run("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", *parts, width=8).view(np.float64)
    wanted = fragment(a @ b + c, lambda lane, i: (lane // 4, lane % 4 * 2 + i), 2, 8).view(np.float64)
    assert np.abs(got - wanted).max() < 1e-12
