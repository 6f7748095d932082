"""Schedules: CTAs in any order, bounded polls that end, traps with their place, and the same run for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lines import kernel
from ptx_of import module_of

import cudatma
import cudatma.emulator.machine.launch as launching
from cudatma.build.nvrtc import compile_source
from cudatma.emulator import ResidencyError, TrapError
from cudatma.errors import HazardError
from cudatma.runtime.compiler_log import register_count
from cudatma.target import get_target

FLAG = """
extern "C" __global__ void k(u32* data, u32* flag, u32* out, u32 producer, u32 consumer, u32 tries) {
    if (blockIdx.x == producer && threadIdx.x == 0) {
        data[0] = 5;
        __threadfence();
        atomicExch(flag, 1);
    }
    if (blockIdx.x == consumer && threadIdx.x == 0) {
        u32 seen = 0;
        for (u32 i = 0; i < tries && !seen; ++i) seen = atomicAdd(flag, 0);
        __threadfence();
        out[0] = data[0];
    }
}
"""


def polled(producer: int, consumer: int, grid: int, tries: int, schedules: int) -> set[str]:
    data, flag, out = (np.zeros(1, np.uint32) for _ in range(3))
    args = (data, flag, out, producer, consumer, tries)
    report = module_of(FLAG).launch("k", grid, 32, args, schedules=schedules, hazards="collect")
    kinds: set[str] = report.kinds
    return kinds


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("producer", "consumer", "grid"), [(0, 1, 2), (1, 0, 2), (0, 100, 101), (100, 0, 101)])
@pytest.mark.parametrize("tries", [1, 20])
def test_a_flag_that_is_polled_a_few_times_may_not_be_set_yet(
    producer: int, consumer: int, grid: int, tries: int
) -> None:
    assert polled(producer, consumer, grid, tries, schedules=20) == {"global_race"}


def test_two_schedules_find_a_consumer_that_starts_before_its_producer() -> None:
    assert polled(0, 1, 2, 1, schedules=2) == {"global_race"}


# Whoever finds the flag taken has to wait for 2; one look is too few where it comes between the other's CAS and store.
INITIALISED_ONCE = """
extern "C" __global__ void k(u32* data, u32* state, u32* out, u32 looks) {
    if (threadIdx.x) return;
    volatile u32* flag = state;
    if (*flag != 2) {
        if (atomicCAS(state, 0, 1) == 0) {
            data[0] = 42;
            __threadfence();
            *flag = 2;
        } else {
            for (u32 i = 0; i < looks && *flag != 2; ++i) {}
        }
    }
    __threadfence();
    out[blockIdx.x] = data[0];
}
"""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(4))
def test_blocks_are_interleaved_at_their_atomics(seed: int) -> None:
    for looks, kinds in ((1 << 20, set()), (1, {"global_race"})):
        args = np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.zeros(6, np.uint32), looks
        report = module_of(INITIALISED_ONCE).launch("k", 6, 32, args, schedules=30, seed=seed, hazards="collect")
        assert report.kinds == kinds, str(report)


CHAIN = """
extern "C" __global__ void k(u32* flags, u32* out, u32 is_reversed) {
    const u32 at = is_reversed ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    if (threadIdx.x) return;
    u32 before = 0, flag;
    if (at) {
        do asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(flag) : "l"(flags + at - 1) : "memory"); while (!flag);
        before = out[at - 1];
    }
    out[at] = before + at;
    asm volatile("st.release.gpu.u32 [%0], %1;" :: "l"(flags + at), "r"(1) : "memory");
}
"""


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("grid", "schedules", "resident", "is_reversed"),
    [(3, 50, 132, 0), (3, 50, 132, 1), (24, 6, 132, 0), (24, 4, 2, 1), (150, 2, 132, 1)],
)
def test_ctas_that_wait_for_each_other_keep_none_from_starting(
    grid: int, schedules: int, resident: int, is_reversed: int
) -> None:
    """A look-back scan, and one whose CTAs wait for later ones."""
    flags, out = np.zeros(grid, np.uint32), np.zeros(grid, np.uint32)
    args = (flags, out, is_reversed)
    module_of(CHAIN).launch("k", grid, 32, args, schedules=schedules, resident_clusters=resident)
    assert (out == np.arange(grid).cumsum()).all()


ALL_WAIT = """
extern "C" __global__ void k(volatile u32* flag, u32* out) {
    __shared__ u32 tile[4096];
    tile[threadIdx.x] = threadIdx.x;
    if (blockIdx.x == gridDim.x - 1) *flag = 1;
    while (!*flag) {}
    out[blockIdx.x] = tile[0];
}
"""


@pytest.mark.parametrize("look", ["!*flag", "!atomicAdd((u32*)flag, 0)", "atomicCAS((u32*)flag, 1, 1) != 1"])
def test_ctas_that_all_spin_exceed_the_bound_of_live_ones(look: str) -> None:
    flag, out = np.zeros(1, np.uint32), np.zeros(12, np.uint32)
    module = module_of(ALL_WAIT.replace("!*flag", look).replace("= tile[0]", "= 7"))
    module.launch("k", 12, 1, (flag, out), schedules=3, resident_clusters=4, step_limit=100_000)
    assert (out == 7).all()


@pytest.mark.parametrize(
    "body",
    [
        "if (blockIdx.x == gridDim.x - 1) *flag = 1; else while (!*flag) {}",
        "atomicAdd((u32*)flag, 1); while (*flag < gridDim.x) {}",
        "atomicAdd((u32*)flag, 1); while (atomicAdd((u32*)flag, 0) < gridDim.x) {}",
    ],
    ids=["the last one sets a flag", "grid barrier", "grid barrier of atomics"],
)
def test_each_poller_looks_again_before_it_is_a_deadlock(body: str) -> None:
    module = module_of(f'extern "C" __global__ void k(volatile u32* flag) {{ if (threadIdx.x == 0) {{ {body} }} }}')
    for grid in (7, 9):
        assert module.launch("k", grid, 32, (np.zeros(1, np.uint32),), schedules=4).is_clean


def test_a_hang_in_a_large_grid_is_a_deadlock() -> None:
    """No other CTA can end a wait for an mbarrier of one's own."""
    endless = POLL.replace("WAIT", "mbarrier_try_wait_parity").replace("i < tries && ", "")
    args = (np.zeros(64, np.uint32), 0)
    report = module_of(endless).launch("k", 5000, 64, args, replay=0, hazards="collect", resident_clusters=4)
    assert report.kinds == {"deadlock"}


def test_live_ctas_take_no_more_memory_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    flag, out = np.zeros(1, np.uint32), np.zeros(40, np.uint32)
    module_of(ALL_WAIT).launch("k", 40, 1, (flag, out), replay=0, resident_clusters=4)
    flag[:] = 0
    monkeypatch.setattr(launching, "MAX_LIVE_BYTES", 8 << 20)
    with pytest.raises(
        ResidencyError, match=r"^grid: \d+ live CTAs occupy \d MiB of host memory \(limit \d MiB\) and wait"
    ):
        module_of(ALL_WAIT).launch("k", 40, 1, (flag, out), replay=0, resident_clusters=4)


POLL = """
extern "C" __global__ void k(u32* out, u32 tries) {
    __shared__ __align__(8) u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) { mbarrier_init(bar, 2); fence_mbarrier_init(); }
    __syncthreads();
    u32 done = 0;
    if (threadIdx.x < 32)
        for (u32 i = 0; i < tries && !done; ++i) done = WAIT(bar, 0);
    out[threadIdx.x] = 1000 + done;
}
"""


@pytest.mark.parametrize("wait", ["mbarrier_test_wait_parity", "mbarrier_try_wait_parity"])
@pytest.mark.parametrize("tries", [1, 7, 500])
def test_a_poll_that_is_bounded_by_a_count_is_no_deadlock(wait: str, tries: int) -> None:
    out = np.zeros(64, np.uint32)
    module_of(POLL.replace("WAIT", wait)).launch("k", 1, 64, (out, tries), schedules=4)
    assert (out == 1000).all()


@pytest.mark.parametrize("wait", ["mbarrier_test_wait_parity", "mbarrier_try_wait_parity"])
def test_a_poll_that_never_ends_is_a_deadlock(wait: str) -> None:
    endless = POLL.replace("WAIT", wait).replace("i < tries && ", "")
    report = module_of(endless).launch("k", 1, 64, (np.zeros(64, np.uint32), 0), schedules=4, hazards="collect")
    assert report.kinds == {"deadlock"}


def test_a_count_beyond_the_step_limit_is_a_deadlock() -> None:
    module = module_of(POLL.replace("WAIT", "mbarrier_try_wait_parity"))
    args = (np.zeros(64, np.uint32), 1 << 30)
    report = module.launch("k", 1, 64, args, schedules=1, hazards="collect", step_limit=5000)
    assert report.kinds == {"deadlock"}


@pytest.mark.parametrize("schedule", [1, 5])
def test_the_same_seed_gives_the_same_run(schedule: int) -> None:
    def steps(seed: int) -> tuple[int, str]:
        flags, out = np.zeros(20, np.uint32), np.zeros(20, np.uint32)
        report = module_of(CHAIN).launch("k", 20, 32, (flags, out, 1), replay=schedule, seed=seed)
        return report.steps, str(report)

    assert steps(3) == steps(3)


TRAPS = """
__device__ __noinline__ void refuse(u32 block) { if (blockIdx.x == block && threadIdx.x >= 32) __trap(); }   // here
extern "C" __global__ void k(u32 block) { refuse(block); }
"""


def test_a_trap_has_its_place() -> None:
    module = module_of(TRAPS)
    report = module.launch("k", 4, 64, (2,), schedules=1, hazards="collect")
    (hazard,) = report.hazards
    assert (hazard.kind, hazard.block, hazard.warp, hazard.instruction) == ("trap", (2, 0, 0), 1, "trap")
    assert hazard.ptx_line > 0
    assert hazard.source.startswith("kernel.cu:")
    place = rf"PTX line {hazard.ptx_line} \(kernel.cu:\d+.*\) `trap`, block \(2, 0, 0\), warp 1"
    with pytest.raises(TrapError, match=place):
        module.launch("k", 4, 64, (2,), schedules=1)


@pytest.mark.parametrize(
    ("body", "instruction"),
    [
        ("mov.u32 %r1, 16;\nbar.sync %r1;", "bar.sync %r1"),
        ("barrier.cluster.wait;", "barrier.cluster.wait"),
        ("mov.u32 %r1, s;\nmbarrier.init.shared.b64 [%r1], 0;", "mbarrier.init.shared.b64 [%r1], 0"),
        ("mov.u32 %r2, 7;\nld.shared.u32 %r1, [s+2];\nmov.u32 %r3, 8;", "ld.shared.u32 %r1, [s + 2]"),
    ],
)
def test_whatever_traps_has_its_place(body: str, instruction: str) -> None:
    module = kernel(body, 0, ".shared .align 16 .b8 s[64];\n")
    report = module.launch("k", 1, 32, (), schedules=1, hazards="collect")
    (hazard,) = [found for found in report.hazards if found.kind == "trap"]
    assert hazard.instruction == instruction
    assert hazard.ptx_line > 6
    assert (hazard.block, hazard.warp) == ((0, 0, 0), 0)
    with pytest.raises((TrapError, HazardError), match=r"PTX line \d+ `"):
        module.launch("k", 1, 32, (), schedules=1)


def test_the_log_of_ptxas_says_how_many_registers_a_kernel_has() -> None:
    source = 'extern "C" __global__ void __launch_bounds__(384, 1) k(int* x) { SET x[threadIdx.x] = 1; }'
    source += '\nextern "C" __global__ void other(int* x) { x[0] = 1; }'
    set_registers = 'asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");'

    def log(text: str) -> str:
        return compile_source(text, get_target("sm_90a")).log

    bounded = log(source.replace("SET", set_registers))
    assert register_count(bounded, "k") in range(40, 169)
    assert register_count(bounded, "missing") is None
    ignored = log(source.replace("SET", set_registers).replace("__launch_bounds__(384, 1)", ""))
    assert register_count(ignored, "k") == 0


def test_a_kernel_tells_the_emulator_what_ptxas_made_of_setmaxnreg() -> None:
    source = 'extern "C" __global__ void k() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }'
    report = cudatma.compile(source, target="sm_90a").emulate(1, 128)
    assert "unchecked: register_pool: ptxas ignores setmaxnreg" in str(report)
    bounded = source.replace("void k", "void __launch_bounds__(384, 1) k")
    with pytest.raises(HazardError, match="started with 168 per thread according to the cubin"):
        cudatma.compile(bounded, target="sm_90a").emulate(1, 384)
