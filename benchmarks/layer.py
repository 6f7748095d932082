"""One layer's operands on the GPU, and our GEMM on them as a contender."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Contender, copies_for, launches_for
from benchmarks.operands import filled, packed_bytes, random_numbers, random_packed, to_torch
from benchmarks.plan import expected_us


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's operands: packed weights and dense ones, each several times, and activations for the largest M.

    dense: torch tensors (K * N,), near-normal, none where cuBLAS is no rival. x: (M, K), out: (M, N), CuPy.
    """

    k: int
    n: int
    dtype: str
    packed: list[Any]
    dense: list[Any]
    x: Any
    out: Any

    @property
    def dense_bytes(self) -> int:
        return 2 * self.k * self.n


def make_layer(k: int, n: int, dtype: str, most_tokens: int, *, with_dense: bool = True) -> Layer:
    """Random operands on the current device. dtype: float16 or bfloat16, of activations and scales."""
    import cupy

    x = filled(cupy, (most_tokens, k), random_numbers(cupy, (1 << 22) - 8, dtype, 4))
    packed = random_packed(cupy, k, n, dtype, copies_for(packed_bytes(k, n)))
    out = cupy.zeros((most_tokens, n), cupy.uint16).view(x.dtype)
    dense: list[Any] = []
    if with_dense:
        numbers = random_numbers(cupy, 1 << 22, dtype, 3, 0.02)
        dense = [to_torch(filled(cupy, (k * n,), numbers)) for _ in range(copies_for(2 * k * n))]
    return Layer(k, n, dtype, packed, dense, x, out)


def ours(layer: Layer, m: int, name: str = "ours", *, spec: Any = None, programmatic: bool = False) -> Contender:
    """marlin_gemm on CuPy arrays, rotating over the packed weights.

    spec: the configuration that runs; None: the one that a GEMM takes.
    programmatic: each launch is a dependent of the one before it. All write one result and none reads it; the chain
    is as long as a model's, without the work between its GEMMs.
    """
    import cudatma
    from cudatma.kernels.choosing import pinned

    x, out, weights = layer.x[:m], layer.out[:m], layer.packed

    def run(index: int) -> None:
        weight = weights[index % len(weights)]
        with nullcontext() if spec is None else pinned(spec):
            cudatma.marlin_gemm(x, weight, out=out, programmatic=programmatic)

    nbytes = packed_bytes(layer.k, layer.n)
    return Contender(name, run, len(weights), launches_for(nbytes, len(weights), expected_us(layer.k, layer.n, m)))
