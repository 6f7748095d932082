"""What attention and attention_decode compute, in NumPy and float64, rounded once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.kernels.attention.problem import DecodeProblem, Mask, Problem
from cudatma.kernels.host import host_array

#: Logits in memory at a time.
_ELEMENTS = 1 << 21

Array = np.ndarray[Any, Any]


def reference(problem: Problem, arrays: Mapping[str, ArrayInfo]) -> None:
    """Write out, and lse if the arrays contain it. The lse of varlen sequences is (heads, total length)."""
    named = {name: host_array(info) for name, info in arrays.items()}
    operands = (named[name] for name in ("q", "k", "v", "out"))
    q, k, v, out = (array if array.ndim == 4 else array[None] for array in operands)
    sums, sink = named.get("lse"), named.get("sink")
    options = problem.scale, problem.limits, problem.softcap, sink
    if not problem.is_varlen:
        for index in range(len(q)):
            written(attend(q[index], k[index], v[index], *options), out[index], None if sums is None else sums[index])
        return
    of_q, of_k = (named[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for index in range(problem.batch):
        rows, keys = slice(of_q[index], of_q[index + 1]), slice(of_k[index], of_k[index + 1])
        found = attend(q[0, rows], k[0, keys], v[0, keys], *options)
        written(found, out[0, rows], None if sums is None else sums[:, rows])


def written(found: tuple[Array, Array], out: Array, lse: Array | None) -> None:
    """Round the results of attend()."""
    with np.errstate(all="ignore"):  # as the GPU: infinities and NaNs are results
        out[...] = found[0].astype(out.dtype)
        if lse is not None:
            lse[...] = found[1]


def attend(
    q: Array, k: Array, v: Array, scale: float, mask: Mask, softcap: float = 0.0, sink: Array | None = None
) -> tuple[Array, Array]:
    """(result (q_length, heads, v_head_dim), lse (heads, q_length)) in float64, of one sequence: q (q_length, heads,
    head_dim), k and v with kv_heads, sink (heads,). A query that sees no key has a result of zeros, and an lse of -inf
    or the sink."""
    (q_length, heads, _), (k_length, kv_heads, v_head_dim) = q.shape, v.shape
    sinks = np.full(heads, -np.inf) if sink is None else sink.astype(np.float64)
    out, lse = np.zeros((q_length, heads, v_head_dim)), np.repeat(sinks[:, None], q_length, 1)
    group = heads // kv_heads
    rows = max(1, _ELEMENTS // max(1, group * k_length))
    with np.errstate(all="ignore"):
        for begin in range(0, q_length, rows):
            taken = slice(begin, begin + rows)
            positions = np.arange(q_length)[taken] + (k_length - q_length)
            first, end = _seen(positions, mask, k_length)
            is_seen = _is_seen(positions, np.arange(first, end), mask)
            for head in range(kv_heads if first < end else 0):
                own = slice(head * group, (head + 1) * group)
                queries = q[taken, own].astype(np.float64).swapaxes(0, 1)
                keys, values = (each[first:end, head].astype(np.float64) for each in (k, v))
                logits = scale * (queries @ keys.T)
                logits = softcap * np.tanh(logits / softcap) if softcap else logits
                sums, lse[own, taken] = _softmax(np.where(is_seen, logits, -np.inf), sinks[own, None, None])
                out[taken, own] = (sums @ values).swapaxes(0, 1)
    return out, lse


def _seen(positions: Array, mask: Mask, k_length: int) -> tuple[int, int]:
    """The first key that any of these queries sees, and the end of them."""
    first = 0 if mask.left is None else max(0, int(positions[0]) - mask.left)
    end = k_length if mask.right is None else min(k_length, int(positions[-1]) + mask.right + 1)
    return first, max(first, end)


def _is_seen(positions: Array, keys: Array, mask: Mask) -> Array:
    distance = keys - positions[:, None]
    seen = np.ones(distance.shape, bool)
    if mask.left is not None:
        seen &= distance >= -mask.left
    if mask.right is not None:
        seen &= distance <= mask.right
    return seen


def _softmax(logits: Array, sinks: Array) -> tuple[Array, Array]:
    """(weights, lse) along the last axis, with one more logit; zeros and -inf where all logits are -inf."""
    most = np.maximum(logits.max(-1, keepdims=True), sinks)
    offset = np.where(np.isneginf(most), 0, most)
    weights = np.exp(logits - offset)
    total = weights.sum(-1, keepdims=True) + np.exp(sinks - offset)
    return weights / np.where(total == 0, 1, total), (most + np.log(total))[..., 0]


def decode_reference(problem: DecodeProblem, arrays: Mapping[str, ArrayInfo]) -> None:
    """Write out, and lse if the arrays contain it."""
    named = {name: host_array(info) for name, info in arrays.items()}
    q, k, v, out = (named[name] for name in ("q", "k", "v", "out"))
    table, sums, sink = named.get("page_table"), named.get("lse"), named.get("sink")
    if problem.has_fp8_cache:
        k = _scaled(k, named.get("k_scale", problem.k_scale), 0.0)
        v = _scaled(v, named.get("v_scale", problem.v_scale))
    for index, length in enumerate(named["seqlens"].tolist()):
        pages = None if table is None else table[index]
        keys, values = (_sequence(cache, index, length, pages) for cache in (k, v))
        found = attend(q[index], keys, values, problem.scale, problem.limits, problem.softcap, sink)
        written(found, out[index], None if sums is None else sums[index])


def _scaled(cache: Array, scale: Any, least: float = -np.inf) -> Array:
    """Return the cache in float64, by heads; scales below ``least`` count as that."""
    factors = np.float64(scale) if isinstance(scale, float) else scale.astype(np.float64).reshape(-1, 1)
    whole: Array = cache.astype(np.float64) * np.maximum(factors, least)
    return whole


def _sequence(cache: Array, index: int, length: int, pages: Array | None) -> Array:
    """The first keys, or values, of a sequence."""
    if pages is None:
        return cache[index, :length]
    size = cache.shape[1]
    taken = pages[: -(-length // size) if length else 0]
    whole: Array = cache[taken].reshape(len(taken) * size, *cache.shape[2:])
    return whole[:length]
