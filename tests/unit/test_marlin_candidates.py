"""The generators of configurations: each one constructs, fits its target, and is there where it was measured best."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatma.kernels.marlin.candidates import candidates, variants
from cudatma.kernels.marlin.card import H200, imagined_card
from cudatma.kernels.marlin.config import Layer, choose_untuned
from cudatma.kernels.marlin.layer import AnyMarlinSpec, Choice
from cudatma.kernels.marlin.model import kernel_name, plan_of
from cudatma.kernels.marlin.problem import ceil_div
from cudatma.kernels.marlin.shortlist import ranked, shortlist
from cudatma.kernels.marlin.strip_spec import StripSpec
from cudatma.kernels.marlin.tune_file import Cell, parse_cell
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.kernels.marlin.workspace import has_room
from cudatma.target import get_target

SM90A = get_target("sm_90a")
layers = st.builds(
    Layer,
    k=st.integers(1, 40_000),
    n=st.integers(1, 70_000),
    group_size=st.sampled_from((32, 64, 128, -1)),
    has_zeros=st.booleans(),
    dtype=st.sampled_from(("float16", "bfloat16")),
)
tokens = st.one_of(st.integers(1, 300), st.integers(1, 10_000))
targets = st.sampled_from(("sm_90a", "sm_90", "sm_120a", "sm_121a"))
processors = st.sampled_from((1, 48, 84, 132, 188))


@settings(max_examples=25, deadline=None)
@given(layers, tokens, targets, processors)
def test_every_candidate_constructs_fits_and_serves_its_layer(layer: Layer, m: int, name: str, count: int) -> None:
    target = get_target(name)
    found = list(candidates(layer, m, target, count))
    assert found
    assert len(set(found)) == len(found)
    for choice in found:
        spec = choice.spec
        spec.check_target(target)
        assert (spec.dtype, spec.group_size, spec.has_zeros) == (layer.dtype, layer.group_size, layer.has_zeros)
        assert choice.blocks_per_sm * (spec.smem_bytes + 1024) <= target.smem_per_sm_bytes
        assert choice.blocks_per_sm * spec.threads <= 2048
        work = plan_of(choice, layer, m, target, count)
        assert work.partial_blocks * spec.partial_bytes <= count * 128 * 256 * 4, "the workspace holds no more"
        assert has_room(spec, choice.blocks_per_sm)


@settings(max_examples=25, deadline=None)
@given(layers, tokens, st.sampled_from(("sm_90a", "sm_120a")))
def test_a_short_list_has_names_of_its_own_and_the_rule_first(layer: Layer, m: int, name: str) -> None:
    target, card = get_target(name), imagined_card(name, 132)
    rule = choose_untuned(layer, m, target, 132)
    listed = shortlist(layer, m, target, card, rule, 12)
    assert listed[0].choice == rule
    assert len({one.label for one in listed}) == len({one.choice for one in listed}) == len(listed) <= 12
    for one in listed:
        one.choice.spec.check_target(target)
        # What the tuner measures, its file must hold and give back.
        cell = Cell(layer, m, one.choice, 2.0, 3.0)
        assert parse_cell(cell.as_json(), target) == cell


def test_tokens_and_target_decide_which_kernels_there_are() -> None:
    layer = Layer(4096, 4096, 128, False, "float16")
    by_tma = {kernel_name(c.spec) for c in candidates(layer, 16, SM90A, 132)}
    assert by_tma == {"strip", "wgmma", "portable"}
    assert {kernel_name(c.spec) for c in candidates(layer, 500, SM90A, 132)} == {"wgmma", "portable"}
    assert {kernel_name(c.spec) for c in candidates(layer, 500, get_target("sm_120a"), 132)} == {"portable"}


def shape_of(spec: AnyMarlinSpec) -> tuple[object, ...]:
    tile = (spec.block_m, spec.block_n, spec.block_k)
    return kernel_name(spec), *tile, spec.consumer_warps, spec.cluster, spec.blocks_k


def test_the_tiles_that_were_measured_best_are_among_them() -> None:
    """docs/performance/marlin_strip.md and marlin_wgmma.md; stages and groups in flight are variants."""
    large, small = Layer(8192, 28672, 128, False, "float16"), Layer(4096, 4096, 128, False, "float16")
    narrow, slim = replace(small, n=1024), replace(large, k=13824, n=5120)
    cases = [(large, m) for m in (1, 64, 128, 1024)] + [(small, m) for m in (1, 64, 1024)]
    for layer, m in [*cases, (narrow, 1), (narrow, 32), (narrow, 64), (slim, 1), (slim, 16)]:
        rule = choose_untuned(layer, m, SM90A, 132).spec
        found = {shape_of(choice.spec) for choice in candidates(layer, m, SM90A, 132)}
        assert shape_of(rule) in found, rule.entry


@settings(max_examples=25, deadline=None)
@given(layers, st.integers(1, 64), processors)
def test_clusters_of_strips_have_work_for_each_block_and_run_at_once(layer: Layer, m: int, count: int) -> None:
    for choice in candidates(layer, m, SM90A, count):
        spec = choice.spec
        if isinstance(spec, StripSpec) and spec.blocks_k > 1:
            clusters = ceil_div(layer.n, 32 * spec.strips) * ceil_div(m, spec.block_m)
            assert clusters * spec.blocks_k <= count, "a multiprocessor for each block"
            assert choice.blocks_per_sm == 1
            assert ceil_div(layer.k, spec.block_k) >= spec.blocks_k, "a stage for each block"


def test_only_cards_with_clusters_get_them() -> None:
    narrow = Layer(4096, 1024, 128, False, "float16")
    blocks = {
        name: {c.spec.blocks_k for c in candidates(narrow, 1, get_target(name), 132)} for name in ("sm_90a", "sm_120a")
    }
    assert blocks["sm_120a"] == {1}
    # 32 strips: clusters of 6 and 8, of which 16 and 14 run at once, have to take two strips or three.
    assert blocks["sm_90a"] >= {1, 2, 3, 4, 5, 6, 8}


@settings(max_examples=15, deadline=None)
@given(layers, tokens)
def test_variants_compute_the_same_tile(layer: Layer, m: int) -> None:
    rule = choose_untuned(layer, m, SM90A, 132)
    for other in variants(rule, layer, SM90A):
        other.spec.check_target(SM90A)
        assert other != rule
        assert (other.spec.block_m, other.spec.block_n) == (rule.spec.block_m, rule.spec.block_n)


LARGE, SQUARE = Layer(8192, 28672, 128, False, "float16"), Layer(8192, 8192, 128, False, "float16")


@settings(max_examples=25, deadline=None)
@given(layers, st.integers(1, 64), targets, processors)
def test_rings_of_strips_hold_64_kib_of_weights_and_three_stages_where_they_can(
    layer: Layer, m: int, name: str, count: int
) -> None:
    target = get_target(name)
    for choice in candidates(layer, m, target, count):
        spec = choice.spec
        if not isinstance(spec, StripSpec):
            continue
        iterations = -(-layer.k // (spec.block_k * spec.blocks_k))  # of the cluster's block that has the most
        assert spec.stages <= max(2, iterations - 1, min(iterations, 3)), "it comes round, but for three stages in all"
        held = spec.stages * spec.weight_stage_bytes
        assert held - spec.weight_stage_bytes < 65536 or spec.stages <= 3, "no deeper than it must be"
        if held < 65536 or spec.stages < 3:
            deeper = replace(spec, stages=spec.stages + 1)
            full = (deeper.smem_bytes + 1024) * choice.blocks_per_sm > target.smem_per_sm_bytes
            too_large = deeper.smem_bytes > target.smem_per_block_bytes
            assert full or too_large or deeper.stages > 12 or deeper.stages >= iterations


def test_rings_that_were_measured_fastest_come_first() -> None:
    """30.5 us with three stages, 33.2 with six; 10.67 with four, 11.18 with eight. [docs/tuning.md]"""
    for layer, tile, stages in ((LARGE, (8, 224, 256), 3), (SQUARE, (8, 64, 512), 4)):
        found = [c.spec for c in candidates(layer, 1, SM90A, 132) if isinstance(c.spec, StripSpec)]
        rings = {s.stages for s in found if (s.block_m, s.block_n, s.block_k) == tile and s.blocks_per_sm == 1}
        assert rings == {stages}


@pytest.mark.parametrize(
    ("m", "tiles"),
    [
        (9, {8, 16}),
        (33, {24, 40}),
        (64, {32, 64}),
        (100, {56, 104}),
        (128, {64, 128}),
        (300, {64, 80, 104, 152, 128, 256}),  # 60 a tile, in multiples of 8
        (1024, {256, 208, 176, 152, 128, 120, 104, 96}),
    ],
)
def test_wgmmas_tiles_of_tokens_are_even(m: int, tiles: set[int]) -> None:
    """As few as can be and up to seven more, besides those of 128 and 256; down to 64 tokens, or half of all."""
    found = [c.spec for c in candidates(LARGE, m, SM90A, 132) if isinstance(c.spec, WgmmaSpec)]
    assert {spec.block_m for spec in found} == tiles
    assert {(spec.warpgroups, spec.warpgroups_k) for spec in found} >= {(1, 1), (2, 1), (3, 1), (1, 2)}


def test_variants_of_a_ring_are_deeper_for_strips_only() -> None:
    def rings(rule: Choice[AnyMarlinSpec], layer: Layer) -> list[int]:
        others = (other.spec for other in variants(rule, layer, SM90A))
        return [spec.stages - rule.spec.stages for spec in others if spec.stages != rule.spec.stages]

    strip = next(c for c in candidates(SQUARE, 1, SM90A, 132) if c.spec.entry.endswith("8x64x512_k4_s4"))
    assert rings(strip, SQUARE) == [1, -1, 2]
    # Six stages' work: a ring of five comes round. And where shared memory is full, there is no deeper one.
    assert rings(strip, replace(SQUARE, k=6 * 512)) == [1, -1]
    assert rings(strip, replace(SQUARE, k=5 * 512)) == [-1]
    full = next(c for c in candidates(LARGE, 1, SM90A, 132) if c.spec.entry.endswith("8x224x256_k1_s3_b2"))
    assert rings(full, LARGE) == [-1]
    for m, fewer in ((64, [-1]), (512, [-1, -2])):  # three stages, of which two must stay, and six
        rule = choose_untuned(LARGE, m, SM90A, 132)
        assert kernel_name(rule.spec) == "wgmma"
        assert rings(rule, LARGE) == fewer


def test_no_tile_holds_more_tokens_than_needed() -> None:
    layer = Layer(4096, 4096, 128, False, "float16")
    for m in (1, 8, 9, 33, 65, 200):
        for choice in candidates(layer, m, SM90A, 132):
            assert choice.spec.block_m <= max(16, 2 * m)
            assert ceil_div(m, choice.spec.block_m) * choice.spec.block_m < m + 256


def test_ranking_is_by_predicted_time_and_deterministic() -> None:
    layer = Layer(8192, 8192, 128, False, "bfloat16")
    first, again = (ranked(layer, 64, SM90A, H200) for _ in range(2))
    assert [one.label for one in first] == [one.label for one in again]
    times = [one.prediction.us for one in first]
    assert times == sorted(times)
