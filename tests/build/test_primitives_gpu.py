"""The primitives on a GPU, against NumPy: what arrives in shared memory, what is written, what waits for what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import probe_configs as probes
import pytest

from cudatma.build.kernel import load_kernel
from cudatma.descriptor import Im2colSpec, TensorMap
from cudatma.runtime.launch import Kernel
from cudatma.target import Target, detect

pytestmark = pytest.mark.gpu

Array = np.ndarray[Any, np.dtype[Any]]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
#: Rank -> shape and box in NumPy order; rows and boxes are multiples of 16 bytes for 2 bytes an element and more.
TENSORS: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    1: ((1000,), (64,)),
    2: ((37, 72), (8, 32)),
    3: ((5, 11, 40), (2, 4, 16)),
    4: ((3, 4, 7, 24), (2, 2, 3, 8)),
    5: ((2, 3, 4, 5, 16), (1, 2, 2, 3, 8)),
}
POISON = 0xA5


@pytest.fixture(scope="module")
def target() -> Target:
    return detect()


def kernel(name: str, config: Any, target: Target) -> Kernel:
    return load_kernel(f"probes/{name}.cu.j2", config, target)


def upload(array: Array) -> Any:
    """A copy on the GPU with the same dtype; bf16 goes through CuPy's own."""
    import cupy

    return cupy.asarray(array)


def download(array: Any) -> Array:
    import cupy

    return np.asarray(cupy.asnumpy(array))


def poisoned(shape: int | tuple[int, ...], dtype: Any) -> Any:
    import cupy

    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return cupy.full(size, POISON, cupy.uint8).view(dtype).reshape(shape)


def numbers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    """Small integers, exact in every type."""
    least = 0 if np.dtype(dtype).kind == "u" else -9
    return np.random.default_rng(seed).integers(least, 10, shape).astype(dtype)


def clip(shape: Sequence[int], box: Sequence[int], at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The part of a tensor that a box at ``at`` covers, and the same part of the box; NumPy order."""
    low = [max(0, a) for a in at]
    high = [max(lo, min(n, a + b)) for n, b, a, lo in zip(shape, box, at, low, strict=True)]
    inside = tuple(slice(lo, hi) for lo, hi in zip(low, high, strict=True))
    return inside, tuple(slice(lo - a, hi - a) for lo, hi, a in zip(low, high, at, strict=True))


def loaded(array: Array, box: Sequence[int], at: Sequence[int]) -> Array:
    """What a tile load delivers: the box, zero outside of the array."""
    result = np.zeros(box, array.dtype)
    inside, part = clip(array.shape, box, at)
    result[part] = array[inside]
    return result


def five(at: Sequence[int]) -> list[int]:
    """Coordinates in NumPy order -> five in TMA order."""
    reversed_ = list(reversed(at))
    return reversed_ + [0] * (5 - len(reversed_))


def move(
    target: Target, source: Array, destination: Array, box: tuple[int, ...], load_at: Any, store_at: Any, **config: Any
) -> tuple[Array, Array]:
    """Run the box_copy probe; the box as it lay in shared memory, and the destination afterwards."""
    device_source, device_destination = upload(source), upload(destination)
    load = TensorMap.from_array(device_source, box)
    store = TensorMap.from_array(device_destination, box)
    probe = probes.BoxCopy(source.ndim, load.expected_bytes, load.footprint_bytes, **config)
    dump = poisoned(load.footprint_bytes, np.uint8)
    args = (load, store, dump, *five(load_at), *five(store_at))
    kernel("box_copy", probe, target).launch(1, 128, args, shared_bytes=load.footprint_bytes)
    return download(dump)[: load.expected_bytes].view(source.dtype).reshape(box), download(device_destination)


def positions(rank: int, itemsize: int, store: bool) -> list[tuple[int, ...]]:
    """Coordinates inside, over the end, far outside and, for loads, negative; the innermost on 16-byte chunks."""
    shape, box = TENSORS[rank]
    unit = 16 // itemsize
    zero = (0,) * rank
    outer = list(zip(shape[:-1], box[:-1], strict=True))
    over = (*(n - b // 2 for n, b in outer), (shape[-1] - unit) // unit * unit)
    some = (*(int(n > b) for n, b in outer), unit)
    outside = (*shape[:-1], (shape[-1] + unit) // unit * unit)
    negative = (*(-1 for _ in shape[:-1]), -unit)
    return [zero, some, over, outside] if store else [zero, some, over, outside, negative]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, BFLOAT16, np.float64], ids=str)
@pytest.mark.parametrize("rank", TENSORS)
def test_tile_load_and_store(target: Target, rank: int, dtype: Any) -> None:
    shape, box = TENSORS[rank]
    itemsize = np.dtype(dtype).itemsize
    source = numbers(shape, dtype)
    for load_at in positions(rank, itemsize, store=False):
        for store_at in positions(rank, itemsize, store=True):
            before = download(poisoned(shape, dtype))
            arrived, after = move(target, source, before, box, load_at, store_at)
            wanted = loaded(source, box, load_at)
            assert arrived.tobytes() == wanted.tobytes(), (load_at, store_at)
            inside, part = clip(shape, box, store_at)
            before[inside] = wanted[part]
            assert after.tobytes() == before.tobytes(), (load_at, store_at)


@pytest.mark.parametrize("policy", ["evict_first", "evict_last", "evict_normal"])
@pytest.mark.parametrize("rank", TENSORS)
def test_cache_hints_change_no_value(target: Target, rank: int, policy: str) -> None:
    shape, box = TENSORS[rank]
    source, zero = numbers(shape, np.float32), (0,) * rank
    arrived, after = move(target, source, np.zeros(shape, np.float32), box, zero, zero, policy=policy)
    inside, _ = clip(shape, box, zero)
    assert (arrived == source[inside]).all()
    assert (after[inside] == source[inside]).all()
    assert np.count_nonzero(after) == np.count_nonzero(source[inside])


REDUCTIONS: dict[str, tuple[Callable[[Array, Array], Array], tuple[Any, ...]]] = {
    "add": (np.add, (np.uint32, np.int32, np.uint64, np.float32, np.float16, BFLOAT16)),
    "min": (np.minimum, (np.uint32, np.int32, np.uint64, np.int64, np.float16, BFLOAT16)),
    "max": (np.maximum, (np.uint32, np.int32, np.uint64, np.int64, np.float16, BFLOAT16)),
    "inc": (lambda old, new: np.where(old >= new, 0, old + 1), (np.uint32,)),
    "dec": (lambda old, new: np.where((old == 0) | (old > new), new, old - 1), (np.uint32,)),
    "and": (np.bitwise_and, (np.uint32, np.int32, np.uint64)),
    "or": (np.bitwise_or, (np.uint32, np.int32, np.uint64)),
    "xor": (np.bitwise_xor, (np.uint32, np.int32, np.uint64)),
}


def check_reduction(target: Target, rank: int, op: str, dtype: Any) -> None:
    shape, box = TENSORS[rank]
    source, old = numbers(shape, dtype, 1), numbers(shape, dtype, 2)
    over = positions(rank, np.dtype(dtype).itemsize, store=True)[2]
    for store_at in ((0,) * rank, over):
        _, after = move(target, source, old, box, (0,) * rank, store_at, write=op)
        inside, part = clip(shape, box, store_at)
        wanted = old.copy()
        wanted[inside] = REDUCTIONS[op][0](old[inside], loaded(source, box, (0,) * rank)[part]).astype(dtype)
        assert (after == wanted).all()


@pytest.mark.parametrize(("op", "dtype"), [(op, d) for op, (_, types) in REDUCTIONS.items() for d in types], ids=str)
def test_reductions_of_every_type(target: Target, op: str, dtype: Any) -> None:
    check_reduction(target, 2, op, dtype)


@pytest.mark.parametrize("size", [32, 48, 4096, 65536])
def test_bulk_copies(target: Target, size: int) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    device, out = upload(source), poisoned(size + 16, np.uint8)
    kernel("bulk_copy", probes.Plain("bulk_copy"), target).launch(1, 128, (device, out, size), shared_bytes=size)
    result = download(out)
    assert (result[:size] == ~source).all()
    assert (result[size:] == POISON).all()


def fragment(matrices: Array, transposed: bool) -> Array:
    """ldmatrix by the PTX ISA's picture: register i of lane l, two elements of row l / 4 of matrix i."""
    chosen = matrices.swapaxes(1, 2) if transposed else matrices
    pairs = chosen.reshape(len(matrices), 32, 2).astype(np.uint32)
    return pairs[..., 0] | pairs[..., 1] << 16


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("load", ["", "_trans"])
@pytest.mark.parametrize("store", ["", "_trans"])
def test_ldmatrix_stmatrix_movmatrix(target: Target, count: int, load: str, store: str) -> None:
    matrices = np.arange(count * 64, dtype=np.uint16).reshape(count, 8, 8) * 257
    registers, out, moved = (
        poisoned((count, 32), np.uint32),
        poisoned((count, 8, 8), np.uint16),
        poisoned(32, np.uint32),
    )
    args = (upload(matrices), registers, out, moved)
    kernel("matrix", probes.Matrix(count, load, store), target).launch(1, 32, args)
    assert (download(registers) == fragment(matrices, bool(load))).all()
    wanted = matrices if load == store else matrices.swapaxes(1, 2)
    assert (download(out) == wanted).all()
    assert (download(moved) == fragment(matrices, not load)[0]).all()


@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.dtype(np.float16)), ("bf16", BFLOAT16)])
def test_mma(target: Target, kind: str, dtype: np.dtype[Any]) -> None:
    random = np.random.default_rng(5)
    for scale in (None, 1.0):
        if scale is None:
            a, b = (random.integers(-8, 9, shape).astype(dtype) for shape in ((16, 16), (16, 8)))
        else:
            a, b = (random.normal(0, scale, shape).astype(dtype) for shape in ((16, 16), (16, 8)))
        c = random.integers(-99, 99, (16, 8)).astype(np.float32)
        d = poisoned((16, 8), np.float32)
        bits = (upload(a.view(np.uint16)), upload(b.view(np.uint16)))
        kernel("mma", probes.Mma(kind), target).launch(1, 32, (*bits, upload(c), d))
        wanted = c.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)
        tolerance = 0.0 if scale is None else 1e-4  # products of integers are exact in fp32
        assert np.abs(download(d) - wanted).max() <= tolerance


@pytest.mark.parametrize("source", ["registers", "shared"])
@pytest.mark.parametrize("n", [8, 24, 256])
@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.dtype(np.float16)), ("bf16", BFLOAT16)])
def test_wgmma(target: Target, kind: str, dtype: np.dtype[Any], n: int, source: str) -> None:
    if not target.has_wgmma:
        pytest.skip(f"{target.name} has no wgmma")
    random = np.random.default_rng(n)
    a, b = (random.integers(-8, 9, shape).astype(dtype) for shape in ((64, 16), (n, 16)))
    c = random.integers(-99, 99, (64, n)).astype(np.float32)
    d = poisoned((64, n), np.float32)
    args = (upload(a.view(np.uint16)), upload(b.view(np.uint16)), upload(c), d)
    kernel("wgmma", probes.Wgmma(kind, n, source), target).launch(1, 128, args)
    assert (download(d) == c + a.astype(np.float64) @ b.astype(np.float64).T).all()


def test_cp_async_fills_with_zeros_and_tells_group_and_barrier(target: Target) -> None:
    source = np.random.default_rng(6).integers(1, 256, (128, 16), dtype=np.uint8)
    sizes = (np.arange(128) % 17).astype(np.uint32)
    by_group, by_barrier = (poisoned((128, 16), np.uint8) for _ in range(2))
    args = (upload(source), upload(sizes), by_group, by_barrier)
    kernel("cp_async", probes.Plain("cp_async"), target).launch(1, 128, args)
    wanted = np.where(np.arange(16) < sizes[:, None], source, 0)
    assert (download(by_group) == wanted).all()
    assert (download(by_barrier) == wanted).all()


@pytest.mark.parametrize("stages", [1, 2, 3, 7])
@pytest.mark.parametrize("consumers", [1, 4])
def test_the_ring_wraps_and_ends_anywhere(target: Target, stages: int, consumers: int) -> None:
    config = probes.Ring(stages, consumers)
    words = config.tile_bytes // 4
    for count in sorted({0, 1, stages - 1, stages, stages + 1, 2 * stages, 5 * stages + 2, 300}):
        tiles = np.random.default_rng(count).integers(0, 1 << 16, (max(count, 1), words)).astype(np.uint32)
        sums = poisoned((consumers, 32), np.uint32)
        args = (upload(tiles), sums, count)
        kernel("ring", config, target).launch(1, 32 * (consumers + 1), args, shared_bytes=config.ring.smem_bytes)
        weights = np.arange(1, count + 1, dtype=np.uint32)
        column = (weights[:, None] * tiles[:count]).sum(axis=0, dtype=np.uint32)
        wanted = column.reshape(-1, consumers, 32).sum(axis=0, dtype=np.uint32)
        assert (download(sums) == wanted).all(), count


def columns(image: Array, config: Im2colSpec, at: Sequence[int], offsets: Sequence[int]) -> Array:
    """What an im2col load delivers. image: (N, .., W, C). at: c, w, (h, (d,)) n; offsets: w, (h, (d))."""
    spatial = list(reversed(image.shape[1:-1]))
    pixel = list(at[1:-1])
    n = at[-1]
    result = np.zeros((config.pixels_per_column, config.channels_per_pixel), image.dtype)
    for row in result:
        place = [p + o for p, o in zip(pixel, offsets, strict=True)]
        if n < image.shape[0] and all(0 <= p < size for p, size in zip(place, spatial, strict=True)):
            row[:] = image[n][tuple(reversed(place))][at[0] : at[0] + config.channels_per_pixel]
        for axis, (low, high) in enumerate(zip(config.lower_corner, config.upper_corner, strict=True)):
            pixel[axis] += 1
            if pixel[axis] < spatial[axis] + high:
                break
            pixel[axis] = low
        else:
            n += 1
    return result


@pytest.mark.parametrize("shape", [(3, 9, 32), (2, 5, 6, 32), (2, 3, 4, 5, 32)])
def test_im2col_loads_a_three_wide_filter_with_padding(target: Target, shape: tuple[int, ...]) -> None:
    image = numbers(shape, np.float16)
    device = upload(image)
    rank, inner = image.ndim, tuple(reversed(shape))
    strides = tuple(image.strides[axis] for axis in range(rank - 2, -1, -1))
    config = Im2colSpec(
        dtype=np.dtype(np.float16),
        dims=inner,
        strides_bytes=strides,
        address=device.data.ptr,
        lower_corner=(-1,) * (rank - 2),
        upper_corner=(-1,) * (rank - 2),
        channels_per_pixel=16,
        pixels_per_column=20,
    )
    load = TensorMap.im2col(config, owner=device)
    probe = probes.Im2col(rank, load.expected_bytes)
    for channel, offset, n in ((0, 0, 0), (16, 1, 0), (0, 2, shape[0] - 1)):
        at = (channel, *(-1 for _ in range(rank - 2)), n)
        offsets = (offset, *(2 - offset for _ in range(rank - 3)))
        dump = poisoned(load.expected_bytes, np.uint8)
        args = (load, dump, *at, *[0] * (5 - rank), *offsets, *[0] * (5 - rank))
        kernel("im2col", probe, target).launch(1, 128, args, shared_bytes=load.expected_bytes)
        arrived = download(dump).view(np.float16).reshape(20, 16)
        assert (arrived == columns(image, config, at, offsets)).all(), (channel, offset, n)


def test_multicast_reaches_both_blocks_of_a_cluster(target: Target) -> None:
    if not target.has_multicast:
        pytest.skip(f"{target.name} has no multicast")
    source = numbers((16, 64), np.float32)
    load = TensorMap.from_array(upload(source), (8, 64))
    dump = poisoned((2, 16, 64), np.float32)
    probe = probes.Multicast(load.expected_bytes, 8)
    kernel("multicast", probe, target).launch(2, 128, (load, dump), cluster=2, shared_bytes=2 * load.footprint_bytes)
    assert (download(dump) == source).all()


@pytest.mark.parametrize("programmatic", [False, True])
def test_elect_named_barrier_and_register_exchange(target: Target, programmatic: bool) -> None:
    values = np.arange(100, 132, dtype=np.uint32)
    counts, out = upload(np.zeros(1, np.uint32)), poisoned(32, np.uint32)
    args = (counts, upload(values), out)
    kernel("sync", probes.Plain("sync"), target).launch(1, 128, args, programmatic=programmatic)
    assert download(counts)[0] == 4
    assert (download(out) == values[::-1]).all()


def test_a_tensor_map_edited_on_the_gpu_is_used_after_the_fence(target: Target) -> None:
    if not target.has("tensormap_replace"):
        pytest.skip(f"{target.name} has no tensormap.replace")
    first, second = numbers((8, 32), np.float32, 1), numbers((8, 32), np.float32, 2)
    original = TensorMap.from_array(upload(first), (8, 32))
    edited, dump = poisoned(128, np.uint8), poisoned((8, 32), np.float32)
    args = (original, edited, upload(second), 5, dump)
    probe = probes.TensorMapEdit(original.expected_bytes)
    kernel("tensormap_edit", probe, target).launch(1, 32, args, shared_bytes=original.footprint_bytes)
    second[5:] = 0
    assert (download(dump) == second).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8, np.int64], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (64, 64), (65, 80), (1000, 1040), (4099, 2064)])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_the_tile_copy_example(
    load_example: Callable[[str], ModuleType], dtype: Any, shape: tuple[int, int], stages: int
) -> None:
    source = np.random.default_rng(8).integers(0, 100, shape).astype(dtype)
    destination = poisoned((shape[0] + 1, shape[1]), dtype)
    load_example("tile_copy").tile_copy(upload(source), destination[: shape[0]], stages=stages)
    result = download(destination)
    assert (result[: shape[0]] == source).all()
    assert (result[shape[0] :].view(np.uint8) == POISON).all()
