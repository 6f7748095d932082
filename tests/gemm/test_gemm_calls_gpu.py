"""What a call of the dense GEMM may ask for, on a GPU, in every version: epilogues, types, batches, scales, copies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cudatma.arrays import describe
from cudatma.errors import DriverError, LaunchError, TargetError
from cudatma.kernels.choosing import pinned
from cudatma.kernels.gemm.choose import times
from cudatma.kernels.gemm.config import PRESETS, WITH_BLOCK_SCALES
from cudatma.kernels.gemm.gemm import gemm
from cudatma.kernels.gemm.problem import ACTIVATIONS, LAYOUTS, Problem
from cudatma.kernels.gpu import gpu_of
from cudatma.target import detect

pytestmark = pytest.mark.gpu

try:
    TARGET = detect()
except (DriverError, TargetError, ImportError) as reason:
    pytest.skip(f"no usable GPU: {reason}", allow_module_level=True)

cupy = pytest.importorskip("cupy")

F16, F32, BF16, E4M3, E5M2 = (
    np.dtype(getattr(ml_dtypes, name, name))
    for name in ("float16", "float32", "bfloat16", "float8_e4m3fn", "float8_e5m2")
)
USABLE = [version for version in PRESETS if version == "mma_sync" or TARGET.has_wgmma]
OF_FP8 = [version for version in USABLE if version != "mma_sync" or TARGET.has("mma_sync_fp8")]
ROUNDING = {F16: 1e-3, BF16: 6e-3, F32: 1e-5}
#: fp8 products are added with fewer bits than fp32 has.
FP8_SUMS = 2e-3
EXACT = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * np.vectorize(lambda one: math.erfc(-one / math.sqrt(2)) / 2)(x),
    "gelu_tanh": lambda x: x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x * (np.tanh(x / 2) + 1) / 2,
}


def numbers(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def upload(values: Any) -> Any:
    """On the GPU with the same strides; CuPy has no fp8, so that its bits are described."""
    rows = values if values.flags.c_contiguous else values.swapaxes(-1, -2)
    bits = cupy.asarray(np.ascontiguousarray(rows).view(f"u{values.itemsize}"))
    info = replace(describe(bits), dtype=values.dtype)
    if rows is values:
        return info
    order = (*range(values.ndim - 2), values.ndim - 1, values.ndim - 2)
    shape, strides = (tuple(one[axis] for axis in order) for one in (info.shape, info.strides_bytes))
    return replace(info, shape=shape, strides_bytes=strides)


def download(array: Any) -> Any:
    return cupy.asnumpy(cupy.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")).view(array.dtype)


def exact(a: Any, b: Any) -> Any:
    return a.astype(np.float64) @ b.astype(np.float64)


def check(found: Any, wanted: Any, allowed: float) -> None:
    assert found.shape == wanted.shape
    assert np.linalg.norm(found.astype(np.float64) - wanted) <= allowed * np.linalg.norm(wanted)


@pytest.mark.parametrize("n", [261, 264])
@pytest.mark.parametrize("out_dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("version", USABLE)
def test_epilogues(version: str, activation: str | None, out_dtype: Any, n: int) -> None:
    m, k = 300, 512
    a, b, bias = numbers((m, k), F16, 0), numbers((k, n), F16, 1), numbers((n,), out_dtype, 2)
    before = numbers((m, n), out_dtype, 3)
    out = cupy.asarray(before.view(f"u{out_dtype.itemsize}")).view(out_dtype)
    options = {"bias": upload(bias), "activation": activation, "version": version}
    gemm(upload(a), upload(b), out=out, alpha=0.05, beta=0.5, **options)
    wanted = 0.05 * exact(a, b) + 0.5 * before.astype(np.float64) + bias.astype(np.float64)
    check(download(out), EXACT[activation](wanted), 2 * ROUNDING[out_dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", OF_FP8)
def test_fp8_with_scales_of_rows_and_columns(version: str, layout: str) -> None:
    m, n, k = 333, 400, 1040
    dtype = E4M3 if layout[0] == "R" else E5M2
    a, b = (
        numbers(shape if letter == "R" else shape[::-1], dtype, seed)
        for seed, (shape, letter) in enumerate(zip(((m, k), (k, n)), layout, strict=True))
    )
    a, b = (one if letter == "R" else one.T for one, letter in zip((a, b), layout, strict=True))
    a_scale, b_scale = abs(numbers((m,), F32, 2)), numbers((n,), F32, 3)
    scales = {"a_scale": upload(a_scale), "b_scale": upload(b_scale)}
    y = gemm(upload(a), upload(b), version=version, **scales)
    check(download(y), exact(a, b) * np.outer(a_scale, b_scale), ROUNDING[BF16])
    whole = gemm(upload(a), upload(b), version=version, a_scale=0.5, out_dtype="float32")
    check(download(whole), 0.5 * exact(a, b), FP8_SUMS)


@pytest.mark.skipif(not TARGET.has_wgmma, reason="scales of blocks need wgmma")
@pytest.mark.parametrize("by_tma", [False, True])
@pytest.mark.parametrize(
    ("batch", "m", "n", "k"),
    [(1, 1, 1, 129), (1, 300, 520, 1000), (3, 130, 384, 640), (1, 64, 7168, 2048), (1, 1000, 260, 5000)],
)
def test_scales_of_blocks(batch: int, m: int, n: int, k: int, by_tma: bool) -> None:
    blocks = -(-k // 128), -(-n // 128)
    a, b = numbers((batch, m, k), E4M3, 0), numbers((batch, n, k), E4M3, 1).swapaxes(1, 2)
    a_scale, b_scale = abs(numbers((batch, m, blocks[0]), F32, 2)), abs(numbers((batch, *blocks), F32, 3))
    scaled_a = a.astype(np.float64) * np.repeat(a_scale, 128, axis=2)[..., :k]
    scaled_b = b.astype(np.float64) * np.repeat(np.repeat(b_scale, 128, axis=1)[:, :k], 128, axis=2)[..., :n]
    columns = cupy.zeros((batch, blocks[0], -(-m // 4) * 4), np.float32)[..., :m].swapaxes(1, 2)
    columns[...] = cupy.asarray(a_scale)
    scales = {"a_scale": columns if by_tma else upload(a_scale), "b_scale": upload(b_scale)}
    problem = Problem(m=m, n=n, k=k, dtype=a.dtype.name, batch=batch, block_scales=True, scales_by_tma=by_tma)
    for version in WITH_BLOCK_SCALES:
        for spec, _ in times(replace(problem, version=version), np.array([problem.m]), gpu_of(0)):
            with pinned(spec):
                check(download(gemm(upload(a), upload(b), **scales)), scaled_a @ scaled_b, ROUNDING[BF16])


@pytest.mark.parametrize("version", USABLE)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 130, 200), (3, 200, 136)),
        ((130, 200), (4, 200, 136)),
        ((5, 130, 200), (1, 200, 137)),
        ((70, 3, 200), (200, 64)),
    ],
)
def test_batches(version: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = numbers(left, F16, 0), numbers(right, F16, 1)
    check(download(gemm(upload(a), upload(b), version=version)), exact(a, b), ROUNDING[F16])
    turned = numbers((*right[:-2], *right[:-3:-1]), BF16, 1).swapaxes(-1, -2)
    check(
        download(gemm(upload(a.astype(BF16)), upload(turned), version=version)),
        exact(a.astype(BF16), turned),
        ROUNDING[BF16],
    )


@pytest.mark.parametrize("version", USABLE)
def test_operands_that_are_copied_first(version: str) -> None:
    whole, b = cupy.asarray(numbers((200, 301), F16, 0)), cupy.asarray(numbers((300, 77), F16, 1))
    for a in (whole[:, 1:], whole[::-1, :300], whole[:, :300], whole[::2, 1:]):
        check(download(gemm(a, b, version=version)), exact(cupy.asnumpy(a), cupy.asnumpy(b)), ROUNDING[F16])
    every_second = cupy.asarray(numbers((200, 600), F16, 2))[:, ::2]
    check(download(gemm(every_second, b)), exact(cupy.asnumpy(every_second), cupy.asnumpy(b)), ROUNDING[F16])


def test_a_copy_is_not_captured() -> None:
    """The graph would keep the address of memory that is freed."""
    a, b = cupy.asarray(numbers((64, 257), F16, 0))[:, 1:], cupy.asarray(numbers((256, 64), F16, 1))
    out = gemm(a, b)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(LaunchError, match="captures a graph, for a with rows"):
            gemm(a, b, out=out)
        stream.end_capture()


@pytest.mark.skipif(not TARGET.has_wgmma, reason="the ladder needs wgmma")
@pytest.mark.parametrize("dtype", [F16, BF16, E4M3], ids=str)
def test_undivided_tiles_add_in_the_same_order(dtype: Any) -> None:
    """What batch_invariant promises."""
    a, b = numbers((300, 1040), dtype, 0), numbers((520, 1040), dtype, 1).T
    seen = set()
    for version in ("v1", "v2", "v3", "v4", "v5"):
        problem = Problem(m=300, n=520, k=1040, dtype=a.dtype.name, version=version)
        for spec, _ in times(problem, np.array([problem.m]), gpu_of(0)):
            with pinned(spec):
                seen.add(download(gemm(upload(a), upload(b), batch_invariant=True)).tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", [F16, BF16, *([E4M3] if OF_FP8 else [])], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_m(dtype: Any) -> None:
    a, b = numbers((3000, 1024), dtype, 0), numbers((768, 1024), dtype, 1).T
    whole = download(gemm(upload(a), upload(b), batch_invariant=True))
    for m in (1, 16, 64, 130, 1000):
        part = download(gemm(upload(a[:m]), upload(b), batch_invariant=True))
        np.testing.assert_array_equal(part.view(np.uint16), whole[:m].view(np.uint16))


def test_a_call_gives_the_same_bits_every_time() -> None:
    a, b = numbers((64, 4096), F16, 0), numbers((512, 4096), F16, 1).T
    for version in USABLE:
        first = download(gemm(upload(a), upload(b), version=version))
        for _ in range(5):
            again = download(gemm(upload(a), upload(b), version=version))
            np.testing.assert_array_equal(first.view(np.uint16), again.view(np.uint16))


def test_a_repeated_call_with_an_epilogue_reads_the_other_arrays() -> None:
    for seed in range(4):
        a, b, bias = numbers((64, 256), F16, seed), numbers((256, 128), F16, seed + 9), numbers((128,), F16, seed)
        scale = abs(numbers((64,), F32, seed))
        y = gemm(upload(a), upload(b), bias=upload(bias), a_scale=upload(scale))
        check(download(y), exact(a, b) * scale[:, None] + bias.astype(np.float64), ROUNDING[F16])
