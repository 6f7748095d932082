"""Record six launches on a GPU, and run them on the emulator.

    python tests/programs/record_on_gpu.py FOLDER          on a machine with a GPU, with torch, Triton and CuPy
    python tests/programs/record_on_gpu.py FOLDER --replay on any machine
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cudatma

#: Maximum ||difference|| / ||expected|| of each program's launches.
TOLERANCES = {"torch_compile": 1e-5, "triton": 1e-6, "gluon": 0.0, "cupy": 0.0, "marlin": 2e-3, "gemm": 2e-3}


def torch_compile() -> None:
    """Launch a fused kernel of torch.compile."""
    import torch

    @torch.compile(dynamic=False)
    def activation(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + bias) * 0.5 + x

    x, bias = torch.randn(64, 200, device="cuda"), torch.randn(200, device="cuda")
    expected = torch.relu(x + bias) * 0.5 + x
    assert torch.allclose(activation(x, bias), expected)


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


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program for program in (torch_compile, triton, gluon, cupy, marlin, gemm)
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
            print(*([] if replay.report.is_clean else [replay.report]), *replay.comparisons, sep="\n", flush=True)
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
