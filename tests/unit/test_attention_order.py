"""The order of attention's tiles: every tile once, work that is nearly equal, keys and values that L2 holds."""

from __future__ import annotations

import numpy as np
import pytest

from cudatma.kernels.attention.order import Order, choose_order, key_blocks
from cudatma.kernels.attention.request import Mask
from cudatma.kernels.attention.spec import AttentionSpec
from cudatma.kernels.attention.versions import AttentionA3, AttentionA4

CAUSAL, SMS = Mask(None, 0), 132


def spec_of(kind: type[AttentionSpec] = AttentionA4, block_m: int = 128, block_n: int = 128) -> AttentionSpec:
    return kind("bfloat16", 128, 128, True, block_m=block_m, block_n=block_n, warpgroups=block_m // 64)


def blocks_of_ctas(spec: AttentionSpec, rows: int, length: int, order: Order) -> list[int]:
    """Blocks of keys that each CTA computes: the kernel's tile_position() and TileQueue, tile by tile."""
    blocks = key_blocks(spec, length, length, CAUSAL)
    tiles = [
        (head, column)
        for first in range(0, rows, order.heads)
        for column in reversed(range(len(blocks)))
        for head in range(first, min(rows, first + order.heads))
    ]
    assert len(set(tiles)) == rows * len(blocks)
    sums = [0] * order.ctas
    for number, (_, column) in enumerate(tiles):
        turn, cta = divmod(number, order.ctas)
        sums[order.ctas - 1 - cta if turn % 2 else cta] += int(blocks[column])
    return sums


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 16384])
@pytest.mark.parametrize(("block_m", "block_n"), [(128, 128), (192, 80)])
def test_persistent_ctas_do_equal_work(length: int, block_m: int, block_n: int) -> None:
    spec, rows = spec_of(block_m=block_m, block_n=block_n), 16 * 16384 // length
    sums = blocks_of_ctas(spec, rows, length, choose_order(spec, rows, 1, length, length, CAUSAL, SMS))
    assert max(sums) <= 1.06 * sum(sums) / SMS


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("kind", [AttentionA3, AttentionA4])
def test_heads_that_take_turns_fit_l2(kind: type[AttentionSpec], group: int) -> None:
    """Where all heads do not, and their loads would take about as long as the products."""
    order = choose_order(spec_of(kind), 128, group, 2048, 2048, CAUSAL, SMS)
    assert order.heads / group * 4 * 2048 * 128 <= 32 << 20
    assert order.heads % group == 0
    assert order.ctas == (SMS if kind is AttentionA4 else 128 * 16)


def test_tiles_of_one_length_come_head_by_head() -> None:
    spec = AttentionA4("bfloat16", 128, 128)
    assert choose_order(spec, 7, 1, 300, 300, Mask(), SMS) == Order(21, 1)


def test_blocks_are_those_that_queries_see() -> None:
    spec = spec_of()
    np.testing.assert_array_equal(key_blocks(spec, 300, 500, CAUSAL), [3, 4, 4])
    np.testing.assert_array_equal(key_blocks(spec, 300, 100, CAUSAL), [0, 1, 1])
    np.testing.assert_array_equal(key_blocks(spec, 512, 512, Mask(127, 0)), [1, 2, 2, 2])
    np.testing.assert_array_equal(key_blocks(spec, 512, 512, Mask()), [4] * 4)


def test_more_tiles_than_are_looked_at() -> None:
    order = choose_order(spec_of(), 1 << 20, 1, 4096, 4096, CAUSAL, SMS)
    assert 0 < order.heads <= 1 << 11
