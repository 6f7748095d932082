"""The order in which CTAs take the tiles of attention: equal work for all, keys and values that L2 holds. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cudatma.kernels.attention.request import Mask
from cudatma.kernels.attention.spec import AttentionSpec
from cudatma.kernels.schedule import ceil_div

#: Bytes of k and v that CTAs which run at the same time share in L2. [inferred: H200's L2 has 50 MB]
_L2_BYTES = 32 << 20
#: Products that an SM adds up in a clock, clocks of a tile besides them, bytes that come from DRAM in a clock. [H200:
#: rates of version a4 without a mask; 4.2 TB/s]
_MACS, _AROUND_CLOCKS, _DRAM_BYTES = 1500, 1800, 2400
#: Tiles that are looked at; the heads of the others repeat their order.
_MOST_TILES = 1 << 16
#: Part of the CTAs that run at a time with which a launch may do.
_LEAST_CTAS = 0.95


@dataclass(frozen=True, slots=True)
class Order:
    """ctas: of the launch. Persistent ones take one tile each in a round, in the order of the tiles, and in every other
    round backwards. heads: of q, whose tiles are numbered by turns, the longest first; then come those of the next
    heads."""

    ctas: int
    heads: int


def key_blocks(spec: AttentionSpec, q_length: int, k_length: int, mask: Mask) -> NDArray[np.int64]:
    """Blocks of keys of each tile of a head, as the kernels' key_blocks() has them, the first queries first."""
    row0 = np.arange(ceil_div(q_length, spec.block_m)) * spec.block_m
    last, diagonal = np.minimum(row0 + spec.block_m, q_length) - 1, k_length - q_length
    ends, begins = np.full_like(row0, k_length), np.zeros_like(row0)
    if mask.right is not None:
        ends = np.clip(last + diagonal + 1 + mask.right, 0, k_length)
    if mask.left is not None:
        begins = np.maximum(0, row0 + diagonal - mask.left)
    ends = -(-ends // spec.block_n)
    return ends - np.minimum(ends, begins // spec.block_n)


def choose_order(
    spec: AttentionSpec, rows: int, group: int, q_length: int, k_length: int, mask: Mask, resident: int
) -> Order:
    """rows: heads of q in the whole batch. group: those that share a head of k and v. resident: CTAs that run at once.

    Tiles that take the same time come head by head. A CTA that is not persistent begins when another one ends: as many
    heads as L2 holds take turns. Persistent CTAs have fixed tiles: the number of heads, and of CTAs, is what makes
    their work most equal with few bytes from DRAM.
    """
    tiles_n = ceil_div(q_length, spec.block_m)
    ctas = min(rows * tiles_n, resident) if spec.is_persistent else rows * tiles_n
    if not spec.is_causal:
        return Order(ctas, 1)
    kv_bytes = 2 * k_length * (spec.head_dim + spec.v_head_dim)
    held = min(rows, max(1, _L2_BYTES // kv_bytes) * group)
    if not spec.is_persistent:
        return Order(ctas, held)
    blocks = key_blocks(spec, q_length, k_length, mask)[::-1]
    products = spec.block_m * spec.block_n * (spec.head_dim + spec.v_head_dim) / _MACS
    clocks, rows = (blocks * products + _AROUND_CLOCKS).astype(np.float64), min(rows, max(held, _MOST_TILES // tiles_n))

    def predicted(order: Order) -> float:
        """Clocks of a launch."""
        ranges = _ranges(clocks, rows, order)
        loads = rows / group
        if order.heads > held:
            loads = ranges.shape[0] * min(order.ctas, order.heads) / group * float(blocks.mean() / blocks.max())
        sm_clocks, memory_clocks = ranges.sum(axis=0).max(), loads * kv_bytes / _DRAM_BYTES
        return float((sm_clocks**3 + memory_clocks**3) ** (1 / 3))

    return min(_orders(ctas, tiles_n, rows, held, group), key=predicted)


def _orders(ctas: int, tiles_n: int, rows: int, held: int, group: int) -> Iterator[Order]:
    """As many CTAs as run at a time, or as make whole heads; tiles of as many heads by turns as L2 holds, of fewer, or
    of all."""
    whole = ctas // tiles_n * tiles_n
    for count in dict.fromkeys((ctas, whole)):
        if count >= _LEAST_CTAS * ctas:
            yield from (Order(count, heads) for heads in (*range(group, held + 1, group), rows))


def _ranges(clocks: NDArray[np.float64], rows: int, order: Order) -> NDArray[np.float64]:
    """Clocks of the tiles of each round (0) and CTA (1); clocks: of a head's tiles, the longest first."""
    times, rest = divmod(rows, order.heads)
    tiles = np.concatenate([np.tile(np.repeat(clocks, order.heads), times), np.repeat(clocks, rest)])
    ranges = np.zeros((ceil_div(len(tiles), order.ctas), order.ctas))
    ranges.flat[: len(tiles)] = tiles
    ranges[1::2] = ranges[1::2, ::-1].copy()
    return ranges
