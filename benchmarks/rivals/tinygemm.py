"""torch's int4 GEMM (tinygemm) with bf16 activations. Symmetric weights have floating-point zero points of 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Contender
from benchmarks.layer import Layer
from benchmarks.operands import GROUP_SIZE
from benchmarks.rivals.common import Int4Rival, cloned

#: Largest M. With more rows, tinygemm takes milliseconds, which is ten times as long as other kernels.
MAX_M = 128
#: Parameter of torch's packing. K must be a multiple of 16 times this parameter.
_INNER_K_TILES = 8


class Tinygemm(Int4Rival):
    """The operator torch.ops.aten._weight_int4pack_mm on one layer."""

    name = "tinygemm"
    is_bf16_only = True
    multiple_of_n = 8

    def __init__(self, layer: Layer, m_values: Sequence[int]) -> None:
        import torch

        super().__init__(layer)
        #: W[k, n] = (code - 8) * scale + zero, where scale and zero are interleaved for each group.
        pairs = torch.stack((self.scales, torch.zeros_like(self.scales)), dim=2).contiguous()
        # torch stores even k in the high nibble.
        packed = torch.ops.aten._convert_weight_to_int4pack((self.codes << 4) | (self.codes >> 4), _INNER_K_TILES)
        self.rotate((packed, pairs), cloned)
        self.results: list[Any] = []

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        """Return the contender. The last two results are kept alive, because a graph continues to write to them."""
        import torch

        if m > MAX_M:
            return []
        x, weights, results = self.x[:m], self.weights, self.results

        def run(index: int) -> Any:
            packed, pairs = weights[index % len(weights)]
            results.append(torch.ops.aten._weight_int4pack_mm(x, packed, GROUP_SIZE, pairs))
            del results[:-2]
            return results[-1]

        return [self.checked(self.name, m, run)]
