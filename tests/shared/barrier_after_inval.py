"""A kernel that uses mbarriers after mbarrier.inval, which the PTX ISA does not define.

It runs on a GPU. With ``ends`` = 0, it invalidates no barrier and also runs on the emulator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudatma.mbarrier_bits import BarrierBits, encode

BYTES = 1024
#: Each wait of this kernel ends with the first try_wait that returns after PATIENCE_NS.
SOURCE = """
//% include "primitives/bulk_copy.cuh.j2"
//% include "primitives/mbarrier.cuh.j2"
using namespace cudatma;

constexpr u32 BYTES = 1024, CASES = 5;
constexpr u64 PATIENCE_NS = 20000000;

__device__ __forceinline__ u64 now() {
    u64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

// The 8 bytes, behind mbarrier.inval where `ends` says so.
__device__ __forceinline__ u64 state_of(u32 bar, u32 ends) {
    u64 bits;
    if (ends != 0) mbarrier_inval(bar);
    __threadfence_block();
    asm volatile("ld.volatile.shared.u64 %0, [%1];" : "=l"(bits) : "r"(bar) : "memory");
    return bits;
}

__device__ __forceinline__ u64 comes(u32 bar, u32 parity) {
    const u64 began = now();
    do {
        if (mbarrier_try_wait_parity(bar, parity)) return 1;
    } while (now() - began < PATIENCE_NS);
    return 0;
}

// out: of each case the state, whether the wait behind it came to its end, and the state then.
extern "C" __global__ void __launch_bounds__(32) after_inval(const u8* source, u64* out, u32 ends) {
    __shared__ __align__(128) u8 tiles[2][BYTES];
    __shared__ __align__(8) u64 barriers[CASES];
    if (threadIdx.x != 0) return;
    const u32 first = shared_address(barriers);

    mbarrier_init(first, 2);   // arrivals
    mbarrier_arrive(first);
    out[0] = state_of(first, ends);
    mbarrier_arrive(first);
    out[1] = comes(first, 0);
    out[2] = state_of(first, ends);

#pragma unroll
    for (u32 late = 0; late < 2; ++late) {   // a copy that begins behind inval, and one that is under way then
        const u32 bar = first + 8 + 8 * late, tile = shared_address(tiles[late]);
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, BYTES);
        if (late == 1) cp_async_bulk_load(tile, source, BYTES, bar);
        out[3 + 3 * late] = state_of(bar, ends);
        if (late == 0) cp_async_bulk_load(tile, source, BYTES, bar);
        out[4 + 3 * late] = comes(bar, 0);
        out[5 + 3 * late] = state_of(bar, ends);
    }

    const u32 twice = first + 24;   // inval of what is none any more
    mbarrier_init(twice, 3);
    out[9] = state_of(twice, ends);
    out[10] = 1;
    out[11] = state_of(twice, ends);

    const u32 asked = first + 32;   // polls change nothing: this phase is not over, the one before it is
    mbarrier_init(asked, 3);
    mbarrier_arrive(asked);
    out[12] = state_of(asked, ends);
    out[13] = !mbarrier_test_wait_parity(asked, 0) && mbarrier_test_wait_parity(asked, 1);
    out[14] = state_of(asked, ends);
}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """Results of a case if barriers still work. ``first`` is None if both results are possible."""

    name: str
    first: BarrierBits | None
    last: BarrierBits


CASES = (
    Case("arrivals", BarrierBits(2, 1, 0, 0), BarrierBits(2, 2, 0, 1)),
    Case("a copy that begins behind it", BarrierBits(1, 0, BYTES, 0), BarrierBits(1, 1, 0, 1)),
    Case("a copy that is under way", None, BarrierBits(1, 1, 0, 1)),
    Case("a second inval", BarrierBits(3, 3, 0, 0), BarrierBits(3, 3, 0, 0)),
    Case("polls", BarrierBits(3, 2, 0, 0), BarrierBits(3, 2, 0, 0)),
)


def operands() -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays (source, out)."""
    return np.arange(BYTES).astype(np.uint8), np.zeros((len(CASES), 3), np.uint64)


def differences(out: list[list[int]]) -> list[str]:
    """Return a line for each case in which a GPU behaves differently."""
    lines = []
    for case, (first, came, last) in zip(CASES, out, strict=True):
        right = (case.first is None or first == encode(case.first)) and came == 1 and last == encode(case.last)
        if not right:
            wanted = "anything" if case.first is None else f"{encode(case.first):#018x}"
            lines.append(
                f"{case.name}: {first:#018x}, wait {'ended' if came else 'did not end'}, {last:#018x}; "
                f"expected {wanted}, ended, {encode(case.last):#018x}"
            )
    return lines
