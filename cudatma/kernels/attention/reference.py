"""NumPy reference for attention and attention_decode, which computes in float64 and rounds once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.kernels.attention.problem import DecodeProblem, Mask, Problem
from cudatma.kernels.host import host_array

#: Maximum number of logits in memory.
_ELEMENTS = 1 << 21

Array = np.ndarray[Any, Any]


def reference(problem: Problem, arrays: Mapping[str, ArrayInfo]) -> None:
    """Write ``out``, and ``lse`` if the arrays contain it. All arrays must be in host memory."""
    named = {name: host_array(info) for name, info in arrays.items()}
    options = problem.scale, problem.limits, problem.softcap, named.get("sink")
    for q, k, v, out, lse in _sequences(problem, named):
        result, sums = attend(q, k, v, *options)
        with np.errstate(all="ignore"):  # Infinities and NaNs are valid results, as on the GPU.
            out[...] = result.astype(out.dtype)
            if lse is not None:
                lse[...] = sums


def _sequences(problem: Problem, named: Mapping[str, Array]) -> Iterator[tuple[Any, ...]]:
    """Yield q, k, v, out and lse of each sequence. lse is None if the call does not return it."""
    q, k, v, out = (named[name] for name in ("q", "k", "v", "out"))
    lse = named.get("lse")
    if problem.is_varlen:
        q_offsets, k_offsets = (named[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
        for index in range(problem.batch):
            rows, keys = slice(q_offsets[index], q_offsets[index + 1]), slice(k_offsets[index], k_offsets[index + 1])
            yield q[rows], k[keys], v[keys], out[rows], None if lse is None else lse[:, rows]
        return
    if isinstance(problem, DecodeProblem) and problem.has_fp8_cache:
        k = _scaled(k, named.get("k_scale", problem.k_scale), 0.0)
        v = _scaled(v, named.get("v_scale", problem.v_scale))
    table, lengths = named.get("page_table"), named["seqlens"].tolist() if "seqlens" in named else []
    for index in range(problem.batch):
        key, value = k[index], v[index]
        if lengths:
            pages = None if table is None else table[index]
            key, value = (_sequence(cache, index, lengths[index], pages) for cache in (k, v))
        yield q[index], key, value, out[index], None if lse is None else lse[index]


def attend(
    q: Array, k: Array, v: Array, scale: float, mask: Mask, softcap: float = 0.0, sink: Array | None = None
) -> tuple[Array, Array]:
    """Return the result (q_length, heads, v_head_dim) and lse (heads, q_length) of one sequence in float64.

    The shape of q is (q_length, heads, head_dim), k and v have kv_heads heads, and sink has the shape (heads,). For a
    query that attends to no key, the result is zero and lse is -inf or the sink.
    """
    (q_length, heads, _), (k_length, kv_heads, v_head_dim) = q.shape, v.shape
    sinks = np.full(heads, -np.inf) if sink is None else sink.astype(np.float64)
    out, lse = np.zeros((q_length, heads, v_head_dim)), np.repeat(sinks[:, None], q_length, 1)
    group = heads // kv_heads
    rows = max(1, _ELEMENTS // max(1, group * k_length))
    with np.errstate(all="ignore"):
        for begin in range(0, q_length, rows):
            block = slice(begin, begin + rows)
            positions = np.arange(q_length)[block] + (k_length - q_length)
            first, end = _visible_range(positions, mask, k_length)
            visible = _visible(positions, np.arange(first, end), mask)
            for head in range(kv_heads if first < end else 0):
                own = slice(head * group, (head + 1) * group)
                queries = q[block, own].astype(np.float64).swapaxes(0, 1)
                keys, values = (each[first:end, head].astype(np.float64) for each in (k, v))
                logits = scale * (queries @ keys.T)
                logits = softcap * np.tanh(logits / softcap) if softcap else logits
                sums, lse[own, block] = _softmax(np.where(visible, logits, -np.inf), sinks[own, None, None])
                out[block, own] = (sums @ values).swapaxes(0, 1)
    return out, lse


def _visible_range(positions: Array, mask: Mask, k_length: int) -> tuple[int, int]:
    """Return the index of the first key that any of these queries attends to, and the index after the last such key."""
    first = 0 if mask.left is None else max(0, int(positions[0]) - mask.left)
    end = k_length if mask.right is None else min(k_length, int(positions[-1]) + mask.right + 1)
    return first, max(first, end)


def _visible(positions: Array, keys: Array, mask: Mask) -> Array:
    """Return a boolean matrix (queries, keys) that is True where a query attends to a key."""
    distance = keys - positions[:, None]
    visible = np.ones(distance.shape, bool)
    if mask.left is not None:
        visible &= distance >= -mask.left
    if mask.right is not None:
        visible &= distance <= mask.right
    return visible


def _softmax(logits: Array, sinks: Array) -> tuple[Array, Array]:
    """Return softmax weights and lse along the last axis, with the sinks as additional logits.

    If all logits are -inf, the weights are zero and lse is -inf.
    """
    largest = np.maximum(logits.max(-1, keepdims=True), sinks)
    offset = np.where(np.isneginf(largest), 0, largest)
    weights = np.exp(logits - offset)
    total = weights.sum(-1, keepdims=True) + np.exp(sinks - offset)
    return weights / np.where(total == 0, 1, total), (largest + np.log(total))[..., 0]


def _scaled(cache: Array, scale: Any, min_scale: float = -np.inf) -> Array:
    """Return the cache in float64, multiplied by the scale of each head, which is at least ``min_scale``."""
    factors = np.float64(scale) if isinstance(scale, float) else scale.astype(np.float64).reshape(-1, 1)
    scaled: Array = cache.astype(np.float64) * np.maximum(factors, min_scale)
    return scaled


def _sequence(cache: Array, index: int, length: int, pages: Array | None) -> Array:
    """Return the first ``length`` keys or values of a sequence."""
    if pages is None:
        return cache[index, :length]
    size = cache.shape[1]
    rows = pages[: -(-length // size) if length else 0]
    keys: Array = cache[rows].reshape(len(rows) * size, *cache.shape[2:])
    return keys[:length]
