"""The choice of a Marlin kernel: always one that fits, always the same, and every way of feeding it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.marlin import config
from cudatma.kernels.marlin.config import Feeds, Layer, choose, choose_portable, dump_specs, parse_feeds
from cudatma.kernels.marlin.problem import schedule
from cudatma.kernels.marlin.spec import ACTIVATION_FEEDS, FEEDS, GROUP_SIZES
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.target import TARGETS, Target, get_target

KIB = 1024
RUNNING = [target for target in TARGETS.values() if target.runs_here]
layers = st.builds(
    Layer,
    k=st.integers(1, 40_000),
    n=st.integers(1, 70_000),
    group_size=st.sampled_from(GROUP_SIZES),
    has_zeros=st.booleans(),
    dtype=st.sampled_from(("float16", "bfloat16")),
)
tokens = st.one_of(st.integers(1, 300), st.integers(1, 100_000))
feeds = st.builds(
    Feeds, weight=st.sampled_from(FEEDS), scale=st.sampled_from(FEEDS), activation=st.sampled_from(ACTIVATION_FEEDS)
)
processors = st.sampled_from((1, 20, 48, 84, 132, 170, 188))
calls = st.tuples(layers, tokens, st.sampled_from(RUNNING), processors, feeds)


@given(calls)
def test_a_portable_choice_fits_99_kib_and_its_target(call: tuple[Layer, int, Target, int, Feeds]) -> None:
    layer, _, target, _, feed = call
    spec = choose_portable(*call).spec
    assert spec.smem_bytes <= 99 * KIB
    assert spec.blocks_per_sm * (spec.smem_bytes + KIB) <= target.smem_per_sm_bytes
    assert spec.blocks_per_sm * spec.threads <= 1536, "SM120 holds 1536 threads a multiprocessor"
    spec.check_target(target)
    assert (spec.dtype, spec.group_size, spec.has_zeros) == (layer.dtype, layer.group_size, layer.has_zeros)
    assert (spec.feed_weight, spec.feed_scale, spec.feed_activation) == (feed.weight, feed.scale, feed.activation)


@given(calls)
def test_every_choice_serves_its_layer_and_fits_its_target(call: tuple[Layer, int, Target, int, Feeds]) -> None:
    layer, m, target, _, feed = call
    spec = choose(*call).spec
    spec.check_target(target)
    assert spec.blocks_per_sm * (spec.smem_bytes + KIB) <= target.smem_per_sm_bytes
    assert (spec.dtype, spec.group_size, spec.has_zeros) == (layer.dtype, layer.group_size, layer.has_zeros)
    assert (spec.feed_weight, spec.feed_scale, spec.feed_activation) == (feed.weight, feed.scale, feed.activation)
    assert not isinstance(spec, WgmmaSpec) or (target.has_wgmma and m > 16 and feed == Feeds())


@given(calls)
def test_a_choice_depends_on_nothing_else(call: tuple[Layer, int, Target, int, Feeds]) -> None:
    first = choose(*call)
    assert choose(*call) == first
    assert hash(first.spec) == hash(choose(*call).spec)
    assert 1 <= first.blocks_per_sm <= first.spec.blocks_per_sm


@given(calls)
def test_a_choice_can_be_scheduled(call: tuple[Layer, int, Target, int, Feeds]) -> None:
    layer, m, _, count, _ = call
    choice = choose(*call)
    made = schedule(choice.spec, m, layer.n, layer.k, count * choice.blocks_per_sm)
    assert made.tiles_m * choice.spec.block_m >= m
    assert made.tiles_n * choice.spec.block_n * choice.spec.cluster >= layer.n
    assert made.blocks % choice.spec.cluster == 0


@given(layers, st.sampled_from(RUNNING), st.sampled_from((20, 48, 84, 132, 170, 188)))
def test_few_tokens_get_small_tiles(layer: Layer, target: Target, count: int) -> None:
    """Rows of a tile beyond M are multiplied for nothing. But a layer of one stage, or a card of one multiprocessor,
    may want the channels of a longer tile."""
    layer = replace(layer, k=max(layer.k, 256))
    for m in (1, 8, 16, 32, 64, 128):
        assert choose(layer, m, target, count, Feeds()).spec.block_m <= max(8, m)


def test_a_target_without_setmaxnreg_gets_a_tile_that_needs_none() -> None:
    layer, plain = Layer(8192, 28672, 128, False, "float16"), get_target("sm_90")
    assert choose_portable(layer, 1024, get_target("sm_90a"), 132, Feeds()).spec.consumer_registers > 0
    if all(plain.has(f) for f in ("shared_cta_destination", "mma_sync", "stmatrix", "griddepcontrol")):
        assert choose(layer, 1024, plain, 132, Feeds()).spec.consumer_registers == 0


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_dump_specs(name: str) -> None:
    target = get_target(name)
    specs = dump_specs(target)
    assert dump_specs(target) == specs
    assert len(set(specs)) == len(specs) > 0
    for spec in specs:
        spec.check_target(target)
    assert {spec.feed_weight for spec in specs} == set(FEEDS)
    assert {spec.feed_scale for spec in specs} == set(FEEDS)
    assert {spec.feed_activation for spec in specs} == set(ACTIVATION_FEEDS)
    assert {spec.dtype for spec in specs} == {"float16", "bfloat16"}
    assert {spec.has_zeros for spec in specs} == {False, True}
    assert {32, 128, -1} <= {spec.group_size for spec in specs}


def test_dump_specs_hold_every_tile_of_the_table() -> None:
    tiles = {tile for _, narrow, wide in config._TILES for tile in (narrow, wide)}
    dumped = {
        (s.block_m, s.block_n, s.block_k, s.warps_m, s.warps_n, s.warps_k) for s in dump_specs(get_target("sm_90a"))
    }
    assert {(t.m, t.n, t.k, t.warps_m, t.warps_n, t.warps_k) for t in tiles} <= dumped


@pytest.mark.parametrize(
    ("feed", "wanted"),
    [
        ("tma", Feeds("tma", "tma", "tma")),
        ("cp_async", Feeds("cp_async", "cp_async", "cp_async")),
        ({}, Feeds("tma", "tma", "tma")),
        ({"scale": "cp_async"}, Feeds("tma", "cp_async", "tma")),
        ({"weight": "cp_async", "activation": "tma"}, Feeds("cp_async", "tma", "tma")),
        ({"activation": "plain"}, Feeds("tma", "tma", "plain")),
        ({"activation": "gather"}, Feeds("tma", "tma", "gather")),
    ],
)
def test_parse_feeds(feed: Any, wanted: Feeds) -> None:
    assert parse_feeds(feed) == wanted


@pytest.mark.parametrize(
    ("feed", "error", "field"),
    [
        ("TMA", ArgumentError, "feed"),
        ("plain", ArgumentError, "feed"),
        ("", ArgumentError, "feed"),
        ({"weights": "tma"}, ArgumentError, "feed"),
        ({"weight": "plain"}, ArgumentError, "feed['weight']"),
        ({"scale": "ldg"}, ArgumentError, "feed['scale']"),
        ({"activation": "ldg"}, ArgumentError, "feed['activation']"),
        ({"weight": None}, ArgumentError, "feed['weight']"),
        (None, ArgumentTypeError, "feed"),
        (("tma",), ArgumentTypeError, "feed"),
        (1, ArgumentTypeError, "feed"),
    ],
)
def test_parse_feeds_refuses(feed: Any, error: type[Exception], field: str) -> None:
    with pytest.raises(error) as caught:
        parse_feeds(feed)
    assert caught.value.field == field  # type: ignore[attr-defined]
