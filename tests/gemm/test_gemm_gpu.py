"""The dense GEMM on a GPU: every version, tile, layout and kind of call, repeated calls, and CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gemm_builders import problem
from gemm_cases import BF16, E4M3, F16, F32, calls, check, numbers
from this_gpu import TARGET, cupy

from cudatma.arrays import describe
from cudatma.errors import LaunchError
from cudatma.kernels.gemm.choose import times
from cudatma.kernels.gemm.config import PRESETS, WITH_BLOCK_SCALES
from cudatma.kernels.gemm.gemm import gemm
from cudatma.kernels.gemm.problem import LAYOUTS, is_fp8
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.tuning import pinned

pytestmark = pytest.mark.gpu

#: What the GPU runs.
USABLE = [version for version in PRESETS if version == "mma_sync" or TARGET.has_wgmma]
OF_FP8 = [version for version in USABLE if version != "mma_sync" or TARGET.has("mma_sync_fp8")]


def upload(values: Any) -> Any:
    """Return an array on the GPU with the same strides; CuPy has no fp8, so its bits are described."""
    gap = values.strides[-1] // values.itemsize if values.ndim == 1 else 1
    if gap > 1:
        return describe(cupy.asarray(np.repeat(values, gap))[::gap])
    rows = values if values.flags.c_contiguous else values.swapaxes(-1, -2)
    info = replace(describe(cupy.asarray(np.ascontiguousarray(rows).view(f"u{values.itemsize}"))), dtype=values.dtype)
    if rows is values:
        return info
    order = (*range(values.ndim - 2), values.ndim - 1, values.ndim - 2)
    shape, strides = (tuple(one[axis] for axis in order) for one in (info.shape, info.strides_bytes))
    return replace(info, shape=shape, strides_bytes=strides)


def download(array: Any) -> Any:
    return cupy.asnumpy(cupy.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")).view(array.dtype)


def among_nans(rows: int, columns: int, letter: str, dtype: Any, seed: int) -> tuple[Any, Any]:
    """Return a matrix on the host and on the GPU, with NaNs between its rows or columns."""
    if letter == "C":
        host, device = among_nans(columns, rows, "R", dtype, seed)
        return host.T, device.T
    host = numbers(rows, columns, dtype=dtype, seed=seed)
    whole = np.full((rows, -(-columns // 8) * 8), np.nan, dtype)
    whole[:, :columns] = host
    return host, cupy.asarray(whole.view(np.uint16)).view(dtype)[:, :columns]


def exact(a: Any, b: Any) -> Any:
    return a.astype(np.float64) @ b.astype(np.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", ["auto", *USABLE])
@pytest.mark.parametrize("size", [1, 127, 128, 333, 512, 1000, 4097])
def test_every_version_and_layout_is_right(size: int, version: Any, layout: str) -> None:
    if version == "v6" and size < 128:
        pytest.skip("version v6 divides K, which has to have two stages")
    dtype = BF16 if size == 333 else F16
    (a, left), (b, right) = (among_nans(size, size, letter, dtype, i) for i, letter in enumerate(layout))
    check(download(gemm(left, right, version=version)), exact(a, b))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", USABLE)
@pytest.mark.parametrize("m", [1, 16, 20, 57, 700])
def test_every_tile_is_right(m: int, version: str, layout: str) -> None:
    """Boxes of A have at most as many rows as A."""
    (a, left), (b, right) = among_nans(m, 1000, layout[0], F16, 0), among_nans(1000, 904, layout[1], F16, 1)
    made = problem(m=m, n=904, k=1000, layout=layout, version=version)
    for config, _ in times(made, np.array([m]), gpu_of(0)):
        with pinned(config):
            check(download(gemm(left, right)), exact(a, b))


@pytest.mark.parametrize("scale", [1, 5])
@pytest.mark.parametrize("version", USABLE)
@pytest.mark.parametrize("name", calls())
def test_calls_of_every_version(name: str, version: str, scale: int) -> None:
    call = calls(scale)[name]
    if is_fp8(call.a.dtype.name) and version not in OF_FP8:
        pytest.skip(f"{version} has no fp8 here")
    options = {key: upload(value) if isinstance(value, np.ndarray) else value for key, value in call.options.items()}
    expected = np.ones_like(gemm(call.a, call.b, backend="reference", **call.options | {"beta": 0}))
    out = cupy.asarray(expected.view(f"u{expected.itemsize}")).view(expected.dtype)
    gemm(call.a, call.b, out=expected, backend="reference", **call.options)
    assert gemm(upload(call.a), upload(call.b), out=out, version=version, **options) is out
    check(download(out), expected)


@pytest.mark.skipif(not TARGET.has_wgmma, reason="block scales need wgmma")
@pytest.mark.parametrize("by_tma", [False, True])
@pytest.mark.parametrize(
    ("batch", "m", "n", "k"),
    [(1, 1, 1, 129), (1, 300, 520, 1000), (3, 130, 384, 640), (1, 64, 7168, 2048), (1, 1000, 260, 5000)],
)
def test_scales_of_blocks(batch: int, m: int, n: int, k: int, by_tma: bool) -> None:
    blocks = -(-k // 128), -(-n // 128)
    a, b = numbers(batch, m, k, dtype=E4M3, seed=0), numbers(batch, n, k, dtype=E4M3, seed=1).swapaxes(1, 2)
    a_scale = abs(numbers(batch, m, blocks[0], dtype=F32, seed=2))
    b_scale = abs(numbers(batch, *blocks, dtype=F32, seed=3))
    scaled_a = a.astype(np.float64) * np.repeat(a_scale, 128, axis=2)[..., :k]
    scaled_b = b.astype(np.float64) * np.repeat(np.repeat(b_scale, 128, axis=1)[:, :k], 128, axis=2)[..., :n]
    columns = cupy.zeros((batch, blocks[0], -(-m // 4) * 4), np.float32)[..., :m].swapaxes(1, 2)
    columns[...] = cupy.asarray(a_scale)
    scales = {"a_scale": columns if by_tma else upload(a_scale), "b_scale": upload(b_scale)}
    made = problem(m=m, n=n, k=k, dtype=a.dtype.name, batch=batch, block_scales=True, scales_by_tma=by_tma)
    for version in WITH_BLOCK_SCALES:
        for config, _ in times(replace(made, version=version), np.array([m]), gpu_of(0)):
            with pinned(config):
                check(download(gemm(upload(a), upload(b), **scales)), scaled_a @ scaled_b)


@pytest.mark.parametrize("version", USABLE)
def test_operands_that_are_copied_first(version: str) -> None:
    whole, b = cupy.asarray(numbers(200, 301)), cupy.asarray(numbers(300, 77))
    every_second = cupy.asarray(numbers(200, 600))[:, ::2]
    for a in (whole[:, 1:], whole[::-1, :300], whole[:, :300], whole[::2, 1:], every_second):
        check(download(gemm(a, b, version=version)), exact(cupy.asnumpy(a), cupy.asnumpy(b)))


def test_a_copy_is_not_captured() -> None:
    """A captured graph would keep the address of freed memory."""
    a, b = cupy.asarray(numbers(64, 257))[:, 1:], cupy.asarray(numbers(256, 64))
    out = gemm(a, b)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(LaunchError, match=r"outside a graph capture \(a has rows"):
            gemm(a, b, out=out)
        stream.end_capture()


@pytest.mark.skipif(not TARGET.has_wgmma, reason="the ladder needs wgmma")
@pytest.mark.parametrize("dtype", [F16, BF16, E4M3], ids=str)
def test_undivided_tiles_add_in_the_same_order(dtype: Any) -> None:
    """batch_invariant promises that the bits of a row depend neither on the tile nor on M."""
    a, b = numbers(3000, 1040, dtype=dtype, seed=0), numbers(520, 1040, dtype=dtype, seed=1).T
    seen = set()
    for version in ("v1", "v2", "v3", "v4", "v5"):
        made = problem(m=300, n=520, k=1040, dtype=a.dtype.name, version=version)
        for config, _ in times(made, np.array([made.m]), gpu_of(0)):
            with pinned(config):
                seen.add(download(gemm(upload(a[:300]), upload(b), batch_invariant=True)).tobytes())
    assert len(seen) == 1
    whole = download(gemm(upload(a), upload(b), batch_invariant=True))
    assert whole[:300].tobytes() in seen
    for m in (1, 16, 64, 130, 1000):
        part = download(gemm(upload(a[:m]), upload(b), batch_invariant=True))
        assert part.tobytes() == whole[:m].tobytes()


def test_a_call_gives_the_same_bits_every_time() -> None:
    a, b = numbers(64, 4096, seed=0), numbers(512, 4096, seed=1).T
    for version in USABLE:
        first = download(gemm(upload(a), upload(b), version=version))
        for _ in range(5):
            again = download(gemm(upload(a), upload(b), version=version))
            np.testing.assert_array_equal(first.view(np.uint16), again.view(np.uint16))


@pytest.mark.parametrize(("pitch", "offset"), [(272, 8), (272, 1), (261, 0)])
@pytest.mark.parametrize("version", ["auto", "mma_sync"])
def test_what_surrounds_the_result_is_left_alone(version: str, pitch: int, offset: int) -> None:
    a, b = numbers(200, 128, seed=0), numbers(250, 128, seed=1).T
    whole = cupy.full((200, pitch), 7, np.float16)
    out = whole[:, offset : offset + 250]
    assert gemm(upload(a), upload(b), out=out, version=version) is out
    check(download(out), exact(a, b))
    assert bool((whole[:, :offset] == 7).all())
    assert bool((whole[:, offset + 250 :] == 7).all())


def test_a_repeated_call_reads_and_writes_the_other_arrays() -> None:
    """Every second result is not 16-byte aligned."""
    for seed in range(6):
        a, b = numbers(130, 256, seed=seed), numbers(200, 256, seed=seed + 10).T
        bias, scale = numbers(200, seed=seed), abs(numbers(130, dtype=F32, seed=seed))
        whole = cupy.full((130, 208), 7, np.float16)
        out = whole[:, seed % 2 : seed % 2 + 200]
        gemm(upload(a), upload(b), out=out, bias=upload(bias), a_scale=upload(scale))
        check(download(out), exact(a, b) * scale[:, None] + bias.astype(np.float64))


def test_in_a_graph() -> None:
    """After a first call, a graph records only the launch."""
    (a, left), (b, right) = among_nans(100, 512, "R", F16, 0), among_nans(512, 300, "C", F16, 1)
    out = cupy.empty((100, 300), np.float16)
    gemm(left, right, out=out)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        gemm(left, right, out=out)
        graph = stream.end_capture()
        out.fill(0)
        left *= 2
        graph.launch(stream)
    stream.synchronize()
    check(download(out), exact(2 * a, b))
