"""What the kernel for few tokens takes, in microseconds: a formula that ranks ways to deal out a layer's channels.

Its numbers are fitted to 418 readings of 15 layers (2 to 117 MB, M = 1, 4, 16) on an H200, of which the way that it
puts first is 0.7 % behind the fastest on average, 5 % at most, and to the order in 93 cells of the kernel before (from
0.5 MB on): 1.5 %.
[docs/performance/marlin_strip.md, "Clusters that divide the depth"]
"""

from __future__ import annotations

from cudatma.kernels.marlin.problem import ceil_div
from cudatma.kernels.marlin.strip_spec import MMA_TOKENS

#: Launch, first stage and result, and of that for each token.
_BASE, _TOKEN = 2.6, 0.029
#: Bytes a microsecond that memory has beside all else.
_MEMORY = 6.5e6
#: Of 1000 depths in a block: each strip, each token, and each token of each strip; and what a stage costs besides.
_STRIP, _TOKENS, _PRODUCTS, _STAGE = 0.0963, 0.0035, 0.0065, 0.0257
#: A cluster's meeting, a strip's sums of 8 tokens, of each block that sends some; and the part of all the rest that
#: blocks lose as the last of them decides.
_MEETING, _SUMS, _APART = 0.001, 0.052, 0.006


def strip_us(k: int, n: int, block_m: int, strips: int, block_k: int, blocks_k: int, waves: int = 1) -> float:
    """One launch, weights cold in L2. waves: of blocks, one behind the other."""
    stages, columns = ceil_div(ceil_div(k, block_k), blocks_k), max(MMA_TOKENS, block_m)
    depth = _STRIP * strips + _TOKENS * block_m + _PRODUCTS * strips * columns
    work = k * n / 2 / _MEMORY + waves * stages * (depth * block_k / 1000 + _STAGE)
    if blocks_k > 1:
        sums = (blocks_k - 1) * ceil_div(strips, blocks_k) * columns / 8
        work += _APART * work + _MEETING + _SUMS * sums
    return _BASE + _TOKEN * columns + work
