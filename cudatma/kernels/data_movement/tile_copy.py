"""A pipelined copy of a 2D array, box by box: what its template needs to know, and the public function.

The smallest whole kernel: a spec, a template, and a function that makes the tensor maps and launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo, describe, overlaps, place_name
from cudatma.backend import backend_for, device_remedy
from cudatma.build.kernel import default_target, load_kernel
from cudatma.deprecation import former_arguments
from cudatma.descriptor import TensorMap, check_store
from cudatma.errors import ArgumentError, counted
from cudatma.kernels.data_movement.ring import BoxRing
from cudatma.kernels.sample import Sample, sample_dtype
from cudatma.library_streams import stream_handle
from cudatma.runtime.launch import Kernel
from cudatma.runtime.streams import order_after_producers
from cudatma.target import Target, detect

TEMPLATE = "kernels/tile_copy.cu.j2"
#: Two on each SM of an H200; every CTA copies several boxes.
BLOCKS, THREADS = 264, 64


@dataclass(frozen=True, slots=True)
class TileCopySpec(BoxRing):
    """One instance of ``kernels/tile_copy.cu.j2``.

    element_bytes: bytes of an element, 1, 2, 4 or 8. box_rows, box_columns: elements of one box, at most 256 each; a
    row of the box is a multiple of 16 bytes. stages: boxes in flight, 2 and up. Raises ArgumentError.
    """

    element_bytes: int
    box_rows: int = 64
    box_columns: int = 64
    stages: int = 4
    entry: str = "tile_copy"

    def __post_init__(self) -> None:
        self.check_box()

    def check_target(self, target: Target) -> None:
        """Raise TargetError or ArgumentError unless the target has TMA and a CTA's shared memory holds the ring."""
        target.require("tma", "the tile copy")
        self.ring.check_fits(target)


@former_arguments("stages", "stream", source="src", destination="dst")
def tile_copy(src: Any, dst: Any, *, stages: int = 4, stream: Any = None, backend: str | None = None) -> Any:
    """Copy a 2D array (rows, columns) into another of the same shape and dtype by TMA; returns dst.

    src, dst: CuPy, torch, DLPack or ``__cuda_array_interface__`` on one device; NumPy on the emulator. Rows
    are contiguous, their pitch and length multiples of 16 bytes, elements 1, 2, 4 or 8 bytes. stages: boxes in flight.
    stream: None is the current stream of the arrays' library. backend: as in marlin_gemm; there is no reference.

    Raises ArgumentError, DescriptorError, TargetError, CompileError, DriverError, HazardError (emulator).
    """
    backend = backend_for("tile_copy", backend)
    if backend == "reference":
        raise ArgumentError("backend", backend, "auto, cuda, emulator", "numpy.copyto copies host arrays")
    pair = _check_pair(src, dst)
    if not pair[0].size_elems:
        return dst
    device = pair[0].device
    if (device is None) != (backend == "emulator"):
        allowed = "the host with backend 'emulator', a CUDA device with 'cuda'"
        raise ArgumentError("src.device", place_name(device), allowed, device_remedy("cupy.asarray moves it", device))
    target = default_target() if device is None else detect(device)
    kernel, grid, args, shared_bytes = prepare(src, dst, target, stages)
    if device is not None:
        stream = stream_handle(stream, "torch" if "torch" in (pair[0].kind, pair[1].kind) else "cupy", device)
        order_after_producers(stream, device, *pair)
    kernel.launch(grid, THREADS, args, shared_bytes=shared_bytes, stream=stream, backend=backend)
    return dst


def prepare(src: Any, dst: Any, target: Target, stages: int = 4) -> tuple[Kernel, int, tuple[Any, ...], int]:
    """The kernel for two arrays that fit each other, its grid, arguments and dynamic shared memory."""
    info = describe(src, "src")
    spec = TileCopySpec(info.dtype.itemsize, stages=stages)
    spec.check_target(target)
    load, store = (TensorMap.from_array(a, (spec.box_rows, spec.box_columns)) for a in (src, dst))
    check_store(store.spec)  # a row that ends inside 16 bytes would let the store write past it
    tiles_y, tiles_x = -(-info.shape[0] // spec.box_rows), -(-info.shape[1] // spec.box_columns)
    kernel = load_kernel(TEMPLATE, spec, target)
    return kernel, min(BLOCKS, tiles_x * tiles_y), (load, store, tiles_x, tiles_y), spec.smem_bytes


def _check_pair(src: Any, dst: Any) -> tuple[ArrayInfo, ArrayInfo]:
    """Both arrays, described. ArgumentError unless they fit each other and share no byte."""
    here, there = describe(src, "src"), describe(dst, "dst")
    if len(here.shape) != 2:
        raise ArgumentError("src.shape", here.shape, "two dimensions")
    if (here.shape, here.dtype, here.device) != (there.shape, there.dtype, there.device):
        got, wanted = (f"{info.shape} of {info.dtype} on {place_name(info.device)}" for info in (there, here))
        raise ArgumentError("dst", got, f"as src: {wanted}")
    if there.readonly:
        raise ArgumentError("dst", "a read-only array", "a writable array")
    if overlaps(here, there):
        raise ArgumentError("dst", "memory that overlaps src", "memory of its own")
    return here, there


def dump_specs(target: Target) -> list[TileCopySpec]:
    """The instance that stands for all in dumps and compile checks; none where the target has no TMA."""
    return [TileCopySpec(4)] if target.has("tma") else []


def sample(
    target: Target, *, rows: int = 300, columns: int = 200, dtype: str = "float32", stages: int = 4, blocks: int = 2
) -> Sample:
    """A copy of a random array, for `cudatma emulate tile_copy`. blocks: the most CTAs."""
    kind = sample_dtype(dtype)
    if min(rows, columns, blocks) < 1:
        raise ArgumentError("rows, columns, blocks", (rows, columns, blocks), "1 and more each")
    src = np.random.default_rng(0).integers(0, 100, (rows, columns)).astype(kind)
    dst = np.zeros_like(src)
    kernel, grid, args, shared_bytes = prepare(src, dst, target, stages)
    run = partial(kernel.emulate, min(grid, blocks), THREADS, args, shared_bytes=shared_bytes)
    title = f"tile copy, {rows} x {columns} {kind}, {counted(min(grid, blocks), 'block')} of {THREADS} threads"
    return Sample(title, kernel, run, lambda: float((src != dst).mean()), 0.0)
