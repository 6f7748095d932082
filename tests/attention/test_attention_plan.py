"""The order of attention's tiles: work that is nearly equal for all SMs, keys and values that L2 holds."""

from __future__ import annotations

import heapq

import pytest

from cudatma.kernels.attention.arguments import raster
from cudatma.kernels.attention.config import AttentionConfig
from cudatma.kernels.attention.problem import Problem
from cudatma.kernels.attention.sample import small_config

SMS = 132


def problem(**sizes: int) -> Problem:
    return Problem.of(head_dim=128, dtype="float16", is_causal=True, **sizes)


def causal(tile_m: int = 128, tile_n: int = 128) -> AttentionConfig:
    return small_config("a4", head_dim=128, v_head_dim=128, is_causal=True, tile_m=tile_m, tile_n=tile_n)


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 16384])
@pytest.mark.parametrize(("tile_m", "tile_n"), [(128, 128), (192, 80)])
def test_sms_that_take_the_next_tile_end_together(length: int, tile_m: int, tile_n: int) -> None:
    config, asked = causal(tile_m, tile_n), problem(batch=16384 // length, heads=16, q_length=length)
    (heads, last), rows = raster(config, asked), 16 * 16384 // length
    ends = [min(length, row0 + tile_m) for row0 in range(0, length, tile_m)]
    blocks = [-(-end // tile_n) for end in reversed(ends)]
    busy = [0] * SMS
    for count in [*[heads] * (last // heads), rows - last]:
        for length_in_blocks in blocks:
            for _ in range(count):
                heapq.heapreplace(busy, busy[0] + length_in_blocks)
    assert max(busy) <= 1.04 * sum(busy) / SMS


@pytest.mark.parametrize("kv_heads", [1, 4, 16])
@pytest.mark.parametrize(("batch", "length"), [(1, 512), (9, 2048), (3, 16384), (1, 1 << 20)])
def test_keys_and_values_of_a_raster_group_are_few_bytes(batch: int, length: int, kv_heads: int) -> None:
    (heads, last), group = (
        raster(causal(), problem(batch=batch, heads=16, kv_heads=kv_heads, q_length=length)),
        16 // kv_heads,
    )
    assert heads % group == last % heads == 0
    assert heads == group or heads // group * length * 512 <= 4 << 20
    assert heads <= 16 * batch - last <= 4 * heads


def test_the_last_raster_group_has_more_heads() -> None:
    """The longest tiles of few heads would come last, with too few of them for all SMs."""
    assert raster(causal(), problem(batch=5, heads=7, q_length=2048)) == (4, 20)  # of 35
