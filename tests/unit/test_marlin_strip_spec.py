"""StripSpec and the choice among its tiles: rules, shared memory, expected bytes, and which blocks cover a weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cudatma.descriptor import create_activation_tma_desc, create_scale_tma_desc, create_weight_tile_tma_desc
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.marlin.clusters import clusters_at_once
from cudatma.kernels.marlin.config import Layer, choose
from cudatma.kernels.marlin.plan import dependent_smem_bytes
from cudatma.kernels.marlin.problem import schedule
from cudatma.kernels.marlin.stage import GROUP_SIZES
from cudatma.kernels.marlin.strip_config import choose_strip, dump_specs, strip_serves, tile_tokens
from cudatma.kernels.marlin.strip_spec import StripSpec
from cudatma.kernels.marlin.strip_times import strip_us
from cudatma.target import SMEM_RESERVED_BYTES, TARGETS, get_target

SM90A, SM120A = get_target("sm_90a"), get_target("sm_120a")
BASE: dict[str, Any] = {
    "dtype": "float16", "group_size": 128, "has_zeros": False, "block_m": 8, "strips": 3, "block_k": 256,
    "warps_k": 2, "stages": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float32"), ("group_size", 16), ("block_m", 24), ("strips", 0), ("strips", 9), ("block_k", 64),
        ("warps_k", 3), ("warps_k", 8), ("stages", 1), ("stages", 17), ("stages", True), ("weight_policy", "keep"),
        ("blocks_per_sm", 3), ("deep_box", 1), ("blocks_k", 0), ("blocks_k", 9),
    ],
)  # fmt: skip
def test_rules(field: str, value: object) -> None:
    with pytest.raises((ArgumentError, TypeError)) as raised:
        StripSpec(**{**BASE, field: value})
    assert field in str(raised.value)


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("at most 16 warps", {"strips": 5, "warps_k": 4}),
        ("deep_box", {"block_m": 4}),  # boxes of 64 depths bring the mma's eight tokens
        ("at least 2 for block_k = 256", {"block_m": 1, "deep_box": True}),
    ],
)
def test_rules_of_several_fields(named: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=named):
        StripSpec(**{**BASE, **fields})


@pytest.mark.parametrize(
    ("m", "block_k", "wanted"),
    [
        (1, 1024, 1), (1, 256, 2), (1, 128, 4), (2, 512, 2), (3, 512, 4),
        (4, 128, 4), (5, 1024, 8), (9, 512, 16), (17, 512, 32),
    ],
)  # fmt: skip
def test_tiles_of_few_tokens(m: int, block_k: int, wanted: int) -> None:
    """A power of two; each stage has whole turns of the swizzle, eight rows of 64 depths."""
    layer = Layer(4096, 4096, 128, False, "float16")
    assert tile_tokens(layer, m, block_k) == wanted
    assert tile_tokens(replace(layer, k=4100), m, block_k) == max(8, wanted)  # no deep box: K has a part of a block
    of = StripSpec(**{**BASE, "block_k": block_k, "block_m": wanted, "deep_box": True})
    assert of.activation_stage_bytes == wanted * block_k * 2
    assert of.activation_stage_bytes % 1024 == 0
    eight = replace(of, block_m=max(8, wanted))
    assert (of.columns, of.sums, of.epilogue_parts()) == (eight.columns, eight.sums, eight.epilogue_parts())


def test_the_box_tells_entries_apart_and_nothing_else() -> None:
    flat, deep = (StripSpec(**BASE, deep_box=deep) for deep in (False, True))
    assert deep.entry == flat.entry + "_d"
    assert deep.smem_layout() == flat.smem_layout()


def test_blocks_of_a_cluster_tell_entries_apart() -> None:
    """Names, what is launched, and nothing of a stage."""
    made = [StripSpec(**BASE, blocks_k=blocks) for blocks in range(1, 9)]
    assert len({of.entry for of in made}) == 8
    assert made[0].entry == StripSpec(**BASE).entry
    assert [of.launch_cluster for of in made] == list(range(1, 9))
    assert {(of.cluster, of.transaction_bytes, of.threads, of.partial_bytes) for of in made} == {
        (1, made[0].transaction_bytes, made[0].threads, 0)
    }


@pytest.mark.parametrize(
    ("strips", "block_m", "blocks_k", "size"),
    [
        # Owned strips x others x fragments (two of a strip, for each 8 tokens) x 512 bytes.
        (1, 8, 4, 1 * 3 * 2 * 512),
        (3, 8, 2, 2 * 1 * 2 * 512),  # three strips for two blocks: two and one
        (3, 16, 8, 1 * 7 * 4 * 512),  # some blocks have none
        (7, 8, 3, 3 * 2 * 2 * 512),
        (8, 32, 2, 4 * 1 * 8 * 512),
        (8, 32, 1, 0),
    ],
)
def test_sums_of_a_cluster_by_hand(strips: int, block_m: int, blocks_k: int, size: int) -> None:
    fields = {**BASE, "strips": strips, "block_m": block_m, "warps_k": 1}
    of = StripSpec(**fields, blocks_k=blocks_k)
    layout = {name: held for name, _, held in of.smem_layout()}
    assert layout["cluster_reduction"] == size
    assert layout["cluster_barrier"] == (8 if blocks_k > 1 else 0)
    assert of.smem_bytes == replace(of, blocks_k=1).smem_bytes + size + layout["cluster_barrier"]


@given(
    strips=st.integers(1, 8), block_m=st.sampled_from((8, 16, 32)), blocks_k=st.integers(1, 8),
    group_size=st.sampled_from((128, -1)),
)  # fmt: skip
def test_each_strip_is_owned_once_and_all_others_sums_have_room(
    strips: int, block_m: int, blocks_k: int, group_size: int
) -> None:
    """Strips are dealt out to the cluster's blocks in turn; each gets all others' sums of its own."""
    fields = {**BASE, "strips": strips, "block_m": block_m, "warps_k": 1}
    of = StripSpec(**{**fields, "group_size": group_size}, blocks_k=blocks_k)
    owned = [[strip for strip in range(strips) if strip % blocks_k == rank] for rank in range(blocks_k)]
    assert sorted(strip for mine in owned for strip in mine) == list(range(strips))
    assert of.column_bytes == 32 * block_m * 4
    most = max(map(len, owned)) * (blocks_k - 1) * of.column_bytes
    assert {name: size for name, _, size in of.smem_layout()}["cluster_reduction"] == most


def test_clusters_need_a_card_that_has_them() -> None:
    narrow = StripSpec(**{**BASE, "strips": 1}, blocks_k=2)
    narrow.check_target(SM90A)
    with pytest.raises(TargetError, match="blocks_k > 1"):
        narrow.check_target(SM120A)
    replace(narrow, blocks_k=1).check_target(SM120A)


def test_shared_memory_is_checked_against_the_target() -> None:
    fits_sm90 = StripSpec(**{**BASE, "strips": 7, "stages": 6})
    fits_sm90.check_target(SM90A)
    with pytest.raises(ArgumentError, match="stages"):
        fits_sm90.check_target(SM120A)
    with pytest.raises(TargetError):
        StripSpec(**BASE).check_target(replace(SM90A, features=SM90A.features - {"tma"}))


@given(
    dtype=st.sampled_from(("float16", "bfloat16")),
    group_size=st.sampled_from(GROUP_SIZES),
    has_zeros=st.booleans(),
    block_m=st.sampled_from((8, 16, 32)),
    strips=st.integers(1, 8),
    block_k=st.sampled_from((128, 256, 512, 1024)),
    warps_k=st.sampled_from((1, 2, 4, 8, 16)),
)
def test_expected_bytes_are_those_of_the_boxes(warps_k: int, strips: int, block_k: int, **fields: Any) -> None:
    """What the full barrier counts is what the maps' loads bring, and every slot is aligned for TMA."""
    assume(strips * warps_k <= 16 and block_k // 64 % warps_k == 0)
    of = StripSpec(strips=strips, block_k=block_k, warps_k=warps_k, stages=2, **fields)
    depth = block_k // 64
    qweight = np.zeros((4 * 16, 2048), np.uint8)
    options: dict[str, Any] = {"target": SM90A, "backend": "codec"}
    boxes = 0
    if of.whole_rows:
        boxes += create_weight_tile_tma_desc(qweight, 16, depth, of.whole_rows, **options).expected_bytes
    if of.has_half_row:
        boxes += create_weight_tile_tma_desc(qweight, 16, depth, 1, half_rows=True, **options).expected_bytes
    kind = activation_type(of.dtype).numpy
    if of.has_stage_scales:
        scales = np.zeros((8, 512), kind)
        boxes += create_scale_tma_desc(
            scales, of.scale_row, of.groups_per_stage, whole_column=False, **options
        ).expected_bytes
    if of.has_stage_zeros:
        zeros = np.zeros((8, 512), np.uint8)
        boxes += create_scale_tma_desc(
            zeros, of.scale_row, of.groups_per_stage, whole_column=False, **options
        ).expected_bytes
    x = np.zeros((64, 1024), kind)
    flat = depth * create_activation_tma_desc(x, of.block_m, **options).expected_bytes
    deep = create_activation_tma_desc(x, of.block_m, blocks=depth, **options).expected_bytes
    assert boxes + flat == boxes + deep == of.transaction_bytes == replace(of, deep_box=True).transaction_bytes
    for name, offset, size in of.smem_layout():
        assert offset % (8 if "barriers" in name else 128) == 0, name
        assert size % of.stages == 0 or name in ("depth_reduction", "cluster_reduction", "cluster_barrier")


@given(
    k=st.integers(1, 40000), n=st.integers(1, 200000), m=st.integers(1, 32), processors=st.integers(1, 300),
    group_size=st.sampled_from(GROUP_SIZES), has_zeros=st.booleans(), target=st.sampled_from((SM90A, SM120A)),
)  # fmt: skip
def test_every_layer_gets_a_ring_that_fits(
    k: int, n: int, m: int, processors: int, group_size: int, has_zeros: bool, target: Any
) -> None:
    layer = Layer(k, n, group_size, has_zeros, "float16")
    spec = choose_strip(layer, m, target, processors).spec
    assert k % 64 == 0 or not spec.deep_box
    spec.check_target(target)
    work = schedule(spec, m, n, k, processors)
    assert work.blocks == work.tiles_m * work.tiles_n * spec.blocks_k
    assert spec.blocks_k == 1 or (target.has("cluster") and work.blocks <= processors)
    assert work.partial_blocks == 0
    assert (work.tiles_n - 1) * spec.block_n < n <= work.tiles_n * spec.block_n


layers = st.builds(
    Layer,
    k=st.one_of(st.integers(1, 2000), st.integers(1, 40_000)),
    n=st.one_of(st.integers(1, 6000), st.integers(1, 70_000)),
    group_size=st.sampled_from(GROUP_SIZES),
    has_zeros=st.booleans(),
    dtype=st.sampled_from(("float16", "bfloat16")),
)


@given(layers, st.integers(1, 32), st.sampled_from((20, 78, 132)))
def test_a_choice_runs_at_once_and_covers_every_channel(layer: Layer, m: int, processors: int) -> None:
    choice = choose_strip(layer, m, SM90A, processors)
    spec = choice.spec
    spec.check_target(SM90A)
    assert (spec.dtype, spec.group_size, spec.has_zeros) == (layer.dtype, layer.group_size, layer.has_zeros)
    tiles_m, tiles_n = -(-m // spec.block_m), -(-layer.n // (32 * spec.strips))
    assert (tiles_n - 1) * 32 * spec.strips < layer.n <= tiles_n * 32 * spec.strips
    assert (tiles_m - 1) * spec.block_m < m <= tiles_m * spec.block_m
    work = schedule(spec, m, layer.n, layer.k, processors)
    assert work.blocks == tiles_m * tiles_n * spec.blocks_k
    if spec.blocks_k > 1:
        assert choice.blocks_per_sm == 1
        # Parts of the card that are no whole clusters stand by.
        assert tiles_m * tiles_n <= clusters_at_once(spec.blocks_k, processors) <= processors // spec.blocks_k
        assert -(-layer.k // spec.block_k) >= spec.blocks_k, "a stage for each block"
    # The ring is not deeper than what a block has to do, but for the least that there can be.
    assert spec.stages <= max(2, -(-layer.k // (spec.block_k * spec.blocks_k)))


@given(layers, st.integers(1, 32), st.sampled_from((20, 78, 132)))
def test_the_way_that_is_predicted_to_be_fastest(layer: Layer, m: int, processors: int) -> None:
    """As few strips a block as its number of blocks allows; the whole depth, unless dividing it is predicted to pay."""

    def us(spec: StripSpec) -> float:
        blocks = -(-strips // spec.strips) * spec.blocks_k
        waves = -(-blocks // processors)
        return strip_us(layer.k, layer.n, spec.block_m, spec.strips, spec.block_k, spec.blocks_k, waves)

    spec, strips = choose_strip(layer, m, SM90A, processors).spec, -(-layer.n // 32)
    alone = choose_strip(layer, m, replace(SM90A, features=SM90A.features - {"cluster"}), processors).spec
    assert alone.blocks_k == 1
    if spec.blocks_k == 1:
        assert spec == alone
    else:
        assert spec.strips == -(-strips // clusters_at_once(spec.blocks_k, processors))
        assert us(spec) < us(alone)


def test_few_channels_are_divided_and_many_are_not() -> None:
    """1024 channels are 32 strips, for 132 multiprocessors. 28672 are 896: seven a block, and 128 blocks."""
    few, many = Layer(4096, 1024, 128, False, "float16"), Layer(8192, 28672, 128, False, "float16")
    for m in (1, 16):
        spec = choose_strip(few, m, SM90A, 132).spec
        # 38 clusters of three run at once; of four, 30, whose blocks would have two strips.
        assert (spec.strips, spec.blocks_k) == (1, 3)
        whole = choose_strip(many, m, SM90A, 132).spec
        assert (whole.strips, whole.blocks_k) == (7, 1)
    assert choose_strip(few, 1, SM120A, 132).spec.blocks_k == 1


def test_a_ring_holds_what_has_to_be_under_way_and_no_more() -> None:
    """64 KB of weights, at least three stages, never all of the depth; what measured best on an H200."""
    chosen = {}
    for k, n, m in ((4096, 4096, 1), (8192, 8192, 1), (8192, 8192, 16), (4096, 12288, 1), (8192, 28672, 16)):
        spec = choose_strip(Layer(k, n, 128, False, "float16"), m, SM90A, 132).spec
        chosen[k, n, m] = (spec.block_k, spec.warps_k, spec.stages)
    assert chosen == {
        (4096, 4096, 1): (1024, 8, 3),
        (8192, 8192, 1): (512, 4, 4),
        (8192, 8192, 16): (512, 4, 4),
        (4096, 12288, 1): (512, 4, 3),
        (8192, 28672, 16): (256, 1, 3),
    }


@pytest.mark.parametrize("name", ["sm_90a", "sm_120a"])
def test_no_more_dependent_blocks_than_meant(name: str) -> None:
    """More than blocks_per_sm blocks on one multiprocessor, of two launches, would leave others without."""
    target = get_target(name)
    for layer in (Layer(4096, 4096, 128, False, "float16"), Layer(8192, 57344, 128, False, "float16")):
        choice = choose_strip(layer, 1, target, 132)
        choice = replace(choice, spec=replace(choice.spec, stages=2))
        asked = dependent_smem_bytes(choice.spec, target)
        assert choice.spec.smem_bytes <= asked <= target.smem_per_block_bytes
        fitting = target.smem_per_sm_bytes // (asked + SMEM_RESERVED_BYTES)
        assert fitting == choice.spec.blocks_per_sm


def test_who_serves() -> None:
    wide, narrow = Layer(8192, 28672, 128, False, "float16"), Layer(8192, 1024, 128, False, "float16")
    for target, processors in ((SM90A, 132), (SM120A, 188)):
        assert [m for m in (1, 16, 32, 33) if strip_serves(wide, m, target, processors)] == [1, 16, 32]
    assert strip_serves(narrow, 1, SM90A, 132)  # clusters divide the depth
    assert strip_serves(replace(narrow, k=1, n=1), 32, SM90A, 132)
    # Without clusters, most of the card would have no strip; half of it may.
    assert not strip_serves(narrow, 1, SM120A, 188)
    assert strip_serves(replace(narrow, n=94 * 32), 1, SM120A, 188)
    assert not strip_serves(replace(narrow, n=93 * 32), 1, SM120A, 188)
    assert not strip_serves(wide, 1, replace(SM90A, features=SM90A.features - {"tma"}), 132)
    assert isinstance(choose(wide, 1, SM90A, 132).spec, StripSpec)
    assert isinstance(choose(narrow, 16, SM90A, 132).spec, StripSpec)


@pytest.mark.parametrize("name", TARGETS)
def test_dump_specs(name: str) -> None:
    target = get_target(name)
    specs = dump_specs(target)
    assert bool(specs) == (target.has("tma") and target.has("mma_sync"))
    for spec in specs:
        spec.check_target(target)
    assert len({spec.entry for spec in specs}) == len(specs)
