"""The probe kernels as subjects for mutants: launches in which every synchronization of a probe matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import probe_configs as probes
from subject import Subject

from cudatma.descriptor import Im2colSpec, TensorMap
from cudatma.mutants.mutant import Call


def _template(name: str) -> str:
    return f"probes/{name}.cu.j2"


def box_copy(mode: str, write: str = "store", policy: str = "") -> Subject:
    shape, box = ((16, 64), (8, 32)) if mode == "none" else ((16, 64), (8, 64))
    kind = np.uint32 if write == "add" else np.uint16
    shape, box = ((16, 32), (8, 16)) if write == "add" else (shape, box)
    layout = TensorMap.from_array(np.zeros(shape, kind), box, swizzle=mode, encoder="codec")
    config = probes.BoxCopy(2, layout.expected_bytes, layout.footprint_bytes, write, policy)

    def make() -> Call:
        source = np.arange(shape[0] * shape[1]).astype(kind).reshape(shape)
        destination = np.ones_like(source)
        maps = [TensorMap.from_array(a, box, swizzle=mode, encoder="codec") for a in (source, destination)]
        dump = np.zeros(config.footprint_bytes, np.uint8)
        args = (*maps, dump, 0, 8, 0, 0, 0, 0, 4, 0, 0, 0)
        arrays = (source, destination)
        return Call("box_copy", 1, 128, args, shared_bytes=config.footprint_bytes, arrays=arrays)

    return Subject(f"box_copy/{mode}_{write}", _template("box_copy"), config, make)


def _bulk_copy() -> Call:
    source = np.random.default_rng(0).integers(0, 256, 1024, dtype=np.uint8)
    return Call("bulk_copy", 1, 128, (source, np.zeros(1024, np.uint8), 1024), shared_bytes=1024)


def _matrix(count: int) -> Callable[[], Call]:
    def make() -> Call:
        data = np.arange(count * 64, dtype=np.uint16)
        return Call(
            "matrix", 1, 32, (data, np.zeros(count * 32, np.uint32), np.zeros_like(data), np.zeros(32, np.uint32))
        )

    return make


def _cp_async() -> Call:
    source = np.random.default_rng(0).integers(0, 256, 128 * 16, dtype=np.uint8)
    counts = (np.arange(128) % 17).astype(np.uint32)
    return Call("cp_async", 1, 128, (source, counts, np.zeros_like(source), np.zeros_like(source)))


def _ring(config: probes.Ring) -> Callable[[], Call]:
    def make() -> Call:
        tiles = np.random.default_rng(0).integers(0, 1000, (7, config.tile_bytes // 4), dtype=np.uint32)
        sums = np.zeros((config.consumers, 32), np.uint32)
        threads = 32 * (config.consumers + 1)
        return Call("ring", 1, threads, (tiles, sums, 7), shared_bytes=config.ring.smem_bytes)

    return make


def im2col(rank: int) -> Subject:
    spatial = (6, 5, 4)[: rank - 2]
    shape = (2, *reversed(spatial), 16)

    def described() -> TensorMap:
        array = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
        config = Im2colSpec(
            dtype="float32",
            dims=(16, *spatial, 2),
            strides_bytes=tuple(array.strides[axis] for axis in range(rank - 2, -1, -1)),
            address=array.ctypes.data,
            lower_corner=(-1,) * (rank - 2),
            upper_corner=(-1,) * (rank - 2),
            channels_per_pixel=8,
            pixels_per_column=32,
        )
        return TensorMap(config, encoder="codec", owner=array)

    def make() -> Call:
        tensor_map = described()
        coordinates = [8, *[0] * (rank - 2), 0, *[0] * (5 - rank)]
        offsets = [*range(1, rank - 1), *[0] * (5 - rank)]
        args = (tensor_map, np.zeros(256, np.float32), *coordinates, *offsets)
        return Call("im2col", 1, 128, args, shared_bytes=1024, arrays=(tensor_map.owner,))

    return Subject(f"im2col/{rank}d", _template("im2col"), probes.Im2col(rank, described().expected_bytes), make)


def _multicast() -> Call:
    source = np.arange(16 * 32, dtype=np.float32).reshape(16, 32)
    tensor_map = TensorMap.from_array(source, (8, 32), encoder="codec")
    dump = np.zeros(2 * 16 * 32 * 4, np.uint8)
    return Call("multicast", 2, 128, (tensor_map, dump), cluster=2, shared_bytes=2048, arrays=(source,))


def _sync() -> Call:
    given = np.arange(32, dtype=np.uint32)
    args = (np.zeros(1, np.uint32), given, np.zeros(32, np.uint32))
    return Call("sync", 1, 128, args, options=(("produced_by_previous", (given,)),))


def _tensormap_edit() -> Call:
    original, other = np.zeros((16, 32), np.float32), np.arange(16 * 32, dtype=np.float32).reshape(16, 32)
    raw = np.zeros(256, np.uint8)
    edited = raw[-raw.ctypes.data % 128 :][:128]
    tensor_map = TensorMap.from_array(original, (8, 32), encoder="codec")
    args = (tensor_map, edited, other, 5, np.zeros((8, 32), np.float32))
    return Call("tensormap_edit", 1, 32, args, shared_bytes=1024, arrays=(original, raw))


def wgmma_gemm(config: Any) -> Subject:
    # Long enough for a wrong arrival count of the empty barriers to add up to a lap.
    rows, columns, k = config.tile_m, config.tile_n * config.cluster, 64 * (5 * config.stages + 1)

    def make() -> Call:
        random = np.random.default_rng(3)
        a, b = (random.normal(size=(size, k)).astype(np.float16) for size in (rows, columns))
        d = np.zeros((rows, columns), np.float32)
        maps = (
            TensorMap.from_array(a, (config.loaded_m, 64), swizzle="128B", encoder="codec"),
            TensorMap.from_array(b, (config.tile_n, 64), swizzle="128B", encoder="codec"),
            TensorMap.from_array(d, (64, config.tile_n), encoder="codec"),
        )
        args = (*maps, k // 64)
        grid = (config.cluster, 1)
        cluster = (config.cluster, 1) if config.cluster > 1 else None
        return Call(
            "wgmma_gemm", grid, config.threads, args, cluster=cluster, shared_bytes=config.smem_bytes, arrays=(a, b, d)
        )

    return Subject(f"wgmma_gemm/cluster{config.cluster}", _template("wgmma_gemm"), config, make)


def wgmma(source: str) -> Subject:
    config = probes.Wgmma("f16", 16, source)

    def make() -> Call:
        random = np.random.default_rng(4)
        a, b = (random.normal(size=(rows, 16)).astype(np.float16).view(np.uint16) for rows in (64, 16))
        c = random.normal(size=(64, 16)).astype(np.float32)
        return Call("wgmma", 1, 128, (a, b, c, np.zeros_like(c)))

    return Subject(f"wgmma/{source}", _template("wgmma"), config, make)


def subjects() -> Iterator[Subject]:
    """Every probe that runs, in the order of probe_configs.PROBES."""
    yield box_copy("none")
    yield box_copy("128B")
    yield box_copy("none", "add", "evict_last")
    yield Subject("bulk_copy/plain", _template("bulk_copy"), probes.Plain("bulk_copy"), _bulk_copy)
    yield Subject("matrix/x4_trans", _template("matrix"), probes.Matrix(4, "_trans", "_trans"), _matrix(4))
    yield Subject("cp_async/plain", _template("cp_async"), probes.Plain("cp_async"), _cp_async)
    ring = probes.Ring(3, 4)
    yield Subject("ring/3x4", _template("ring"), ring, _ring(ring))
    yield from (im2col(rank) for rank in (3, 5))
    yield Subject("multicast/2", _template("multicast"), probes.Multicast(1024, 8), _multicast)
    yield Subject("sync/plain", _template("sync"), probes.Plain("sync"), _sync)
    yield Subject("tensormap_edit/plain", _template("tensormap_edit"), probes.TensorMapEdit(1024), _tensormap_edit)
    yield wgmma("registers")
    yield wgmma("shared")
    yield wgmma_gemm(probes.WgmmaGemm(1, 32, 2))
    yield wgmma_gemm(probes.WgmmaGemm(2, 32, 2, 2))
