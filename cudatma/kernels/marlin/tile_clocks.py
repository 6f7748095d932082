"""What tiles of the wgmma kernel take, in clocks of a multiprocessor: a formula that ranks them.

Its numbers are fitted to 80 cells (16 layers, M = 32 to 1024) that `cudatma tune` measured on an H200: of the tiles
measured, the one that it puts first is 1 % behind the fastest on average, 7 % at most, with one exception; no cell was
kept aside. [docs/performance/marlin_wgmma.md, "Which tile"] It knows nothing of clock and power. model.py predicts
times; this only compares.
"""

from __future__ import annotations

from cudatma.kernels.marlin.problem import ceil_div, longest_share

#: Multiply-adds that the tensor cores of a multiprocessor do in a clock. [H100 white paper]
_PRODUCTS = 2048
#: Dequantising 64 channels costs as much as so many tokens more; a stage costs so much besides, and for each byte.
_DEQUANTISE_TOKENS, _STAGE, _BYTE = 18, 80, 0.008
#: A stage of a divided tile: blocks are at different depths then, and share less in L2.
DIVIDED_STAGE = 1.06
#: Partial sums go out and come in again: once, and bytes a clock for each block that shares a tile with its owner.
_DIVISION, _PARTIAL_BYTES = 4500, 64
#: Until the first KiB of a stage is there, and for the result of 128 x 128.
_FIRST_KIB, _RESULT = 62, 4000


def division_clocks(block_m: int, block_n: int, others: int = 1) -> float:
    """What dividing tiles costs a block. others: that share a tile with the block that stores it."""
    return _DIVISION + others * 4 * block_m * block_n / _PARTIAL_BYTES


def stage_clocks(block_m: int, block_n: int, block_k: int, cluster: int) -> float:
    """One stage of a whole tile, with the ring full."""
    products = (block_m + _DEQUANTISE_TOKENS) * block_n * block_k / _PRODUCTS
    return products + _BYTE * _stage_bytes(block_m // cluster, block_n, block_k) + _STAGE


def launch_clocks(
    block_m: int, block_n: int, block_k: int, cluster: int, m: int, n: int, k: int, multiprocessors: int
) -> float:
    """All tiles of an (m, n, k) problem, dealt out whole or divided, whichever is less; without the launch itself."""
    resident = max(1, multiprocessors // cluster)
    tiles, depth = ceil_div(m, block_m) * ceil_div(n, block_n * cluster), ceil_div(k, block_k)
    stage = stage_clocks(block_m, block_n, block_k, cluster)
    longest = longest_share(tiles, resident, depth)
    whole = longest.whole * stage
    divided = (longest.before + longest.divided * DIVIDED_STAGE) * stage
    divided += division_clocks(block_m, block_n, longest.others)
    first = _FIRST_KIB * _stage_bytes(block_m, block_n, block_k) / 1024
    return min(whole, divided) + first + _RESULT * block_m * block_n / (128 * 128)


def _stage_bytes(block_m: int, block_n: int, block_k: int) -> float:
    return block_k * (2 * block_m + block_n / 2)
