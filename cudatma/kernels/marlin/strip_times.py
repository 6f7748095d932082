"""What the kernel for few tokens takes, in microseconds: a formula that ranks ways to deal out a layer's channels.

Its numbers are fitted to 101 cells (33 layers of 0.5 to 117 MB, M = 1, 16, 32), some 14 ways each, measured on an
H200: the way that it puts first is 2 % behind the fastest on average, 12 % at most, but for weights of several waves.
[docs/performance/marlin_strip.md, "Clusters that divide the depth"]
"""

from __future__ import annotations

from cudatma.kernels.marlin.problem import ceil_div
from cudatma.kernels.marlin.strip_spec import MMA_TOKENS

#: Launch, first stage and result, and of that for each token.
_BASE, _TOKEN = 2.28, 0.027
#: Bytes a microsecond that memory has beside all else.
_MEMORY = 6.6e6
#: Of 1000 depths in a block: each strip, each token, and each token of each strip; and what a stage costs besides.
_STRIP, _TOKENS, _PRODUCTS, _STAGE = 0.111, 0.0043, 0.0105, 0.039
#: A cluster's launch and its meeting, by its blocks; and a strip's sums of 8 tokens, of each block that sends some.
_CLUSTER, _CLUSTER_BLOCK, _SUMS = 0.065, 0.028, 0.029


def strip_us(k: int, n: int, block_m: int, strips: int, block_k: int, blocks_k: int, waves: int = 1) -> float:
    """One launch, weights cold in L2. waves: of blocks, one behind the other."""
    stages, columns = ceil_div(ceil_div(k, block_k), blocks_k), max(MMA_TOKENS, block_m)
    depth = _STRIP * strips + _TOKENS * block_m + _PRODUCTS * strips * columns
    work = waves * stages * (depth * block_k / 1000 + _STAGE)
    cluster = 0.0
    if blocks_k > 1:
        sums = (blocks_k - 1) * ceil_div(strips, blocks_k) * columns / 8
        cluster = _CLUSTER + _CLUSTER_BLOCK * blocks_k + _SUMS * sums
    return _BASE + _TOKEN * columns + k * n / 2 / _MEMORY + work + cluster
