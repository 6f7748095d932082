"""Attention's kernels on a GPU, with each tile of each version: results, bounds, reproducibility, streams and
graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from this_gpu import cupy

from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.attention.attention import attention
from cudatma.kernels.attention.choose import times
from cudatma.kernels.attention.config import VERSIONS, AttentionConfig
from cudatma.kernels.attention.problem import HEAD_DIMS, Problem
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.tuning import pinned

pytestmark = pytest.mark.gpu


def runs_here(version: str) -> bool:
    """Return whether the GPU has the features that a version uses."""
    try:
        return bool(
            times(Problem.of(q_length=64, head_dim=64, dtype="float16", version=version), np.array([64]), gpu_of(0))
        )
    except (ArgumentError, TargetError):
        return False


USABLE = [version for version in VERSIONS.names if runs_here(version)]
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
#: ||out - reference|| / ||reference||: probabilities and results are rounded to 16 bits.
LIMITS = {"float16": 1e-3, "bfloat16": 6e-3}
#: A NaN of either dtype.
NAN = 0x7FFF
#: Batch, heads of q and of k and v, queries, keys: more tiles than an H200 has SMs, with tails of queries and keys.
MANY = (3, 24, 8, 333, 460)


def among_nans(batch: int, length: int, heads: int, dim: int, dtype: str, seed: int) -> Any:
    """Return normally distributed numbers with NaNs before them, after them and between the heads."""
    whole = cupy.full((batch, length + 5, heads, dim + 8), NAN, np.uint16)
    random = np.random.default_rng(seed).standard_normal((batch, length, heads, dim), np.float32)
    whole[:, 2:-3, :, :dim] = cupy.asarray(random.astype(DTYPES[dtype]).view(np.uint16))
    return whole.view(DTYPES[dtype])[:, 2:-3, :, :dim]


def operands(sizes: tuple[int, int, int, int, int], dims: tuple[int, int], dtype: str) -> tuple[Any, Any, Any]:
    batch, heads, kv_heads, q_length, k_length = sizes
    q = among_nans(batch, q_length, heads, dims[0], dtype, 0)
    k = among_nans(batch, k_length, kv_heads, dims[0], dtype, 1)
    return q, k, among_nans(batch, k_length, kv_heads, dims[1], dtype, 2)


def widened(array: Any) -> Any:
    """Return the array in float64, with heads before rows."""
    if array.dtype == np.float16:
        return array.astype(np.float64).swapaxes(1, 2)
    bits = cupy.ascontiguousarray(array.view(np.uint16)).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).astype(np.float64).swapaxes(1, 2)


def exact(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
    """Return the result (batch, heads, q_length, v_dim) and lse (batch, heads, q_length) in float64."""
    group = q.shape[2] // k.shape[2]
    rows, keys, values = widened(q), *(cupy.repeat(widened(each), group, axis=1) for each in (k, v))
    scores = rows @ keys.swapaxes(2, 3) / np.sqrt(q.shape[3])
    if causal:
        seen = cupy.tri(q.shape[1], k.shape[1], k.shape[1] - q.shape[1], dtype=bool)
        scores = cupy.where(seen, scores, -np.inf)
    most = scores.max(axis=3, keepdims=True)
    most[cupy.isinf(most)] = 0
    powers = cupy.exp(scores - most)
    total = powers.sum(axis=3, keepdims=True)
    out = (powers / cupy.where(total == 0, 1, total)) @ values
    lse = cupy.where(total == 0, -np.inf, most + cupy.log(cupy.where(total == 0, 1, total)))
    return out, lse[..., 0]


def check(out: Any, lse: Any, wanted: tuple[Any, Any], dtype: str) -> None:
    assert float(cupy.linalg.norm(widened(out) - wanted[0]) / cupy.linalg.norm(wanted[0])) <= LIMITS[dtype]
    cupy.testing.assert_array_equal(cupy.isneginf(lse), cupy.isneginf(wanted[1]))
    seen = cupy.isfinite(wanted[1])
    assert float(abs(lse[seen] - wanted[1][seen]).max()) <= 1e-3


def tiles(dims: tuple[int, int], dtype: str, version: str, **masks: bool) -> Iterator[AttentionConfig]:
    """Yield each candidate of a version with the longest and with the shortest ring."""
    given: dict[str, Any] = {"batch": 3, "heads": 24, "kv_heads": 8, "q_length": 333, "k_length": 460, **masks}
    problem = Problem.of(**given, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype, version=version)
    for config, _ in times(problem, np.array([problem.m]), gpu_of(0)):
        yield config
        if config.stages > 2:
            yield replace(config, stages=2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("version", USABLE)
def test_every_tile_is_right(version: str, dims: tuple[int, int], causal: bool) -> None:
    dtype = "bfloat16" if causal else "float16"
    q, k, v = operands(MANY, dims, dtype)
    wanted = exact(q, k, v, causal)
    for config in tiles(dims, dtype, version, is_causal=causal):
        with pinned(config):
            out, lse = attention(q, k, v, causal=causal, return_lse=True)
        check(out, lse, wanted, dtype)


@pytest.mark.parametrize("version", USABLE)
@pytest.mark.parametrize("sizes", [(1, 200, 25, 200, 77), (5, 40, 40, 129, 641), (2, 2, 1, 2049, 2049)])
def test_more_queries_than_keys_fewer_and_long_heads(sizes: tuple[int, int, int, int, int], version: str) -> None:
    """Some queries see no key."""
    q, k, v = operands(sizes, (64, 64), "float16")
    wanted = exact(q, k, v, True)
    for config in tiles((64, 64), "float16", version, is_causal=True):
        with pinned(config):
            out, lse = attention(q, k, v, causal=True, return_lse=True)
        check(out, lse, wanted, "float16")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("version", USABLE)
def test_what_surrounds_the_result_is_left_alone(version: str, causal: bool) -> None:
    q, k, v = operands((2, 6, 2, 201, 130), (128, 128), "float16")
    whole = cupy.full((2, 211, 8, 144), 7, np.float16)
    out = whole[:, 4:205, 1:7, 8:136]
    done, lse = attention(q, k, v, causal=causal, out=out, return_lse=True, version=version)
    assert done is out
    check(out, lse, exact(q, k, v, causal), "float16")
    out[...] = 7
    assert bool((whole == 7).all())


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("version", USABLE)
def test_five_hundred_calls_give_the_same_bits(version: str, dims: tuple[int, int]) -> None:
    q, k, v = operands((2, 40, 8, 700, 700), dims, "bfloat16")
    out = cupy.empty((2, 700, 40, dims[1]), np.uint16)
    first: tuple[Any, Any] | None = None
    for _ in range(500):
        out.fill(NAN)
        _, lse = attention(q, k, v, causal=True, out=out.view(DTYPES["bfloat16"]), return_lse=True, version=version)
        if first is None:
            first = out.copy(), lse
        cupy.testing.assert_array_equal(out, first[0])
        cupy.testing.assert_array_equal(lse, first[1])


@pytest.mark.parametrize("version", USABLE)
def test_a_graph_reads_what_the_arrays_then_hold(version: str) -> None:
    q, k, v = operands(MANY, (128, 128), "float16")
    out = cupy.empty(q.shape, np.float16)
    attention(q, k, v, causal=True, out=out, version=version)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        attention(q, k, v, causal=True, out=out, version=version)
        graph = stream.end_capture()
        for _ in range(3):
            v *= 2
            out.fill(np.nan)
            graph.launch(stream)
    stream.synchronize()
    wanted, _ = exact(q, k, v, True)
    assert float(cupy.linalg.norm(widened(out) - wanted) / cupy.linalg.norm(wanted)) <= LIMITS["float16"]
