"""A kernel of one's own: copy a 2D array box by box, TMA load -> shared memory -> TMA store, in a ring of stages.

    python examples/tile_copy.py                       # copies on the card, compares, measures
    python examples/tile_copy.py --target sm_120a      # compiles only; needs no card

A kernel is a template (ptx_templates/kernels/tile_copy.cu.j2), a frozen spec that the template reads its numbers from
(cudatma/kernels/tile_copy.py), and a function that makes the tensor maps and launches: here.
"""

from __future__ import annotations

import argparse
from typing import Any

import cudatma
from cudatma.descriptor import TensorMap, check_store
from cudatma.errors import ArgumentError
from cudatma.kernels.tile_copy import TEMPLATE, TileCopySpec

BLOCKS = 264  # two on each multiprocessor of an H200; every block walks over the boxes


def tile_copy(source: Any, destination: Any, stages: int = 4) -> None:
    """Copy a 2D CuPy array (rows, columns) into another of the same shape and dtype, on CuPy's current stream.

    Rows are contiguous, their pitch and length multiples of 16 bytes. Raises ArgumentError or DescriptorError.
    """
    if (source.shape, source.dtype) != (destination.shape, destination.dtype) or source.ndim != 2:
        got = f"{destination.shape} of {destination.dtype}"
        raise ArgumentError("destination", got, f"2D, as the source: {source.shape} of {source.dtype}")
    if not source.size:
        return
    spec = TileCopySpec(source.dtype.itemsize, stages=stages)
    load, store = (TensorMap.from_array(a, (spec.box_rows, spec.box_columns)) for a in (source, destination))
    check_store(store.spec)  # a row that ends inside 16 bytes would let the store write past it
    tiles_y, tiles_x = -(-source.shape[0] // spec.box_rows), -(-source.shape[1] // spec.box_columns)
    kernel = cudatma.compile(TEMPLATE, spec)
    grid = min(BLOCKS, tiles_x * tiles_y)
    kernel.launch(grid, 64, (load, store, tiles_x, tiles_y), shared_bytes=spec.smem_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="compile for this architecture and stop")
    options = parser.parse_args()
    if options.target:
        spec = TileCopySpec(element_bytes=4)
        kernel = cudatma.compile(TEMPLATE, spec, options.target)
        print(f"{kernel}: {len(kernel.cubin)} bytes, {spec.smem_bytes} bytes of shared memory")
        return
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
