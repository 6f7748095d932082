"""What tiles of the wgmma kernel take, in clocks of a multiprocessor: a formula that ranks them.

Its numbers are fitted to the order in 56 cells of the kernel as it is (14 layers, M = 32 to 512, what the tuner read of
the rules' forms): the tile that it puts first is 0.3 % behind the fastest on average, 8 % at most; and in 450 of the
kernel before (26 layers of 2 to 117 MB, M = 24 to 2048): 1.0 %, 22 % at most. No cell was kept aside.
[docs/performance/marlin_wgmma.md, "Which tile"] It knows nothing of power. model.py predicts times; this compares.
"""

from __future__ import annotations

from cudatma.kernels.marlin.problem import ceil_div, longest_share

#: Multiply-adds that the tensor cores of a multiprocessor do in a clock. [H100 white paper]
_PRODUCTS = 2048
#: Dequantising 64 channels costs as much as so many tokens more; a stage costs so much besides, and for each byte.
_DEQUANTISE_TOKENS, _STAGE, _BYTE = 23, 139, 0.0051
#: A stage of a divided tile: blocks are at different depths then, and share less in L2.
DIVIDED_STAGE = 1.03
#: Partial sums go out and come in again: once, and bytes a clock for each block that shares a tile with its owner.
_DIVISION, _PARTIAL_BYTES = 4900, 64
#: Each tile's result: in any case, and of 128 x 128.
_TILE, _RESULT = 1540, 4100
#: Until the first stage is there.
_LAUNCH = 3500


#: Blocks of a cluster that divide the depth meet: once, for each of them, and bytes a clock of what they send.
_MEETING, _MEETING_BLOCK, _SUMS_BYTES = 350, 320, 22.5


def division_clocks(block_m: int, block_n: int, others: int = 1) -> float:
    """What dividing tiles costs a block. others: that share a tile with the block that stores it."""
    return _DIVISION + others * 4 * block_m * block_n / _PARTIAL_BYTES


def stage_clocks(block_m: int, block_n: int, block_k: int, cluster: int) -> float:
    """One stage of a whole tile, with the ring full."""
    products = (block_m + _DEQUANTISE_TOKENS) * block_n * block_k / _PRODUCTS
    return products + _BYTE * _stage_bytes(block_m // cluster, block_n, block_k) + _STAGE


def launch_clocks(
    block_m: int,
    block_n: int,
    block_k: int,
    cluster: int,
    m: int,
    n: int,
    k: int,
    multiprocessors: int,
    blocks_k: int = 1,
) -> float:
    """All tiles of an (m, n, k) problem, dealt out whole or divided, whichever is less; or by clusters of ``blocks_k``
    blocks that divide the depth, a cluster a tile, all at once."""
    if blocks_k > 1:
        return _LAUNCH + _cluster_clocks(block_m, block_n, block_k, k, blocks_k)
    resident = max(1, multiprocessors // cluster)
    tiles, depth = ceil_div(m, block_m) * ceil_div(n, block_n * cluster), ceil_div(k, block_k)
    stage = stage_clocks(block_m, block_n, block_k, cluster)
    longest = longest_share(tiles, resident, depth)
    divided = (longest.before + longest.divided * DIVIDED_STAGE) * stage
    divided += division_clocks(block_m, block_n, longest.others)
    # Divided or not, the longest share stores as many results.
    results = ceil_div(tiles, resident) * (_TILE + _RESULT * block_m * block_n / (128 * 128))
    return _LAUNCH + min(longest.whole * stage, divided) + results


def _cluster_clocks(block_m: int, block_n: int, block_k: int, k: int, blocks_k: int) -> float:
    """A tile whose depth a cluster divides: each block stores a part of its tokens."""
    stages = ceil_div(ceil_div(k, block_k), blocks_k)
    own = 8 * ceil_div(block_m, 8 * blocks_k) * block_n
    meeting = _MEETING + _MEETING_BLOCK * blocks_k + 4 * (blocks_k - 1) * own / _SUMS_BYTES
    return stages * stage_clocks(block_m, block_n, block_k, 1) + meeting + _TILE + _RESULT * own / (128 * 128)


def _stage_bytes(block_m: int, block_n: int, block_k: int) -> float:
    return block_k * (2 * block_m + block_n / 2)
