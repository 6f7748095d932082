"""mma.sync of every served type against matrices put together element by element as the PTX ISA's figures say."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mma_fragments import Place, a8, a16, a32, b8, b16, b32, c4, fragment, run_mma

from cudatma import compile

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
    got = run_mma(opcode, *parts)
    wanted = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(c.dtype)
    assert (got == fragment(wanted, c4, 4, 4)).all()


@pytest.mark.parametrize(("init", "kinds"), [("", ["uninitialised_register"]), ("= {}", [])], ids=["none", "zeros"])
def test_what_an_mma_adds_to_was_written(init: str, kinds: list[str]) -> None:
    source = f"""
    //% include "primitives/mma.cuh.j2"
    extern "C" __global__ void k(float* out) {{
        const cudatma::u32 ones = 0x3c003c00, a[4] = {{ones, ones, ones, ones}};
        float d[4] {init};
        cudatma::mma_m16n8k16_f16(d, a, ones, ones);
        for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = d[i];
    }}"""
    out = np.zeros(128, np.float32)
    report = compile(source, "sm_90a", template=True).emulate(1, 32, (out,), hazards="collect")
    assert sorted(report.kinds) == kinds, str(report)
    assert (out == 16).all()


def test_half_accumulators() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.integers(-4, 5, (16, 16)).astype(np.float16), rng.integers(-4, 5, (16, 8)).astype(np.float16)
    c = rng.integers(-50, 50, (16, 8)).astype(np.float16)
    parts = [fragment(a, a16, 8, 4), fragment(b, b16, 4, 4), fragment(c, c4, 4, 4)]
    got = run_mma("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", *parts)
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
    got = run_mma("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", *parts, width=8).view(np.float64)
    wanted = fragment(a @ b + c, lambda lane, i: (lane // 4, lane % 4 * 2 + i), 2, 8).view(np.float64)
    assert np.abs(got - wanted).max() < 1e-12
