"""QuACK's W4A16 GEMM in CuTe DSL (package quack-kernels), for bf16 and symmetric weights with group size 128.

Launches overlap, because QuACK uses programmatic dependent launch by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.harness import Contender
from benchmarks.layer import Layer
from benchmarks.rivals.common import Int4Rival, cloned, fastest

#: QuACK's name for int4 weights with an offset of 8 and one scale per 128 values along K.
_FORMAT = "int4"
_TILE_CHANNELS = 128
#: Smallest M at which other tiles are tried, and the sizes of these tiles and of their clusters along the tokens.
_TUNED_FROM, _TILE_TOKENS, _CLUSTERS = 128, (128, 192, 256), (1, 2)


class Quack(Int4Rival):
    """QuACK's gemm_w4a16 on one layer, with QuACK's own choice or, for many rows, the fastest of several tiles.

    Raises
    ------
    ImportError
        If the package is absent.
    """

    name = "quack"
    is_bf16_only = True
    multiple_of_n = _TILE_CHANNELS

    def __init__(self, layer: Layer, m_values: Sequence[int]) -> None:
        super().__init__(layer)
        from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight

        self.gemm = gemm_w4a16
        self.rotate(prepare_w4_weight(self.codes, self.scales.t().contiguous(), _FORMAT), cloned)

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        self.errors.clear()
        configurations: dict[str, dict[str, int]] = {self.name: {}}
        if m >= _TUNED_FROM:
            configurations |= {
                f"{self.name} {_TILE_CHANNELS}x{tokens} c1x{cluster}": {
                    "tile_m": _TILE_CHANNELS,
                    "tile_n": tokens,
                    "cluster_n": cluster,
                    "split_k": 1,
                }
                for tokens in _TILE_TOKENS
                for cluster in _CLUSTERS
            }
        makers = {name: partial(self._contender, name, m, options) for name, options in configurations.items()}
        return fastest(stream, makers, self.layer.expected_us(m), count, self.errors)

    def _contender(self, name: str, m: int, options: dict[str, int]) -> Contender:
        x, out, weights = self.x[:m], self.out[:m], self.weights

        def run(index: int) -> Any:
            blob, strips = weights[index % len(weights)]
            self.gemm(x, blob, strips, out=out, wformat=_FORMAT, **options)
            return out

        return self.checked(name, m, run)
