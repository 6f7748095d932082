"""The reference of attention against loops over queries and keys: masks, grouped heads, lse, varlen and caches."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cudatma.kernels.attention import reference
from cudatma.kernels.attention.attention import attention, attention_varlen
from cudatma.kernels.attention.decode import attention_decode
from cudatma.kernels.attention.problem import HEAD_DIMS

BF16 = np.dtype(ml_dtypes.bfloat16)
LENGTHS = [(1, 1), (1, 9), (9, 1), (5, 12), (12, 5), (33, 33)]
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (3, 2)},
    {"window": (0, 0)},
    {"window": (None, 4)},
    {"window": (2, None)},
    {"window": (4, 4), "causal": True},
    {"window": (None, None), "causal": True},
]


def tensor(*shape: int, dtype: Any = np.float16, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def expected(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float = 0.0,
    window: Any = None,
    softcap: float = 0.0,
    sink: Any = None,
) -> tuple[Any, Any]:
    """Return (rows, lse) of one sequence, computed by loops in double precision."""
    (q_length, heads, dim), (k_length, kv_heads, v_dim) = q.shape, v.shape
    out, lse = np.zeros((q_length, heads, v_dim)), np.full((heads, q_length), -math.inf)
    left, right = window or (None, None)
    for head in range(heads):
        for row in range(q_length):
            shift = k_length - q_length
            logits, rows = [], []
            for key in range(k_length):
                if causal and key > row + shift:
                    continue
                if left is not None and key < row + shift - left:
                    continue
                if right is not None and key > row + shift + right:
                    continue
                of_key = head * kv_heads // heads
                pairs = zip(q[row, head].tolist(), k[key, of_key].tolist(), strict=True)
                logit = math.fsum(a * b for a, b in pairs) * (scale or 1 / math.sqrt(dim))
                logits.append(softcap * math.tanh(logit / softcap) if softcap else logit)
                rows.append(v[key, of_key].astype(np.float64))
            if sink is not None and sink[head] > -math.inf:
                logits.append(float(sink[head]))
                rows.append(np.zeros(v_dim))
            if logits:
                most = max(logits)
                weights = [math.exp(logit - most) for logit in logits]
                total = math.fsum(weights)
                lse[head, row] = most + math.log(total)
                out[row, head] = sum(weight / total * row_of_v for weight, row_of_v in zip(weights, rows, strict=True))
    return out, lse


def close(found: Any, wanted: Any) -> None:
    """Return whether two arrays differ by at most half a unit in the last place plus fp32 rounding."""
    step = 1e-6 if found.dtype == np.float32 else float(ml_dtypes.finfo(found.dtype).eps)
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=step, atol=step / 50)


@pytest.mark.parametrize(("q_length", "k_length"), LENGTHS)
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_a_query_sees_the_keys_that_the_mask_allows(q_length: int, k_length: int, options: dict[str, Any]) -> None:
    q, k, v = tensor(2, q_length, 2, 32), tensor(2, k_length, 2, 32, seed=1), tensor(2, k_length, 2, 32, seed=2)
    out, lse = attention(q, k, v, **options, return_lse=True, backend="reference")
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 2, q_length), np.float32)
    for index in range(2):
        wanted, sums = expected(q[index], k[index], v[index], **options)
        close(out[index], wanted)
        close(lse[index], sums)


@pytest.mark.parametrize(("dim", "v_dim"), HEAD_DIMS)
@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=str)
def test_every_head_dim_and_dtype(dim: int, v_dim: int, dtype: Any) -> None:
    q, k, v = tensor(1, 4, 2, dim, dtype=dtype), tensor(1, 6, 1, dim, dtype=dtype), tensor(1, 6, 1, v_dim, dtype=dtype)
    out = attention(q, k, v, causal=True, backend="reference")
    assert (out.shape, out.dtype) == ((1, 4, 2, v_dim), dtype)
    close(out[0], expected(q[0], k[0], v[0], causal=True)[0])


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_neighboring_heads_share_keys_and_values(kv_heads: int) -> None:
    q, k, v = tensor(1, 5, 6, 32), tensor(1, 7, kv_heads, 32, seed=1), tensor(1, 7, kv_heads, 32, seed=2)
    close(attention(q, k, v, backend="reference")[0], expected(q[0], k[0], v[0])[0])


@pytest.mark.parametrize("options", [{"scale": 0.7}, {"softcap": 1.5}, {"scale": 3, "softcap": 20.0}], ids=str)
def test_scale_and_softcap(options: dict[str, Any]) -> None:
    q, k, v = tensor(1, 5, 2, 64), tensor(1, 7, 2, 64, seed=1), tensor(1, 7, 2, 64, seed=2)
    out, lse = attention(q, k, v, return_lse=True, backend="reference", **options)
    given: dict[str, Any] = {name: float(np.float32(value)) for name, value in options.items()}
    wanted, sums = expected(q[0], k[0], v[0], **given)
    close(out[0], wanted)
    close(lse[0], sums)


def test_a_sink_is_one_more_key_without_a_value() -> None:
    q, k, v = tensor(1, 7, 4, 64), tensor(1, 5, 2, 64, seed=1), tensor(1, 5, 2, 64, seed=2)
    sink = np.array([1.5, -math.inf, 30, -3], np.float32)
    for options in ({"causal": True}, {"window": (1, 0), "softcap": 2.0}):  # two queries see no key
        out, lse = attention(q, k, v, sink=sink, return_lse=True, backend="reference", **options)
        wanted, sums = expected(q[0], k[0], v[0], sink=sink, **options)
        close(out[0], wanted)
        close(lse[0], sums)


def test_queries_that_see_no_key_have_zeros_and_an_lse_of_minus_infinity() -> None:
    q, k = tensor(1, 6, 2, 32), tensor(1, 2, 2, 32, seed=1)
    out, lse = attention(q, k, k, causal=True, return_lse=True, backend="reference")
    assert not out[0, :4].any()
    assert np.isneginf(lse[0, :, :4]).all()
    assert np.isfinite(lse[0, :, 4:]).all()
    none = np.empty((1, 0, 2, 32), np.float16)
    out, lse = attention(q, none, none, return_lse=True, backend="reference")
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("shape", [(0, 4, 2, 32), (3, 0, 2, 32)])
def test_nothing_to_compute_is_an_empty_result(shape: tuple[int, ...]) -> None:
    q, k = np.empty(shape, np.float16), tensor(shape[0], 5, 2, 32)
    out, lse = attention(q, k, k, return_lse=True, backend="reference")
    assert (out.shape, lse.shape) == (shape, (shape[0], 2, shape[1]))


def test_large_logits_do_not_overflow() -> None:
    q, k, v = (
        tensor(1, 3, 1, 64) * np.float16(1000),
        tensor(1, 5, 1, 64, seed=1) * np.float16(1000),
        tensor(1, 5, 1, 64),
    )
    out, lse = attention(q, k, v, return_lse=True, backend="reference")
    wanted, sums = expected(q[0], k[0], v[0])
    close(out[0], wanted)
    np.testing.assert_allclose(lse[0], sums, rtol=1e-6)
    assert lse.max() > 1e6


def test_views_are_read_where_they_are() -> None:
    heads_first = [tensor(2, 3, 8, 32, seed=seed) for seed in range(3)]
    q, k, v = (each.swapaxes(1, 2) for each in heads_first)
    packed = np.ascontiguousarray(np.stack([q, k, v], axis=2))
    plain = attention(*(np.ascontiguousarray(each) for each in (q, k, v)), backend="reference")
    out = np.zeros((2, 3, 8, 32), np.float16).swapaxes(1, 2)
    assert attention(q, k, v, out=out, backend="reference") is out
    np.testing.assert_array_equal(out, plain)
    of_packed = attention(packed[:, :, 0], packed[:, :, 1], packed[:, :, 2], backend="reference")
    np.testing.assert_array_equal(of_packed, plain)
    shared = np.broadcast_to(k[:1], k.shape)
    np.testing.assert_array_equal(
        attention(q, shared, v, backend="reference"),
        attention(q, np.ascontiguousarray(shared), v, backend="reference"),
    )


def test_rows_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = tensor(1, 50, 2, 32), tensor(1, 70, 1, 32, seed=1)
    options: dict[str, Any] = {"window": (9, 3), "return_lse": True, "backend": "reference"}
    whole = attention(q, k, k, **options)
    monkeypatch.setattr(reference, "_ELEMENTS", 2 * 70 * 7)
    for found, wanted in zip(attention(q, k, k, **options), whole, strict=True):
        np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), rtol=1e-6, atol=1e-6)


# ---- Sequences of different lengths


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_sequences_one_after_the_other(options: dict[str, Any]) -> None:
    of_q, of_k = (np.array(each, np.int32) for each in ([0, 3, 3, 10, 12], [0, 5, 9, 13, 13]))
    q, k, v = tensor(12, 4, 32), tensor(13, 2, 32, seed=1), tensor(13, 2, 32, seed=2)
    out, lse = attention_varlen(
        q, k, v, of_q, of_k, max_seqlen_q=7, max_seqlen_k=8, return_lse=True, backend="reference", **options
    )
    assert (out.shape, lse.shape) == (q.shape, (4, 12))
    for index in range(4):
        rows, keys = slice(*of_q[index : index + 2]), slice(*of_k[index : index + 2])
        wanted, sums = expected(q[rows], k[keys], v[keys], **options)
        close(out[rows], wanted)
        close(lse[:, rows], sums)


def test_no_sequences() -> None:
    none, begin = np.empty((0, 2, 32), np.float16), np.zeros(1, np.int32)
    given = {"max_seqlen_q": 0, "max_seqlen_k": 0, "backend": "reference"}
    assert attention_varlen(none, none, none, begin, begin, **given).shape == (0, 2, 32)  # type: ignore[arg-type]


# ---- Caches


def paged(cache: Any, page_size: int, spare: int, seed: int = 7) -> tuple[Any, Any]:
    """Return the pages of a cache in random order, with some unused pages, and the page table."""
    batch, capacity = cache.shape[:2]
    each = capacity // page_size
    order = np.random.default_rng(seed).permutation(batch * each + spare)[: batch * each]
    pages = np.full((batch * each + spare, page_size, *cache.shape[2:]), np.nan, cache.dtype)
    pages[order] = cache.reshape(batch * each, page_size, *cache.shape[2:])
    return pages, order.reshape(batch, each).astype(np.int32)


@pytest.mark.parametrize("window", [None, (3, 0), (4, None)], ids=str)
@pytest.mark.parametrize("page_size", [0, 1, 3, 12])
@pytest.mark.parametrize("q_length", [1, 3])
def test_new_queries_see_the_cache_up_to_themselves(q_length: int, page_size: int, window: Any) -> None:
    lengths = np.array([12, 0, 1, 7], np.int32)
    q, k, v = tensor(4, q_length, 4, 32), tensor(4, 12, 2, 32, seed=1), tensor(4, 12, 2, 32, seed=2)
    caches, table = (k, v), None
    if page_size:
        (k_pages, table), (v_pages, _) = paged(k, page_size, 2), paged(v, page_size, 2)
        caches = k_pages, v_pages
    given: dict[str, Any] = {"page_table": table, "window": window, "return_lse": True, "backend": "reference"}
    out, lse = attention_decode(q, *caches, lengths, **given)
    for index, length in enumerate(lengths):
        wanted, sums = expected(q[index], k[index, :length], v[index, :length], causal=True, window=window)
        close(out[index], wanted)
        close(lse[index], sums)


def test_pages_behind_the_end_of_a_sequence_are_not_read() -> None:
    q, k = tensor(2, 1, 2, 32), tensor(2, 8, 2, 32, seed=1)
    pages, table = paged(k, 4, 0)
    lengths = np.array([3, 8], np.int32)
    table[0, 1] = -1
    out = attention_decode(q, pages, pages, lengths, page_table=table, softcap=2.0, scale=0.5, backend="reference")
    wanted, _ = expected(q[0], k[0, :3], k[0, :3], softcap=2.0, scale=0.5)
    close(out[0], wanted)
