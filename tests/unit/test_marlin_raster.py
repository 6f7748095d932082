"""The model of DRAM traffic by order of tiles: its limits, what it chooses, and the page that shows its figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.kernels.marlin.candidates import variants
from cudatma.kernels.marlin.layer import Layer
from cudatma.kernels.marlin.problem import ProblemStruct, ceil_div, fill_problem, schedule
from cudatma.kernels.marlin.raster import least_traffic, traffic
from cudatma.kernels.marlin.wgmma_config import choose_wgmma
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.target import get_target

WIDE = WgmmaSpec("float16", 128, False, 256, 64, 2, 1, 5, steps=1, in_flight=3, consumer_registers=232)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance" / "marlin_wgmma.md"
PROCESSORS = 132

problems = st.tuples(
    st.integers(1, 20_000), st.integers(1, 30_000), st.integers(32, 30_000), st.integers(1, 200), st.integers(1, 100)
)


@given(problems, st.sampled_from(("evict_normal", "evict_first")))
def test_every_operand_comes_at_least_once_and_at_most_once_a_tile(
    problem: tuple[int, int, int, int, int], policy: str
) -> None:
    m, n, k, shares, band = problem
    found = traffic(replace(WIDE, weight_policy=policy), m, n, k, shares, band)
    tiles_m, tiles_n = ceil_div(m, WIDE.block_m), ceil_div(n, WIDE.block_n)
    weight = n * (k // 2 + 2 * ceil_div(k, 128))
    assert 2 * m * k <= found.activations <= 2 * m * k * tiles_n
    assert weight <= found.weights <= weight * tiles_m
    assert found.result == 2 * m * n
    assert found.total == found.activations + found.weights + found.result


@given(problems)
def test_what_fits_comes_once(problem: tuple[int, int, int, int, int]) -> None:
    """All of both operands and the result in 30 MB: nothing is read again, whatever the band."""
    m, n, k, shares, band = (min(value, 1500) for value in problem)
    found = traffic(replace(WIDE, weight_policy="evict_normal"), m, n, k, shares, band)
    assert (found.activations, found.weights) == (2 * m * k, n * (k // 2 + 2 * ceil_div(k, 128)))


def test_a_long_batch_counted_by_hand() -> None:
    """8192 x 28672 with 4096 tokens, 132 blocks, bands of 4 token tiles, weights evicted first.

    33 channel tiles a wave, 224 of them: 6.8 waves a band, 4 bands. Between two waves a band's 1024 tokens and what a
    wave writes come by: 16.8 + 8.7 MB < 30 MB, so that activations come once, and the weights once a band.
    """
    found = traffic(replace(WIDE, weight_policy="evict_first"), 4096, 28672, 8192, 132, 4)
    assert found.activations == 4096 * 8192 * 2
    assert found.weights == 4 * 28672 * (8192 // 2 + 64 * 2)
    # Bands of 8: 33.5 + 8.7 MB do not fit, and the part that is too much comes again with each of the other 12.6 waves.
    wider = traffic(replace(WIDE, weight_policy="evict_first"), 4096, 28672, 8192, 132, 8)
    distance = 2048 * 8192 * 2 + 2048 * 28672 * 2 / (224 / 16.5)
    again = (224 / 16.5 - 1) * (1 - 30e6 / distance)
    assert wider.activations == pytest.approx(4096 * 8192 * 2 * (1 + again), rel=1e-6)
    assert wider.weights == found.weights // 2


@given(problems)
def test_the_choice_is_the_least_of_all_to_two_percent(problem: tuple[int, int, int, int, int]) -> None:
    m, n, k, shares, _ = problem
    band, policy = least_traffic(WIDE, m, n, k, shares)
    tiles_m = ceil_div(m, WIDE.block_m)
    assert 1 <= band <= tiles_m
    chosen = traffic(replace(WIDE, weight_policy=policy), m, n, k, shares, band).total
    even = {ceil_div(tiles_m, count) for count in range(1, tiles_m + 1)}
    for width in even:
        for other in ("evict_normal", "evict_first"):
            assert chosen <= 1.02 * traffic(replace(WIDE, weight_policy=other), m, n, k, shares, width).total


def test_one_band_where_it_makes_no_difference() -> None:
    assert least_traffic(WIDE, 1024, 4096, 4096, PROCESSORS) == (4, "evict_normal")


def test_rules_take_bands_by_tokens_and_the_tuner_tries_the_models() -> None:
    layer, m, target = Layer(8192, 28672, 128, False, "float16"), 8192, get_target("sm_90a")
    shipped = choose_wgmma(layer, m, target, PROCESSORS)
    assert (shipped.band, shipped.spec.store_tokens, shipped.spec.weight_policy) == (0, 0, "evict_normal")
    band, policy = least_traffic(shipped.spec, m, layer.n, layer.k, PROCESSORS // shipped.spec.cluster)
    tried = replace(shipped, spec=replace(shipped.spec, weight_policy=policy), band=band)
    others = list(variants(shipped, layer, m, target, PROCESSORS))
    assert [other for other in others if other.band] == [tried]
    for chosen, raster in ((shipped, 2048 // shipped.spec.block_m), (tried, band)):
        plan, problem = schedule(chosen.spec, m, layer.n, layer.k, PROCESSORS, band=chosen.band), ProblemStruct()
        fill_problem(problem, chosen.spec, plan, m, layer.n, layer.k, 64)
        assert problem.raster_m == raster
    # One token tile: nothing is read again, and the weights had better leave L2 first, as before.
    one = choose_wgmma(layer, 64, target, PROCESSORS)
    assert (one.band, one.spec.weight_policy, one.spec.block_m) == (0, "evict_first", 64)
    assert all(other.band == 0 for other in variants(one, layer, 64, target, PROCESSORS))
    # Results by TMA, where staging rows find room beside the ring.
    small = Layer(4096, 12288, 128, False, "float16")
    others = list(variants(choose_wgmma(small, 256, target, PROCESSORS), small, 256, target, PROCESSORS))
    assert {other.spec.store_tokens for other in others if isinstance(other.spec, WgmmaSpec)} == {0, 16, 32}


def test_the_page_shows_what_the_model_says() -> None:
    """Rows | K, N | M | of today | band, policy | predicted |, in MB."""
    rows = re.findall(r"^\| (\d+), (\d+) \| (\d+) \| (\d+): (\d+) \| (\d+), (\w+): (\d+) \|$", PAGE.read_text(), re.M)
    assert len(rows) == 25
    for k, n, m, today, today_mb, band, policy, mb in rows:
        layer = Layer(int(k), int(n), 128, False, "float16")
        spec = choose_wgmma(layer, int(m), get_target("sm_90a"), PROCESSORS).spec
        numbers = (int(m), int(n), int(k), PROCESSORS // spec.cluster)
        plan, problem = schedule(spec, int(m), int(n), int(k), PROCESSORS), ProblemStruct()
        fill_problem(problem, spec, plan, int(m), int(n), int(k), 64)
        assert min(problem.raster_m, plan.tiles_m) == int(today)
        assert round(traffic(spec, *numbers, int(today)).total / 1e6) == int(today_mb)
        assert least_traffic(spec, *numbers) == (int(band), policy)
        assert round(traffic(replace(spec, weight_policy=policy), *numbers, int(band)).total / 1e6) == int(mb)
