"""Operands of a layer on the GPU, and marlin_gemm on these operands as a contender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.harness import Contender, copies_for, launches_for
from benchmarks.operands import filled, packed_bytes, random_numbers, random_packed, to_torch

#: Bytes and floating-point operations per microsecond of an H200, and microseconds of the shortest launch.
_BYTES_PER_US, _FLOP_PER_US, _LAUNCH_US = 4.0e6, 6.0e8, 4.0


class CellKey(NamedTuple):
    """A cell of the benchmark: (K, N) of a layer, and M."""

    k: int
    n: int
    m: int

    def __str__(self) -> str:
        return f"{self.k}x{self.n} M={self.m}"


@dataclass(frozen=True, slots=True)
class Layer:
    """Operands of a layer: several copies of the packed and the dense weight, and activations for the largest M.

    Attributes
    ----------
    packed : list of PackedWeight
        Packed weights.
    dense : list of torch.Tensor, shape (K * N,)
        Approximately normally distributed weights. The list is empty if cuBLAS does not take part.
    x : cupy.ndarray, shape (M, K)
        Activations.
    out : cupy.ndarray, shape (M, N)
        Result.
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

    def expected_us(self, m: int, weight_bytes: int | None = None) -> float:
        """Estimate the time of a launch: the maximum of the times for its weight (by default int4) and arithmetic."""
        nbytes = packed_bytes(self.k, self.n) if weight_bytes is None else weight_bytes
        return max(nbytes / _BYTES_PER_US, 2 * m * self.n * self.k / _FLOP_PER_US) + _LAUNCH_US

    def contender(self, name: str, run: Any, weights: Sequence[Any], m: int) -> Contender:
        """Return a contender that rotates over int4 weights."""
        launches = launches_for(packed_bytes(self.k, self.n), len(weights), self.expected_us(m))
        return Contender(name, run, len(weights), launches)


def make_layer(k: int, n: int, dtype: str, max_m: int, *, with_dense: bool = True) -> Layer:
    """Create random operands on the current device. ``dtype`` is float16 or bfloat16, for activations and scales."""
    import cupy

    x = filled(cupy, (max_m, k), random_numbers(cupy, (1 << 22) - 8, dtype, 4))
    packed = random_packed(cupy, k, n, dtype, copies_for(packed_bytes(k, n)))
    out = cupy.zeros((max_m, n), cupy.uint16).view(x.dtype)
    dense: list[Any] = []
    if with_dense:
        numbers = random_numbers(cupy, 1 << 22, dtype, 3, 0.02)
        dense = [to_torch(filled(cupy, (k * n,), numbers)) for _ in range(copies_for(2 * k * n))]
    return Layer(k, n, dtype, packed, dense, x, out)


def ours(layer: Layer, m: int, name: str = "ours", *, programmatic: bool = False) -> Contender:
    """Return marlin_gemm on CuPy arrays, rotating over the packed weights.

    With ``programmatic``, each launch is a programmatic dependent of the previous launch. All launches write the same
    result, and no launch reads it. The chain therefore resembles the GEMMs of a model without the work between the
    GEMMs.
    """
    import cudatma

    x, out, weights = layer.x[:m], layer.out[:m], layer.packed

    def run(index: int) -> None:
        cudatma.marlin_gemm(x, weights[index % len(weights)], out=out, programmatic=programmatic)

    return layer.contender(name, run, weights, m)
