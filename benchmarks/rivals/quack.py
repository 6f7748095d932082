"""QuACK's W4A16 GEMM (package quack-kernels), in CuTe DSL: bf16, group 128, symmetric.

Its launches overlap as QuACK has them do by default: each is a programmatic dependent of the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.harness import Contender, copies_for, launches_for
from benchmarks.layer import Layer
from benchmarks.operands import GROUP_SIZE, filled, packed_bytes, random_words, to_torch
from benchmarks.plan import expected_us
from benchmarks.rivals.check import check
from benchmarks.rivals.fastest import fastest
from benchmarks.rivals.tinygemm import abs_scales, dense_weight

#: Its name of int4 weights with an offset of 8 and a scale for each 128 values along K.
_FORMAT = "int4"
_TILE_CHANNELS = 128
#: From so many tokens on, besides what QuACK chooses: tokens of a tile, and CTAs of a cluster along the tokens.
_TUNED_FROM, _TILE_TOKENS, _CLUSTERS = 128, (128, 192, 256), (1, 2)


class Quack:
    """quack.gemm_w4.gemm_w4a16 on one layer: what QuACK chooses, for many tokens the fastest of some tiles. Raises
    ImportError where the package is absent, and ValueError where the layer is not its kind."""

    name = "quack"

    def __init__(self, layer: Layer, m_values: Sequence[int]) -> None:
        import cupy
        import torch

        self.layer, self.errors = layer, dict[str, str]()
        k, n = layer.k, layer.n
        if layer.dtype != "bfloat16":
            raise ValueError("bf16 only")
        if k % GROUP_SIZE or n % _TILE_CHANNELS:
            raise ValueError(f"K = {k} is no multiple of {GROUP_SIZE}, or N = {n} none of {_TILE_CHANNELS}")
        from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight

        self.gemm = gemm_w4a16
        self.x = to_torch(layer.x)
        self.out = torch.zeros((len(layer.x), n), dtype=self.x.dtype, device=self.x.device)
        # The bits that Humming gets: eight codes a word along K, and scales in a band like that of our own weights.
        words = filled(cupy, (n, k // 8), random_words(cupy, 1 << 20, 6))
        codes = torch.as_tensor(words.view(cupy.uint8), device=self.x.device)
        scales = to_torch(filled(cupy, (n, k // GROUP_SIZE), abs_scales(cupy, layer.dtype)))
        #: dense_weight() wants the even k in the high nibble.
        self.reference = dense_weight((codes << 4) | (codes >> 4), scales.t())
        blob, strips = prepare_w4_weight(codes, scales, _FORMAT)
        copies = copies_for(packed_bytes(k, n))
        self.weights = [(blob, strips), *((blob.clone(), strips.clone()) for _ in range(copies - 1))]

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
        return fastest(stream, makers, expected_us(self.layer.k, self.layer.n, m), count, self.errors)

    def _contender(self, name: str, m: int, options: dict[str, int]) -> Contender:
        x, out, weights = self.x[:m], self.out[:m], self.weights

        def run(index: int) -> None:
            blob, strips = weights[index % len(weights)]
            self.gemm(x, blob, strips, out=out, wformat=_FORMAT, **options)

        out.zero_()
        run(0)
        check(out, x, self.reference)
        nbytes = packed_bytes(self.layer.k, self.layer.n)
        launches = launches_for(nbytes, len(weights), expected_us(self.layer.k, self.layer.n, m))
        return Contender(name, run, len(weights), launches)
