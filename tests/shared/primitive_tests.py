"""Tests that compare the primitives with NumPy through probe kernels, on the emulator and on a GPU.

test_probes.py and test_primitives_gpu.py import these tests and define the fixture ``machine``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import probe_configs as probes
import pytest

from cudatma.descriptor import Im2colSpec, TensorMap
from cudatma.target import Target

Array = np.ndarray[Any, np.dtype[Any]]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
POISON = 0xA5
#: Maps each rank to a shape and a box in NumPy order. Rows and boxes of elements of 2 or more bytes are multiples of 16
#: bytes.
TENSORS: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    1: ((1000,), (64,)),
    2: ((37, 72), (8, 32)),
    3: ((5, 11, 40), (2, 4, 16)),
    4: ((3, 4, 7, 24), (2, 2, 3, 8)),
    5: ((2, 3, 4, 5, 16), (1, 2, 2, 3, 8)),
}


class Machine(Protocol):
    """A GPU or emulator that runs probes on arrays in its memory."""

    target: Target
    #: Encoder of tensor maps.
    encoder: Any

    def upload(self, array: Array) -> Any: ...

    def download(self, array: Any) -> Array: ...

    def launch(self, name: str, config: Any, grid: int, block: int, args: Sequence[Any], **options: Any) -> None:
        """Launch the kernel of a probe."""


def poisoned(machine: Machine, shape: int | tuple[int, ...], dtype: Any) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return machine.upload(np.full(size, POISON, np.uint8).view(dtype).reshape(shape))


def tensor_map(machine: Machine, array: Any, box: tuple[int, ...], **options: Any) -> TensorMap:
    return TensorMap.from_array(array, box, encoder=machine.encoder, **options)


def numbers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    """Return small integers, which are exact in every type."""
    least = 0 if np.dtype(dtype).kind == "u" else -9
    return np.random.default_rng(seed).integers(least, 10, shape).astype(dtype)


def clip(shape: Sequence[int], box: Sequence[int], at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the part of a tensor that a box at ``at`` covers, and that part of the box, in NumPy order."""
    low = [max(0, a) for a in at]
    high = [max(lo, min(n, a + b)) for n, b, a, lo in zip(shape, box, at, low, strict=True)]
    inside = tuple(slice(lo, hi) for lo, hi in zip(low, high, strict=True))
    return inside, tuple(slice(lo - a, hi - a) for lo, hi, a in zip(low, high, at, strict=True))


def loaded(array: Array, box: Sequence[int], at: Sequence[int]) -> Array:
    """Return the box that a tile load delivers, with zeros outside the array."""
    result = np.zeros(box, array.dtype)
    inside, part = clip(array.shape, box, at)
    result[part] = array[inside]
    return result


def five(at: Sequence[int]) -> list[int]:
    """Convert coordinates from NumPy order to TMA order, and extend them to five."""
    return [*reversed(at), *[0] * (5 - len(at))]


def move(
    machine: Machine,
    source: Array,
    destination: Array,
    box: tuple[int, ...],
    load_at: Sequence[int],
    store_at: Sequence[int],
    swizzle: str = "none",
    **config: Any,
) -> tuple[Array, Array]:
    """Run the box_copy probe, and return the bytes of shared memory and the destination afterwards."""
    arrays = machine.upload(source), machine.upload(destination)
    load, store = (tensor_map(machine, array, box, swizzle=swizzle) for array in arrays)
    probe = probes.BoxCopy(source.ndim, load.expected_bytes, load.footprint_bytes, **config)
    dump = poisoned(machine, load.footprint_bytes, np.uint8)
    args = (load, store, dump, *five(load_at), *five(store_at))
    machine.launch("box_copy", probe, 1, 128, args, shared_bytes=load.footprint_bytes)
    return machine.download(dump), machine.download(arrays[1])


def positions(rank: int, itemsize: int) -> list[tuple[int, ...]]:
    """Return coordinates of boxes at the origin, inside, across the end, far outside, and at negative coordinates.

    The innermost coordinate is a multiple of 16 bytes.
    """
    shape, box = TENSORS[rank]
    unit = 16 // itemsize
    outer = list(zip(shape[:-1], box[:-1], strict=True))
    over = (*(n - b // 2 for n, b in outer), (shape[-1] - unit) // unit * unit)
    some = (*(int(n > b) for n, b in outer), unit)
    outside = (*shape[:-1], (shape[-1] + unit) // unit * unit)
    return [(0,) * rank, some, over, outside, (*(-1 for _ in shape[:-1]), -unit)]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.float64], ids=str)
@pytest.mark.parametrize("rank", TENSORS)
def test_tile_load_and_store(machine: Machine, rank: int, dtype: Any) -> None:
    shape, box = TENSORS[rank]
    source, places = numbers(shape, dtype), positions(rank, np.dtype(dtype).itemsize)
    for load_at, store_at in zip(places, places[1:4] + places[:2], strict=True):
        before = np.full(shape, 7).astype(dtype)
        dump, after = move(machine, source, before.copy(), box, load_at, store_at)
        expected = loaded(source, box, load_at)
        assert dump[: expected.nbytes].tobytes() == expected.tobytes(), (load_at, store_at)
        inside, part = clip(shape, box, store_at)
        before[inside] = expected[part]
        assert after.tobytes() == before.tobytes(), (load_at, store_at)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("policy", ["evict_first", "evict_last", "evict_normal"])
def test_cache_hints_change_no_value(machine: Machine, policy: str) -> None:
    for rank, (shape, box) in TENSORS.items():
        source, zero = numbers(shape, np.float32), (0,) * rank
        _, after = move(machine, source, np.zeros(shape, np.float32), box, zero, zero, policy=policy)
        inside, _ = clip(shape, box, zero)
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


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("op", "dtype"), [(op, d) for op, (_, types) in REDUCTIONS.items() for d in types], ids=str)
def test_reductions_of_every_type(machine: Machine, op: str, dtype: Any) -> None:
    shape, box = TENSORS[2]
    source, old = numbers(shape, dtype, 1), numbers(shape, dtype, 2)
    for store_at in positions(2, np.dtype(dtype).itemsize)[:3:2]:
        _, after = move(machine, source, old, box, (0, 0), store_at, write=op)
        inside, part = clip(shape, box, store_at)
        expected = old.copy()
        expected[inside] = REDUCTIONS[op][0](old[inside], loaded(source, box, (0, 0))[part]).astype(dtype)
        assert (after == expected).all()


@pytest.mark.parametrize("size", [32, 48, 4096])
def test_bulk_copies(machine: Machine, size: int) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    out = poisoned(machine, size + 16, np.uint8)
    args = (machine.upload(source), out, size)
    machine.launch("bulk_copy", probes.Plain("bulk_copy"), 1, 128, args, shared_bytes=size)
    result = machine.download(out)
    assert (result[:size] == ~source).all()
    assert (result[size:] == POISON).all()


def fragment(matrices: Array, transposed: bool) -> Array:
    """Return the registers of ldmatrix. Lane l has two elements of row l / 4 of each matrix. [PTX ISA, ldmatrix]"""
    chosen = matrices.swapaxes(1, 2) if transposed else matrices
    pairs = chosen.reshape(len(matrices), 32, 2).astype(np.uint32)
    return pairs[..., 0] | pairs[..., 1] << 16


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("load", "store"), [("", ""), ("_trans", ""), ("_trans", "_trans")])
def test_ldmatrix_stmatrix_movmatrix(machine: Machine, count: int, load: str, store: str) -> None:
    matrices = np.arange(count * 64, dtype=np.uint16).reshape(count, 8, 8) * 257
    shapes = ((count, 32), np.uint32), ((count, 8, 8), np.uint16), (32, np.uint32)
    registers, out, moved = (poisoned(machine, *shape) for shape in shapes)
    config = probes.Matrix(count, load, store)
    machine.launch("matrix", config, 1, 32, (machine.upload(matrices), registers, out, moved))
    assert (machine.download(registers) == fragment(matrices, bool(load))).all()
    assert (machine.download(out) == (matrices if load == store else matrices.swapaxes(1, 2))).all()
    assert (machine.download(moved) == fragment(matrices, not load)[0]).all()


FLOATS = [("f16", np.dtype(np.float16)), ("bf16", BFLOAT16)]


def operands(rows: int, columns: int, dtype: Any, *, exact: bool) -> tuple[Array, Array, Array]:
    """Return A (rows, 16), B (columns, 16) and C of a product, as integers if ``exact``, else normally distributed."""
    random, shapes = np.random.default_rng(columns), ((rows, 16), (columns, 16), (rows, columns))
    made = [random.integers(-8, 9, shape) if exact else random.normal(0, 1, shape) for shape in shapes]
    return made[0].astype(dtype), made[1].astype(dtype), made[2].astype(np.float32)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("kind", "dtype"), FLOATS)
def test_mma(machine: Machine, kind: str, dtype: Any, exact: bool) -> None:
    a, b, c = operands(16, 8, dtype, exact=exact)
    d = poisoned(machine, (16, 8), np.float32)
    stored = (machine.upload(np.ascontiguousarray(part).view(np.uint16)) for part in (a, b.T))
    machine.launch("mma", probes.Mma(kind), 1, 32, (*stored, machine.upload(c), d))
    expected = c + a.astype(np.float64) @ b.astype(np.float64).T
    assert np.abs(machine.download(d) - expected).max() <= (0 if exact else 1e-4)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("kind", "dtype"), FLOATS)
@pytest.mark.parametrize("n", [8, 24, 256])
@pytest.mark.parametrize("source", ["registers", "shared"])
def test_wgmma(machine: Machine, source: str, n: int, kind: str, dtype: Any) -> None:
    if not machine.target.has_wgmma:
        pytest.skip(f"{machine.target.name} has no wgmma")
    a, b, c = operands(64, n, dtype, exact=True)
    d = poisoned(machine, (64, n), np.float32)
    stored = (machine.upload(part.view(np.uint16)) for part in (a, b))
    machine.launch("wgmma", probes.Wgmma(kind, n, source), 1, 128, (*stored, machine.upload(c), d))
    assert (machine.download(d) == c + a.astype(np.float64) @ b.astype(np.float64).T).all()


def test_cp_async_fills_with_zeros_and_reports_to_group_and_barrier(machine: Machine) -> None:
    source = np.random.default_rng(6).integers(1, 256, (128, 16), dtype=np.uint8)
    sizes = (np.arange(128) % 17).astype(np.uint32)
    results = [poisoned(machine, (128, 16), np.uint8) for _ in range(2)]
    args = (machine.upload(source), machine.upload(sizes), *results)
    machine.launch("cp_async", probes.Plain("cp_async"), 1, 128, args)
    expected = np.where(np.arange(16) < sizes[:, None], source, 0)
    assert all((machine.download(result) == expected).all() for result in results)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("stages", "consumers"), [(1, 4), (2, 1), (3, 4), (7, 1)])
def test_a_ring_wraps_and_ends_anywhere(machine: Machine, stages: int, consumers: int) -> None:
    config = probes.Ring(stages, consumers)
    for count in sorted({0, 1, stages - 1, stages, stages + 1, 5 * stages + 2}):
        words = config.tile_bytes // 4
        tiles = np.random.default_rng(count).integers(0, 1 << 16, (max(count, 1), words)).astype(np.uint32)
        sums = poisoned(machine, (consumers, 32), np.uint32)
        args, threads = (machine.upload(tiles), sums, count), 32 * (consumers + 1)
        machine.launch("ring", config, 1, threads, args, shared_bytes=config.ring.smem_bytes)
        weights = np.arange(1, count + 1, dtype=np.uint32)
        column = (weights[:, None] * tiles[:count]).sum(axis=0, dtype=np.uint32)
        expected = column.reshape(-1, consumers, 32).sum(axis=0, dtype=np.uint32)
        assert (machine.download(sums) == expected).all(), count


def columns(image: Array, config: Im2colSpec, at: Sequence[int], offsets: Sequence[int]) -> Array:
    """Return the columns that an im2col load delivers.

    ``image`` is (N, .., W, C), ``at`` is (c, w, [h, [d,]] n), and ``offsets`` is (w, [h, [d]]).
    """
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
def test_im2col_loads_a_three_wide_filter_with_padding(machine: Machine, shape: tuple[int, ...]) -> None:
    image = numbers(shape, np.float16)
    device, rank = machine.upload(image), image.ndim
    config = Im2colSpec(
        dtype=np.dtype(np.float16),
        dims=tuple(reversed(shape)),
        strides_bytes=tuple(image.strides[axis] for axis in range(rank - 2, -1, -1)),
        address=device.data.ptr if hasattr(device.data, "ptr") else device.ctypes.data,
        lower_corner=(-1,) * (rank - 2),
        upper_corner=(-1,) * (rank - 2),
        channels_per_pixel=16,
        pixels_per_column=20,
    )
    load = TensorMap(config, encoder=machine.encoder, owner=device)
    probe = probes.Im2col(rank, load.expected_bytes)
    for channel, offset, n in ((0, 0, 0), (16, 1, 0), (0, 2, shape[0] - 1)):
        at = (channel, *(-1 for _ in range(rank - 2)), n)
        offsets = (offset, *(2 - offset for _ in range(rank - 3)))
        dump = poisoned(machine, load.expected_bytes, np.uint8)
        args = (load, dump, *at, *[0] * (5 - rank), *offsets, *[0] * (5 - rank))
        machine.launch("im2col", probe, 1, 128, args, shared_bytes=load.expected_bytes)
        arrived = machine.download(dump).view(np.float16).reshape(20, 16)
        assert (arrived == columns(image, config, at, offsets)).all(), (channel, offset, n)


def test_multicast_reaches_both_blocks_of_a_cluster(machine: Machine) -> None:
    if not machine.target.has_multicast:
        pytest.skip(f"{machine.target.name} has no multicast")
    source = numbers((16, 64), np.float32)
    load = tensor_map(machine, machine.upload(source), (8, 64))
    dump = poisoned(machine, (2, 16, 64), np.float32)
    probe = probes.Multicast(load.expected_bytes, 8)
    machine.launch("multicast", probe, 2, 128, (load, dump), cluster=2, shared_bytes=2 * load.footprint_bytes)
    assert (machine.download(dump) == source).all()


def test_named_barriers_election_and_setmaxnreg(machine: Machine) -> None:
    values = np.arange(100, 132, dtype=np.uint32)
    counts, out = machine.upload(np.zeros(1, np.uint32)), poisoned(machine, 32, np.uint32)
    machine.launch("sync", probes.Plain("sync"), 1, 128, (counts, machine.upload(values), out))
    assert machine.download(counts)[0] == 4
    assert (machine.download(out) == values[::-1]).all()


def test_a_tensor_map_edited_on_the_device_is_used_after_the_fence(machine: Machine) -> None:
    if not machine.target.has("tensormap_replace"):
        pytest.skip(f"{machine.target.name} has no tensormap.replace")
    first, second = numbers((8, 32), np.float32, 1), numbers((8, 32), np.float32, 2)
    original = tensor_map(machine, machine.upload(first), (8, 32))
    room, dump = poisoned(machine, 256, np.uint8), poisoned(machine, (8, 32), np.float32)
    address = room.data.ptr if hasattr(room.data, "ptr") else room.ctypes.data
    edited = room[-address % 128 :][:128]
    args = (original, edited, machine.upload(second), 5, dump)
    probe = probes.TensorMapEdit(original.expected_bytes)
    machine.launch("tensormap_edit", probe, 1, 32, args, shared_bytes=original.footprint_bytes)
    second[5:] = 0
    assert (machine.download(dump) == second).all()
