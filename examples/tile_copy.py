"""A kernel of one's own: copy a 2D array box by box, TMA load -> shared memory -> TMA store, in a ring of stages.

    python examples/tile_copy.py                       # copies on the card, compares, measures
    python examples/tile_copy.py --target sm_120a      # compiles only; needs no card

A kernel is a template (ptx_templates/kernels/tile_copy.cu.j2), a frozen spec that the template reads its numbers from,
and a function that makes the tensor maps and launches.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import cudatma
from cudatma.descriptor import TensorMap, check_store
from cudatma.errors import ArgumentError
from cudatma.pipeline import Operand, PipelineSpec

TEMPLATE = "kernels/tile_copy.cu.j2"
BLOCKS = 264  # two on each multiprocessor of an H200; every block walks over the boxes


@dataclass(frozen=True, slots=True)
class TileCopySpec:
    """box_rows, box_columns: elements of one box, at most 256 each. element_bytes: bytes of an element. stages: 2.."""

    element_bytes: int
    box_rows: int = 64
    box_columns: int = 64
    stages: int = 4
    entry: str = "tile_copy"

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ArgumentError("stages", self.stages, "2 and up", "the kernel frees a slot one store later")

    @property
    def ring(self) -> PipelineSpec:
        """One box a stage; one thread loads it, one stores it. What the load delivers is what the slot holds."""
        box_bytes = self.box_rows * self.box_columns * self.element_bytes
        return PipelineSpec(self.stages, (Operand("tile", box_bytes, box_bytes),))

    @property
    def notes(self) -> tuple[str, ...]:
        return self.ring.notes()


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
    kernel.launch(grid, 64, (load, store, tiles_x, tiles_y), shared_bytes=spec.ring.smem_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="compile for this architecture and stop")
    options = parser.parse_args()
    if options.target:
        kernel = cudatma.compile(TEMPLATE, TileCopySpec(4), options.target)
        print(f"{kernel}: {len(kernel.cubin)} bytes, {TileCopySpec(4).ring.smem_bytes} bytes of shared memory")
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
