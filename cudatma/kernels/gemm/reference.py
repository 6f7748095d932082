"""What gemm computes, in NumPy: products and sums in fp32, rounded once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.kernels.gemm.problem import SCALE_BLOCK
from cudatma.kernels.gemm.request import Request
from cudatma.kernels.host import host_array


def reference(request: Request, result: ArrayInfo) -> None:
    """Write the result. request, result: in host memory."""
    with np.errstate(all="ignore"):  # as the GPU: infinities and NaNs are results
        out, (_, n, k) = host_array(result), request.sizes
        a, b = (host_array(info).astype(np.float32) for info in (request.a, request.b))
        scales = [np.ones((1, 1), np.float32) if one is None else host_array(one) for one in request.scales.arrays]
        scales = [one.reshape(1, 1) if one.size == 1 else one for one in scales]
        if request.scales.of_blocks:
            a_blocks, b_blocks = (_repeated(one, -1) for one in scales)
            a = a * a_blocks[..., :k]
            b = b * _repeated(b_blocks[..., :n], -2)[..., :k, :]
            values = np.float32(request.alpha) * (a @ b)
        else:
            values = np.float32(request.alpha) * (a @ b) * scales[0].reshape(-1, 1) * scales[1].reshape(1, -1)
        if request.beta:
            values += np.float32(request.beta) * out.astype(np.float32)
        if request.bias is not None:
            values += host_array(request.bias).astype(np.float32)
        out[...] = _activated(values, request.activation).astype(out.dtype)


def _repeated(scales: Any, axis: int) -> Any:
    """Each scale for the elements of its block."""
    return np.repeat(scales, SCALE_BLOCK, axis=axis)


def _activated(x: Any, name: str | None) -> Any:
    if name == "relu":
        return np.where(x < 0, np.float32(0), x)
    if name == "gelu":
        return np.float32(0.5) * x * (1 + np.vectorize(math.erf, otypes=[np.float32])(x * np.float32(math.sqrt(0.5))))
    if name == "gelu_tanh":
        return (
            np.float32(0.5) * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
        )
    return x / (1 + np.exp(-x)) if name == "silu" else x
