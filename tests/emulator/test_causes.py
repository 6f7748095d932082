"""Reports put the cause first, and what follows from it under it; mistakes that have nothing in common stay apart."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from catalogue import Case

from cudatma.emulator import Report

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
    """In order, warp 0 reads the tile before warp 1 issues the copy: nobody has written it then."""
    assert run(schedules=20).is_clean
    report = run("NO_WAIT")
    cause = report.findings[0]
    assert cause.kind == "read_before_load"
    assert "mbarrier.try_wait.parity" in cause.advice
    assert "phase 0 (parity 0) of the mbarrier at 0x" in cause.advice
    assert len(report.hazards) == 1
    assert report.kinds == {"read_before_load", "uninitialised_shared"}


def test_text_and_data_show_what_follows_under_its_cause() -> None:
    report = run("NO_WAIT")
    text = str(report)
    assert text.startswith("read_before_load: ")
    assert "  missing: before the read a wait for phase 0 (parity 0) of the mbarrier at 0x" in text
    assert "  then uninitialised_shared at PTX line " in text
    data = asdict(report.hazards[0])
    assert [c["kind"] for c in data["consequences"]] == ["uninitialised_shared"]
    assert data["consequences"][0]["ptx_line"] == data["ptx_line"]


def test_mistakes_that_share_no_bytes_stay_apart() -> None:
    report = run("NO_WAIT", "NO_BARRIER", schedules=4)
    assert {"read_before_load", "data_race"} <= {hazard.kind for hazard in report.hazards}
    report = run("NO_WAIT", "OTHER_COUNT", schedules=4)
    assert {"byte_count", "read_before_load"} <= {hazard.kind for hazard in report.hazards}
