"""What attention_decode computes, in NumPy and float64, rounded once."""

from __future__ import annotations

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.kernels.attention.decode_request import DecodeRequest
from cudatma.kernels.attention.reference import Array, attend, written
from cudatma.kernels.host import host_array


def decode_reference(request: DecodeRequest, result: ArrayInfo, lse: ArrayInfo | None) -> None:
    """Write the result, and lse if there is one. All in host memory."""
    q, k, v, out = (host_array(info) for info in (request.q, request.k, request.v, result))
    table = None if request.page_table is None else host_array(request.page_table)
    sums = None if lse is None else host_array(lse)
    sink = None if request.sink is None else host_array(request.sink)
    if request.has_fp8_cache:
        k, v = _scaled(k, request.k_scale, 0.0), _scaled(v, request.v_scale)
    for index, length in enumerate(host_array(request.seqlens).tolist()):
        pages = None if table is None else table[index]
        keys, values = (_sequence(cache, index, length, pages) for cache in (k, v))
        found = attend(q[index], keys, values, request.scale, request.mask, request.softcap, sink)
        written(found, out[index], None if sums is None else sums[index])


def _scaled(cache: Array, scale: float | ArrayInfo, least: float = -np.inf) -> Array:
    """In float64, by heads; scales below ``least`` count as that."""
    factors = np.float64(scale) if isinstance(scale, float) else host_array(scale).astype(np.float64).reshape(-1, 1)
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
