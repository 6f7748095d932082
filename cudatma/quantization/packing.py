"""A weight's plain integers, packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import ArgumentTypeError, QuantizationError
from cudatma.quantization import layout_v1
from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO
from cudatma.quantization.namespaces import host_array, namespace_of, on_device_of, upload
from cudatma.quantization.packed import MAX_ZERO, PackedWeight, check_group_size


def pack(
    q: Any, scales: Any, zeros: Any | None = None, *, group_size: int = 128, perm: Any | None = None
) -> PackedWeight:
    """Pack integers and scales into layout version 1.

    q: uint8 (K, N), 0..15, NumPy or CuPy; the result lies where q does. scales: fp16 or bf16 (G, N) with
    G = ceil(K / group_size), or 1 for group_size -1. zeros: integers 0..16 (G, N), None for the symmetric offset 8.
    perm: (K,), row k of q belongs to activation column perm[k]. Raises QuantizationError, ArgumentTypeError.
    """
    xp = namespace_of(q)
    if xp is np and not isinstance(q, np.ndarray):
        raise ArgumentTypeError("q", type(q).__name__, "a NumPy or CuPy array of uint8")
    if q.ndim != 2 or q.dtype != np.uint8 or 0 in q.shape:
        raise QuantizationError("q", f"{q.dtype} {q.shape}", "uint8 (K, N) with K and N at least 1")
    if int(q.max()) > 15:
        raise QuantizationError("q", f"a value of {int(q.max())}", "0..15", "four bits hold no more")
    shape = (int(q.shape[0]), int(q.shape[1]))
    check_group_size(group_size)
    scales, zeros = host_array(scales, "scales"), None if zeros is None else _plain_zeros(zeros)
    rows = layout_v1.group_count(shape[0], group_size)
    for name, array in (("scales", scales), ("zeros", zeros)):
        if array is not None and array.shape != (rows, shape[1]):
            raise QuantizationError(
                name, array.shape, f"({rows}, {shape[1]}) for q {shape} and group_size {group_size}"
            )
    with on_device_of(q):
        packed = layout_v1.pack_values(_padded_values(q, zeros, group_size, xp))
        place: Callable[[Any], Any] = np.ascontiguousarray if xp is np else upload
        return PackedWeight(
            qweight=xp.ascontiguousarray(packed),
            scales=place(_ordered(scales, 0)),
            zeros=None if zeros is None else place(_ordered(zeros, SYMMETRIC_ZERO)),
            perm=None if perm is None else place(_plain_perm(perm, shape[0])),
            shape=shape,
            group_size=group_size,
            dtype=scales.dtype.name,
        )


def _plain_zeros(zeros: Any) -> NDArray[Any]:
    host = host_array(zeros, "zeros")
    if host.dtype.kind not in "ui":
        raise QuantizationError("zeros", host.dtype.name, f"integers 0..{MAX_ZERO}")
    if host.size and (host.min() < 0 or host.max() > MAX_ZERO):
        raise QuantizationError("zeros", f"{host.min()}..{host.max()}", f"0..{MAX_ZERO}")
    return host.astype(np.uint8)


def _plain_perm(perm: Any, k: int) -> NDArray[np.int32]:
    """As int32, after its range was checked in its own type; PackedWeight finds what occurs twice."""
    host = host_array(perm, "perm")
    if host.dtype.kind not in "ui" or host.shape != (k,):
        raise QuantizationError("perm", f"{host.dtype} {host.shape}", f"integers ({k},)")
    if host.min() < 0 or host.max() >= k:
        raise QuantizationError("perm", f"{host.min()}..{host.max()}", f"each of 0..{k - 1} once")
    return np.ascontiguousarray(host, dtype=np.int32)


def _ordered(rows: NDArray[Any], padding: int) -> NDArray[Any]:
    """(G, N) -> (G, 64 N64) padded and in stored order."""
    groups, n = rows.shape
    padded: NDArray[Any] = np.full((groups, layout_v1.blocks(n) * layout_v1.BLOCK), padding, dtype=rows.dtype)
    padded[:, :n] = rows
    return np.ascontiguousarray(layout_v1.order_columns(padded))


def _padded_values(q: Any, zeros: NDArray[Any] | None, group_size: int, xp: Any) -> Any:
    """q padded to whole blocks with values that dequantise to 0.

    A zero point of 16 has no such value: there padding holds 15, and the zero activation beyond K cancels it.
    """
    k, n = q.shape
    padded_shape = (layout_v1.blocks(k) * layout_v1.BLOCK, layout_v1.blocks(n) * layout_v1.BLOCK)
    if padded_shape == (k, n):
        return q
    padded = xp.full(padded_shape, SYMMETRIC_ZERO, dtype=np.uint8)
    padded[:k, :n] = q
    if zeros is not None:
        for row in range(k, padded_shape[0]):
            group = 0 if group_size == -1 else row // group_size
            if group < zeros.shape[0]:
                padded[row, :n] = xp.asarray(np.minimum(zeros[group], 15))
    return padded
