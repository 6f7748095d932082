"""Control flow, calls, memories, clusters, warp instructions, parser errors and events, on PTX by nvcc or by hand."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptx_lines import kernel
from ptx_of import module_of

from cudatma.emulator import EmulatedModule, EmulatorError, PtxError, TrapError, api, coverage, load
from cudatma.emulator.machine.events import UNOBSERVED, Observer, combined
from cudatma.errors import HazardError

CALLS = r"""
__constant__ float table[4] = {1.f, 2.f, 3.f, 4.f};
__device__ int counter = 7;
__device__ __noinline__ float walk(float x, int n, float* p) {
    float s = 0;
    for (int i = 0; i < n; i++) { s += x * p[i]; if (s > 100.f) return s; }
    return s;
}
__device__ __noinline__ int power(int n) { return n <= 1 ? 1 : n * power(n - 1); }
extern __shared__ float late[];
extern "C" __global__ void __launch_bounds__(128) k(float* a, const float* b, int n, int* f) {
    __shared__ float early[128];
    float own[8];
    for (int i = 0; i < 8; i++) own[(i * n) & 7] = b[i];
    early[threadIdx.x] = b[threadIdx.x];
    __syncthreads();
    float v = walk(early[threadIdx.x ^ 1], n, own) + table[threadIdx.x & 3];
    if (threadIdx.x & 1) v = v * 2; else v = sqrtf(v);
    v += __shfl_xor_sync(~0u, v, 3);
    atomicAdd(&counter, 1);
    late[threadIdx.x] = v;
    __syncwarp();
    a[threadIdx.x] = late[threadIdx.x];
    f[threadIdx.x] = power(threadIdx.x % 7);
}
"""


def reference(b: Any, n: int) -> Any:
    own = np.zeros(8, np.float32)
    for i in range(8):
        own[(i * n) & 7] = b[i]
    values = []
    for t in range(128):
        s = np.float32(0)
        for i in range(n):
            s += b[t ^ 1] * own[i]
            if s > 100:
                break
        v = np.float32(s + (1 + (t & 3)))
        values.append(v * 2 if t & 1 else np.sqrt(v))
    result = np.array(values, np.float32)
    return result + result[np.arange(128) ^ 3]


def check_calls(module: EmulatedModule) -> None:
    a, f = np.zeros(128, np.float32), np.zeros(128, np.int32)
    b = np.arange(128, dtype=np.float32)
    assert module.launch("k", 1, 128, (a, b, 5, f), shared_bytes=512, schedules=5).is_clean
    assert (a == reference(b, 5)).all()
    factorial = [1, 1, 2, 6, 24, 120, 720]
    assert f.tolist() == [factorial[t % 7] for t in range(128)]
    assert module.variable("counter").view(np.int32)[0] == 7 + 128  # each schedule starts from the same memory


def test_calls_recursion_local_and_constant_memory() -> None:
    check_calls(module_of(CALLS))


def test_the_same_as_nvcc_writes_it(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    (tmp_path / "k.cu").write_text(CALLS)
    command = [nvcc, "-ptx", "-arch=sm_90a", "-lineinfo", "-o", str(tmp_path / "k.ptx"), str(tmp_path / "k.cu")]
    subprocess.run(command, check=True, capture_output=True)
    text = (tmp_path / "k.ptx").read_text()
    check_calls(load(text))
    assert not coverage(text).missing


def test_loops_that_lanes_leave_at_different_times() -> None:
    module = module_of("""
extern "C" __global__ void k(u32* out) {
    u32 n = threadIdx.x * 2654435761u >> 20, steps = 0;
    while (n != 1 && steps < 500) {
        if (n == 0) break;
        n = n & 1 ? 3 * n + 1 : n / 2;
        ++steps;
    }
    switch (threadIdx.x % 5) { case 0: steps += 1000; break; case 1: steps *= 2; break; case 3: steps ^= 5; break; }
    out[threadIdx.x] = steps;
}""")
    out = np.zeros(96, np.uint32)
    assert module.launch("k", 1, 96, (out,), schedules=4).is_clean
    wanted = []
    for t in range(96):
        n, steps = (t * 2654435761 & 0xFFFFFFFF) >> 20, 0
        while n != 1 and steps < 500 and n != 0:
            n = 3 * n + 1 if n & 1 else n // 2
            steps += 1
        wanted.append({0: steps + 1000, 1: steps * 2, 3: steps ^ 5}.get(t % 5, steps))
    assert out.tolist() == wanted


def test_lanes_of_one_warp_may_wait_for_each_other() -> None:
    module = module_of("""
extern "C" __global__ void k(u32* out) {
    __shared__ __align__(8) u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) { mbarrier_init(bar, 1); fence_mbarrier_init(); }
    __syncwarp();
    if (threadIdx.x == 0) mbarrier_wait_parity(bar, 0);
    else if (threadIdx.x == 1) mbarrier_arrive(bar);
    out[threadIdx.x] = threadIdx.x;
}""")
    out = np.zeros(32, np.uint32)
    assert module.launch("k", 1, 32, (out,), schedules=6).is_clean
    assert out.tolist() == list(range(32))


def test_warp_instructions() -> None:
    module = module_of("""
extern "C" __global__ void k(u32* out) {
    const u32 lane = threadIdx.x, v = lane * 7 % 5;
    out[lane] = __ballot_sync(~0u, v > 2);
    out[32 + lane] = __match_any_sync(~0u, v);
    out[64 + lane] = __reduce_add_sync(~0u, v);
    out[96 + lane] = __shfl_up_sync(~0u, v, 3, 8);
    out[128 + lane] = __reduce_xor_sync(~0u, v) + __popc(__activemask()) + __all_sync(~0u, v < 5);
    if (v == 1) out[160 + lane] = __popc(__activemask());
}""")
    out = np.zeros(192, np.uint32)
    assert module.launch("k", 1, 32, (out,)).is_clean
    v = np.arange(32) * 7 % 5
    assert (out[:32] == sum(1 << i for i in range(32) if v[i] > 2)).all()
    assert out[32:64].tolist() == [sum(1 << j for j in range(32) if v[j] == v[i]) for i in range(32)]
    assert (out[64:96] == v.sum()).all()
    assert out[96:128].tolist() == [v[i - 3] if i % 8 >= 3 else v[i] for i in range(32)]
    assert (out[128:160] == np.bitwise_xor.reduce(v) + 32 + 1).all()
    assert (out[160:][v == 1] == (v == 1).sum()).all()


def test_atomics() -> None:
    module = module_of("""
extern "C" __global__ void k(u32* out, float* sum, unsigned long long* wide) {
    __shared__ u32 box;
    if (threadIdx.x == 0) box = 0;
    __syncthreads();
    atomicAdd(&box, threadIdx.x);
    atomicMax(out + 1, threadIdx.x * 37 % 64);
    atomicAdd(sum, 0.5f);
    atomicCAS(out + 2, 9u, 11u);
    atomicInc(out + 3, 10u);
    atomicExch(wide, 1ull << 40);
    __syncthreads();
    if (threadIdx.x == 0) out[0] = box;
}""")
    out, total, wide = np.array([0, 0, 9, 0], np.uint32), np.zeros(1, np.float32), np.zeros(1, np.uint64)
    assert module.launch("k", 1, 64, (out, total, wide), schedules=3).is_clean
    assert out.tolist() == [sum(range(64)), 63, 11, 64 % 11]
    assert total[0] == 32
    assert wide[0] == 1 << 40


def test_shared_memory_of_a_cluster() -> None:
    module = module_of("""
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(u32* out) {
    __shared__ u32 box[32];
    const u32 rank = cluster_ctarank();
    box[threadIdx.x] = 100 * rank + threadIdx.x;
#ifndef BUG
    barrier_cluster_arrive(); barrier_cluster_wait();
#endif
    u32 v;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v)
                 : "r"(mapa_shared_cluster(shared_address(box) + 4 * threadIdx.x, rank ^ 1)));
    out[blockIdx.x * 32 + threadIdx.x] = v;
    barrier_cluster_arrive(); barrier_cluster_wait();
}""")
    out = np.zeros(64, np.uint32)
    assert module.launch("k", 2, 32, (out,), schedules=5).is_clean
    assert out.tolist() == [100 + i for i in range(32)] + list(range(32))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not PTX"),
        (".version 8.0\n.target sm_90a\n.address_size 64\n.entry k() { frobnicate.u32 %r1; }", "no such|unknown|`frob"),
        (".version 8.0\n.target sm_90a\n.address_size 64\n.entry k() { bra nowhere; }", "nowhere"),
        (".version 8.0\n.target sm_90a\n.address_size 64\n.entry k() { .reg .b32 %r<5>; mov.u32 %r1, %r2", "line 4"),
        (".version 8.0\n.entry k() { .reg .b32 %r<99999999999>; }", "registers"),
        (".version 8.0\n.global .b8 a[99999999999999];", "bytes"),
        ("{" * 5000, "directive"),
        (".version 8.0\n.entry k() " + "{" * 5000, "nested"),
    ],
)
def test_hostile_text_is_refused(text: str, match: str) -> None:
    with pytest.raises(PtxError, match=match):
        load(text).launch("k", 1, 32)


def test_an_unknown_instruction_names_its_lines() -> None:
    module = kernel("mov.u32 %r1, 1;\nwarpspeed.u32 %r2, %r1;")
    a = np.zeros(1, np.uint8)
    with pytest.raises(PtxError, match=r"PTX line 9: instruction `warpspeed.u32` is unknown") as caught:
        module.launch("k", 1, 32, (a, a, a, a))
    assert caught.value.line == 9


def test_traps_and_asserts() -> None:
    a = np.zeros(1, np.uint8)
    with pytest.raises(TrapError, match="trap"):
        kernel("trap;").launch("k", 1, 32, (a, a, a, a))
    with pytest.raises(HazardError, match="past the end of p0"):
        kernel("ld.param.u64 %d1, [p0];\nld.global.u8 %h1, [%d1+64];").launch("k", 1, 32, (a, a, a, a))
    with pytest.raises(HazardError, match=r"access of 1 byte at 0x[0-9a-f]+, 1 byte past the end of p0"):
        kernel("ld.param.u64 %d1, [p0];\nld.global.u8 %h1, [%d1+2];").launch("k", 1, 32, (a, a, a, a))
    assert issubclass(TrapError, EmulatorError)


@pytest.mark.parametrize("version", ["0x9", "1" * 5000, "8.1e3", "9999999999.1"])
def test_a_version_that_is_none(version: str) -> None:
    text = f".version {version}\n.target sm_90a\n.address_size 64\n"
    with pytest.raises(PtxError, match="version"):
        load(text)


BODY = """
shl.b32 %r1, %r63, 2;
mov.u32 %r2, buffer;
add.u32 %r1, %r1, %r2;
st.shared.u32 [%r1], %r63;
bar.sync 0;
ld.shared.u32 %r3, [%r1];
"""


class Log(Observer):
    """Notes what happens."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def note(self, what: str) -> None:
        self.log.append(f"a: {what}")

    def warp_started(self, w: Any) -> None:
        self.note("start")

    def shared_write(self, w: Any, at: int, block: Any, offsets: Any, *rest: Any) -> None:
        self.note(f"write over {block.shared.data[int(offsets[5])]:#x}")

    def shared_read(self, w: Any, at: int, block: Any, offsets: Any, *rest: Any) -> None:
        self.note(f"read {block.shared.data[int(offsets[5])]:#x}")

    def barrier_completed(self, barrier: Any, warps: list[Any]) -> None:
        self.note(f"barrier {barrier.number}")

    def cluster_ended(self) -> None:
        self.note("cluster ends")

    def block_ended(self, block: Any) -> None:
        self.note("block ends")

    def warp_ended(self, w: Any) -> None:
        self.note("warp ends")


class Barriers(Observer):
    """Is called for barriers alone."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def barrier_completed(self, barrier: Any, warps: list[Any]) -> None:
        self.log.append(f"b: barrier {barrier.number}")


def test_observers_are_called_in_their_order_before_each_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(api, "checks_of", lambda *of: [Log(log), Barriers(log)])
    kernel(BODY, declarations=".shared .align 4 .b8 buffer[128];").launch("k", 1, 32, (0,) * 4, schedules=1)
    assert log == [
        "a: start",
        "a: write over 0xa5",
        "a: barrier 0",
        "b: barrier 0",
        "a: read 0x5",
        "a: cluster ends",
        "a: block ends",
        "a: warp ends",
    ]


def test_nobody_observes_a_launch_without_hazards_and_trace() -> None:
    assert combined(()) is UNOBSERVED
