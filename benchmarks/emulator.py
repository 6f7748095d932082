"""Measure the CPU time that the emulator takes to run GEMMs, TMA operations and simple kernels, and to load PTX.

The emulator uses one core, runs one schedule and checks for hazards.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cudatma.kernels.marlin.candidates import dump_configs

if __name__ == "__main__":  # The checkout need not be installed.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    # NumPy's matrix products would use more than one core.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks.report import ROOT, Cell, Result, Table, failure, machine_facts, make_parser, shown
from cudatma.build.kernel import load_kernel
from cudatma.build.nvrtc import compile_source
from cudatma.build.render import render
from cudatma.descriptor import TensorMap
from cudatma.emulator import EmulatedModule, Report, load
from cudatma.kernels.marlin.gemm import marlin_gemm
from cudatma.quantization import quantize
from cudatma.target import get_target

REPEATS = 5
TARGET = "sm_90a"
SWIZZLES = ("none", "32B", "64B", "128B")
#: Number of TMA loads or stores per launch in the tma cases.
COPIES = 64
_BOX_BYTES = 16384

_SGEMM = """
//# One thread per element, and tiles of 32 x 32 in shared memory.
using f32 = float;
extern "C" __global__ void __launch_bounds__(1024) sgemm(const f32* a, const f32* b, f32* c, int n, int k) {
    __shared__ f32 left[32][32], right[32][32];
    const int row = blockIdx.y * 32 + threadIdx.y, column = blockIdx.x * 32 + threadIdx.x;
    f32 sum = 0;
    for (int at = 0; at < k; at += 32) {
        left[threadIdx.y][threadIdx.x] = a[row * k + at + threadIdx.x];
        right[threadIdx.y][threadIdx.x] = b[(at + threadIdx.y) * n + column];
        __syncthreads();
        for (int i = 0; i < 32; ++i) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}
"""
_COPY = """
extern "C" __global__ void __launch_bounds__(256) copy(const float4* from, float4* to, int count) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) to[at] = from[at];
}
"""
_MMA_GEMM = """
//# Tiles of 64 x 64, four warps of 32 x 32, two stages of cp.async, ldmatrix, and rows padded to 72 elements.
//% include "primitives/cp_async.cuh.j2"
//% include "primitives/ldmatrix.cuh.j2"
//% include "primitives/mma.cuh.j2"
using namespace cudatma;
constexpr u32 TILE = 64, PITCH = 72, STAGE = 2 * TILE * PITCH * 2;
__device__ __forceinline__ void fetch(u32 to, const u16* from, u32 k) {
    for (u32 i = threadIdx.x; i < TILE * 8; i += 128)
        cp_async_16(to + i / 8 * PITCH * 2 + i % 8 * 16, from + i / 8 * k + i % 8 * 8, 16);
}
extern "C" __global__ void __launch_bounds__(128) mma_gemm(const u16* a, const u16* b, float* c, u32 n, u32 k) {
    __shared__ __align__(128) u8 shared[2 * STAGE];
    const u32 base = shared_address(shared), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    a += blockIdx.y * TILE * k;
    b += blockIdx.x * TILE * k;
    const u32 wm = warp / 2 * 32, wn = warp % 2 * 32;
    float d[2][4][4] = {};
    fetch(base, a, k);
    fetch(base + STAGE / 2, b, k);
    cp_async_commit_group();
    for (u32 at = 0, stage = 0; at < k; at += TILE, stage ^= 1) {
        if (at + TILE < k) {
            fetch(base + (stage ^ 1) * STAGE, a + at + TILE, k);
            fetch(base + (stage ^ 1) * STAGE + STAGE / 2, b + at + TILE, k);
        }
        cp_async_commit_group();
        cp_async_wait_group<1>();
        __syncthreads();
        const u32 left = base + stage * STAGE, right = left + STAGE / 2;
#pragma unroll
        for (u32 depth = 0; depth < TILE; depth += 16) {
            u32 fa[2][4], fb[2][4];
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                const u32 row = wm + 16 * i + lane % 16, column = wn + 16 * i + lane % 8 + lane / 16 * 8;
                ldmatrix_x4(fa[i], left + row * PITCH * 2 + (depth + lane / 16 * 8) * 2);
                ldmatrix_x4(fb[i], right + column * PITCH * 2 + (depth + lane / 8 % 2 * 8) * 2);
            }
#pragma unroll
            for (u32 i = 0; i < 2; ++i)
#pragma unroll
                for (u32 j = 0; j < 4; ++j)
                    mma_m16n8k16_f16(d[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
        }
        __syncthreads();
    }
    for (u32 i = 0; i < 2; ++i)
        for (u32 j = 0; j < 4; ++j)
            for (u32 e = 0; e < 4; ++e) {
                const u32 row = blockIdx.y * TILE + wm + 16 * i + lane / 4 + e / 2 * 8;
                c[row * n + blockIdx.x * TILE + wn + 8 * j + lane % 4 * 2 + e % 2] = d[i][j][e];
            }
}
"""
_TMA = """
//% include "primitives/bulk_group.cuh.j2"
//% include "primitives/fence.cuh.j2"
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/tma_load.cuh.j2"
//% include "primitives/tma_store.cuh.j2"
using namespace cudatma;
extern "C" __global__ void __launch_bounds__(32)
tma(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to, u32 bytes, u32 loads, u32 stores) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 box = shared_address(shared), bar = box + bytes;
    if (threadIdx.x) return;
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
    for (u32 i = 0; i < loads; ++i) {
        mbarrier_arrive_expect_tx(bar, bytes);
        cp_async_bulk_tensor_2d_load(box, &from, bar, 0, 0);
        mbarrier_wait_parity(bar, i & 1);
    }
    for (u32 i = 0; i < stores; ++i) {
        cp_async_bulk_tensor_2d_store(&to, box, 0, 0);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }
}
"""


#: The timed call, and a function that returns the maximum error of the result.
Prepared = tuple[Callable[[], object], Callable[[], float]]


@dataclass(frozen=True, slots=True)
class Case:
    """A benchmark. ``tolerance`` is the maximum allowed error, and ``operations`` the number of operations per call."""

    name: str
    prepare: Callable[[], Prepared]
    tolerance: float = 0.0
    operations: int = 1


@lru_cache(maxsize=32)
def _module(source: str) -> EmulatedModule:
    target = get_target(TARGET)
    return load(str(compile_source(render(source, None, target, is_source=True), target).ptx))


def _launcher(source: str, entry: str, grid: Any, block: Any, args: Any, **options: Any) -> Callable[[], Report]:
    module = _module(source)
    return lambda: module.launch(entry, grid, block, args, schedules=1, **options)


def _worst(result: Any, expected: Any) -> float:
    return float(np.abs(result.astype(np.float64) - expected).max())


def _normal(seed: int, shape: tuple[int, ...], dtype: type) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def _marlin() -> Prepared:
    """Prepare marlin_gemm for M = 16, N = 256, K = 512 and group size 128. Each call includes parsing the PTX."""
    w = quantize(_normal(0, (512, 256), np.float32) * 0.05)
    x, out = _normal(1, (16, 512), np.float16), np.zeros((16, 256), np.float16)
    expected = x.astype(np.float64) @ w.dequantize()
    return lambda: marlin_gemm(x, w, out=out, backend="emulator"), lambda: _worst(out, expected)


def _wgmma() -> Prepared:
    """Prepare the wgmma_gemm probe, which uses TMA, the 128-byte swizzle, one producer warp and m64n128k16."""
    sys.path.insert(0, str(ROOT / "tests" / "shared"))
    config = import_module("probe_configs").WgmmaGemm()
    module = load(load_kernel("probes/wgmma_gemm.cu.j2", config, get_target(TARGET)).ptx)
    a, b = (_normal(seed, (128, 128), np.float16) for seed in (2, 3))
    d = np.zeros((128, 128), np.float32)
    boxes = ((a, (config.loaded_m, 64), "128B"), (b, (config.tile_n, 64), "128B"), (d, (64, config.tile_n), "none"))
    args = [TensorMap.from_array(x, box, swizzle=mode, encoder="codec") for x, box, mode in boxes] + [2]

    def launch() -> Report:
        return module.launch(
            config.entry, 1, config.threads, args, shared_bytes=config.smem_bytes, schedules=1, arrays=(a, b, d)
        )

    return launch, lambda: _worst(d, a.astype(np.float64) @ b.astype(np.float64).T)


def _mma() -> Prepared:
    a, b = (_normal(seed, (128, 128), np.float16) for seed in (4, 5))
    c = np.zeros((128, 128), np.float32)
    launch = _launcher(_MMA_GEMM, "mma_gemm", (2, 2), 128, (a, b, c, 128, 128))
    return launch, lambda: _worst(c, a.astype(np.float64) @ b.astype(np.float64).T)


def _sgemm() -> Prepared:
    a, b = (_normal(seed, (128, 128), np.float32) for seed in (6, 7))
    c = np.zeros((128, 128), np.float32)
    launch = _launcher(_SGEMM, "sgemm", (4, 4), (32, 32), (a, b, c, 128, 128))
    return launch, lambda: _worst(c, a.astype(np.float64) @ b.astype(np.float64))


def _copy() -> Prepared:
    source = _normal(8, (1 << 20,), np.float32)
    to = np.zeros_like(source)
    launch = _launcher(_COPY, "copy", 1024, 256, (source, to, source.size // 4))
    return launch, lambda: _worst(to, source.astype(np.float64))


def _tma(mode: str, loads: int, stores: int) -> Prepared:
    """Prepare a kernel in which one thread moves the same 16 KB box repeatedly."""
    inner = {"none": 128, "32B": 16, "64B": 32, "128B": 64}[mode]
    rows = min(256, _BOX_BYTES // 2 // inner)
    source = np.arange(rows * inner, dtype=np.uint32).astype(np.uint16).reshape(rows, inner)
    to = np.zeros_like(source)
    maps = [TensorMap.from_array(x, (rows, inner), swizzle=mode, encoder="codec") for x in (source, to)]
    size = source.nbytes
    args = (*maps, size, loads, stores)
    launch = _launcher(_TMA, "tma", 1, 32, args, shared_bytes=size + 8, arrays=(source, to))
    return launch, lambda: _worst(to, source) if stores else 0.0


@lru_cache(maxsize=1)
def _large_ptx() -> str:
    """Return two million characters of PTX: copies of the Marlin kernel under different names."""
    config = dump_configs("mma_sync", get_target(TARGET))[0]
    head, entry = load_kernel("kernels/marlin_mma_sync.cu.j2", config, get_target(TARGET)).ptx.split(".visible", 1)
    kernel = ".visible" + entry.split(".section")[0]
    return head + "".join(kernel.replace(config.entry, f"{config.entry}_{i}") for i in range(2_000_000 // len(kernel)))


def _load() -> Prepared:
    text = _large_ptx()
    return lambda: load(text), lambda: 0.0


def all_cases() -> list[Case]:
    """Return all cases."""
    copies = [
        Case(f"TMA {what} of 16 KB, swizzle {mode}", partial(_tma, mode, *counts), 0.0, COPIES)
        for mode in SWIZZLES
        for what, counts in (("load", (COPIES, 0)), ("store", (1, COPIES)))
    ]
    return [
        Case("Marlin GEMM, M = 16, N = 256, K = 512", _marlin, 0.02),
        Case("wgmma GEMM, 128 x 128 x 128", _wgmma, 1e-4),
        *copies,
        Case("mma.sync GEMM, 128 x 128 x 128, ldmatrix", _mma, 1e-4),
        Case("SIMT SGEMM, 128 x 128 x 128", _sgemm, 1e-4),
        Case("copy of 1 Mi floats, 1024 blocks", _copy),
        Case("load of 2 MB of PTX", _load),
    ]


def measure(case: Case, repeats: int) -> Cell:
    """Measure the CPU milliseconds per operation in the first call (which compiles segments) and in later calls."""
    call, error = case.prepare()
    times = []
    for _ in range(1 + repeats):
        begin = time.process_time()
        call()
        times.append((time.process_time() - begin) * 1e3 / case.operations)
    worst = error()
    cell: Cell = {"case": case.name, "first_ms": times[0], "ms": statistics.median(times[1:])}
    if not worst <= case.tolerance:
        cell["error"] = f"the error of the result must be at most {case.tolerance:.3g}, got {worst:.3g}"
    return cell


def make_table(cells: Sequence[Cell]) -> Table:
    rows = tuple((c["case"], c.get("first_ms", "-"), c.get("ms", "-")) for c in cells)
    return Table(("one schedule, with checks for hazards", "first call, ms", "later calls, ms"), rows)


def processor() -> str:
    """Return the name of the processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench emulator`` and return the exit status (1 if a result is wrong)."""
    parser = make_parser("emulator", __doc__)
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help=f"number of calls after the first call (default: {REPEATS})"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="measure only cases whose names contain this text")
    options = parser.parse_args(argv)
    repeats = max(1, options.repeats)
    machine = {**machine_facts(), "processor": processor()}
    result = Result({"repeats": repeats}, make_table, options.json, machine=machine)
    for case in all_cases():
        if options.only.lower() not in case.name.lower():
            continue
        try:
            cell = measure(case, repeats)
        except Exception as error:  # A failed case does not end the run.
            cell = {"case": case.name, "error": failure(error)}
        result.add(cell, f"{case.name:<44} {shown(cell.get('first_ms'))} {shown(cell.get('ms'))}")
    return result.finish("The emulator on one core")


if __name__ == "__main__":
    raise SystemExit(main())
