"""Capture the results of all registry and probe kernels on a GPU.

    python tests/emulator/capture_kernels.py --out FILE.npz

The file contains an array of bytes for each result of each case in tests/emulator/kernel_cases.py, named "case/result".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Import the checkout's package and the shared helpers from any working directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kernel_cases import Array, kernel_cases

from cudatma.build.kernel import load_kernel
from cudatma.descriptor import TensorMap
from cudatma.kernels.marlin.gemm import marlin_gemm
from cudatma.target import detect


class Gpu:
    """The current CUDA device, through CuPy."""

    def __init__(self) -> None:
        self.target = detect()

    def put(self, array: Array) -> Any:
        import cupy

        return cupy.asarray(array)

    def get(self, array: Any) -> Array:
        import cupy

        return np.asarray(cupy.asnumpy(array))

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def map(self, spec: Any, array: Any) -> TensorMap:
        return TensorMap(spec, owner=array)

    def launch(
        self, template: str, config: Any, grid: int, block: int, args: Sequence[Any], cluster: int = 1, shared: int = 0
    ) -> None:
        import cupy

        kernel = load_kernel(template, config, self.target)
        kernel.launch(grid, block, args, cluster=cluster if cluster > 1 else None, shared_bytes=shared)
        cupy.cuda.runtime.deviceSynchronize()

    def gemm(self, x: Array, weight: Any) -> Array:
        return self.get(marlin_gemm(self.put(x), weight.to_device()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    gpu, found, failed = Gpu(), {}, []
    for name, case in kernel_cases(gpu.target).items():
        try:
            results = case(gpu)
        except Exception as error:  # capture the other cases
            failed.append(f"{name}: {type(error).__name__}: {error}")
            continue
        found |= {f"{name}/{key}": np.ascontiguousarray(value).view(np.uint8) for key, value in results.items()}
    np.savez_compressed(arguments.out, **found)
    print("\n".join([*failed, f"{len(found)} results, {len(failed)} cases failed"]))


if __name__ == "__main__":
    main()
