"""Record launches of each library on a GPU, and run them on the emulator.

python tests/programs/record_on_gpu.py FOLDER          on a machine with a GPU, with torch, Triton and CuPy
python tests/programs/record_on_gpu.py FOLDER --replay on any machine
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cudatma

#: Maximum ||difference|| / ||expected|| of each program's launches.
TOLERANCES = {
    "torch_compile": 1e-5,
    "triton": 1e-6,
    "gluon": 0.0,
    "cupy": 0.0,
    "marlin": 2e-3,
    "gemm": 2e-3,
    "cuda_python": 0.0,
    "cuda_core": 0.0,
}


def torch_compile() -> None:
    """Launch a fused kernel of torch.compile."""
    import torch

    @torch.compile(dynamic=False)
    def activation(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + bias) * 0.5 + x

    bias = torch.randn(200, device="cuda")
    for _ in range(2):  # the first launch follows measurements, which have written its result before
        x = torch.randn(64, 200, device="cuda")
        assert torch.allclose(activation(x, bias), torch.relu(x + bias) * 0.5 + x)


def triton() -> None:
    """Launch a row-wise softmax written in Triton."""
    import torch
    from triton_kernels import softmax

    x = torch.randn(16, 100, device="cuda")
    y = torch.empty_like(x)
    softmax[(16,)](y, x, 100, BLOCK=128)
    assert torch.allclose(y, torch.softmax(x, dim=1))


def gluon() -> None:
    """Launch a Gluon kernel that doubles tiles through TMA."""
    import torch
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton_kernels import double_tiles

    x = torch.randn(64, 64, device="cuda", dtype=torch.float16)
    y = torch.empty_like(x)
    layout = gl.NVMMASharedLayout.get_default_for([32, 64], gl.float16)
    maps = [TensorDescriptor.from_tensor(array, [32, 64], layout) for array in (x, y)]
    double_tiles[(2,)](*maps, num_warps=4)
    assert torch.equal(y, x + x)


def cupy() -> None:
    """Launch a RawKernel that reverses blocks."""
    import cupy as cp

    code = r"""
    extern "C" __global__ void reverse(const float* x, float* y, int n) {
        __shared__ float tile[128];
        int i = blockIdx.x * 128 + threadIdx.x;
        if (i < n) tile[threadIdx.x] = x[i];
        __syncthreads();
        if (i < n) y[i] = tile[127 - threadIdx.x];
    }"""
    kernel = cp.RawKernel(code, "reverse")
    x = cp.arange(512, dtype=cp.float32)
    y = cp.empty_like(x)
    kernel((4,), (128,), (x, y, np.int32(512)))
    assert (cp.asnumpy(y) == cp.asnumpy(x).reshape(4, 128)[:, ::-1].reshape(-1)).all()


def marlin() -> None:
    """Launch cudatma's int4 GEMM."""
    import torch

    weight = cudatma.quantize(torch.randn(512, 256, device="cuda", dtype=torch.float16), group_size=128)
    x = torch.randn(16, 512, device="cuda", dtype=torch.float16)
    assert torch.isfinite(cudatma.marlin_gemm(x, weight)).all()


def gemm() -> None:
    """Launch cudatma's dense GEMM."""
    import torch

    a = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
    assert torch.allclose(cudatma.gemm(a, b).float(), a.float() @ b.float(), atol=0.5, rtol=0.05)


def cuda_python() -> None:
    """Launch PTX with cuda-python."""
    from cuda.bindings import driver

    def ok(result: tuple[Any, ...]) -> Any:
        assert int(result[0]) == 0, result[0]
        return result[1] if len(result) == 2 else None

    code = 'extern "C" __global__ void scale(float* x, float a, int n) { int i = threadIdx.x; if (i < n) x[i] *= a; }'
    ok(driver.cuInit(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))))
    module = ok(driver.cuModuleLoadData(cudatma.compile(code).ptx.encode() + b"\0"))
    x = np.arange(100, dtype=np.float32)
    memory = ok(driver.cuMemAlloc(x.nbytes))
    ok(driver.cuMemcpyHtoD(memory, x, x.nbytes))
    arguments = (memory, 2.0, 90), (None, ctypes.c_float, ctypes.c_int)
    function = ok(driver.cuModuleGetFunction(module, b"scale"))
    ok(driver.cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, 0, 0, arguments, 0))
    result = np.empty_like(x)
    ok(driver.cuMemcpyDtoH(result, memory, x.nbytes))
    assert (result == np.where(np.arange(100) < 90, 2 * x, x)).all()


def cuda_core() -> None:
    """Launch a kernel with cuda.core, if it is installed."""
    try:
        from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
    except ImportError:
        print("cuda.core is not installed")
        return
    code = 'extern "C" __global__ void iota(int* x, int n) { int i = threadIdx.x; if (i < n) x[i] = i; }'
    device = Device()
    device.set_current()
    stream = device.create_stream()
    options = ProgramOptions(std="c++17", arch=f"sm_{device.arch}")
    kernel = Program(code, "c++", options).compile("cubin").get_kernel("iota")
    memory = device.allocate(400, stream=stream)
    launch(stream, LaunchConfig(grid=1, block=128), kernel, memory, np.int32(90))
    stream.sync()


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program for program in (torch_compile, triton, gluon, cupy, marlin, gemm, cuda_python, cuda_core)
}


def record_all(folder: Path) -> int:
    """Record each program in a folder of its own. Return the number of programs that failed."""
    failed = 0
    for name, program in PROGRAMS.items():
        print(f"== record {name}", flush=True)
        try:
            with cudatma.record(folder / name) as recorder:
                program()
            print(recorder, flush=True)
        except Exception:
            failed += 1
            traceback.print_exc(file=sys.stdout)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{size / 2**20:.2f} MiB in {folder}")
    return failed


def replay_all(folder: Path) -> int:
    """Run each recorded launch on the emulator. Return the number of launches that differ or have hazards."""
    failed = 0
    for name, tolerance in TOLERANCES.items():
        if not (folder / name).is_dir():
            continue
        for number, recorded in enumerate(cudatma.read_recording(folder / name)):
            started = time.perf_counter()
            try:
                replay = recorded.run()
            except Exception as error:
                failed += 1
                print(f"== replay {name} {number} {recorded.entry}: {type(error).__name__}: {error}", flush=True)
                continue
            passed = replay.passes(tolerance)
            failed += not passed
            seconds = time.perf_counter() - started
            print(f"== replay {name} {number} {recorded.entry}: {'ok' if passed else 'WRONG'}, {seconds:.1f} s")
            hazards = [] if replay.report.is_clean else [replay.report]
            for line in [*hazards, *replay.comparisons] or ["the launch changed no memory"]:
                print(line, flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replay", action="store_true", help="only run the recorded launches on the emulator")
    options = parser.parse_args()
    failed = 0 if options.replay else record_all(options.folder)
    return 1 if failed + replay_all(options.folder) else 0


if __name__ == "__main__":
    raise SystemExit(main())
