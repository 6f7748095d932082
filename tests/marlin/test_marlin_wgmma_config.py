"""MarlinConfig and its tiles: rules, shared memory, expected bytes, and what setmaxnreg can give."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from marlin_builders import mma_sync, skinny, wgmma

from cudatma.descriptor import create_activation_tma_desc, create_scale_tma_desc, create_weight_tile_tma_desc
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, ArgumentTypeError, TargetError
from cudatma.kernels.marlin.candidates import WGMMA_TILES, dump_configs, fitted
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.problem import GROUP_SIZES, LinearShape
from cudatma.layout import Swizzle
from cudatma.target import get_target

SM90A = get_target("sm_90a")
BASE = wgmma(tile_m=64, tile_n=128, tile_k=128, warpgroups=2, stages=4)
WIDE = wgmma(
    tile_m=256,
    tile_n=128,
    tile_k=64,
    warpgroups=2,
    stages=5,
    mmas_per_commit=1,
    commits_in_flight=3,
    consumer_registers=232,
)


@st.composite
def configs(draw: st.DrawFn) -> MarlinConfig:
    """Any config that its own rules allow."""
    stack, warpgroups = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    mmas_per_commit, commits_in_flight = draw(st.sampled_from(((1, 3), (2, 1), (1, 1))))
    try:
        return wgmma(
            dtype=draw(st.sampled_from(("float16", "bfloat16"))),
            group_size=draw(st.sampled_from(GROUP_SIZES)),
            has_zeros=draw(st.booleans()),
            tile_m=draw(st.integers(1, 32 // stack)) * 8,
            tile_n=64 * warpgroups * stack,
            tile_k=draw(st.sampled_from((64, 128, 256))),
            warpgroups=warpgroups,
            stages=draw(st.integers(2, 16)),
            cluster_n=draw(st.integers(1, 2)),
            mmas_per_commit=mmas_per_commit,
            commits_in_flight=commits_in_flight,
            consumer_registers=draw(st.sampled_from((0, 0, 152, 232))),
            slice_k=draw(st.sampled_from((1, 2))),
        )
    except ArgumentError:
        assume(False)
        raise


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group_size", 96),
        ("tile_k", 32),
        ("warpgroups", 0),
        ("warpgroups", 4),
        ("slice_k", 3),
        ("tile_n", 96),
        ("cluster_n", 4),
        ("mmas_per_commit", 3),
        ("commits_in_flight", 0),
        ("commits_in_flight", 2),
        ("consumer_registers", 236),
        ("scale_form", "somehow"),
        ("scale_form", True),
        ("tile_m", 12),
        ("tile_m", 0),
        ("tile_m", 264),
        ("tile_m", 64.0),
        ("stages", 1),
        ("stages", 17),
        ("cluster_k", 0),
        ("cluster_k", 9),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        replace(BASE, **{field: value})
    assert (caught.value.field, caught.value.got) == (field, value)


@pytest.mark.parametrize(
    ("changes", "field", "why"),
    [
        ({"tile_m": 24, "cluster_n": 2}, "tile_m", "swizzle"),
        ({"warpgroups": 3}, "tile_n", "192 or 384"),
        ({"warpgroups": 2, "slice_k": 2}, "warpgroups * slice_k", "at most 3"),
        ({"tile_k": 64, "slice_k": 2}, "slice_k", "multiple of 64"),
        (
            {"warpgroups": 1, "tile_n": 64, "slice_k": 2, "commits_in_flight": 3},
            "commits_in_flight",
            "a stage has 2 commit groups",
        ),
        ({"tile_m": 200, "tile_n": 256}, "tile_m", "accumulators"),
        ({"tile_m": 256}, "consumer_registers", "setmaxnreg"),
        ({"tile_m": 128, "tile_n": 256}, "consumer_registers", "setmaxnreg"),
        ({"consumer_registers": 240}, "consumer_registers", "waits forever"),
        ({"warpgroups": 3, "tile_n": 192, "consumer_registers": 160}, "consumer_registers", "waits forever"),
        ({"tile_m": 128, "consumer_registers": 64}, "consumer_registers", "spill"),
        # The loop's body holds too few groups for ptxas to keep the fragments of those in flight apart.
        ({"tile_k": 64, "mmas_per_commit": 4}, "commits_in_flight", "a stage has 1 commit group"),
        ({"tile_k": 64, "mmas_per_commit": 2, "commits_in_flight": 3}, "commits_in_flight", "2 commit groups"),
        ({"tile_k": 128, "mmas_per_commit": 4, "commits_in_flight": 3}, "commits_in_flight", "increase tile_k"),
        ({"cluster_k": 2, "cluster_n": 2}, "cluster_k", "share activations, or divide K"),
    ],
)
def test_fields_that_do_not_go_together(changes: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(ArgumentError, match=why) as caught:
        replace(BASE, **changes)
    assert caught.value.field == field


SKINNY = skinny(tile_m=8, tile_n=64, tile_k=256, stages=4)
MMA_SYNC = mma_sync(tile_m=16, tile_n=64, tile_k=128, stages=4, warps_n=4)


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (BASE, "version", "wmma"),
        (BASE, "deep_box", True),
        (BASE, "ctas_per_sm", 2),
        (BASE, "warps_n", 4),
        (BASE, "scale_on", "weight"),
        (BASE, "scale_load_path", "cp_async"),
        (SKINNY, "warpgroups", 1),
        (SKINNY, "cluster_n", 2),
        (SKINNY, "consumer_registers", 232),
        (MMA_SYNC, "cluster_k", 2),
        (MMA_SYNC, "pingpong", True),
        (MMA_SYNC, "scale_form", "as_stored"),
        (MMA_SYNC, "mmas_per_commit", 1),
    ],
)
def test_a_kernel_refuses_fields_of_the_others(base: MarlinConfig, field: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        replace(base, **{field: value})
    assert (caught.value.field, caught.value.got) == (field, value)


def test_a_workspace_holds_the_sums_of_a_tile() -> None:
    tall: dict[str, Any] = {"mmas_per_commit": 1, "commits_in_flight": 3, "consumer_registers": 152, "stages": 2}
    with pytest.raises(ArgumentError, match="at most 168") as caught:
        wgmma(tile_m=176, tile_k=64, warpgroups=3, **tall)
    assert caught.value.field == "tile_m"
    assert wgmma(tile_m=176, tile_k=64, warpgroups=3, cluster_k=2, **tall).partial_bytes == 0


def test_an_unknown_dtype() -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError)):
        replace(BASE, dtype="float32")


@given(configs())
def test_the_registers_that_setmaxnreg_assigns_exist(config: MarlinConfig) -> None:
    """PTX ISA, setmaxnreg: inc waits until the CTA's register pool has them."""
    launched = min(255, 65536 // config.threads) // 8 * 8 * config.threads
    if config.consumer_registers:
        assert config.producer_warps == 4
        taken = 128 * config.producer_registers + 32 * config.consumer_warps * config.consumer_registers
        assert taken <= max(launched, 65536 // config.threads // 8 * 8 * config.threads)
    assert config.threads <= 1024


@given(configs())
def test_the_released_slot_is_read_by_no_wgmma(config: MarlinConfig) -> None:
    """A model of the loop: groups are committed in order, and all but the last
    commits_in_flight are complete after a wait."""
    committed: list[int] = []
    for stage in range(3):
        for k64 in range(config.k64_per_warpgroup):
            committed += [stage] * (4 // config.mmas_per_commit)
            running = committed[len(committed) - config.commits_in_flight :]
            if k64 == config.release_k64:
                assert stage - 1 not in running
                break
        else:
            pytest.fail("the slot is never released")
        committed += [stage] * (4 // config.mmas_per_commit) * (config.k64_per_warpgroup - 1 - config.release_k64)


@given(configs())
def test_shared_memory_has_no_overlap_and_is_aligned(config: MarlinConfig) -> None:
    """PTX ISA, cp.async.bulk.tensor: a destination is aligned to 128 bytes, in the 128-byte swizzle to 1024."""
    layout = config.smem_layout()
    offsets = {name: offset for name, offset, _ in layout}
    for (_, offset, size), (_, following, _) in pairwise(layout):
        assert offset + size <= following
    assert config.smem_bytes == max(offset + size for _, offset, size in layout)
    for stage in range(config.stages):
        for i in range(config.tile_k // 64):
            for rank in range(config.cluster):
                rows = i * config.tile_m + rank * config.loaded_m
                assert (offsets["activations"] + stage * config.activation_stage_bytes + rows * 128) % 1024 == 0
        assert (offsets["weights"] + stage * config.weight_stage_bytes) % 128 == 0
        assert (offsets.get("scales", 0) + stage * config.scale_stage_bytes) % 128 == 0
        assert (offsets.get("zeros", 0) + stage * config.zero_slot_bytes) % 128 == 0
    assert config.zero_slot_bytes >= config.zero_stage_bytes
    assert (offsets["staging"] | config.staging_bytes | config.staging_pitch_bytes) % 16 == 0
    assert (offsets["full_barriers"] | offsets["empty_barriers"]) % 8 == 0


@given(configs())
def test_the_staging_rows_hold_a_chunk_and_chunks_make_up_a_tile(config: MarlinConfig) -> None:
    """At most 20 KB of all warpgroups, of pairs of 8 rows or of 8 alone."""
    assert config.staging_rows % min(16, config.tile_m) == 0
    assert config.staging_bytes == config.staging_rows * (64 * 2 * config.stack + 16)
    most = 20480 if config.tile_m <= 128 else 10240
    assert config.staging_rows <= 16 or config.warpgroups * config.staging_bytes <= most
    assert min(config.tile_m, 16) <= config.staging_rows <= config.tile_m


@given(st.integers(1, 20), st.integers(1, 3), st.integers(2, 8))
def test_the_ctas_of_a_cluster_own_all_rows_and_hold_the_sums_of_each_other(
    eights: int, warpgroups: int, cluster_k: int
) -> None:
    of = wgmma(
        tile_m=8 * eights,
        tile_n=64 * warpgroups,
        tile_k=64,
        warpgroups=warpgroups,
        stages=2,
        cluster_k=cluster_k,
    )
    owned = [range(8 * eights)[rank * of.own_rows : (rank + 1) * of.own_rows] for rank in range(cluster_k)]
    assert sum(map(len, owned)) == of.tile_m
    # Whole fragments, as even as they can be; from every other CTA fp32 sums of each element.
    assert len(owned[0]) % 8 == 0
    assert len(owned[0]) < of.tile_m / cluster_k + 8
    layout = {name: size for name, _, size in of.smem_layout()}
    assert layout["cluster_sums"] == (cluster_k - 1) * len(owned[0]) * 64 * warpgroups * 4
    assert (layout["cluster_barrier"], of.partial_bytes) == (8, 0)
    assert of.launch_cluster == cluster_k


def test_chunks_of_staging_rows() -> None:
    """As many rows as the limit allows: a row of 64 columns takes 144 bytes, one of 128 takes 272."""
    tiles = ((8, 1, 1), (24, 1, 1), (40, 1, 2), (64, 1, 2), (88, 2, 1), (96, 2, 2), (64, 3, 1))
    found = [
        wgmma(tile_m=m, tile_n=64 * groups * stack, tile_k=64, warpgroups=groups, stages=2).staging_rows
        for m, groups, stack in tiles
    ]
    assert found == [8, 16, 32, 64, 64, 32, 32]
    assert WIDE.staging_rows == 32
    assert replace(WIDE, warpgroups=3, tile_n=192, consumer_registers=152, tile_m=160).staging_rows == 16


@given(configs())
def test_a_stage_expects_what_its_boxes_deliver(config: MarlinConfig) -> None:
    k, n, m = 256, 256, 256
    dtype = activation_type(config.dtype).numpy
    weight = create_weight_tile_tma_desc(
        np.zeros((n // 64 * k // 64, 2048), np.uint8),
        k // 64,
        config.tile_k // 64,
        config.tile_n // 64,
        encoder="codec",
    )
    assert weight.footprint_bytes == weight.expected_bytes == config.weight_stage_bytes
    total = weight.expected_bytes
    if config.has_stage_scales:
        tables = [np.zeros((k // config.group_size, n), dtype)]
        tables += [np.zeros((k // config.group_size, n), np.uint8)] * config.has_stage_zeros
        groups = config.groups_per_stage
        boxes = [create_scale_tma_desc(t, config.tile_n, groups, whole_column=False, encoder="codec") for t in tables]
        total += sum(box.expected_bytes for box in boxes)
    x = create_activation_tma_desc(np.zeros((m, k), dtype), config.loaded_m, encoder="codec")
    assert x.spec.swizzle == Swizzle.B128
    total += x.expected_bytes * (config.tile_k // 64) * config.cluster
    assert config.transaction_bytes == total < 1 << 20, "mbarrier's tx-count is limited to 2^20 - 1"


@given(configs())
def test_the_entry_is_a_c_identifier(config: MarlinConfig) -> None:
    assert config.entry.isidentifier()


def test_entries_tell_operands_and_tiles_apart() -> None:
    changed: list[dict[str, Any]] = [
        {"dtype": "bfloat16"},
        {"group_size": 64},
        {"group_size": -1},
        {"has_zeros": True},
        {"tile_m": 32},
        {"tile_k": 256},
        {"stages": 5},
        {"tile_n": 256},
        {"warpgroups": 3, "tile_n": 192},
        {"warpgroups": 1, "tile_n": 64, "slice_k": 2},
        {"cluster_n": 2},
        {"mmas_per_commit": 1},
        {"commits_in_flight": 3},
        {"consumer_registers": 232},
        {"cluster_k": 2},
        {"cluster_k": 3},
    ]
    entries = [BASE.entry, *(replace(BASE, **change).entry for change in changed)]
    assert len(set(entries)) == len(entries)


def test_check_target() -> None:
    BASE.check_target(SM90A)
    for name in ("sm_90", "sm_100a", "sm_120a"):
        with pytest.raises(TargetError, match="wgmma"):
            BASE.check_target(get_target(name))
    with pytest.raises(ArgumentError, match="fewer stages"):
        replace(WIDE, stages=7).check_target(SM90A)


# ---- The tiles that candidates are made from


def test_every_tile_has_three_stages_unless_scales_take_their_memory() -> None:
    """A ring of two loads nothing while a stage is computed. Three tiles have stages of 64 and 72 KB: with small groups
    shared memory does not hold the scales and zero points of a third stage."""
    shorter = set()
    for tile in WGMMA_TILES:
        for group_size, has_zeros in itertools.product(GROUP_SIZES, (False, True)):
            layer = LinearShape(8192, 28672, group_size, has_zeros, "float16")
            for size in (tile.min_m, tile.max_m):
                made = fitted(tile.config(layer, size), SM90A)
                assert made.stages <= tile.stages
                if made.stages < 3:
                    shorter.add((size, made.tile_n, made.tile_k, group_size, has_zeros))
                    assert replace(made, stages=3).smem_bytes > SM90A.smem_per_block_bytes
    assert shorter == {
        (64, 256, 256, 32, True), (256, 128, 128, 32, False), (256, 128, 128, 32, True), (256, 128, 128, 64, True),
        (128, 64, 256, 32, False), (128, 64, 256, 32, True), (128, 64, 256, 64, True),
    }  # fmt: skip


def test_dump_specs_hold_every_tile_of_the_list() -> None:
    """Each with its largest tile_m, and with 40, or its least where that is more."""
    dumped = dump_configs("wgmma", SM90A)
    assert len({config.entry for config in dumped}) == len(dumped)
    fields = attrgetter(
        "tile_n", "tile_k", "cluster_n", "warpgroups", "slice_k", "mmas_per_commit", "commits_in_flight"
    )
    found = {(config.tile_m, *fields(config)) for config in dumped}
    layer = LinearShape(8192, 28672, 128, False, "float16")
    wanted = {
        (size, *fields(tile.config(layer, size))) for tile in WGMMA_TILES for size in (max(40, tile.min_m), tile.max_m)
    }
    assert wanted <= found
    assert {shape[1:] for shape in found} == {shape[1:] for shape in wanted}, "no tile that is not in the list"
    assert {config.cluster_k for config in dumped} > {1}
    assert {config.group_size for config in dumped} == set(GROUP_SIZES)
    assert {(config.dtype, config.has_zeros) for config in dumped} >= {("bfloat16", True), ("float16", True)}
    assert dump_configs("wgmma", get_target("sm_120a")) == []
