"""torch's int4 GEMM (tinygemm): bf16 activations, symmetric weights as floating zero points of 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Contender, copies_for, launches_for
from benchmarks.layer import Layer
from benchmarks.operands import GROUP_SIZE, filled, packed_bytes, random_numbers, random_words, to_torch
from benchmarks.plan import expected_us
from benchmarks.rivals.check import check

#: Beyond, it takes milliseconds where everybody else takes a tenth of one.
MAX_M = 128
#: Of torch's packing: K must be a multiple of 16 times this.
_INNER_K_TILES = 8


class Tinygemm:
    """torch.ops.aten._weight_int4pack_mm on one layer. Raises ValueError where the layer is not its kind."""

    name = "tinygemm"

    def __init__(self, layer: Layer, m_values: Sequence[int]) -> None:
        import cupy
        import torch

        self.layer, self.errors = layer, dict[str, str]()
        if layer.dtype != "bfloat16":
            raise ValueError("bf16 only")
        k, n = layer.k, layer.n
        if k % (16 * _INNER_K_TILES) or k % GROUP_SIZE or n % 8:
            raise ValueError(f"K = {k} is no multiple of {16 * _INNER_K_TILES}")
        self.x = to_torch(layer.x)
        words = random_words(cupy, 1 << 20, 5)
        codes = torch.as_tensor(filled(cupy, (n, k // 2), words.view(cupy.uint8)), device="cuda")
        scales = to_torch(filled(cupy, (k // GROUP_SIZE, n), abs_scales(cupy, layer.dtype)))
        #: W[k, n] = (code - 8) * scale + zero, with (scale, zero) of each group side by side.
        pairs = torch.stack((scales, torch.zeros_like(scales)), dim=2).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack(codes, _INNER_K_TILES)
        self.reference = dense_weight(codes, scales)
        self.weights = [(packed.clone(), pairs.clone()) for _ in range(copies_for(packed_bytes(k, n)))]
        self.results: list[Any] = []

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        """The kernel makes its result itself; the last two are kept alive, as the graph goes on writing them."""
        import torch

        if m > MAX_M:
            return []
        x, weights, results = self.x[:m], self.weights, self.results

        def run(index: int) -> None:
            packed, pairs = weights[index % len(weights)]
            results.append(torch.ops.aten._weight_int4pack_mm(x, packed, GROUP_SIZE, pairs))
            del results[:-2]

        run(0)
        check(results[-1], x, self.reference)
        nbytes = packed_bytes(self.layer.k, self.layer.n)
        launches = launches_for(nbytes, len(weights), expected_us(self.layer.k, self.layer.n, m))
        return [Contender(self.name, run, len(weights), launches)]


def abs_scales(xp: Any, dtype: str) -> Any:
    """A block of positive scales in a band like that of the packed weights, 16-bit."""
    numbers = random_numbers(xp, 1 << 16, dtype, 2, 1 / 64)
    bits = numbers.view(xp.uint16) & xp.uint16(0x7FFF)
    return bits.view(numbers.dtype)


def dense_weight(codes: Any, scales: Any) -> Any:
    """(K, N): the weight that ``codes`` (N, K / 2), the even k in the high nibble, and scales (K / 128, N) mean."""
    import torch

    values = torch.stack((codes >> 4, codes & 15), dim=2).flatten(1).to(scales.dtype) - 8
    return values.t() * scales.repeat_interleave(GROUP_SIZE, dim=0)
