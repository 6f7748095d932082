"""Reports of compiled kernels: resources against cuobjdump, occupancy, source lines, loops."""

from __future__ import annotations

import pickle
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import cudatma
from cudatma.errors import ArgumentError
from cudatma.review import Image, reports
from cudatma.review.cubin import Resources, read_cubin
from cudatma.review.occupancy import occupancy, target_of
from cudatma.review.report import KernelReport
from cudatma.runtime.launch import Kernel
from cudatma.toolkit import find_program

TARGETS = ("sm_90a", "sm_120a")
#: A kernel that spills and has a stack, one that calls a function and uses barriers, and one with a TMA pipeline.
SOURCE = """
__device__ __noinline__ float sum(float* x, int n) {
    float part[16];
    for (int i = 0; i < 16; ++i) part[i] = x[i + n];
    __syncthreads();
    return part[n & 15];
}
extern "C" __global__ void __launch_bounds__(1024) spilling(float* x, int n) {
    float part[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) part[i] = x[i * n];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; ++i) x[i] = part[i] * part[(i * 7) % 96];
}
extern "C" __global__ void __launch_bounds__(96) calling(float* x, int n) {
    __shared__ float shared[300];
    shared[threadIdx.x] = x[n];
    asm volatile("bar.sync 5, 96;" ::: "memory");
    x[threadIdx.x] = sum(x, n) + shared[threadIdx.x ^ 1];
}
extern "C" __global__ void piped(const float* x, float* y, int turns) {
    extern __shared__ float tile[];
    __shared__ unsigned long long barrier;
    const unsigned bar = (unsigned)__cvta_generic_to_shared(&barrier);
    const unsigned to = (unsigned)__cvta_generic_to_shared(tile);
    float total = 0;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        unsigned ready = 0;
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];"
                     :: "r"(to), "l"(x), "r"(bar) : "memory");
        while (!ready)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                         : "=r"(ready) : "r"(bar), "r"(turn & 1) : "memory");
        total += tile[threadIdx.x];
    }
    y[threadIdx.x] = total;
}
"""
LINES = {
    text: number
    for number, line in enumerate(SOURCE.splitlines(), 1)
    for text in ("cp.async", "try_wait")
    if text in line
}


def compiled(entry: str, target: str) -> Kernel:
    return cudatma.compile(SOURCE, target=target, entry=entry)


@pytest.mark.parametrize("target", TARGETS)
def test_resources_agree_with_cuobjdump(target: str, tmp_path: Path) -> None:
    program = find_program("cuobjdump")
    if program is None:
        pytest.skip("cuobjdump is not installed here")
    kernel = compiled("calling", target)
    (tmp_path / "k.cubin").write_bytes(kernel.cubin)
    command = [str(program), "--dump-resource-usage", "k.cubin"]
    text = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    pattern = r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    expected = {name: tuple(map(int, numbers)) for name, *numbers in re.findall(pattern, text)}
    cubin = read_cubin(kernel.cubin, "k.cubin", kernel.log)
    assert cubin.target == target
    assert {
        name: (use.registers, use.stack_bytes, use.static_smem_bytes + use.reserved_smem_bytes, use.local_bytes)
        for name, use in cubin.kernels.items()
    } == expected
    assert expected.keys() == {"spilling", "calling", "piped"}
    spilling, calling = cubin.kernels["spilling"], cubin.kernels["calling"]
    assert (spilling.max_threads, calling.max_threads, cubin.kernels["piped"].max_threads) == (1024, 96, None)
    assert (calling.named_barriers, calling.static_smem_bytes) == (6, 1200)
    log = re.search(
        r"'spilling'.*?stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", kernel.log, re.DOTALL
    )
    assert log is not None
    assert (spilling.spill_store_bytes, spilling.spill_load_bytes) == (int(log[1]), int(log[2]))
    assert int(log[1]) > 0


@pytest.mark.parametrize(
    ("target", "use", "threads", "dynamic_bytes", "ctas", "limited_by"),
    [  # the CTAs are what NVIDIA's cuda_occupancy.h gives
        ("sm_90a", {"registers": 168}, 384, 229440, 1, ("registers", "shared memory")),
        ("sm_90a", {"registers": 32}, 1024, 0, 2, ("registers", "threads")),
        ("sm_90a", {"registers": 33}, 1024, 0, 1, ("registers",)),
        ("sm_90a", {"registers": 16}, 32, 0, 32, ("CTAs",)),
        ("sm_90", {"registers": 16, "static_smem_bytes": 48 * 1024}, 64, 0, 4, ("shared memory",)),
        ("sm_90a", {"registers": 16}, 64, 233000, 0, ("shared memory",)),
        ("sm_90a", {"registers": 255}, 1024, 0, 0, ("registers",)),
        ("sm_120a", {"registers": 16}, 512, 0, 3, ("threads",)),
        ("sm_120", {"registers": 16, "named_barriers": 9}, 96, 0, 2, ("named barriers",)),
        ("sm_120a", {"registers": 40}, 33, 50 * 1024, 1, ("shared memory",)),
    ],
)
def test_occupancy(
    target: str, use: dict[str, Any], threads: int, dynamic_bytes: int, ctas: int, limited_by: tuple[str, ...]
) -> None:
    zeros = dict.fromkeys(
        ("stack_bytes", "local_bytes", "static_smem_bytes", "reserved_smem_bytes", "named_barriers"), 0
    )
    resources = Resources(**(zeros | {"spill_store_bytes": None, "spill_load_bytes": None, "max_threads": None} | use))
    known = target_of(target)
    assert known is not None
    result = occupancy(resources, known, threads, dynamic_bytes)
    assert (result.ctas, result.limited_by) == (ctas, limited_by)
    assert result.warps == ctas * -(-threads // 32)


def test_a_target_that_has_no_row() -> None:
    assert target_of("sm_80") is None


def lines_of(report: KernelReport, opcode: str) -> set[int]:
    return {row.places[0][1] for row in report.rows if row.opcode.startswith(opcode)}


@pytest.mark.parametrize("target", TARGETS)
def test_instructions_have_their_source_lines_and_loops_their_waits(target: str) -> None:
    if find_program("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed here")
    report = compiled("piped", target).report(threads=128, shared_bytes=1024)
    assert {row.kind for row in report.rows} == {"TMA", "mbarrier"}
    assert lines_of(report, "UBLKCP") in ({LINES["cp.async"]}, {LINES["cp.async"] + 1})
    assert lines_of(report, "SYNCS.PHASECHK") & {LINES["try_wait"], LINES["try_wait"] + 1}
    loop = report.loops[0]
    assert {"mbarrier", "LDS"} <= loop.waits.keys()
    assert (loop.depth, loop.classes["TMA"]) == (0, 1)
    assert (report.dynamic_smem_bytes, report.threads, report.smem_total_bytes) == (1024, 128, 1040)
    text = str(report)
    assert "(line of kernel.cu < line of the call)" in text
    assert "mbarrier" in text[text.index("waits for: ") :]
    assert report.as_dict()["rows"][0]["kind"] == "TMA"
    assert "code" not in report.as_dict()
    assert pickle.loads(pickle.dumps(report)) == report


def test_without_a_disassembler_the_table_is_that_of_the_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudatma.review.nvidia_programs.find_programs", lambda name: iter(()))
    report = compiled("piped", "sm_90a").report()
    assert report.sass is None
    assert report.notes[-1].startswith("no SASS: neither nvdisasm nor cuobjdump was found")
    assert report.resources is not None
    assert lines_of(report, "cp.async.bulk") in ({LINES["cp.async"]}, {LINES["cp.async"] + 1})
    assert lines_of(report, "mbarrier.try_wait") in ({LINES["try_wait"]}, {LINES["try_wait"] + 1})
    assert [each.threads for each in report.occupancy] == [128, 256, 512, 1024]
    assert "mbarrier.try_wait" in str(report)


def test_ptx_alone() -> None:
    ptx = """.version 8.0
.target sm_90a
.visible .entry other() { mbarrier.init.shared.b64 [%r1], 1; ret; }
.visible .entry k(.param .u64 p) .reqntid 64, 2 { @%p1 wgmma.fence.sync.aligned; ret; }"""
    (report,) = reports(Image("k", "sm_90a", ptx), entry="k")
    assert (report.resources, report.threads, report.occupancy) == (None, 128, ())
    assert [(row.kind, row.opcode, row.places) for row in report.rows] == [
        ("tensor core", "wgmma.fence.sync.aligned", ())
    ]
    with pytest.raises(ArgumentError, match=r"entry must be other or k.*got no"):
        reports(Image("k", "sm_90a", ptx), entry="no")
