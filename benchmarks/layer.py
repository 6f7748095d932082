"""Operands of a layer on the GPU, and the contender that runs marlin_gemm on these operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.harness import Contender, copies_for, launches_for
from benchmarks.operands import filled, packed_bytes, random_numbers, random_packed, to_torch

#: Bytes and floating-point operations per microsecond of an H200, and microseconds of the shortest launch.
_BYTES_PER_US, _FLOP_PER_US, _LAUNCH_US = 4.0e6, 6.0e8, 4.0


class CellKey(NamedTuple):
    """Key of a benchmark cell: K and N of a layer, and M."""

    k: int
    n: int
    m: int

    def __str__(self) -> str:
        return f"{self.k}x{self.n} M={self.m}"


@dataclass(frozen=True, slots=True)
class Layer:
    """Several copies of a layer's packed and dense weight, and activations for the largest M.

    Attributes
    ----------
    packed : list of PackedWeight
        Packed weights.
    dense : list of torch.Tensor, shape (K * N,)
        Approximately normally distributed weights. The list is empty if cuBLAS is not measured.
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
        """Return the estimated time of a launch, bound by the weight's bytes (by default int4) or the arithmetic."""
        nbytes = packed_bytes(self.k, self.n) if weight_bytes is None else weight_bytes
        return max(nbytes / _BYTES_PER_US, 2 * m * self.n * self.k / _FLOP_PER_US) + _LAUNCH_US

    def contender(self, name: str, run: Any, weights: Sequence[Any], m: int) -> Contender:
        """Return a contender that rotates over int4 weights."""
        launches = launches_for(packed_bytes(self.k, self.n), len(weights), self.expected_us(m))
        return Contender(name, run, len(weights), launches)


def make_layer(k: int, n: int, dtype: str, max_m: int, *, with_dense: bool = True) -> Layer:
    """Create random operands on the current device. ``dtype`` is float16 or bfloat16."""
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
    """Return a contender that runs marlin_gemm on CuPy arrays and rotates over the packed weights.

    If ``programmatic`` is True, the launches use programmatic dependent launch. All launches write the same result,
    which no launch reads. The chain therefore resembles the GEMMs of a model without the other kernels between them.
    """
    import cudatma

    x, out, weights = layer.x[:m], layer.out[:m], layer.packed

    def run(index: int) -> None:
        cudatma.marlin_gemm(x, weights[index % len(weights)], out=out, programmatic=programmatic)

    return layer.contender(name, run, weights, m)
