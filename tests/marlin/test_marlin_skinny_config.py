"""MarlinConfig: rules, shared memory, expected bytes, and the CTAs that cover a weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from marlin_builders import skinny

from cudatma.descriptor import create_activation_tma_desc, create_scale_tma_desc, create_weight_tile_tma_desc
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.cost import cheapest_first
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.marlin.arguments import dependent_smem_bytes
from cudatma.kernels.marlin.candidates import dump_configs, skinny_times, tile_rows
from cudatma.kernels.marlin.problem import GROUP_SIZES, LinearShape, Problem
from cudatma.target import SMEM_RESERVED_BYTES, TARGETS, get_target

SM90A, SM120A = get_target("sm_90a"), get_target("sm_120a")
BASE: dict[str, Any] = {
    "tile_m": 8, "tile_n": 96, "tile_k": 256,
    "slice_k": 2, "stages": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float32"), ("group_size", 16), ("tile_m", 24), ("tile_n", 0), ("tile_n", 288), ("tile_k", 64),
        ("slice_k", 3), ("slice_k", 8), ("stages", 1), ("stages", 17), ("stages", True),
        ("ctas_per_sm", 3), ("deep_box", 1), ("cluster_k", 0), ("cluster_k", 9),
    ],
)  # fmt: skip
def test_rules(field: str, value: object) -> None:
    with pytest.raises((ArgumentError, TypeError)) as raised:
        skinny(**{**BASE, field: value})
    assert field in str(raised.value)


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("at most 16 warps", {"tile_n": 160, "slice_k": 4}),
        ("deep_box", {"tile_m": 4}),  # a box of 64 of K has the mma's eight rows
        ("at least 2 for tile_k = 256", {"tile_m": 1, "deep_box": True}),
    ],
)
def test_rules_of_several_fields(named: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=named):
        skinny(**{**BASE, **fields})


@pytest.mark.parametrize(
    ("m", "tile_k", "wanted"),
    [
        (1, 1024, 1), (1, 256, 2), (1, 128, 4), (2, 512, 2), (3, 512, 4),
        (4, 128, 4), (5, 1024, 8), (9, 512, 16), (17, 512, 32),
    ],
)  # fmt: skip
def test_tiles_for_small_m(m: int, tile_k: int, wanted: int) -> None:
    """A power of two; each stage has whole periods of the swizzle, eight rows of 64 elements."""
    layer = LinearShape(4096, 4096, 128, False, "float16")
    assert tile_rows(layer, m, tile_k) == wanted
    assert tile_rows(replace(layer, k=4100), m, tile_k) == max(8, wanted)  # no deep box: K has a part of a block
    of = skinny(**{**BASE, "tile_k": tile_k, "tile_m": wanted, "deep_box": True})
    assert of.activation_stage_bytes == wanted * tile_k * 2
    assert of.activation_stage_bytes % 1024 == 0
    assert of.epilogue_parts() == replace(of, tile_m=max(8, wanted)).epilogue_parts()


def test_the_box_tells_entries_apart_and_nothing_else() -> None:
    flat, deep = (skinny(deep_box=deep, **BASE) for deep in (False, True))
    assert deep.entry == flat.entry + "_d"
    assert deep.smem_layout() == flat.smem_layout()


def test_clusters_tell_entries_apart() -> None:
    """Names, what is launched, and nothing of a stage."""
    made = [skinny(cluster_k=ctas, **BASE) for ctas in range(1, 9)]
    assert len({of.entry for of in made}) == 8
    assert made[0].entry == skinny(**BASE).entry
    assert [of.launch_cluster for of in made] == list(range(1, 9))
    assert {(of.cluster, of.transaction_bytes, of.threads, of.partial_bytes) for of in made} == {
        (1, made[0].transaction_bytes, made[0].threads, 0)
    }


@pytest.mark.parametrize(
    ("n_tiles", "tile_m", "cluster_k", "size"),
    [
        # Owned N tiles x other CTAs x fragments (two of an N tile, for each 8 rows) x 512 bytes.
        (1, 8, 4, 1 * 3 * 2 * 512),
        (3, 8, 2, 2 * 1 * 2 * 512),  # three N tiles for two CTAs: two and one
        (3, 16, 8, 1 * 7 * 4 * 512),  # some CTAs have none
        (7, 8, 3, 3 * 2 * 2 * 512),
        (8, 32, 2, 4 * 1 * 8 * 512),
        (8, 32, 1, 0),
    ],
)
def test_sums_of_a_cluster_by_hand(n_tiles: int, tile_m: int, cluster_k: int, size: int) -> None:
    fields = {**BASE, "tile_n": 32 * n_tiles, "tile_m": tile_m, "slice_k": 1}
    of = skinny(cluster_k=cluster_k, **fields)
    layout = {name: held for name, _, held in of.smem_layout()}
    assert layout["cluster_sums"] == size
    assert layout["cluster_barrier"] == (8 if cluster_k > 1 else 0)
    assert of.smem_bytes == replace(of, cluster_k=1).smem_bytes + size + layout["cluster_barrier"]


@given(
    n_tiles=st.integers(1, 8), tile_m=st.sampled_from((8, 16, 32)), cluster_k=st.integers(1, 8),
    group_size=st.sampled_from((128, -1)),
)  # fmt: skip
def test_each_n_tile_has_one_owner_with_memory_for_all_sums(
    n_tiles: int, tile_m: int, cluster_k: int, group_size: int
) -> None:
    """The CTAs of a cluster own N tiles in turn; each receives the sums of all other CTAs for its own."""
    fields = {**BASE, "tile_n": 32 * n_tiles, "tile_m": tile_m, "slice_k": 1}
    of = skinny(cluster_k=cluster_k, **{**fields, "group_size": group_size})
    owned = [[n_tile for n_tile in range(n_tiles) if n_tile % cluster_k == rank] for rank in range(cluster_k)]
    assert sorted(n_tile for mine in owned for n_tile in mine) == list(range(n_tiles))
    assert of.column_bytes == 32 * tile_m * 4
    most = max(map(len, owned)) * (cluster_k - 1) * of.column_bytes
    assert {name: size for name, _, size in of.smem_layout()}["cluster_sums"] == most


def test_clusters_need_a_target_that_has_them() -> None:
    narrow = skinny(cluster_k=2, **{**BASE, "tile_n": 32})
    narrow.check_target(SM90A)
    with pytest.raises(TargetError, match="with cluster"):
        narrow.check_target(SM120A)
    replace(narrow, cluster_k=1).check_target(SM120A)


def test_shared_memory_is_checked_against_the_target() -> None:
    fits_sm90 = skinny(**{**BASE, "tile_n": 224, "stages": 6})
    fits_sm90.check_target(SM90A)
    with pytest.raises(ArgumentError, match="stages"):
        fits_sm90.check_target(SM120A)
    with pytest.raises(TargetError):
        skinny(**BASE).check_target(replace(SM90A, features=SM90A.features - {"tma"}))


@given(
    dtype=st.sampled_from(("float16", "bfloat16")),
    group_size=st.sampled_from(GROUP_SIZES),
    has_zeros=st.booleans(),
    tile_m=st.sampled_from((8, 16, 32)),
    n_tiles=st.integers(1, 8),
    tile_k=st.sampled_from((128, 256, 512, 1024)),
    slice_k=st.sampled_from((1, 2, 4, 8, 16)),
)
def test_expected_bytes_are_those_of_the_boxes(slice_k: int, n_tiles: int, tile_k: int, **fields: Any) -> None:
    """What the full barrier counts is what the maps' loads deliver, and every slot is aligned for TMA."""
    assume(n_tiles * slice_k <= 16 and tile_k // 64 % slice_k == 0)
    of = skinny(tile_n=32 * n_tiles, tile_k=tile_k, slice_k=slice_k, stages=2, **fields)
    k64 = tile_k // 64
    qweight = np.zeros((4 * 16, 2048), np.uint8)
    options: dict[str, Any] = {"target": SM90A, "encoder": "codec"}
    boxes = 0
    if of.whole_rows:
        boxes += create_weight_tile_tma_desc(qweight, 16, k64, of.whole_rows, **options).expected_bytes
    if of.has_half_row:
        boxes += create_weight_tile_tma_desc(qweight, 16, k64, 1, half_rows=True, **options).expected_bytes
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
    flat = k64 * create_activation_tma_desc(x, of.tile_m, **options).expected_bytes
    deep = create_activation_tma_desc(x, of.tile_m, blocks=k64, **options).expected_bytes
    assert boxes + flat == boxes + deep == of.transaction_bytes == replace(of, deep_box=True).transaction_bytes
    for name, offset, size in of.smem_layout():
        assert offset % (8 if "barriers" in name else 128) == 0, name
        assert size % of.stages == 0 or name in ("slice_sums", "cluster_sums", "cluster_barrier")


@pytest.mark.parametrize("name", ["sm_90a", "sm_120a"])
def test_no_more_dependent_ctas_on_an_sm_than_ctas_per_sm(name: str) -> None:
    """With more than ctas_per_sm CTAs of two launches on one SM, another SM would have none."""
    target = get_target(name)
    for layer in (LinearShape(4096, 4096, 128, False, "float16"), LinearShape(8192, 57344, 128, False, "float16")):
        for chosen, _ in cheapest_first(skinny_times, Problem(layer, 1), imagined_gpu(target, 132)):
            config = replace(chosen, stages=2)
            asked = dependent_smem_bytes(config, target)
            assert config.smem_bytes <= asked <= target.smem_per_block_bytes
            assert target.smem_per_sm_bytes // (asked + SMEM_RESERVED_BYTES) == config.ctas_per_sm


@pytest.mark.parametrize("name", TARGETS)
def test_dump_configs(name: str) -> None:
    target = get_target(name)
    configs = dump_configs("skinny", target)
    assert bool(configs) == (target.has("tma") and target.has("mma_sync"))
    for config in configs:
        config.check_target(target)
    assert len({config.entry for config in configs}) == len(configs)
