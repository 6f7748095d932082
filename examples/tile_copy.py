"""Copy a 2D array box by box with TMA loads and stores through a ring of stages, as a model for your own kernels.

    python examples/tile_copy.py                       # copy on the GPU, verify and measure
    python examples/tile_copy.py --emulator            # copy a small array on the CPU, and draw the pipeline
    python examples/tile_copy.py --target sm_120a      # only compile; requires no GPU

A kernel consists of a template (ptx_templates/kernels/tile_copy.cu.j2), a frozen config with the values that the
template uses, and an operation that validates the arrays and provides the launch arguments. The config and operation
are in cudatma/kernels/data_movement/tile_copy.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import cudatma
from cudatma.arrays import describe
from cudatma.emulator import Trace
from cudatma.kernels.data_movement.movement import LaunchLimits
from cudatma.kernels.data_movement.tile_copy import TEMPLATE, TileCopyConfig, plan_tiles, tile_copy


def emulate(picture: Path) -> None:
    """Copy a NumPy array under 20 schedules, print the emulator's report and draw the pipeline of the last schedule."""
    source = np.random.default_rng(0).random((500, 200), dtype=np.float32)
    destination = np.full_like(source, -1)
    target, arrays = cudatma.get_target("sm_90a"), {"src": describe(source), "out": describe(destination)}
    launch = plan_tiles(arrays["src"], arrays["out"], LaunchLimits(target, ctas=2))
    trace = Trace()
    report = launch.emulate(target, arrays, schedules=20, trace=trace)
    picture.write_text(trace.to_svg())
    print(f"{report}; equal: {bool((source == destination).all())}; {picture}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="compile for this architecture and stop")
    parser.add_argument("--emulator", action="store_true", help="run on the CPU")
    options = parser.parse_args()
    if options.emulator:
        emulate(Path("tile_copy.svg"))
        return
    if options.target:
        config = TileCopyConfig(element_bytes=4)
        kernel = cudatma.compile(TEMPLATE, config, target=options.target)
        print(f"{kernel}: {len(kernel.cubin)} bytes, {config.smem_bytes} bytes of shared memory")
        return
    try:
        cudatma.detect()
    except cudatma.errors.CudaTmaError as error:
        parser.exit(2, f"no GPU is available ({error}); pass --emulator to run on the CPU\n")
    import cupy

    source = cupy.random.default_rng(0).random((8192, 8200), dtype=cupy.float32)
    destination = cupy.full_like(source, -1)
    tile_copy(source, destination)
    equal = bool((source == destination).all())
    start, end, repeats = cupy.cuda.Event(), cupy.cuda.Event(), 50
    start.record()
    for _ in range(repeats):
        tile_copy(source, destination)
    end.record()
    end.synchronize()
    seconds = cupy.cuda.get_elapsed_time(start, end) / 1e3 / repeats
    print(f"equal: {equal}; {seconds * 1e6:.1f} us, {2 * source.nbytes / seconds / 1e12:.2f} TB/s read and written")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
