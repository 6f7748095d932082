"""The operations over arrays on a card against NumPy: rings that wrap many times, edges, guards behind every result."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cudatma as c
from cudatma.target import detect

pytestmark = pytest.mark.gpu

Array = np.ndarray[Any, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
GUARD = 0xA5


def numbers(shape: Sequence[int], dtype: Any, seed: int = 0) -> Array:
    """Small integers, exact in every type."""
    return np.random.default_rng(seed).integers(1, 100, tuple(shape)).astype(dtype)


def upload(array: Array) -> Any:
    import cupy

    return cupy.asarray(array)


def download(array: Any) -> Array:
    import cupy

    return np.asarray(cupy.asnumpy(array))


def guarded(shape: Sequence[int], dtype: Any) -> tuple[Any, Any]:
    """An array in the middle of a buffer of guard bytes, and the whole buffer."""
    import cupy

    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    whole = cupy.full(nbytes + 512, GUARD, cupy.uint8)
    return whole[256 : 256 + nbytes].view(dtype).reshape(tuple(shape)), whole


def check_guards(whole: Any) -> None:
    bytes_ = download(whole)
    assert (bytes_[:256] == GUARD).all()
    assert (bytes_[-256:] == GUARD).all()


def window(array: Array, offset: Sequence[int], shape: Sequence[int], fill: float = 0) -> Array:
    """What a copy with padding gives, by a padded array and plain slices."""
    before = [max(0, -start) for start in offset]
    after = [max(0, start + extent - size) for start, extent, size in zip(offset, shape, array.shape, strict=True)]
    padded = np.full([b + n + a for b, n, a in zip(before, array.shape, after, strict=True)], fill, array.dtype)
    padded[tuple(slice(b, b + n) for b, n in zip(before, array.shape, strict=True))] = array
    return padded[tuple(slice(o + b, o + b + n) for o, b, n in zip(offset, before, shape, strict=True))]


# ---- copy


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, BF16, np.float32, np.float64, np.complex128], ids=str)
@pytest.mark.parametrize(
    ("shape", "offset", "extent"),
    [
        ((5_000_016,), (0,), (5_000_016,)),
        ((1500, 2048), (0, 0), (1500, 2048)),
        ((1500, 2048), (7, 32), (1400, 1904)),
        ((1500, 2048), (-5, -32), (1600, 2144)),
        ((9, 130, 528), (1, -2, 16), (9, 131, 544)),
        ((5, 6, 70, 112), (-1, 1, 0, 16), (7, 4, 71, 96)),
        ((3, 4, 5, 30, 112), (1, 0, -1, 1, 16), (3, 4, 7, 29, 80)),
    ],
)
def test_copy(shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...], dtype: Any) -> None:
    source = numbers(shape, dtype)
    wanted = window(source, offset, extent)
    for via in ("tma", "plain"):
        out, whole = guarded(extent, dtype)
        assert c.copy(upload(source), out=out, offset=offset, shape=extent, pad="zeros", via=via) is out
        assert (download(out) == wanted).all()
        check_guards(whole)


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64], ids=str)
def test_copy_fills_with_nan(dtype: Any) -> None:
    source = numbers((300, 528), dtype)
    wanted = window(source, (-9, -16), (320, 560), np.nan)
    for via in ("tma", "plain"):
        result = c.copy(upload(source), offset=(-9, -16), shape=(320, 560), pad="nan", via=via)
        assert np.array_equal(download(result), wanted, equal_nan=True)


@pytest.mark.parametrize("cache", [None, "evict_first", "evict_last", "evict_normal"])
def test_copy_with_an_l2_policy(cache: str | None) -> None:
    source = numbers((4000, 1040), np.float32)
    for part in (source, source[:, :1024]):
        device = upload(source)[:, : part.shape[1]]
        assert (download(c.copy(device, cache=cache)) == part).all()


def test_runs_at_odd_addresses() -> None:
    source = numbers((1_000_003,), np.uint8)
    device = upload(source)
    for begin, end, to in ((3, -5, 19), (0, -1, 16), (1, 7, 1), (5, -5, 6)):
        part = source[begin:end]
        whole = upload(np.full(len(source) + 64, GUARD, np.uint8))
        c.copy(device[begin:end], out=whole[to : to + len(part)])
        found = download(whole)
        assert (found[to : to + len(part)] == part).all()
        assert (found[:to] == GUARD).all()
        assert (found[to + len(part) :] == GUARD).all()


def test_strided_and_reversed_arrays() -> None:
    source = numbers((200, 300), np.float32)
    device = upload(source)
    views: list[tuple[Any, Array]] = [
        (device[::2, ::3], source[::2, ::3]),
        (device[::-1, 1:], source[::-1, 1:]),
        (device.T, source.T),
    ]
    for view, wanted in views:
        assert (download(c.copy(view)) == wanted).all()


# ---- transpose


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, BF16, np.int32, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("shape", [(16, 16), (1040, 784), (2048, 4096), (7, 336, 208)])
def test_transpose(shape: tuple[int, ...], dtype: Any) -> None:
    source = numbers(shape, dtype)
    out, whole = guarded((*shape[:-2], shape[-1], shape[-2]), dtype)
    c.transpose(upload(source), out=out, via="tma")
    assert (download(out) == np.swapaxes(source, -1, -2)).all()
    check_guards(whole)


def test_transpose_of_what_tma_cannot() -> None:
    for source in (numbers((333, 35), np.float32), numbers((64, 48), np.complex128)):
        assert (download(c.transpose(upload(source))) == source.T).all()


# ---- reduce_into

TYPES: dict[str, tuple[Any, ...]] = {
    "add": (np.uint32, np.int32, np.uint64, np.int64, np.float16, BF16, np.float32, np.float64),
    "min": (np.uint32, np.int32, np.uint64, np.int64, np.float16, BF16),
    "max": (np.uint32, np.int32, np.uint64, np.int64, np.float16, BF16),
    "inc": (np.uint32,),
    "dec": (np.uint32,),
    "and": (np.uint8, np.int16, np.uint32, np.int64),
    "or": (np.uint8, np.int16, np.uint32, np.int64),
    "xor": (np.uint8, np.int16, np.uint32, np.int64),
}


def reduced(old: Array, new: Array, op: str) -> Array:
    names = {"add": "add", "min": "minimum", "max": "maximum"}
    if op == "inc":
        return np.where(old >= new, 0, old + 1).astype(old.dtype)
    if op == "dec":
        return np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype)
    return np.asarray(getattr(np, names.get(op, f"bitwise_{op}"))(old, new), old.dtype)


@pytest.mark.parametrize(("op", "dtype"), [(op, dtype) for op, kinds in TYPES.items() for dtype in kinds], ids=str)
def test_reduce_into(op: str, dtype: Any) -> None:
    cases: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
        ((3_000_016,), (0,), (3_000_016,)),
        ((900, 1040), (13, 16), (800, 992)),
        ((20, 30, 144), (-1, 2, 32), (20, 20, 160)),
    ]
    for shape, offset, extent in cases:
        old, new = numbers(shape, dtype, 1), numbers(extent, dtype, 2)
        low = [max(0, o) for o in offset]
        high = [min(n, o + e) for n, o, e in zip(shape, offset, extent, strict=True)]
        inside = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
        part = new[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
        wanted = old.copy()
        wanted[inside] = reduced(old[inside], part, op)
        out, whole = guarded(shape, dtype)
        out[...] = upload(old)
        assert c.reduce_into(out, upload(new), op, offset=offset) is out
        assert (download(out) == wanted).all()
        check_guards(whole)


def test_reductions_of_two_streams_add_up() -> None:
    import cupy

    into, one = cupy.zeros((2048, 2048), cupy.int32), cupy.ones((2048, 2048), cupy.int32)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.get_current_stream().synchronize()
    for _ in range(10):
        for stream in streams:
            c.reduce_into(into, one, "add", stream=stream)
    for stream in streams:
        stream.synchronize()
    assert (download(into) == 20).all()


# ---- gather, halo_tiles, im2col, broadcast, prefetch


@pytest.mark.parametrize("dtype", [np.uint8, BF16, np.float32, np.float64], ids=str)
def test_gather(dtype: Any) -> None:
    import cupy

    source, unit = numbers((500, 480), dtype), 16 // np.dtype(dtype).itemsize
    random = np.random.default_rng(0)
    starts = np.stack([random.integers(-20, 520, 3000), random.integers(-5, 500 // unit, 3000) * unit], 1)
    box = (20, 4 * unit)
    wanted = np.stack([window(source, at, box) for at in starts])
    tables: list[Any] = [starts, starts.tolist(), cupy.asarray(starts.astype(np.int32))]
    for table in tables:
        out, whole = guarded((3000, *box), dtype)
        c.gather(upload(source), table, box, out=out)
        assert (download(out) == wanted).all()
        check_guards(whole)
    assert (download(c.gather(upload(source), tables[-1], box, check=False)) == wanted).all()
    with pytest.raises(c.ArgumentError, match="multiples of"):
        c.gather(upload(source), tables[-1] + 1, box) if unit > 1 else c.gather(upload(source), [(0, 2**31)], box)


def test_halo_tiles() -> None:
    source = numbers((300, 528), np.float32)
    result = download(c.halo_tiles(upload(source), (32, 64), (2, 4)))
    assert result.shape == (10, 9, 36, 72)
    for y, x in np.ndindex(10, 9):
        assert (result[y, x] == window(source, (32 * y - 2, 64 * x - 4), (36, 72))).all()


@pytest.mark.parametrize(
    ("shape", "taps", "stride", "padding", "dilation"),
    [
        ((4, 1001, 32), (5,), (2,), (2,), (1,)),
        ((3, 56, 57, 64), (3, 3), (1, 1), (1, 1), (1, 1)),
        ((2, 31, 30, 264), (3, 2), (2, 3), (1, 0), (2, 1)),
        ((2, 9, 10, 11, 16), (3, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=str)
def test_im2col(shape: tuple[int, ...], taps: Any, stride: Any, padding: Any, dilation: Any, dtype: Any) -> None:
    """Against views of the padded images, one for each tap."""
    images = numbers(shape, dtype)
    result = download(c.im2col(upload(images), taps, stride=stride, padding=padding, dilation=dilation))
    padded = np.pad(images, [(0, 0), *((p, p) for p in padding), (0, 0)])
    spatial = len(taps)
    for tap in np.ndindex(*taps):
        seen = [
            slice(t * d, t * d + (count - 1) * s + 1, s)
            for t, d, s, count in zip(tap, dilation, stride, result.shape[1 : 1 + spatial], strict=True)
        ]
        window = (slice(None), *seen)
        wanted = padded[window]
        assert (result[(slice(None),) * (1 + spatial) + tap] == wanted).all()


@pytest.mark.parametrize("copies", [1, 2, 3, 5, 8, 11])
def test_broadcast(copies: int) -> None:
    if not detect().has("multicast"):
        pytest.skip("this card has no multicast")
    for size in (16, 40_000, 3_000_016):
        source = numbers((size,), np.uint8)
        out, whole = guarded((copies, size), np.uint8)
        c.broadcast(upload(source), copies, out=out)
        assert (download(out) == source).all()
        check_guards(whole)


def test_prefetch_changes_nothing() -> None:
    source = numbers((3000, 1040), np.float32)
    device = upload(source)
    c.prefetch(device)
    c.prefetch(device, offset=(3, 4), shape=(2000, 800))
    c.prefetch(device[:, :1000])
    assert (download(device) == source).all()


# ---- libraries, streams, graphs


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    source = torch.arange(300 * 528, device="cuda", dtype=torch.float32).reshape(300, 528)
    assert torch.equal(c.copy(source), source)
    part = c.copy(source, offset=(1, 8), shape=(200, 500))
    assert torch.equal(part, source[1:201, 8:508])
    assert torch.equal(c.transpose(source.bfloat16()), source.bfloat16().T)
    assert torch.equal(
        c.gather(source, [(0, 8), (3, 16)], (2, 8)), torch.stack([source[0:2, 8:16], source[3:5, 16:24]])
    )
    into = torch.ones_like(source)
    assert torch.equal(c.reduce_into(into, source, "add"), source + 1)
    with torch.cuda.stream(torch.cuda.Stream()):
        result = c.transpose(source)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(result, source.T)


def test_in_a_graph() -> None:
    """After a first call, which loads the kernels, nothing but launches is recorded."""
    import cupy

    source, moved = upload(numbers((512, 1040), np.float32)), cupy.zeros((512, 1024), cupy.float32)
    turned, sums = cupy.zeros((1024, 512), cupy.float32), cupy.zeros((512, 1024), cupy.float32)

    def chain(stream: Any) -> None:
        c.copy(source, out=moved, offset=(0, 8), shape=(512, 1024), stream=stream)
        c.transpose(moved, out=turned, stream=stream)
        c.reduce_into(sums, moved, "add", stream=stream)

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        chain(stream)
        stream.synchronize()
        stream.begin_capture()
        chain(stream)
        graph = stream.end_capture()
        source *= 2
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    first = download(source) / 2
    assert (download(turned) == 2 * first[:, 8:1032].T).all()
    assert (download(sums) == 7 * first[:, 8:1032]).all()


# ---- repeated calls: what an earlier one left behind serves other arrays


def test_repeated_calls_read_the_other_arrays() -> None:
    """Arrays of earlier turns stay alive, so that each turn's lie elsewhere."""
    import cupy

    kept: list[Any] = []
    for seed in range(4):
        host, sums = numbers((300, 528), np.float32, seed), numbers((300, 528), np.float32, 10 + seed)
        x, total = upload(host), upload(sums)
        starts = np.array([(seed, 4 * seed), (-3, 520), (290, 0)], np.int32)
        boxes = np.stack([window(host, at, (20, 16)) for at in starts])
        found = [
            (c.copy(x), host),
            (c.copy(x, offset=(7, 8), shape=(280, 500), pad="zeros"), window(host, (7, 8), (280, 500))),
            (c.copy(x, offset=(-5, -8), shape=(310, 560), pad="zeros"), window(host, (-5, -8), (310, 560))),
            (c.copy(x, offset=(1, 1), shape=(200, 301)), host[1:201, 1:302]),
            (c.transpose(x), host.T),
            (c.reduce_into(total, x, "add"), sums + host),
            (c.gather(x, starts, (20, 16)), boxes),
            (c.gather(x, cupy.asarray(starts), (20, 16), check=False), boxes),
            (c.halo_tiles(x, (100, 64), (2, 4)), None),
            (c.im2col(x.reshape(1, 300, 66, 8), 1), host.reshape(1, 300, 66, 1, 1, 8)),
        ]
        if detect().has("multicast"):
            found.append((c.broadcast(x, 3), np.stack([host] * 3)))
        c.prefetch(x)
        for result, wanted in found:
            assert wanted is None or (download(result) == wanted).all()
        tiles = download(found[8][0])
        for index in np.ndindex(*tiles.shape[:2]):
            assert (tiles[index] == window(host, (100 * index[0] - 2, 64 * index[1] - 4), (104, 72))).all()
        kept += [x, total, *(result for result, _ in found)]


def test_repeated_calls_look_at_addresses() -> None:
    import cupy

    host, room = numbers((64, 80), np.float32), cupy.zeros(65 * 80, cupy.float32)
    x = upload(host)
    c.copy(x, out=room[: 64 * 80].reshape(64, 80), via="tma")
    off = room[1 : 1 + 64 * 80].reshape(64, 80)
    with pytest.raises(c.DescriptorError):
        c.copy(x, out=off, via="tma")
    assert (download(c.copy(x, out=off)) == host).all()
    with pytest.raises(c.ArgumentError, match="memory of its own"):
        c.copy(room[: 64 * 80].reshape(64, 80), out=room[80:].reshape(64, 80), via="tma")
    assert (download(c.copy(x)) == host).all()


def test_repeated_calls_in_a_graph() -> None:
    """Each call's addresses are those of its own arrays, although all share the maps that are changed."""
    import cupy

    sources = [upload(numbers((256, 1040), np.float32, seed)) for seed in range(5)]
    moved = [cupy.zeros((256, 1024), cupy.float32) for _ in sources]
    turned = [cupy.zeros((1024, 256), cupy.float32) for _ in sources]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        c.transpose(c.copy(sources[0], out=moved[0], offset=(0, 8), shape=(256, 1024)), out=turned[0])
        stream.synchronize()
        stream.begin_capture()
        for source, between, out in zip(sources, moved, turned, strict=True):
            c.copy(source, out=between, offset=(0, 8), shape=(256, 1024))
            c.transpose(between, out=out)
        graph = stream.end_capture()
        for source in sources:
            source += 1
        graph.launch(stream)
        stream.synchronize()
    for seed, out in enumerate(turned):
        assert (download(out) == numbers((256, 1040), np.float32, seed)[:, 8:1032].T + 1).all()


def test_repeated_calls_of_many_threads() -> None:
    import cupy

    wrong: list[object] = []
    device = cupy.cuda.runtime.getDevice()
    c.copy(upload(numbers((128, 528), np.float32)), offset=(3, 4), shape=(100, 512))

    def work(thread: int) -> None:
        try:
            with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
                hosts = [numbers((128, 528), np.float32, 100 * thread + turn) for turn in range(30)]
                arrays = [upload(host) for host in hosts]
                results = [c.copy(array, offset=(3, 4), shape=(100, 512)) for array in arrays]
                stream.synchronize()
                for turn, (host, result) in enumerate(zip(hosts, results, strict=True)):
                    if not (download(result) == host[3:103, 4:516]).all():
                        wrong.append((thread, turn))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


def test_repeated_calls_on_two_cards() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two cards")
    for seed in range(2):
        for ordinal in range(2):
            with cupy.cuda.Device(ordinal):
                host = numbers((128, 528), np.float32, 2 * seed + ordinal)
                x, out = upload(host), cupy.zeros((100, 512), cupy.float32)
                cupy.cuda.get_current_stream().synchronize()
            # Whichever card is current.
            c.copy(x, out=out, offset=(3, 4), shape=(100, 512))
            with cupy.cuda.Device(ordinal):
                cupy.cuda.Device(ordinal).synchronize()
                assert (download(out) == host[3:103, 4:516]).all()


def test_wrong_calls_leave_the_context_usable() -> None:
    device = upload(numbers((64, 64), np.float32))
    with pytest.raises(c.DescriptorError):
        c.copy(device[:, 1:61], via="tma")
    with pytest.raises(c.ArgumentError):
        c.gather(device, [(0, 1)], (4, 8))
    with pytest.raises(c.ArgumentError):
        c.copy(device, out=np.zeros((64, 64), np.float32))
    with pytest.raises(c.ArgumentTypeError):
        c.reduce_into(device, device, "xor")
    assert (download(c.copy(device)) == download(device)).all()
