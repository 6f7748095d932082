"""The formula that ranks ways to deal out strips: near what was measured, and never less for more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.kernels.marlin.clusters import BLOCKS_K, clusters_at_once
from cudatma.kernels.marlin.strip_times import strip_us

depths, channels = st.integers(1, 60_000), st.integers(1, 100_000)
tokens, boxes = st.sampled_from((1, 4, 8, 16, 32)), st.sampled_from((128, 256, 512, 1024))
blocks = st.sampled_from(BLOCKS_K)

#: (K, N, tokens of a tile, strips, depth of a stage, blocks of a cluster): microseconds. [H200]
MEASURED = {
    (2048, 2048, 8, 1, 512, 2): 3.2,
    (4096, 1024, 8, 1, 512, 4): 3.39,
    (13824, 5120, 8, 3, 512, 2): 12.16,
    (13824, 5120, 16, 3, 512, 2): 13.91,
    (14336, 4096, 8, 1, 1024, 1): 11.88,
    (14336, 4096, 8, 2, 512, 2): 9.98,
    (8192, 8192, 16, 2, 512, 1): 11.84,
    (28672, 8192, 8, 2, 512, 1): 30.0,
}


@pytest.mark.parametrize("way", MEASURED, ids=str)
def test_it_is_within_forty_percent_of_what_was_measured(way: tuple[int, int, int, int, int, int]) -> None:
    assert strip_us(*way) == pytest.approx(MEASURED[way], rel=0.4)


def test_it_puts_the_faster_way_first() -> None:
    """Of (14336, 4096), M = 1, two blocks that divide the depth of two strips took 9.98 us, one of a strip 11.88."""
    assert strip_us(14336, 4096, 8, 2, 512, 2) < strip_us(14336, 4096, 8, 1, 1024, 1)


def test_a_launch_counted_by_hand() -> None:
    """(2048, 2048), one strip, four stages of 512, 8 tokens: half of them in each of two blocks."""
    whole, divided = (strip_us(2048, 2048, 8, 1, 512, blocks_k) for blocks_k in (1, 2))
    stage = (0.0963 + 0.0035 * 8 + 0.0065 * 8) * 0.512 + 0.0257
    # Memory brings 2 MB of weights at 6.5 TB/s, beside what its latency adds to all launches.
    outside, weights = 2.6 + 0.029 * 8, 2.097152 / 6.5
    assert whole == pytest.approx(outside + weights + 4 * stage)
    # A cluster of two: 0.6 % more of all, and the sums of one column of 8 tokens that one block sends.
    assert divided == pytest.approx(outside + 1.006 * (weights + 2 * stage) + 0.001 + 0.052)
    # One token is an eighth of the activations, and takes as many columns of the mma.
    assert strip_us(2048, 2048, 1, 1, 512, 1) == pytest.approx(whole - 4 * 0.0035 * 7 * 0.512)


@given(depths, channels, tokens, st.integers(1, 8), boxes, blocks, st.integers(1, 4), st.integers(0, 5000))
def test_more_takes_no_less(
    k: int, n: int, block_m: int, strips: int, block_k: int, blocks_k: int, waves: int, more: int
) -> None:
    """Depths, channels, tokens, strips of a block, waves."""
    us = strip_us(k, n, block_m, strips, block_k, blocks_k, waves)
    assert 2 < us < 1e6
    assert us <= strip_us(k + more, n, block_m, strips, block_k, blocks_k, waves)
    assert us <= strip_us(k, n + more, block_m, strips, block_k, blocks_k, waves)
    assert us < strip_us(k, n, 2 * block_m, strips, block_k, blocks_k, waves)
    assert us < strip_us(k, n, block_m, strips + 1, block_k, blocks_k, waves)
    assert us < strip_us(k, n, block_m, strips, block_k, blocks_k, waves + 1)


@given(channels, tokens, st.integers(1, 8), boxes, st.sampled_from(BLOCKS_K[1:]))
def test_blocks_without_a_stage_win_nothing(n: int, block_m: int, strips: int, block_k: int, blocks_k: int) -> None:
    """A depth of one stage is as long for a cluster, which has to meet besides."""
    assert strip_us(block_k, n, block_m, strips, block_k, blocks_k) > strip_us(block_k, n, block_m, strips, block_k, 1)


@given(blocks, st.integers(0, 300))
def test_clusters_at_once_have_a_multiprocessor_for_each_block(blocks_k: int, processors: int) -> None:
    found = clusters_at_once(blocks_k, processors)
    assert 0 <= found <= processors // blocks_k
    assert found <= clusters_at_once(blocks_k, processors + 1)
    # Parts of a card that are no whole clusters: no more than a quarter of it, and one cluster.
    assert found >= processors * 3 // 4 // blocks_k - 1


def test_clusters_of_an_h200() -> None:
    """cuOccupancyMaxActiveClusters' answers: never more than these, and one fewer at most."""
    measured = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 8: 15}
    assert set(measured) == set(BLOCKS_K)
    for blocks_k, most in measured.items():
        assert most - 1 <= clusters_at_once(blocks_k, 132) <= most
