"""Ordinary reads of a tile that a tensor map wrote with a swizzle: linear reads cause a warning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from catalogue import NAME, line_of, module_of

from cudatma.descriptor import TensorMap
from cudatma.emulator import Report

KERNEL = """
#ifndef READ
#define READ(i) box[i]
#endif
// Where element i of a tile of 8 rows of 32 floats lies under swizzle 128B, counted in floats.
#define PLACE(i) ((i) ^ ((i) / 32 % 8 * 4))
extern "C" __global__ void k(const __grid_constant__ Map in, const __grid_constant__ Map to, float* out) {
    __shared__ alignas(1024) float box[8 * 32];
    __shared__ alignas(8) u64 barrier;
    const u32 bar = ADDRESS(&barrier), t = threadIdx.x;
    if (t == 0) { INIT(bar, 1); FENCE_INIT(); EXPECT(bar, 1024); TMA_LOAD(ADDRESS(box), &in, bar, 0, 0); }
    __syncthreads();
    WAIT(bar, 0);
#if defined(COPY_ON)
    if (t == 0) { TMA_STORE(&to, ADDRESS(box), 0, 0); COMMIT(); WAIT_ALL(0); }
#elif defined(MATRICES)
    u32 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(v) : "r"(ADDRESS(box + PLACE(t % 8 * 32))) : "memory");
    out[t] = __uint_as_float(v);
#elif defined(IN_PLACE)
    for (u32 i = t; i < 256; i += 64) box[i] *= 2;
    FENCE_ASYNC_SHARED();
    __syncthreads();
    if (t == 0) { TMA_STORE(&to, ADDRESS(box), 0, 0); COMMIT(); WAIT_ALL(0); }
#else
    for (u32 i = t; i < 256; i += 64) out[i] = READ(i);   //! LINEAR
#endif
}
"""
#: Ways to go over the tile: with the swizzle, along rows, columns, in fragments of mma, in vectors.
HEEDING = {
    "rows": "READ(i) box[PLACE(i)]",
    "columns": "READ(i) box[PLACE(i % 8 * 32 + i / 8)]",
    "fragments": "READ(i) box[PLACE(i % 32 / 4 * 32 + i % 4 + i / 32 * 4)]",
    "vectors": "READ(i) ((float4*)box)[PLACE(i % 64 * 4) / 4].x",
    "one for all": "READ(i) box[PLACE(37)]",
}
LINEAR = {
    "rows": "READ(i) box[i]",
    "columns": "READ(i) box[i % 8 * 32 + i / 8]",
    "fragments": "READ(i) box[i % 32 / 4 * 32 + i % 4 + i / 32 * 4]",
    "vectors": "READ(i) ((float4*)box)[i % 64].x",
}


def run(*defines: str, swizzle: str = "128B", to_swizzle: str = "128B") -> tuple[Report, Any]:
    given = np.arange(256, dtype=np.float32).reshape(8, 32)
    stored, out = np.zeros_like(given), np.zeros(256, np.float32)
    maps = [
        TensorMap.from_array(array, (8, 32), swizzle=mode, encoder="codec")
        for array, mode in ((given, swizzle), (stored, to_swizzle))
    ]
    return module_of(KERNEL, defines).launch("k", 1, 64, (*maps, out), schedules=3, hazards="collect"), out


@pytest.mark.parametrize("way", LINEAR)
def test_a_linear_read_is_a_warning(way: str) -> None:
    report, _ = run(LINEAR[way])
    assert report.is_clean, str(report)
    assert report.kinds == set()
    (warning,) = report.warnings
    assert warning.kind == "swizzle_mismatch"
    assert warning.source == f"{NAME}:{line_of(KERNEL, (LINEAR[way],), 'LINEAR')}"
    assert "128B" in warning.message
    assert warning.advice
    assert "warning: swizzle_mismatch" in str(report)


@pytest.mark.parametrize("way", HEEDING)
def test_a_read_through_the_swizzle_is_none(way: str) -> None:
    report, out = run(HEEDING[way])
    assert report.is_clean, str(report)
    assert not report.warnings
    assert way != "rows" or (out == np.arange(256)).all()


@pytest.mark.parametrize("way", LINEAR)
def test_a_tile_without_a_swizzle_is_read_as_one_likes(way: str) -> None:
    report, _ = run(LINEAR[way], swizzle="none")
    assert report.is_clean, str(report)
    assert not report.warnings


@pytest.mark.parametrize("use", ["COPY_ON", "MATRICES", "IN_PLACE"])
def test_other_uses_of_a_swizzled_tile_are_none(use: str) -> None:
    """The tile is copied by TMA, read by ldmatrix with the swizzle, and changed in place."""
    report, _ = run(use)
    assert report.is_clean, str(report)
    assert not report.warnings
