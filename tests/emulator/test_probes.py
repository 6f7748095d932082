"""The probe kernels on the CPU under several schedules, against NumPy and without hazards."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import probe_configs as probes
import pytest
from ptx_of import probe

from cudatma.descriptor import Im2colSpec, TensorMap
from cudatma.layout import Swizzle, swizzle

Array = np.ndarray[Any, np.dtype[Any]]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SCHEDULES = 6
#: Rank -> shape and box in NumPy order; rows and boxes are multiples of 16 bytes for 2 bytes an element and more.
TENSORS: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    1: ((1000,), (64,)),
    2: ((37, 72), (8, 32)),
    3: ((5, 11, 40), (2, 4, 16)),
    4: ((3, 4, 7, 24), (2, 2, 3, 8)),
    5: ((2, 3, 4, 5, 16), (1, 2, 2, 3, 8)),
}


def numbers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    """Return small integers that are exact in every type."""
    least = 0 if np.dtype(dtype).kind == "u" else -9
    return np.random.default_rng(seed).integers(least, 10, shape).astype(dtype)


def clip(shape: Sequence[int], box: Sequence[int], at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    low = [max(0, a) for a in at]
    high = [max(lo, min(n, a + b)) for n, b, a, lo in zip(shape, box, at, low, strict=True)]
    inside = tuple(slice(lo, hi) for lo, hi in zip(low, high, strict=True))
    return inside, tuple(slice(lo - a, hi - a) for lo, hi, a in zip(low, high, at, strict=True))


def loaded(array: Array, box: Sequence[int], at: Sequence[int]) -> Array:
    result = np.zeros(box, array.dtype)
    inside, part = clip(array.shape, box, at)
    result[part] = array[inside]
    return result


def five(at: Sequence[int]) -> list[int]:
    reversed_ = list(reversed(at))
    return reversed_ + [0] * (5 - len(reversed_))


def move(
    source: Array,
    destination: Array,
    box: tuple[int, ...],
    load_at: Any,
    store_at: Any,
    mode: str = "none",
    **spec: Any,
) -> tuple[Array, Array]:
    """Run the box_copy probe; return the raw shared memory and the destination."""
    load = TensorMap.from_array(source, box, swizzle=mode, encoder="codec")
    store = TensorMap.from_array(destination, box, swizzle=mode, encoder="codec")
    chosen = probes.BoxCopy(source.ndim, load.expected_bytes, load.footprint_bytes, **spec)
    dump = np.zeros(load.footprint_bytes, np.uint8)
    args = (load, store, dump, *five(load_at), *five(store_at))
    report = probe("box_copy", chosen).launch(
        "box_copy", 1, 128, args, shared_bytes=load.footprint_bytes, schedules=SCHEDULES, arrays=(source, destination)
    )
    assert report.is_clean
    return dump, destination


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


@pytest.mark.sweep(5)
@pytest.mark.parametrize("dtype", [np.float32, np.uint8, BFLOAT16], ids=str)
@pytest.mark.parametrize("rank", TENSORS)
def test_tile_load_and_store(rank: int, dtype: Any) -> None:
    shape, box = TENSORS[rank]
    if dtype == np.uint8:
        shape, box = (*shape[:-1], -(-shape[-1] // 16) * 16), (*box[:-1], 32)
    source = numbers(shape, dtype)
    itemsize = np.dtype(dtype).itemsize
    pairs = zip(positions(rank, itemsize, False), [*positions(rank, itemsize, True)] * 2, strict=False)
    for load_at, store_at in pairs:
        if dtype == np.uint8:
            load_at = (*load_at[:-1], load_at[-1] // 16 * 16)
            store_at = (*store_at[:-1], store_at[-1] // 16 * 16)
        before = np.full(shape, 7).astype(dtype)
        after = before.copy()
        dump, _ = move(source, after, box, load_at, store_at)
        wanted = loaded(source, box, load_at)
        assert dump[: wanted.nbytes].tobytes() == wanted.tobytes(), (load_at, store_at)
        inside, part = clip(shape, box, store_at)
        before[inside] = wanted[part]
        assert after.tobytes() == before.tobytes(), (load_at, store_at)


@pytest.mark.parametrize("mode", [Swizzle.B32, Swizzle.B64, Swizzle.B128])
@pytest.mark.parametrize("narrow", [False, True])
def test_swizzled_rows_lie_on_permuted_chunks_and_narrow_rows_are_padded(mode: Swizzle, narrow: bool) -> None:
    span = mode.span_bytes
    inner = 16 // 2 if narrow else span // 2
    source = numbers((32, 128), np.uint16, 3) + np.arange(32 * 128, dtype=np.uint16).reshape(32, 128)
    destination = np.zeros_like(source)
    dump, after = move(source, destination, (16, inner), (4, 8), (8, 16), mode.label)
    wanted = source[4:20, 8 : 8 + inner]
    raw = np.full(16 * span, 0xEE, np.uint8)
    for row in range(16):
        for chunk in range(inner * 2 // 16):
            # The probe's buffer is aligned to 1024, so that offsets and addresses have the same low bits.
            at = swizzle(row * span + chunk * 16, mode)
            raw[at : at + 16] = wanted[row, chunk * 8 : chunk * 8 + 8].view(np.uint8)
    assert dump.tobytes() == raw.tobytes()
    assert (after[8:24, 16 : 16 + inner] == wanted).all()
    assert int((after != 0).sum()) == int((wanted != 0).sum())


@pytest.mark.parametrize(
    ("write", "dtype"), [("add", np.float32), ("min", np.int32), ("xor", np.uint64), ("inc", np.uint32)]
)
def test_reductions(write: str, dtype: Any) -> None:
    source, before = numbers((37, 72), dtype, 1), numbers((37, 72), dtype, 2)
    after = before.copy()
    move(source, after, (8, 16), (3, 8), (30, 64), write=write)
    tile = source[3:10, 8:16]
    old = before[30:37, 64:72]
    wanted = {
        "add": old + tile,
        "min": np.minimum(old, tile),
        "xor": old ^ tile if dtype == np.uint64 else old,
        "inc": np.where(old >= tile, 0, old + 1),
    }[write]
    expected = before.copy()
    expected[30:37, 64:72] = wanted
    assert after.tobytes() == expected.tobytes()


def test_stores_clip_at_sixteen_bytes() -> None:
    """A row of 15 elements of 2 bytes in rows 20 elements apart: the 16th is overwritten, the 17th is not."""
    storage = np.full((8, 24), 99, np.uint16)
    source = np.arange(8 * 16, dtype=np.uint16).reshape(8, 16)
    load = TensorMap.from_array(source, (8, 16), encoder="codec")
    store = TensorMap.from_array(storage[:, :15], (8, 16), encoder="codec")
    spec = probes.BoxCopy(2, load.expected_bytes, load.footprint_bytes)
    dump = np.zeros(load.footprint_bytes, np.uint8)
    args = (load, store, dump, *([0] * 10))
    probe("box_copy", spec).launch("box_copy", 1, 128, args, shared_bytes=256, arrays=(source, storage))
    assert (storage[:, :16] == source).all()
    assert (storage[:, 16:] == 99).all()


def test_bulk_copy() -> None:
    source = np.random.default_rng(0).integers(0, 256, 1024, dtype=np.uint8)
    destination = np.zeros(1024, np.uint8)
    module = probe("bulk_copy", probes.Plain("bulk_copy"))
    report = module.launch("bulk_copy", 1, 128, (source, destination, 1024), shared_bytes=1024, schedules=SCHEDULES)
    assert report.is_clean
    assert (destination == ~source).all()


@pytest.mark.parametrize("suffix", ["", "_trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(count: int, suffix: str) -> None:
    data = np.arange(count * 64, dtype=np.uint16)
    registers = np.zeros(count * 32, np.uint32)
    out, moved = np.zeros_like(data), np.zeros(32, np.uint32)
    module = probe("matrix", probes.Matrix(count, suffix, suffix))
    assert module.launch("matrix", 1, 32, (data, registers, out, moved), schedules=SCHEDULES).is_clean
    assert (out == data).all()
    matrices = data.reshape(count, 8, 8)
    for lane in range(32):
        for number in range(count):
            matrix = matrices[number].T if suffix else matrices[number]
            low, high = matrix[lane // 4, 2 * (lane % 4)], matrix[lane // 4, 2 * (lane % 4) + 1]
            assert registers[number * 32 + lane] == int(low) | int(high) << 16


@pytest.mark.parametrize(("name", "dtype"), [("f16", np.dtype(np.float16)), ("bf16", BFLOAT16)])
def test_mma(name: str, dtype: Any) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(16, 16)).astype(dtype), rng.normal(size=(16, 8)).astype(dtype)
    c = rng.normal(size=(16, 8)).astype(np.float32)
    d = np.zeros_like(c)
    module = probe("mma", probes.Mma(name))
    assert module.launch("mma", 1, 32, (a.view(np.uint16), b.view(np.uint16), c, d)).is_clean
    wanted = a.astype(np.float64) @ b.astype(np.float64) + c
    assert np.abs(d - wanted).max() < 1e-5


@pytest.mark.sweep(4)
@pytest.mark.parametrize("source", ["registers", "shared"])
@pytest.mark.parametrize("n", [8, 24, 256])
@pytest.mark.parametrize(("name", "dtype"), [("f16", np.dtype(np.float16)), ("bf16", BFLOAT16)])
def test_wgmma(name: str, dtype: Any, n: int, source: str) -> None:
    rng = np.random.default_rng(n)
    a, b = rng.normal(size=(64, 16)).astype(dtype), rng.normal(size=(n, 16)).astype(dtype)
    c = rng.normal(size=(64, n)).astype(np.float32)
    d = np.zeros_like(c)
    module = probe("wgmma", probes.Wgmma(name, n, source))
    assert module.launch("wgmma", 1, 128, (a.view(np.uint16), b.view(np.uint16), c, d)).is_clean
    wanted = a.astype(np.float64) @ b.astype(np.float64).T + c
    assert np.abs(d - wanted).max() < 1e-5


def test_cp_async() -> None:
    source = np.random.default_rng(0).integers(0, 256, 128 * 16, dtype=np.uint8)
    counts = (np.arange(128) % 17).astype(np.uint32)
    by_group, by_barrier = np.zeros_like(source), np.zeros_like(source)
    module = probe("cp_async", probes.Plain("cp_async"))
    report = module.launch(
        "cp_async", 1, 128, (source, counts, by_group, by_barrier), schedules=SCHEDULES, hazards="collect"
    )
    wanted = np.where(np.arange(16) < counts[:, None], source.reshape(128, 16), 0).astype(np.uint8).reshape(-1)
    assert (by_group == wanted).all()
    assert (by_barrier == wanted).all()
    # The probe reads across threads after its own wait_group and a barrier, which is what orders it.
    assert report.is_clean, str(report)


def test_ring() -> None:
    tiles = np.random.default_rng(0).integers(0, 1000, (7, 256), dtype=np.uint32)
    spec = probes.Ring(3, 4)
    sums = np.zeros((4, 32), np.uint32)
    module = probe("ring", spec)
    report = module.launch("ring", 1, 160, (tiles, sums, 7), shared_bytes=spec.ring.smem_bytes, schedules=20)
    assert report.is_clean
    weighted = tiles * np.arange(1, 8, dtype=np.uint32)[:, None]
    assert (sums == weighted.reshape(7, 2, 4, 32).sum(axis=(0, 1), dtype=np.uint32)).all()


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_im2col(rank: int) -> None:
    """A column of pixels of a convolution with padding: W fastest, then H, D and the image."""
    spatial = (6, 5, 4)[: rank - 2]
    array = np.arange(2 * int(np.prod(spatial)) * 16, dtype=np.float32).reshape(2, *reversed(spatial), 16)
    strides = [array.strides[axis] for axis in range(rank - 2, -1, -1)]
    low, high = (-1,) * (rank - 2), (-1,) * (rank - 2)
    spec = Im2colSpec(
        dtype="float32",
        dims=(16, *spatial, 2),
        strides_bytes=tuple(strides),
        address=array.ctypes.data,
        lower_corner=low,
        upper_corner=high,
        channels_per_pixel=8,
        pixels_per_column=32,
    )
    map_ = TensorMap(spec, encoder="codec", owner=array)
    dump = np.zeros(32 * 8, np.float32)
    start, offset = [-1 + 1] * (rank - 2), [k + 1 for k in range(rank - 2)]
    coords = [8, *start, 0]
    args = (map_, dump, *coords, *[0] * (5 - rank), *offset, *[0] * (5 - rank))
    module = probe("im2col", probes.Im2col(rank, map_.expected_bytes))
    assert module.launch("im2col", 1, 128, args, shared_bytes=1024, schedules=SCHEDULES, arrays=(array,)).is_clean
    wanted = np.zeros((32, 8), np.float32)
    position, image = list(start), 0
    for pixel in range(32):
        place = [p + o for p, o in zip(position, offset, strict=True)]
        if image < 2 and all(0 <= p < n for p, n in zip(place, spatial, strict=True)):
            wanted[pixel] = array[image][tuple(reversed(place))][8:16]
        for k in range(rank - 2):
            position[k] += 1
            if position[k] <= spatial[k] - 1 + high[k]:
                break
            position[k] = low[k]
        else:
            image += 1
    assert (dump.reshape(32, 8) == wanted).all()


def test_multicast() -> None:
    source = np.arange(16 * 32, dtype=np.float32).reshape(16, 32)
    map_ = TensorMap.from_array(source, (8, 32), encoder="codec")
    dump = np.zeros((2, 16 * 32), np.float32)
    spec = probes.Multicast(map_.expected_bytes, 8)
    report = probe("multicast", spec).launch(
        "multicast",
        2,
        128,
        (map_, dump.view(np.uint8)),
        cluster=2,
        shared_bytes=2048,
        schedules=SCHEDULES,
        arrays=(source,),
    )
    assert report.is_clean
    assert (dump == source.reshape(-1)).all()


def test_named_barriers_election_and_setmaxnreg() -> None:
    counts, given, out = np.zeros(1, np.uint32), np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    module = probe("sync", probes.Plain("sync"))
    assert module.launch("sync", 1, 128, (counts, given, out), schedules=1).is_clean
    assert counts[0] == 4
    assert (out == given[::-1]).all()


@pytest.mark.parametrize("is_low", [False, True], ids=["anywhere", "below 4 GiB"])
def test_tensor_map_edited_on_the_device(is_low: bool) -> None:
    """A tensor map in global memory below 4 GiB is not mistaken for one in shared memory."""
    original, other = np.zeros((16, 32), np.float32), np.arange(16 * 32, dtype=np.float32).reshape(16, 32)
    map_ = TensorMap.from_array(original, (8, 32), encoder="codec")
    low = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40  # MAP_32BIT
    raw = np.frombuffer(mmap.mmap(-1, 4096, flags=low), np.uint8) if is_low else np.zeros(256, np.uint8)
    assert not is_low or raw.ctypes.data < 1 << 32
    edited = raw[-raw.ctypes.data % 128 :][:128]
    dump = np.zeros((8, 32), np.float32)
    module = probe("tensormap_edit", probes.TensorMapEdit(map_.expected_bytes))
    report = module.launch(
        "tensormap_edit",
        1,
        32,
        (map_, edited, other, 5, dump),
        shared_bytes=1024,
        schedules=SCHEDULES,
        arrays=(original,),
    )
    assert report.is_clean
    wanted = other[:8].copy()
    wanted[5:] = 0
    assert (dump == wanted).all()
