"""Launches of all registry and probe kernels on seeded inputs, for a GPU and for the emulator.

A case is a function that takes a Device and returns its results as NumPy arrays by name. Results of tensor cores and
float sums agree within TOLERANCE, all others bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import probe_configs as probes

from cudatma.descriptor import Im2colSpec, TiledSpec
from cudatma.kernels.data_movement.tile_copy import TileCopyConfig
from cudatma.kernels.registry import REGISTRY
from cudatma.target import Target

Array = np.ndarray[Any, np.dtype[Any]]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
#: Relative error, in norm, of results of tensor cores. Other results must be equal.
TOLERANCE = {"mma_f16": 1e-5, "mma_bf16": 1e-5, "marlin_": 6e-3, "marlin_f16": 1e-3, "marlin_wgmma_f16": 1e-3}


class Device(Protocol):
    """The memory and launches of a GPU or of the emulator."""

    target: Target

    def put(self, array: Array) -> Any:
        """Copy an array to the device."""

    def get(self, array: Any) -> Array:
        """Copy an array back."""

    def address(self, array: Any) -> int:
        """Return the address of an array."""

    def map(self, spec: Any, array: Any) -> Any:
        """Return a tensor map of a spec, with the address of an array."""

    def launch(
        self, template: str, config: Any, grid: int, block: int, args: Sequence[Any], cluster: int = 1, shared: int = 0
    ) -> None:
        """Run a template's kernel and wait for it."""

    def gemm(self, x: Array, weight: Any) -> Array:
        """Run marlin_gemm on the device, with operands and result on the host."""


def random_bytes(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    """Return small integers that are exact in every type."""
    least = 0 if np.dtype(dtype).kind == "u" else -9
    return np.random.default_rng(seed).integers(least, 10, shape).astype(dtype)


def tiled(array: Array, box: Sequence[int], address: int, **options: Any) -> TiledSpec:
    """Return the spec of a map over an array in C order; the box is in NumPy order."""
    return TiledSpec.from_strided(
        address, array.shape, strides_bytes=array.strides, dtype=array.dtype, box=box, **options
    )


def box_copy(device: Device, rank: int, write: str, policy: str, dtype: Any, swizzle: str) -> dict[str, Array]:
    shapes = {1: (1000,), 2: (37, 80), 3: (5, 11, 40), 4: (3, 4, 7, 24), 5: (2, 3, 4, 5, 16)}
    boxes = {1: (64,), 2: (8, 16), 3: (2, 4, 8), 4: (2, 2, 3, 8), 5: (1, 2, 2, 3, 8)}
    source, destination = (random_bytes(shapes[rank], dtype, seed) for seed in (rank, rank + 10))
    there, out = device.put(source), device.put(destination)
    load = tiled(source, boxes[rank], device.address(there), swizzle=swizzle)
    store = tiled(destination, boxes[rank], device.address(out), swizzle=swizzle)
    dump = device.put(np.zeros(load.footprint_bytes, np.uint8))
    config = probes.BoxCopy(rank, load.expected_bytes, load.footprint_bytes, write, policy)
    at = [16, *[-1] * (rank - 1), 0, 0, 0, 0][:5]
    to = [16, *[1] * (rank - 1), 0, 0, 0, 0][:5]
    args = (device.map(load, there), device.map(store, out), dump, *at, *to)
    device.launch("probes/box_copy.cu.j2", config, 1, 128, args, shared=load.footprint_bytes)
    return {"dump": device.get(dump), "out": device.get(out)}


def bulk_copy(device: Device, size: int) -> dict[str, Array]:
    out = device.put(np.zeros(size + 16, np.uint8))
    args = (device.put(random_bytes((size,), np.uint8, size)), out, size)
    device.launch("probes/bulk_copy.cu.j2", probes.Plain("bulk_copy"), 1, 128, args, shared=size)
    return {"out": device.get(out)}


def matrix(device: Device, count: int, load: str, store: str) -> dict[str, Array]:
    given = np.arange(count * 64, dtype=np.uint16) * np.uint16(257)
    found = [device.put(np.zeros(n, t)) for n, t in ((count * 32, np.uint32), (count * 64, np.uint16), (32, np.uint32))]
    device.launch("probes/matrix.cu.j2", probes.Matrix(count, load, store), 1, 32, (device.put(given), *found))
    return {name: device.get(a) for name, a in zip(("registers", "out", "moved"), found, strict=True)}


def mma(device: Device, kind: str) -> dict[str, Array]:
    random, dtype = np.random.default_rng(5), np.dtype(np.float16) if kind == "f16" else BFLOAT16
    a, b = (random.normal(size=shape).astype(dtype).view(np.uint16) for shape in ((16, 16), (16, 8)))
    d = device.put(np.zeros((16, 8), np.float32))
    c = random.normal(size=(16, 8)).astype(np.float32)
    device.launch("probes/mma.cu.j2", probes.Mma(kind), 1, 32, (device.put(a), device.put(b), device.put(c), d))
    return {"d": device.get(d)}


def cp_async(device: Device) -> dict[str, Array]:
    source, sizes = random_bytes((2048,), np.uint8, 6), (np.arange(128) % 17).astype(np.uint32)
    found = [device.put(np.zeros(2048, np.uint8)) for _ in range(2)]
    args = (device.put(source), device.put(sizes), *found)
    device.launch("probes/cp_async.cu.j2", probes.Plain("cp_async"), 1, 128, args)
    return {"by_group": device.get(found[0]), "by_barrier": device.get(found[1])}


def ring(device: Device, stages: int, consumers: int, count: int) -> dict[str, Array]:
    config = probes.Ring(stages, consumers)
    tiles = np.random.default_rng(count).integers(0, 1 << 16, (count, config.tile_bytes // 4)).astype(np.uint32)
    sums = device.put(np.zeros((consumers, 32), np.uint32))
    args = (device.put(tiles), sums, count)
    device.launch("probes/ring.cu.j2", config, 1, 32 * (consumers + 1), args, shared=config.ring.smem_bytes)
    return {"sums": device.get(sums)}


def im2col(device: Device, rank: int) -> dict[str, Array]:
    shape = {3: (3, 9, 32), 4: (2, 5, 6, 32), 5: (2, 3, 4, 5, 32)}[rank]
    image = random_bytes(shape, np.float16, rank)
    there = device.put(image)
    spec = Im2colSpec(
        dtype="float16",
        dims=tuple(reversed(shape)),
        strides_bytes=tuple(image.strides[axis] for axis in range(rank - 2, -1, -1)),
        address=device.address(there),
        lower_corner=(-1,) * (rank - 2),
        upper_corner=(-1,) * (rank - 2),
        channels_per_pixel=16,
        pixels_per_column=20,
    )
    dump = device.put(np.zeros(spec.expected_bytes, np.uint8))
    at = (16, *[-1] * (rank - 2), 0)
    args = (device.map(spec, there), dump, *at, *[0] * (5 - rank), *[1] * (rank - 2), *[0] * (5 - rank))
    chosen = probes.Im2col(rank, spec.expected_bytes)
    device.launch("probes/im2col.cu.j2", chosen, 1, 128, args, shared=spec.expected_bytes)
    return {"dump": device.get(dump)}


def multicast(device: Device) -> dict[str, Array]:
    source = random_bytes((16, 64), np.float32, 1)
    there, dump = device.put(source), device.put(np.zeros((2, 16, 64), np.float32))
    load = tiled(source, (8, 64), device.address(there))
    config = probes.Multicast(load.expected_bytes, 8)
    args = (device.map(load, there), dump)
    device.launch("probes/multicast.cu.j2", config, 2, 128, args, cluster=2, shared=2 * load.footprint_bytes)
    return {"dump": device.get(dump)}


def sync(device: Device) -> dict[str, Array]:
    counts, out = device.put(np.zeros(1, np.uint32)), device.put(np.zeros(32, np.uint32))
    args = (counts, device.put(np.arange(100, 132, dtype=np.uint32)), out)
    device.launch("probes/sync.cu.j2", probes.Plain("sync"), 1, 128, args)
    return {"counts": device.get(counts), "out": device.get(out)}


def tensormap_edit(device: Device) -> dict[str, Array]:
    first, second = random_bytes((8, 32), np.float32, 1), random_bytes((8, 32), np.float32, 2)
    there, dump = device.put(first), device.put(np.zeros((8, 32), np.float32))
    original = tiled(first, (8, 32), device.address(there))
    edited = device.put(np.zeros(128, np.uint8))
    args = (device.map(original, there), edited, device.put(second), 5, dump)
    config = probes.TensorMapEdit(original.expected_bytes)
    device.launch("probes/tensormap_edit.cu.j2", config, 1, 32, args, shared=original.footprint_bytes)
    return {"dump": device.get(dump), "edited": device.get(edited)[8:]}


def tile_copy(device: Device, dtype: Any, stages: int) -> dict[str, Array]:
    source = random_bytes((130, 80), dtype, 3)
    there, out = device.put(source), device.put(np.zeros((131, 80), dtype))
    config = TileCopyConfig(np.dtype(dtype).itemsize, stages=stages)
    box = (config.box_rows, config.box_columns)
    maps = (tiled(source, box, device.address(there)), tiled(source, box, device.address(out)))
    args = (device.map(maps[0], there), device.map(maps[1], out), 2, 3)
    device.launch("kernels/tile_copy.cu.j2", config, 3, 64, args, shared=config.smem_bytes)
    return {"out": device.get(out)}


def marlin(device: Device, config: Any, m: int) -> dict[str, Array]:
    """Return a case that runs a registry config on a small layer: 512 x 256, or larger if the config's group requires
    it.
    """
    from cudatma.kernels.tuning import pinned
    from cudatma.quantization import quantize

    random, (k, n) = np.random.default_rng(m), (512, 256)
    dtype = np.dtype(np.float16) if config.dtype == "float16" else BFLOAT16
    weight = random.normal(size=(k, n)).astype(np.float32) * np.float32(0.05)
    packed = quantize(weight, dtype=config.dtype, group_size=config.group_size, symmetric=not config.has_zeros)
    x = random.normal(size=(m, k)).astype(dtype)
    with pinned(config):
        return {"y": device.gemm(x, packed)}


def kernel_cases(target: Target) -> dict[str, Callable[[Device], dict[str, Array]]]:
    """Return the cases of all registry configs and probes by name."""
    found: dict[str, Callable[[Device], dict[str, Array]]] = {}
    for rank in range(1, 6):
        found[f"box_copy_{rank}"] = lambda d, r=rank: box_copy(d, r, "store", "", np.float16, "none")
    for swizzle in ("32B", "64B", "128B"):
        found[f"box_copy_{swizzle}"] = lambda d, s=swizzle: box_copy(d, 2, "store", "", np.uint8, s)
    found["box_copy_evict"] = lambda d: box_copy(d, 2, "store", "evict_last", np.float32, "none")
    for write in ("add", "min", "max", "inc", "dec", "and", "or", "xor"):
        found[f"box_copy_{write}"] = lambda d, w=write: box_copy(d, 3, w, "", np.uint32, "none")
    found |= {f"bulk_copy_{size}": lambda d, s=size: bulk_copy(d, s) for size in (32, 4096)}
    found |= {f"matrix_{c}": lambda d, c=c: matrix(d, c, "_trans", "") for c in (1, 2, 4)}
    found |= {f"mma_{kind}": lambda d, k=kind: mma(d, k) for kind in ("f16", "bf16")}
    found |= {"cp_async": cp_async, "multicast": multicast, "sync": sync, "tensormap_edit": tensormap_edit}
    found |= {f"ring_{s}_{c}": lambda d, s=s, c=c: ring(d, s, c, 11) for s, c in ((1, 1), (3, 4))}
    found |= {f"im2col_{rank}": lambda d, r=rank: im2col(d, r) for rank in (3, 4, 5)}
    for dtype in (np.uint8, np.float32):
        found[f"tile_copy_{np.dtype(dtype)}"] = lambda d, t=dtype: tile_copy(d, t, 3)
    for entry in REGISTRY.values():
        if entry.name.startswith("marlin"):
            found |= {s.entry: lambda d, s=s: marlin(d, s, min(s.tile_m, 20)) for s in entry.configs(target)}
    return found
