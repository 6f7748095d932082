"""attention_decode and attention_varlen on a GPU: against float64, pages, graphs, streams, repeated calls."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from this_gpu import TARGET, cupy

from cudatma.arrays import describe
from cudatma.kernels.arguments import FLAGS, PARTIALS
from cudatma.kernels.attention.arguments import decode_sizes, launch_arguments
from cudatma.kernels.attention.attention import attention_varlen
from cudatma.kernels.attention.check import check_decode
from cudatma.kernels.attention.choose import decode_config
from cudatma.kernels.attention.config import AttentionConfig
from cudatma.kernels.attention.decode import DECODE_CALL, attention_decode
from cudatma.kernels.attention.problem import HEAD_DIMS, OPTIONS
from cudatma.kernels.attention.sample import small_config
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.tuning import pinned
from cudatma.kernels.workspace import workspace_bytes
from cudatma.target import get_target

pytestmark = pytest.mark.gpu

#: Root mean square of the difference from float64, as a part of the result's.
ALLOWED = 2e-3
LENGTHS = [0, 1, 63, 64, 65, 300, 2048]


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(np.float16)


def make(
    lengths: list[int], heads: int = 8, kv_heads: int = 2, dims: tuple[int, int] = (128, 128), q_length: int = 1
) -> dict[str, Any]:
    """Return a call on NumPy arrays with NaNs after the end of each sequence."""
    batch, capacity = len(lengths), max(lengths)
    caches = [numbers(batch, capacity, kv_heads, dim, seed=seed) for seed, dim in enumerate(dims, 1)]
    for index, length in enumerate(lengths):
        for cache in caches:
            cache[index, length:] = np.nan
    q = numbers(batch, q_length, heads, dims[0])
    return {"q": q, "k_cache": caches[0], "v_cache": caches[1], "seqlens": np.array(lengths, np.int32)}


def in_pages(given: dict[str, Any], page_size: int) -> dict[str, Any]:
    """Return the call with its cache in pages in random order."""
    batch, capacity = given["k_cache"].shape[:2]
    count = -(-capacity // page_size)
    table = np.random.default_rng(5).permutation(batch * count).reshape(batch, count).astype(np.int32)
    paged = dict(given)
    for name in ("k_cache", "v_cache"):
        cache = given[name]
        padded = np.full((batch, count * page_size, *cache.shape[2:]), np.nan, cache.dtype)
        padded[:, :capacity] = cache
        pages = np.empty((batch * count, page_size, *cache.shape[2:]), cache.dtype)
        pages[table] = padded.reshape(batch, count, page_size, *cache.shape[2:])
        paged[name] = pages
    return paged | {"page_table": table}


def to_gpu(given: dict[str, Any]) -> dict[str, Any]:
    return {name: cupy.asarray(array) for name, array in given.items()}


def check(found: Any, wanted: Any) -> None:
    found, wanted = (np.asarray(each, np.float64) for each in (found, wanted))
    assert np.linalg.norm(found - wanted) <= ALLOWED * np.linalg.norm(wanted)


def compared(given: dict[str, Any], **options: Any) -> Any:
    sink = {"sink": cupy.asarray(options["sink"])} if "sink" in options else {}
    out, lse = attention_decode(**to_gpu(given), return_lse=True, **(options | sink))
    wanted, sums = attention_decode(**given, return_lse=True, backend="reference", **options)
    check(out.get(), wanted)
    found = lse.get()
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(sums))
    np.testing.assert_allclose(found[np.isfinite(sums)], sums[np.isfinite(sums)], rtol=1e-3, atol=1e-3)
    return out


@pytest.mark.parametrize("page_size", [0, 16, 24, 64, 256, 5])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_head_dims_and_pages(dims: tuple[int, int], page_size: int) -> None:
    given = make(LENGTHS, dims=dims)
    compared(in_pages(given, page_size) if page_size else given)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_length", "options"),
    [
        (8, 1, 1, {}),
        (4, 4, 3, {}),
        (64, 1, 3, {}),
        (8, 2, 2, {"window": (100, 0)}),
        (8, 2, 1, {"softcap": 2.0, "scale": 0.3}),
        (4, 2, 1, {"sink": np.array([3, -1, -np.inf, 0.5], np.float32)}),
    ],
)
def test_groups_queries_and_masks(heads: int, kv_heads: int, q_length: int, options: dict[str, Any]) -> None:
    given = make([5000, 2, 700], heads, kv_heads, (64, 64), q_length)
    compared(given, **options)
    compared(in_pages(given, 16), **options)


def test_pages_and_a_contiguous_cache_give_the_same_bits() -> None:
    given = make([3840, 1000])
    first = compared(given)
    for page_size in (16, 24, 64, 5):
        assert (compared(in_pages(given, page_size)) == first).all()


def test_five_hundred_runs_are_equal() -> None:
    given = to_gpu(make([4096, 777]))
    first = attention_decode(**given)
    out = cupy.empty_like(first)
    for _ in range(500):
        out.fill(cupy.nan)
        assert (attention_decode(**given, out=out) == first).all()


def test_a_page_that_there_is_not_and_lengths_beyond_the_capacity_reach_nothing() -> None:
    for page_size in (16, 5):
        given = to_gpu(in_pages(make([200, 200]), page_size))
        given["page_table"][0, 3], given["page_table"][1, 0] = 2**31 - 1, -1
        given["seqlens"][:] = cupy.asarray([2**31 - 1, -7], np.int32)
        out = attention_decode(**given)
        assert not out[1].any()


def test_a_graph_sees_new_lengths_and_allocates_nothing() -> None:
    host = make([4096, 777])
    given = to_gpu(host)
    out = cupy.empty_like(given["q"])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attention_decode(**given, out=out)
        stream.synchronize()
        stream.begin_capture()
        attention_decode(**given, out=out)
        graph = stream.end_capture()
        held = workspace_bytes()
        for lengths in ([4096, 777], [64, 700], [0, 1]):
            given["seqlens"][:] = cupy.asarray(lengths, np.int32)
            graph.launch(stream)
            stream.synchronize()
            wanted = attention_decode(**host | {"seqlens": np.array(lengths, np.int32)}, backend="reference")
            check(out.get(), wanted)
        assert workspace_bytes() == held


def test_streams_do_not_share_partial_sums() -> None:
    given = to_gpu(make([4096, 777]))
    first = attention_decode(**given)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    outs = [cupy.empty_like(first) for _ in streams]
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        for stream, out in zip(streams, outs, strict=True):
            attention_decode(**given, out=out, stream=stream)
    cupy.cuda.Device().synchronize()
    assert all((out == first).all() for out in outs)


@pytest.mark.parametrize("page_size", [0, 16, 5])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_the_mma_sync_kernel(dims: tuple[int, int], page_size: int) -> None:
    """SM120's kernel, with SM120's shared memory limit, compiled for this GPU."""
    given = make(LENGTHS, dims=dims)
    given = in_pages(given, page_size) if page_size else given
    arrays = to_gpu(given)
    out = cupy.empty((*given["q"].shape[:3], dims[1]), np.float16)
    checked = check_decode(**arrays, out=out)
    problem = checked.problem
    config = decode_config(problem, get_target("sm_120a"))
    sizes = decode_sizes(problem, config, gpu_of(0))(problem)
    partials, counters = cupy.empty(sizes.partials_bytes // 4 + 4, np.float32), cupy.zeros(sizes.grid[0], np.uint32)
    launch = launch_arguments(problem, config, TARGET, sizes)
    named = DECODE_CALL.named(checked) | {PARTIALS: describe(partials), FLAGS: describe(counters)}
    kernel = launch.kernel(TARGET)
    kernel.launch(launch.sizes.grid, config.threads, launch.filled(named), shared_bytes=launch.shared_bytes)
    check(out.get(), attention_decode(**given, backend="reference"))
    assert not counters.any()


@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_an_e4m3_cache(dims: tuple[int, int], page_size: int) -> None:
    """Scales are an array with one element per head, or one number. CuPy has no fp8, so the bits are described."""
    given = make(LENGTHS, dims=dims)
    given = in_pages(given, page_size) if page_size else given
    names = ("k_cache", "v_cache")
    given |= {name: given[name].astype(np.float32).astype(ml_dtypes.float8_e4m3fn) for name in names}
    scales: Any = {"k_scale": np.array([0.5, 1.5], np.float32), "v_scale": 0.7}
    arrays = to_gpu({name: array for name, array in given.items() if name not in names})
    arrays |= {
        name: replace(describe(cupy.asarray(given[name].view(np.uint8))), dtype=given[name].dtype) for name in names
    }
    arrays["k_scale"] = cupy.asarray(scales["k_scale"])
    wanted, sums = attention_decode(**given, **scales, return_lse=True, backend="reference")
    for _ in range(2):
        out, lse = attention_decode(**arrays, v_scale=0.7, return_lse=True)
        check(out.get(), wanted)
        np.testing.assert_allclose(lse.get(), sums, rtol=1e-3, atol=1e-3)


def mma_sync_config(dims: tuple[int, int], options: dict[str, Any]) -> AttentionConfig:
    """Return SM120's kernel for fp16 sequences."""
    fields: dict[str, Any] = {option.field: option.name in options for option in OPTIONS}
    fields |= {"head_dim": dims[0], "v_head_dim": dims[1], "tile_n": 64 if dims[0] <= 128 else 32}
    return small_config("mma_sync", is_varlen=True, **fields)


@pytest.mark.parametrize("version", ["auto", "mma_sync"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (60, 10)}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_sequences_one_after_the_other(dims: tuple[int, int], options: dict[str, Any], version: str) -> None:
    q_lengths, k_lengths = [65, 1, 0, 300, 512], [130, 64, 40, 0, 1030]
    begins = [np.cumsum([0, *lengths]).astype(np.int32) for lengths in (q_lengths, k_lengths)]
    q, k = numbers(sum(q_lengths), 4, dims[0]), numbers(sum(k_lengths), 2, dims[0], seed=1)
    given = {"q": q, "k": k, "v": numbers(sum(k_lengths), 2, dims[1], seed=2)}
    given |= {"cu_seqlens_q": begins[0], "cu_seqlens_k": begins[1]}
    longest: Any = {"max_seqlen_q": max(q_lengths), "max_seqlen_k": max(k_lengths)}
    wanted, sums = attention_varlen(**given, **longest, **options, return_lse=True, backend="reference")
    for _ in range(2):  # the second call is a repeated one
        with pinned(mma_sync_config(dims, options)) if version == "mma_sync" else nullcontext():
            out, lse = attention_varlen(**to_gpu(given), **longest, **options, return_lse=True)
        check(out.get(), wanted)
        found = lse.get()
        np.testing.assert_array_equal(np.isneginf(found), np.isneginf(sums))
        np.testing.assert_allclose(found[np.isfinite(sums)], sums[np.isfinite(sums)], rtol=1e-3, atol=1e-3)
