"""Reports: causes first, with their consequences; schedules that are replayed, or that end at a kind of hazard."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from catalogue import NAME, Case, line_of, module_of
from ptx_lines import kernel
from test_hazard_catalogue_pipelines import CASES

from cudatma.descriptor import TensorMap
from cudatma.emulator import Report
from cudatma.emulator.ptx.parser import parse
from cudatma.errors import ArgumentError, ArgumentTypeError, HazardError

RING = CASES[0]
HEADER = ".version 8.0\n.target sm_90a\n.address_size 64\n"

TILE = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(128) u32 box[256];
    __shared__ alignas(128) u32 other[256];
    __shared__ u32 scratch[64];
    __shared__ alignas(8) u64 full[2];
    const u32 t = threadIdx.x, f = ADDRESS(full);
    if (t == 32) { INIT(f, 1); INIT(f + 8, 1); FENCE_INIT(); }
    __syncthreads();
    if (t == 32) {
        EXPECT(f, 1024);
        BULK_LOAD(ADDRESS(box), in, 1024, f);
#ifdef OTHER_COUNT
        EXPECT(f + 8, 1024 + 16);
#else
        EXPECT(f + 8, 1024);
#endif
        BULK_LOAD(ADDRESS(other), in, 1024, f + 8);
    }
#ifndef NO_WAIT
    WAIT(f, 0);
#endif
    out[t] = box[t];
    scratch[t] = box[t];
#ifndef NO_BARRIER
    __syncthreads();
#endif
    out[64 + t] = scratch[63 - t];
    WAIT(f + 8, 0);
}
"""


def run(*defines: str, schedules: int = 1) -> Report:
    given, out = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    case = Case("tile", TILE, {}, lambda: ((given, out), lambda: bool((out[:64] == given[:64]).all())), block=64)
    return case.run(*defines, schedules=schedules)[0]


def test_a_read_before_its_copy_is_issued_is_a_read_without_a_wait() -> None:
    """In order, warp 0 reads the unwritten tile before warp 1 issues the copy."""
    assert run(schedules=20).is_clean
    report = run("NO_WAIT")
    cause = report.findings[0]
    assert cause.kind == "read_before_load"
    assert "mbarrier.try_wait.parity" in cause.advice
    assert "phase 0 (parity 0) of the mbarrier full[0] of block" in cause.advice
    assert len(report.hazards) == 1
    assert report.kinds == {"read_before_load", "uninitialized_shared"}


def test_text_and_data_show_what_follows_under_its_cause() -> None:
    report = run("NO_WAIT")
    text = str(report)
    assert text.startswith("read_before_load: ")
    assert "  missing: before the read, a wait for phase 0 (parity 0) of the mbarrier full[0] of block" in text
    assert "  then uninitialized_shared at PTX line " in text
    data = asdict(report.hazards[0])
    assert [c["kind"] for c in data["consequences"]] == ["uninitialized_shared"]
    assert data["consequences"][0]["ptx_line"] == data["ptx_line"]


def test_mistakes_that_share_no_bytes_stay_apart() -> None:
    report = run("NO_WAIT", "NO_BARRIER", schedules=4)
    assert {"read_before_load", "data_race"} <= {hazard.kind for hazard in report.hazards}
    report = run("NO_WAIT", "OTHER_COUNT", schedules=4)
    assert {"byte_count", "read_before_load"} <= {hazard.kind for hazard in report.hazards}


# ---- schedules of a ring


def ring(*defines: str, hazards: str = "collect", schedules: int = 8, **options: Any) -> Report:
    args, _ = RING.arguments()
    return module_of(RING.source, defines).launch("k", 1, 96, args, hazards=hazards, schedules=schedules, **options)


def test_a_schedule_ends_at_a_kind_that_is_asked_for() -> None:
    whole, stopped = (ring("NO_WAIT", stop_at=stop_at) for stop_at in ((), ("read_before_load", "trap")))
    assert "read_before_load" in stopped.kinds
    assert stopped.kinds <= whole.kinds
    assert stopped.steps < whole.steps / 2
    assert ring("NO_WAIT", stop_at=("data_race",)).findings == whole.findings


@pytest.mark.parametrize(
    ("stop_at", "error", "got"), [(("races",), ArgumentError, "races"), ("data_race", ArgumentTypeError, "str")]
)
def test_a_kind_to_stop_at_that_there_is_not(stop_at: Any, error: type[Exception], got: str) -> None:
    with pytest.raises(error, match=rf"^stop_at must be .*hazard kinds.*, got {got}"):
        ring(stop_at=stop_at)


def test_a_failing_schedule_can_be_replayed() -> None:
    hazard = ring("NO_ACQUIRE").hazards[0]
    assert hazard.kind in ring("NO_ACQUIRE", seed=hazard.seed, replay=hazard.schedule).kinds


def test_raise_names_everything_that_was_found() -> None:
    with pytest.raises(HazardError, match=r"missing_init_fence.*\n.*PTX line \d+ \(kernel.cu:\d+\)"):
        ring("NO_INIT_FENCE", hazards="raise")


# ---- other ways to wait, and to read


POLL = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ __align__(128) u32 box[256];
    __shared__ __align__(8) u64 barrier;
    const u32 bar = ADDRESS(&barrier);
    if (threadIdx.x == 0) { INIT(bar, ARRIVALS); FENCE_INIT(); }
    __syncthreads();
    if (threadIdx.x == 0) { EXPECT(bar, 1024); BULK_LOAD(ADDRESS(box), in, 1024, bar); }
    u32 done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(bar) : "memory");
    out[threadIdx.x] = box[threadIdx.x];
}"""


@pytest.mark.parametrize(("arrivals", "kinds"), [(1, set()), (2, {"deadlock"})])
def test_threads_that_poll_instead_of_waiting(arrivals: int, kinds: set[str]) -> None:
    given, out = np.arange(256, dtype=np.uint32), np.zeros(64, np.uint32)
    module = module_of(POLL, (f"ARRIVALS {arrivals}",))
    report = module.launch("k", 1, 64, (given, out), schedules=8, hazards="collect", step_limit=100_000)
    assert report.kinds == kinds
    assert kinds or (out == given[:64]).all()


def test_a_register_that_nobody_wrote() -> None:
    body = "add.u32 %r2, %r1, 1;\nld.param.u64 %d1, [p0];\nst.global.u32 [%d1], %r2;"
    report = kernel(body, params=1).launch("k", 1, 32, (np.zeros(1, np.uint32),), hazards="collect")
    assert report.kinds == {"uninitialized_register"}
    assert "%r1 is read" in str(report)


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


def run_swizzled(*defines: str, swizzle: str = "128B", to_swizzle: str = "128B") -> tuple[Report, Any]:
    given = np.arange(256, dtype=np.float32).reshape(8, 32)
    stored, out = np.zeros_like(given), np.zeros(256, np.float32)
    maps = [
        TensorMap.from_array(array, (8, 32), swizzle=mode, encoder="codec")
        for array, mode in ((given, swizzle), (stored, to_swizzle))
    ]
    return module_of(KERNEL, defines).launch("k", 1, 64, (*maps, out), schedules=3, hazards="collect"), out


@pytest.mark.parametrize("way", LINEAR)
def test_a_linear_read_is_a_warning(way: str) -> None:
    report, _ = run_swizzled(LINEAR[way])
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
    report, out = run_swizzled(HEEDING[way])
    assert report.is_clean, str(report)
    assert not report.warnings
    assert way != "rows" or (out == np.arange(256)).all()


@pytest.mark.parametrize("way", LINEAR)
def test_a_tile_without_a_swizzle_is_read_as_one_likes(way: str) -> None:
    report, _ = run_swizzled(LINEAR[way], swizzle="none")
    assert report.is_clean, str(report)
    assert not report.warnings


@pytest.mark.parametrize("use", ["COPY_ON", "MATRICES", "IN_PLACE"])
def test_other_uses_of_a_swizzled_tile_are_none(use: str) -> None:
    """Copied on by TMA, read by ldmatrix with the swizzle, changed where it lies."""
    report, _ = run_swizzled(use)
    assert report.is_clean, str(report)
    assert not report.warnings


@pytest.mark.parametrize(
    ("callers", "source"),
    [
        (2, "h0.cuh:10, inlined at h1.cuh:11, inlined at user.cu:12"),
        (12, "h0.cuh:10, inlined at user.cu:22"),
    ],
)
def test_a_long_chain_of_inlined_calls_keeps_its_ends(callers: int, source: str) -> None:
    """The kernel is in user.cu; every other function is in a header of its own."""
    files = [f'.file {depth + 1} "/include/h{depth}.cuh"\n' for depth in range(callers)]
    files.append(f'.file {callers + 1} "/home/user.cu"\n')
    places = [f".loc {depth + 1} {10 + depth} 0" for depth in range(callers + 1)]
    chain = [places[-1]]
    for depth in reversed(range(callers)):
        chain.append(f"{places[depth]}, function_name name, inlined_at {places[depth + 1].removeprefix('.loc ')}")
    body = "\n".join([*chain, "add.u32 %r1, %r1, 1;"])
    module = parse(f"{HEADER}{''.join(files)}.visible .entry k() {{ .reg .b32 %r<2>;\n{body}\nret; }}")
    assert module.source_of(module.functions["k"].body[0]) == source
