"""Order through global memory in whole kernels: Marlin's flags and its previous grid, locks, scopes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import marlin_runner
import numpy as np
import pytest
from catalogue import module_of
from marlin_builders import mma_sync
from ptx_lines import kernel

from cudatma.emulator import load
from cudatma.emulator.hazards.clocks import Clock, LaneClocks
from cudatma.quantization import quantize

Mutation = Callable[[str], str]
#: A tile and ring of the mma.sync kernel; three blocks share the tiles of the product below.
CONFIG = mma_sync(tile_m=16, tile_n=64, tile_k=256, warps_n=2, slice_k=2, stages=4)


def run_marlin(monkeypatch: pytest.MonkeyPatch, mutate: Mutation, *, depends: bool = False) -> Any:
    """Return the report of a Marlin product whose blocks share tiles, with changed PTX."""
    rng = np.random.default_rng(0)
    w = quantize(rng.normal(size=(768, 128)).astype(np.float32) * 0.05, dtype="float16")
    x = rng.normal(size=(16, 768)).astype(np.float16)
    seen: list[str] = []

    def loaded(ptx: str) -> Any:
        seen.append(mutate(ptx))
        assert "unchanged" in mutate.__name__ or seen[-1] != ptx
        return load(seen[-1])

    monkeypatch.setattr(marlin_runner, "load", loaded)
    options: dict[str, Any] = {"produced_by_previous": (x,)} if depends else {}
    return marlin_runner.run_marlin(x, w, config=CONFIG, processors=3, schedules=2, hazards="collect", **options)[1]


def unchanged(ptx: str) -> str:
    return ptx


def unreleased(ptx: str) -> str:
    return ptx.replace("st.release.gpu", "st.relaxed.gpu").replace("membar.gl;", "").replace("fence.acq_rel.gpu;", "")


def narrow(ptx: str) -> str:
    return ptx.replace("st.release.gpu", "st.release.cta").replace("membar.gl;", "membar.cta;")


def unacquired(ptx: str) -> str:
    return ptx.replace("ld.acquire.gpu", "ld.relaxed.gpu")


def independent(ptx: str) -> str:
    return ptx.replace("griddepcontrol.wait;", "")


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [unreleased, narrow, unacquired])
def test_marlin_without_its_flags_order(monkeypatch: pytest.MonkeyPatch, mutate: Mutation) -> None:
    assert run_marlin(monkeypatch, mutate).kinds == {"global_race"}


def test_marlin_reads_and_writes_after_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_marlin(monkeypatch, unchanged, depends=True).is_clean
    assert run_marlin(monkeypatch, independent, depends=True).kinds == {"grid_dependency"}


LOCK = """
extern "C" __global__ void k(u32* lock, u32* value) {
    for (u32 i = 0; i < 3; ++i) {
        while (atomicCAS(lock, 0, 1) != 0) { }
#ifndef NO_ACQUIRE
        __threadfence();
#endif
        *value = *value + 1;
#ifndef NO_RELEASE
        __threadfence();
#endif
        atomicExch(lock, 0);
    }
}
"""


@pytest.mark.parametrize("define", ["", "NO_ACQUIRE", "NO_RELEASE"])
def test_a_lock(define: str) -> None:
    lock, value = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    module = module_of(LOCK, (define,) if define else ())
    report = module.launch("k", 3, 1, (lock, value), schedules=10, hazards="collect", step_limit=200_000)
    assert report.kinds == ({"global_race"} if define else set()), str(report)
    assert value[0] == 9


SHARED_LOCK = """
extern "C" __global__ void k(u32* value) {
    __shared__ u32 lock;
    if (threadIdx.x == 0) lock = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        while (atomicCAS(&lock, 0, 1) != 0) { }
        __threadfence_block();
        *value = *value + 1;
        __threadfence_block();
        UNLOCK
    }
}
"""


@pytest.mark.parametrize(
    ("unlock", "kinds"),
    [("*(volatile u32*)&lock = 0;", set()), ("lock = 0;", {"data_race", "global_race"})],
    ids=["strong", "plain"],
)
def test_a_lock_in_shared_memory(unlock: str, kinds: set[str]) -> None:
    value = np.zeros(1, np.uint32)
    report = module_of(SHARED_LOCK.replace("UNLOCK", unlock), ()).launch(
        "k", 1, 128, (value,), schedules=10, hazards="collect"
    )
    assert report.kinds == kinds, str(report)
    assert value[0] == 4


NUMBERED = """
extern "C" __global__ void __cluster_dims__(1, 2, 1) k(u32* out) {
    if (blockIdx.y == 1) out[0] = blockIdx.x;
}
"""


def test_a_race_names_the_other_block_by_its_index() -> None:
    """Clusters start in any order."""
    module = module_of(NUMBERED, ())
    for schedule in range(4):
        report = module.launch("k", (2, 2), 1, (np.zeros(1, np.uint32),), hazards="collect", replay=schedule)
        (hazard,) = report.hazards
        assert hazard.block[1] == 1
        assert f"warp 0 of block ({1 - hazard.block[0]}, 1, 0) wrote" in hazard.message


WITHIN = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(u32* data, u32* flag, u32* out) {
    const bool writes = threadIdx.x == 0 && blockIdx.x == 0, reads = threadIdx.x == 32 && blockIdx.x == READER;
    if (writes) {
        *data = 7;
        asm volatile("fence.acq_rel." SCOPE "; st.relaxed.gpu.global.u32 [%0], 1;" :: "l"(flag) : "memory");
    }
    if (reads) {
        u32 seen;
        do asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory"); while (seen == 0);
        asm volatile("fence.acq_rel." SCOPE ";" ::: "memory");
        *out = *data;
    }
}
"""


@pytest.mark.parametrize(
    ("scope", "reader", "is_enough"),
    [
        *[("cta", 0, True), ("cta", 1, False), ("cta", 2, False)],
        *[("cluster", 0, True), ("cluster", 1, True), ("cluster", 2, False)],
        *[("gpu", 0, True), ("gpu", 1, True), ("gpu", 2, True), ("sys", 2, True)],
    ],
)
def test_a_fence_orders_what_lies_in_its_scope(scope: str, reader: int, is_enough: bool) -> None:
    data, flag, out = (np.zeros(1, np.uint32) for _ in range(3))
    module = module_of(WITHIN, (f'SCOPE "{scope}"', f"READER {reader}"))
    report = module.launch("k", 4, 64, (data, flag, out), schedules=6, hazards="collect", step_limit=200_000)
    assert report.kinds == (set() if is_enough else {"global_race"}), str(report)


def test_a_flag_that_nobody_sets_is_a_deadlock() -> None:
    body = """
    ld.param.u64 %d1, [p0];
    wait:
    ld.relaxed.gpu.global.u32 %r1, [%d1];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra wait;
    """
    report = kernel(body, 1).launch("k", 2, 32, (np.zeros(1, np.uint32),), schedules=3, hazards="collect")
    assert report.kinds == {"deadlock"}
    assert "polls byte 0 of p0, whose value remains 0" in str(report)
    assert report.schedules == 1, "the first infinite loop ends the search"


def test_lanes_know_what_they_acquired_until_they_meet() -> None:
    whole = Clock(4)
    lanes = LaneClocks(whole, 0)
    for lane, agent in ((0, 1), (1, 2)):
        for clock in lanes.learners(1 << lane, 0xF):
            clock.order[agent] = 5
    assert lanes.known(0b01).order.tolist() == [0, 5, 0, 0]
    assert lanes.known(0b10).order.tolist() == [0, 0, 5, 0]
    assert lanes.known(0b11).order.tolist() == [0, 0, 0, 0]
    assert lanes.known(0b100) is whole
    assert sorted(bits for bits, _ in lanes.groups(0b111)) == [1, 2, 4]
    for clock in lanes.learners(0xF, 0xF):
        clock.order[3] = 1
    assert lanes.known(0b11).order.tolist() == [0, 0, 0, 1]
    assert lanes.merge().order.tolist() == [0, 5, 5, 1]


def test_what_another_cluster_released_is_known_apart_from_ones_own() -> None:
    mine, theirs = Clock(2), Clock(2)
    theirs.order[0] = 4
    theirs.beyond().learn(0, np.array([3, 0], np.int32), np.zeros(2, np.int32))
    mine.absorb(1, theirs, own=0)
    assert mine.order.tolist() == [3, 0]
    assert mine.of(np.array([0, 2, 3, 4]), 2, 0).tolist() == [3, 4, 0, 0]


ADD_ONE = """
ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mul.wide.u32 %d3, %r63, 4;
add.u64 %d4, %d1, %d3; add.u64 %d5, %d2, %d3;
setp.eq.u32 %p1, %r63, 0; setp.lt.u32 %p2, %r63, 63; mov.u32 %r2, 0;
"""


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        ("ld.global.u32 %r1, [%d1]; add.u32 %r2, %r1, 1; @%p1 st.global.u32 [%d1], %r2;", set()),
        (
            "ld.global.u32 %r1, [%d1]; add.u32 %r2, %r1, 1; @%p1 st.global.u32 [%d1], %r2; st.global.u32 [%d5], %r2;",
            {"global_race", "lane_race"},
        ),
        ("@%p2 ld.global.u32 %r1, [%d4+4]; @%p2 st.global.u32 [%d4], %r1;", {"global_race", "lane_race"}),
        (
            "ld.global.u32 %r1, [%d1]; setp.eq.u32 %p3, %r1, 0; @%p3 st.global.u32 [%d5], %r2; "
            "@%p1 st.global.u32 [%d1], %r63;",
            {"global_race", "lane_race"},
        ),
    ],
    ids=["one thread stores", "each thread also stores the value", "in place", "the value decides"],
)
def test_a_value_that_a_thread_loads_and_does_not_use_does_not_race(body: str, kinds: set[str]) -> None:
    """Triton loads a scalar in each thread, and stores the sum in one."""
    module = kernel(ADD_ONE + body, 2)
    x, y = np.arange(1, 66, dtype=np.uint32), np.zeros(64, np.uint32)
    assert module.launch("k", 1, 64, (x, y), schedules=4, hazards="collect").kinds == kinds


def test_two_blocks_race_even_if_one_thread_of_each_stores() -> None:
    body = ADD_ONE + "ld.global.u32 %r1, [%d1]; add.u32 %r2, %r1, 1; @%p1 st.global.u32 [%d1], %r2;"
    report = kernel(body, 2).launch("k", 2, 64, (np.zeros(64, np.uint32),) * 2, hazards="collect")
    assert report.kinds == {"global_race"}
    assert "of block (0, 0, 0) wrote" in report.hazards[0].message
