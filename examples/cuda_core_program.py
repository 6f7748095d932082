"""Run a program that uses cuda.core on the emulator, without a GPU.

    pip install cuda-core
    python examples/cuda_core_program.py             # no hazards and a correct result
    python examples/cuda_core_program.py --broken    # omits the proxy fence, which the emulator reports

Each block writes 1024 doubled numbers to shared memory and copies them to global memory with one bulk copy (TMA). The
copy reads shared memory through the async proxy, so a fence is required between the threads' writes and the copy.
"""

from __future__ import annotations

import argparse

import numpy as np
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

import cudatma

SOURCE = r"""
extern "C" __global__ void twice(const float4* x, float* y) {
    __shared__ alignas(128) float4 tile[256];
    const float4 v = x[blockIdx.x * 256 + threadIdx.x];
    tile[threadIdx.x] = float4{2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w};
#ifndef BROKEN
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned from = __cvta_generic_to_shared(tile);
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :: "l"(__cvta_generic_to_global(y + blockIdx.x * 1024)), "r"(from), "r"(4096) : "memory");
        asm volatile("cp.async.bulk.commit_group;");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
"""


def run(x: np.ndarray, broken: bool) -> np.ndarray:
    """Return 2 * x."""
    device = Device()
    device.set_current()
    stream = device.create_stream()
    options = ProgramOptions(std="c++17", arch=f"sm_{device.arch}", define_macro="BROKEN" if broken else None)
    kernel = Program(SOURCE, "c++", options).compile("cubin").get_kernel("twice")
    y = np.zeros_like(x)
    launch(stream, LaunchConfig(grid=x.size // 1024, block=256), kernel, x, y)
    stream.sync()
    return y


def main() -> int:
    """Run the kernel, print the emulator's report, and return 1 if there is a hazard or a wrong result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broken", action="store_true", help="omit the fence")
    options = parser.parse_args()
    x = np.arange(4096, dtype=np.float32)
    with cudatma.emulate_launches(hazards="collect") as log:
        y = run(x, options.broken)
    wrong = np.count_nonzero(y != 2 * x)
    print(f"{log}\nwrong elements: {wrong}")
    return int(not log.is_clean or wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
