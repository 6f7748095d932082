"""Run a CuPy RawKernel on the emulator, without a GPU and with NumPy arrays instead of CuPy arrays.

    pip install cupy-cuda13x
    python examples/cupy_kernel.py             # no hazards and a correct result
    python examples/cupy_kernel.py --broken    # omits __syncthreads(); the emulator reports both lines of the race

Each block reverses 256 numbers in shared memory, so every thread reads an element that another thread wrote.
"""

from __future__ import annotations

import argparse

import cupy
import numpy as np

import cudatma

SOURCE = r"""
extern "C" __global__ void reverse(const float* x, float* y) {
    __shared__ float tile[256];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x] = x[i];
#ifndef BROKEN
    __syncthreads();
#endif
    y[i] = tile[255 - threadIdx.x];
}
"""


def main() -> int:
    """Run the kernel, print the emulator's report, and return 1 if there is a hazard or a wrong result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broken", action="store_true", help="omit __syncthreads()")
    options = parser.parse_args()
    x, y = np.arange(1024, dtype=np.float32), np.zeros(1024, np.float32)
    with cudatma.emulate_launches(hazards="collect") as log:
        kernel = cupy.RawKernel(SOURCE, "reverse", options=("-DBROKEN",) if options.broken else ())
        kernel((4,), (256,), (x, y))
    wrong = np.count_nonzero(y != x.reshape(4, 256)[:, ::-1].reshape(-1))
    print(f"{log}\nwrong elements: {wrong}")
    return int(not log.is_clean or wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
