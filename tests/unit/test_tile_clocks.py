"""The formula that ranks wgmma's tiles: near what was measured, of one mind with schedule(), and never at a loss."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.kernels.marlin import tile_clocks, tune_file, wgmma_config
from cudatma.kernels.marlin.clusters import clusters_at_once
from cudatma.kernels.marlin.layer import Layer
from cudatma.kernels.marlin.problem import ceil_div, schedule
from cudatma.kernels.marlin.tile_clocks import Tile, division_clocks, launch_clocks, stage_clocks
from cudatma.kernels.marlin.tune_file import parse_cell
from cudatma.kernels.marlin.wgmma_config import choose_wgmma
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.target import get_target

SM90A = get_target("sm_90a")
PROCESSORS = 132
SHIPPED = Path(tune_file.__file__).with_name("tuned") / "h200"
#: What an H200 runs at under load.
MEGAHERTZ = 1755
SPECS = [
    WgmmaSpec("float16", 128, False, *tile)
    for tile in ((32, 256, 1, 1, 8), (64, 256, 3, 1, 3), (96, 128, 3, 1, 5), (152, 128, 2, 1, 4))
]
SPECS += [
    WgmmaSpec("float16", 128, False, 128, 128, 2, 2, 4, 2, consumer_registers=232),
    WgmmaSpec("float16", 128, False, 256, 64, 2, 1, 6, 2, consumer_registers=232),
]
tiles = st.sampled_from(SPECS)
cards = st.sampled_from((20, 78, 114, 132))


def clocks(spec: WgmmaSpec, m: int, n: int, k: int, processors: int = PROCESSORS) -> float:
    return launch_clocks(spec.tile, m, n, k, processors)


def stage(spec: WgmmaSpec) -> float:
    return stage_clocks(spec.tile)


def result(spec: WgmmaSpec) -> float:
    """Of a tile, whatever its depth: what is left of a launch of one, and of one with half as much to store."""
    one, half = (replace(spec, block_m=tokens, cluster=1, consumer_registers=0) for tokens in (16, 8))
    of_8 = (clocks(one, 8, 64, 1) - stage(one)) - (clocks(half, 8, 64, 1) - stage(half))
    return tile_clocks._TILE + of_8 * spec.block_m / 8


def one_wave(spec: WgmmaSpec, processors: int = PROCESSORS) -> int:
    """Channels that all blocks together cover with a tile each."""
    return processors // spec.cluster * spec.cluster * spec.block_n


def test_a_stage_counted_by_hand() -> None:
    """64 tokens, 128 x 128 weights: 64 x 128 x 128 multiply-adds take 512 clocks, and all else less than as much."""
    tile = Tile(64, 128, 128, warpgroups=2)
    assert 512 < stage_clocks(tile) < 1024
    assert stage_clocks(replace(tile, cluster=2)) < stage_clocks(tile), "half of the activations come from the other"
    # 64 x 128 sums of 4 bytes go out, and come in, at more than 16 bytes a clock.
    assert 0 < division_clocks(tile, 2) - division_clocks(tile, 1) < 64 * 128 * 4 / 16


def test_a_warpgroup_with_many_tokens_dequantises_meanwhile() -> None:
    """64 x 256 weights: 142 clocks for each 64 of the depth, while products take 2 for each token. Two warpgroups that
    divide the depth are ahead with few tokens; with many they do what one does."""
    one, two = Tile(32, 64, 256, 1), Tile(32, 64, 256, 1, 2)
    assert stage_clocks(one) > 4 * 142
    assert stage_clocks(two) < 0.95 * stage_clocks(one)
    one, two = (replace(tile, block_m=128) for tile in (one, two))
    assert 0.95 * stage_clocks(one) < stage_clocks(two) < stage_clocks(one)


def test_it_is_within_half_of_what_was_measured() -> None:
    """The shipped table, on an H200 whose clock the formula does not know."""
    sections = [section for path in SHIPPED.glob("*.json") for section in tune_file.read_sections(path)]
    cells = [parse_cell(raw, SM90A) for section in sections for raw in section["cells"] if raw["kernel"] == "wgmma"]
    assert len(cells) >= 500
    for cell in cells:
        assert isinstance(cell.choice.spec, WgmmaSpec)
        us = clocks(cell.choice.spec, cell.m, cell.layer.n, cell.layer.k) / MEGAHERTZ
        assert us == pytest.approx(cell.us, rel=0.5), cell


@given(tiles, st.integers(1, 5000), st.integers(1, 60_000), st.integers(1, 30_000), st.integers(0, 3000), cards)
def test_more_depth_takes_no_less(spec: WgmmaSpec, m: int, n: int, k: int, more: int, processors: int) -> None:
    assert 0 < clocks(spec, m, n, k, processors) <= clocks(spec, m, n, k + more, processors) < inf


@given(tiles, st.integers(1, 4), st.integers(1, 200), cards)
def test_full_waves_are_whole(spec: WgmmaSpec, waves: int, stages: int, processors: int) -> None:
    """Each takes as long as a tile's stages and its result; with one wave there is nothing to divide either."""
    n, k = one_wave(spec, processors), stages * spec.block_k
    first, last = (clocks(spec, count * spec.block_m, n, k, processors) for count in (1, waves))
    assert last - first == pytest.approx((waves - 1) * (stages * stage(spec) + result(spec)))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry)
def test_a_wave_and_a_bit_is_divided_where_it_is_deep(spec: WgmmaSpec) -> None:
    n = one_wave(spec)
    for stages, is_divided in ((2, False), (200, True)):
        k = stages * spec.block_k
        one, two = (clocks(spec, waves * spec.block_m, n, k) for waves in (1, 2))
        more = clocks(spec, spec.block_m, n + spec.cluster * spec.block_n, k)
        assert one < more <= two
        assert (more < two) == is_divided
        # A divided stage takes longer, but all blocks have the same number of them.
        assert not is_divided or more < one + 0.2 * (two - one)


@given(tiles, st.integers(1, 5000), st.integers(1, 60_000), st.integers(1, 30_000), cards)
def test_it_divides_where_schedule_does(spec: WgmmaSpec, m: int, n: int, k: int, processors: int) -> None:
    """Of a wave and a bit, of less than a wave, and of neither."""
    resident, depth = processors // spec.cluster, ceil_div(k, spec.block_k)
    count = ceil_div(m, spec.block_m) * ceil_div(n, spec.block_n * spec.cluster)
    around = clocks(spec, spec.block_m, one_wave(spec, processors), k, processors) - depth * stage(spec)
    waves = ceil_div(count, resident)
    whole = around + waves * depth * stage(spec) + (waves - 1) * result(spec)
    is_divided = clocks(spec, m, n, k, processors) < whole * (1 - 1e-9)
    plan = schedule(spec, m, n, k, processors)
    assert bool(plan.stream_tiles) == is_divided


# ---- The tiles that it puts first


def chosen(k: int, n: int, m: int) -> tuple[int, int, int]:
    spec = choose_wgmma(Layer(k, n, 128, False, "float16"), m, SM90A, PROCESSORS).spec
    return spec.block_m, spec.block_n, spec.cluster


def test_192_channels_where_others_leave_a_wave_almost_empty() -> None:
    """12288 channels are 48 of 256 and 96 of 128; with two token tiles of 128, 96 and 192 for 132 multiprocessors. In
    tiles of 192 they are 128, nearly a wave. And so they are with one token tile, 64 in clusters of two blocks: of 96
    tiles, 66 would run at once."""
    assert chosen(4096, 12288, 256) == (128, 192, 1)
    assert chosen(4096, 12288, 64) == (64, 192, 1)
    assert choose_wgmma(Layer(4096, 12288, 128, False, "float16"), 64, SM90A, PROCESSORS).spec.blocks_k == 2


@pytest.mark.parametrize("m", [17, 32, 128, 256, 512, 1024, 4096])
def test_wide_layers_take_wide_tiles(m: int) -> None:
    block_m, block_n, cluster = chosen(8192, 28672, m)
    assert cluster * block_n in (192, 256)
    assert m <= 64 or block_m >= 128, "the weights are dequantised once for many tokens"


@given(st.integers(1, 8192), st.integers(0, 20_000), st.integers(0, 40_000), cards)
def test_there_is_a_tile_for_everything_and_none_is_ahead_of_it(m: int, k: int, n: int, processors: int) -> None:
    k, n = 2 * k + 1, 2 * n + 1
    spec = choose_wgmma(Layer(k, n, 128, False, "float16"), m, SM90A, processors).spec
    least = clocks(spec, m, n, k, processors)
    assert 0 < least < inf
    assert spec.block_m >= min(48, m), "tiles of few tokens are for one of them alone"
    for form in wgmma_config._FORMS:
        for size in range(form.least, form.most + 1, 8):
            if size > (-(-m // 8) * 8 if m <= 64 else -(-m // 16) * 16):
                continue  # a shorter one holds all tokens
            if size >= min(48, m) and (size <= 64 or size % 16 == 0) and size % (8 * form.cluster) == 0:
                warpgroups = (form.warpgroups, form.warpgroups_k)
                tile = Tile(size, form.block_n, form.block_k, *warpgroups, form.cluster)
                assert least <= launch_clocks(tile, m, n, k, processors) * (1 + 1e-9)


@given(st.integers(1, 500), st.integers(1, 20_000), st.integers(1, 5000), cards)
def test_no_cluster_that_could_run_is_ahead_of_it(m: int, k: int, n: int, processors: int) -> None:
    spec = choose_wgmma(Layer(k, n, 128, False, "float16"), m, SM90A, processors).spec
    least = clocks(spec, m, n, k, processors)
    for form in wgmma_config._FORMS:
        size = next((size for size in (64, 96, 128, 160) if m <= size < m + 8 and size >= form.least), 0)
        if form.cluster > 1 or not size or size > form.most:
            continue
        fields = (size, form.block_k, form.warpgroups, form.stack, 3, 1, *form.pipeline(size))
        registers = 232 if form.stack * size > 192 and form.warpgroups > 1 else 0
        for blocks_k in (2, 3, 4, 5, 6, 8):
            able = ceil_div(n, form.block_n) <= clusters_at_once(blocks_k, processors)
            one = WgmmaSpec(
                "float16", 128, False, *fields, consumer_registers=registers, warpgroups_k=form.warpgroups_k,
                blocks_k=blocks_k,
            )  # fmt: skip
            if able and ceil_div(k, form.block_k) >= blocks_k and one.smem_bytes <= SM90A.smem_per_block_bytes:
                assert least <= clocks(one, m, n, k, processors) * (1 + 1e-9)


def test_a_cluster_counted_by_hand() -> None:
    """64 tokens x 64 channels, 16 stages of 256 depths: two blocks have 8 each, and store 32 tokens. One alone, of all
    multiprocessors, would divide the tile; with one multiprocessor there is none to divide it with."""
    tile = Tile(64, 64, 256, 1)
    one, two = (launch_clocks(replace(tile, blocks_k=blocks_k), 64, 64, 4096, 1) for blocks_k in (1, 2))
    saved = 8 * stage_clocks(tile)
    # Of 32 tokens x 64 channels sums go to the other block; half of the result is stored.
    meeting = 2 * tile_clocks._MEETING + 32 * 64 * 4 / tile_clocks._SUMS_BYTES
    assert one - two == pytest.approx(saved - meeting + tile_clocks._RESULT * 32 * 64 / 128**2)
    assert 16 <= tile_clocks._SUMS_BYTES <= 64, "what a block's shared memory takes from others in a clock"
    # Nothing is won by blocks without a stage.
    four, two = (launch_clocks(replace(tile, blocks_k=blocks_k), 64, 64, 512, PROCESSORS) for blocks_k in (4, 2))
    assert four > two


@given(tiles, st.integers(1, 60_000), st.integers(0, 3000), st.integers(2, 8))
def test_a_clusters_time_goes_by_its_longest_block(spec: WgmmaSpec, k: int, more: int, blocks_k: int) -> None:
    """As long as a tile of that block's stages, and the meeting besides, whatever the depth."""
    tile = replace(spec.tile, cluster=1, blocks_k=blocks_k)
    shallow, deep = (launch_clocks(tile, spec.block_m, spec.block_n, depth, PROCESSORS) for depth in (k, k + more))
    longest = [ceil_div(ceil_div(depth, spec.block_k), blocks_k) for depth in (k, k + more)]
    assert deep - shallow == pytest.approx((longest[1] - longest[0]) * stage_clocks(tile))
