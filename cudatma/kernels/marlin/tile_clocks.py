"""What tiles of the wgmma kernel take, in clocks of a multiprocessor: a formula that ranks them.

Its numbers are fitted to 191 cells (25 layers of 2 to 235 MB, M = 16 to 1024, some 20 tiles each, whole, divided, in
clusters): above all to their order, loosely to their times. The tile that it puts first is 0.8 % behind the fastest of
all on average, 9 % at most. [docs/performance/marlin_wgmma.md, "Which tile"; there too what it does at 90 cells of
other layers, after which only ``_SHARING`` was changed, and at 75 layers.] It knows nothing of power. model.py
predicts; this compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.kernels.marlin.problem import ceil_div, longest_share

#: Multiply-adds that the tensor cores of a multiprocessor do in a clock. [H100 white paper]
_PRODUCTS = 2048
#: A warpgroup alone dequantises 64 x 64 weights in so many clocks; each one beside it, on the same schedulers, adds so
#: much of them. Products and dequantising go on together, but not quite: their sum in so high a norm.
_DEQUANTISE, _BESIDE, _NORM = 142, 0.8, 2.6
#: A stage costs so much besides, and for each byte.
_STAGE, _BYTE = 57, 0.0032
#: A stage of a divided tile: blocks are at different depths then, and share less in L2.
DIVIDED_STAGE = 1.06
#: Partial sums go out and come in again: once, and bytes a clock for each block that shares a tile with its owner.
_DIVISION, _PARTIAL_BYTES = 4850, 50
#: Each tile's result: in any case, and of 128 x 128.
_TILE, _RESULT = 700, 700
#: Until the first stage is there; longer in clusters that share activations, whose blocks wait for each other.
_LAUNCH, _SHARING = 3800, 2000
#: Blocks of a cluster that divide the depth meet: for each of them, and bytes a clock of what they send.
_MEETING, _SUMS_BYTES = 60, 18


@dataclass(frozen=True, slots=True)
class Tile:
    """What the formula knows of a kernel; fields as in WgmmaSpec. block_n: channels of one block."""

    block_m: int
    block_n: int
    block_k: int
    warpgroups: int
    warpgroups_k: int = 1
    cluster: int = 1
    blocks_k: int = 1


def division_clocks(tile: Tile, others: int = 1) -> float:
    """What dividing tiles costs a block. others: that share a tile with the block that stores it."""
    return _DIVISION + others * 4 * tile.block_m * tile.block_n / _PARTIAL_BYTES


def stage_clocks(tile: Tile) -> float:
    """One stage of a whole tile, with the ring full."""
    products = tile.block_m * tile.block_n * tile.block_k / _PRODUCTS
    blocks = tile.block_n / 64 * tile.block_k / 64  # of weights; all warpgroups have as many
    warpgroups = tile.warpgroups * tile.warpgroups_k
    dequantise = blocks / warpgroups * _DEQUANTISE * (1 + _BESIDE * (warpgroups - 1))
    loaded = tile.block_k * (2 * tile.block_m / tile.cluster + tile.block_n / 2)
    together: float = (products**_NORM + dequantise**_NORM) ** (1 / _NORM)
    return together + _BYTE * loaded + _STAGE


def launch_clocks(tile: Tile, m: int, n: int, k: int, multiprocessors: int) -> float:
    """All tiles of an (m, n, k) problem, dealt out whole or divided, whichever is less; or by clusters of ``blocks_k``
    blocks that divide the depth, a cluster a tile, all at once."""
    depth, stage = ceil_div(k, tile.block_k), stage_clocks(tile)
    if tile.blocks_k > 1:
        return _LAUNCH + ceil_div(depth, tile.blocks_k) * stage + _meeting_clocks(tile)
    resident = max(1, multiprocessors // tile.cluster)
    tiles = ceil_div(m, tile.block_m) * ceil_div(n, tile.block_n * tile.cluster)
    longest = longest_share(tiles, resident, depth)
    divided = (longest.before + longest.divided * DIVIDED_STAGE) * stage + division_clocks(tile, longest.others)
    # Divided or not, the longest share stores as many results.
    results = ceil_div(tiles, resident) * _result_clocks(tile.block_m * tile.block_n)
    return _LAUNCH + (_SHARING if tile.cluster > 1 else 0) + min(longest.whole * stage, divided) + results


def _meeting_clocks(tile: Tile) -> float:
    """Each block of a cluster that divides the depth gets others' sums of a part of the tokens, and stores it."""
    own = 8 * ceil_div(tile.block_m, 8 * tile.blocks_k) * tile.block_n
    return _MEETING * tile.blocks_k + 4 * (tile.blocks_k - 1) * own / _SUMS_BYTES + _result_clocks(own)


def _result_clocks(elements: int) -> float:
    return _TILE + _RESULT * elements / (128 * 128)
