"""What a lane publishes when a part of its warp has met: the accesses of those lanes, and of no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from catalogue import Case, check_bug, check_clean, module_of, names, parametrised

Made = tuple[tuple[Any, ...], Callable[[], bool]]


def reversed_lanes(size: int = 96) -> Callable[[], Made]:
    """(in, out): whether each row of out is that of in, backwards."""

    def make() -> Made:
        source = np.random.default_rng(3).integers(0, 1000, size).astype(np.uint32)
        out = np.zeros(size, np.uint32)
        return (source, out), lambda: bool((out.reshape(-1, 32) == source.reshape(-1, 32)[:, ::-1]).all())

    return make


# Warp 0 writes a row, warp 1 reads it, three times; each half of a warp meets and releases on its own.
HALVES = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ u32 box[32];
    __shared__ alignas(8) u64 full, empty;
    const u32 lane = threadIdx.x % 32, f = ADDRESS(&full), e = ADDRESS(&empty);
    const u32 half = lane < 16 ? 0xffffu : 0xffff0000u;
    if (threadIdx.x == 0) {
#if defined(ONE_HALF_WRITES) || defined(ONE_HALF_SHUFFLES)
        INIT(f, 1);
#elif defined(SIXTEEN_ARRIVE)
        INIT(f, 16);
#else
        INIT(f, 2);
#endif
#ifdef ONE_HALF_READS
        INIT(e, 1);
#else
        INIT(e, 2);
#endif
    }
    __syncthreads();
    for (u32 i = 0; i < 3; ++i) {
        if (threadIdx.x < 32) {
            WAIT(e, (i & 1) ^ 1);
            u32 v = in[32 * i + lane];
            box[lane] = v;   //! ONE_HALF_READS
#ifdef ONE_HALF_SHUFFLES
            if (lane < 16) v = __shfl_sync(0xffffu, v, 0);
            if (lane == 0) ARRIVE(f);
#elif defined(ONE_HALF_WRITES)
            __syncwarp(half);
            if (lane == 0) ARRIVE(f);
#elif defined(SIXTEEN_ARRIVE)
            __syncwarp(half);
            if (lane < 16) ARRIVE(f);
#else
            __syncwarp(half);
            if (lane % 16 == 0) ARRIVE(f);
#endif
        } else {
            WAIT(f, i & 1);
            out[32 * i + lane] = box[31 - lane];   //! ONE_HALF_WRITES ONE_HALF_SHUFFLES SIXTEEN_ARRIVE
            __syncwarp(half);
#ifdef ONE_HALF_READS
            if (lane == 0) ARRIVE(e);
#else
            if (lane % 16 == 0) ARRIVE(e);
#endif
        }
    }
}
"""

# Lanes meet in pairs, then pairs in fours, and so on: lane 0 knows of all of them in the end.
TREE = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ u32 box[32];
    __shared__ alignas(8) u64 full;
    const u32 lane = threadIdx.x % 32, f = ADDRESS(&full);
    if (threadIdx.x == 0) INIT(f, 1);
    __syncthreads();
    if (threadIdx.x < 32) {
        box[lane] = in[lane];
#ifdef WITHOUT_LAST
        const u32 last = 16;
#else
        const u32 last = 32;
#endif
        for (u32 n = 2; n <= last; n *= 2)
            if (lane % (n / 2) == 0) {
                u32 members = 0;
                for (u32 k = lane / n * n; k < lane / n * n + n; k += n / 2) members |= 1u << k;
                __syncwarp(members);
            }
        if (lane == 0) ARRIVE(f);
    } else {
        WAIT(f, 0);
        out[lane] = box[31 - lane];   //! WITHOUT_LAST
    }
}
"""

# The same through a flag in global memory.
FLAG = """
extern "C" __global__ void k(const u32* in, u32* data, u32* flag, u32* out) {
    const u32 lane = threadIdx.x;
    if (blockIdx.x == 0) {
#ifdef ALL_WRITE
        data[lane] = in[lane];
#else
        if (lane < 16) data[lane] = in[lane];
#endif
        if (lane < 16) __syncwarp(0xffffu);
        if (lane == 0) { __threadfence(); *(volatile u32*)flag = 1; }
    } else {
        while (*(volatile u32*)flag == 0) {}
        __threadfence();
        out[lane] = data[lane];   //! ALL_WRITE
    }
}
"""


def flagged() -> Made:
    source = np.arange(1, 33, dtype=np.uint32)
    data, flag, out = np.zeros(32, np.uint32), np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    return (source, data, flag, out), lambda: bool((out[:16] == source[:16]).all() and not out[16:].any())


CASES = [
    Case(
        "halves",
        HALVES,
        {
            "ONE_HALF_WRITES": "data_race",
            "ONE_HALF_SHUFFLES": "data_race",
            "SIXTEEN_ARRIVE": "data_race",
            "ONE_HALF_READS": "data_race",
        },
        reversed_lanes(),
        block=64,
    ),
    Case("tree", TREE, {"WITHOUT_LAST": "data_race"}, reversed_lanes(32), block=64),
    Case("flag", FLAG, {"ALL_WRITE": "global_race"}, flagged, grid=2),
]


@pytest.mark.parametrize("case", CASES, ids=names)
def test_parts_that_release_their_own_accesses_are_clean(case: Case) -> None:
    check_clean(case)


@pytest.mark.parametrize(("case", "bug"), parametrised(CASES), ids=names)
def test_a_lane_publishes_for_those_it_has_met(case: Case, bug: str) -> None:
    check_bug(case, bug)


def test_a_replay_knows_the_parts_from_the_start() -> None:
    args, _ = CASES[1].arguments()
    report = module_of(TREE, ("WITHOUT_LAST",)).launch("k", 1, 64, args, replay=0, hazards="collect")
    assert report.kinds == {"data_race"}
