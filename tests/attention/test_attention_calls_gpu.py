"""Options of attention on a GPU, in every version: masks, softcap, lse, views and repeated calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_cases import CASES
from this_gpu import TARGET, cupy

from cudatma.errors import ArgumentError
from cudatma.kernels.attention.attention import ATTENTION_CALL, attention
from cudatma.kernels.attention.config import VERSIONS
from cudatma.kernels.calls import calls_of

pytestmark = pytest.mark.gpu

if not TARGET.has_wgmma:
    pytest.skip("the kernels need wgmma", allow_module_level=True)

#: Root mean square of the difference from float64, as a part of the result's.
ALLOWED = {"float16": 2e-3, "bfloat16": 1.2e-2}


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(np.float16)


def check(found: Any, wanted: Any, allowed: float) -> None:
    found, wanted = (np.asarray(each, np.float64) for each in (found, wanted))
    assert found.shape == wanted.shape
    assert np.linalg.norm(found - wanted) <= allowed * np.linalg.norm(wanted)


def compared(q: Any, k: Any, v: Any, **options: Any) -> None:
    """Compare the result and lse on the GPU with the NumPy reference."""
    version = options.pop("version", "auto")
    on_gpu = (cupy.asarray(each) for each in (q, k, v))
    sink = cupy.asarray(options["sink"]) if "sink" in options else None
    out, lse = attention(*on_gpu, return_lse=True, version=version, **(options | {"sink": sink}))
    wanted, sums = attention(q, k, v, return_lse=True, backend="reference", **options)
    check(out.get(), wanted, ALLOWED["float16"])
    found = lse.get()
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(sums))
    np.testing.assert_allclose(found[np.isfinite(sums)], sums[np.isfinite(sums)], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scale", [1, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", VERSIONS.names)
def test_calls_of_every_version(version: str, case: str, scale: int) -> None:
    given = {"heads": 1} | CASES[case]
    q_length, k_length, heads = scale * given.pop("q_length"), scale * given.pop("k_length"), 2 * given.pop("heads")
    q = numbers(2, q_length, heads, 64)
    k, v = (numbers(2, k_length, heads // 2, 64, seed=seed) for seed in (1, 2))
    compared(q, k, v, version=version, **given)


@pytest.mark.parametrize("version", [version for version in VERSIONS.names if version != "scalar"])
def test_sinks(version: str) -> None:
    q, k, v = numbers(2, 133, 4, 64), numbers(2, 260, 2, 64, seed=1), numbers(2, 260, 2, 64, seed=2)
    compared(q, k, v, version=version, causal=True, sink=np.array([3, -1, -np.inf, 0.5], np.float32))


@pytest.mark.parametrize("shape", [(2, 0, 4, 64), (0, 7, 4, 64), (2, 7, 4, 64)])
def test_no_queries_or_no_keys(shape: tuple[int, ...]) -> None:
    q, k = cupy.ones(shape, np.float16), cupy.ones((shape[0], 0, 4, 64), np.float16)
    out, lse = attention(q, k, k, return_lse=True, sink=cupy.full(4, -np.inf, np.float32))
    assert (out.shape, lse.shape) == (shape, (shape[0], shape[2], shape[1]))
    assert not out.any()
    assert cupy.isneginf(lse).all()


@pytest.mark.parametrize("version", VERSIONS.names)
def test_views_are_read_and_written_where_they_are(version: str) -> None:
    heads_first = [cupy.asarray(numbers(2, 4, 150, 64, seed=seed)) for seed in range(3)]
    q, k, v = (each.swapaxes(1, 2) for each in heads_first)
    plain = attention(*(cupy.ascontiguousarray(each) for each in (q, k, v)), version=version)
    buffer = cupy.zeros((2, 4, 150, 64), np.float16)
    out = buffer.swapaxes(1, 2)
    assert attention(q, k, v, out=out, version=version) is out
    cupy.testing.assert_array_equal(out, plain)
    packed = cupy.ascontiguousarray(cupy.stack([q, k, v], axis=2))
    of_packed = attention(packed[:, :, 0], packed[:, :, 1], packed[:, :, 2], version=version)
    cupy.testing.assert_array_equal(of_packed, plain)


def test_a_repeated_call_looks_at_the_arrays_that_it_is_given() -> None:
    given = [[cupy.asarray(numbers(1, 90, 2, 64, seed=3 * turn + part)) for part in range(3)] for turn in range(3)]
    for q, k, v in given:
        out, lse = attention(q, k, v, window=(30, 0), return_lse=True)
        wanted, sums = attention(
            *(each.get() for each in (q, k, v)), window=(30, 0), return_lse=True, backend="reference"
        )
        check(out.get(), wanted, ALLOWED["float16"])
        np.testing.assert_allclose(lse.get(), sums, rtol=1e-3, atol=1e-3)
    assert len(calls_of(ATTENTION_CALL).calls) == 1
    with pytest.raises(ArgumentError, match=r"^out must be .*got memory that overlaps k"):
        attention(*given[0], window=(30, 0), return_lse=True, out=given[0][1])


def test_streams_do_not_share_a_counter_of_tiles() -> None:
    q, k, v = (cupy.asarray(numbers(4, 1000, 8, 64, seed=seed)) for seed in range(3))
    wanted = attention(q, k, v, causal=True, version="a4")
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    outs = [cupy.empty_like(q) for _ in streams]
    cupy.cuda.Device().synchronize()
    for _ in range(50):
        for stream, out in zip(streams, outs, strict=True):
            attention(q, k, v, causal=True, version="a4", out=out, stream=stream)
    cupy.cuda.Device().synchronize()
    for out in outs:
        cupy.testing.assert_array_equal(out, wanted)
