"""MarlinConfig: its rules, its shared memory, and the bytes its barriers expect, against what descriptors deliver."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from marlin_builders import mma_sync

from cudatma.descriptor import create_activation_tma_desc, create_scale_tma_desc, create_weight_tma_desc
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, TargetError
from cudatma.kernels.marlin.config import LOAD_PATHS, MarlinConfig
from cudatma.kernels.marlin.problem import GROUP_SIZES
from cudatma.layout import Swizzle
from cudatma.target import TARGETS, get_target

BASE = mma_sync(tile_m=64, tile_n=128, tile_k=128, warps_n=4, stages=3)


@st.composite
def configs(draw: st.DrawFn) -> MarlinConfig:
    """Any config that its own rules allow."""
    group_size = draw(st.sampled_from(GROUP_SIZES))
    try:
        return mma_sync(
            dtype=draw(st.sampled_from(("float16", "bfloat16"))),
            group_size=group_size,
            has_zeros=draw(st.booleans()),
            tile_m=draw(st.sampled_from((8, 16, 32, 48, 64, 128))),
            tile_n=draw(st.sampled_from((64, 128, 256))),
            tile_k=draw(st.sampled_from((64, 128, 256))),
            warps_n=draw(st.sampled_from((1, 2, 4, 8))),
            slice_k=draw(st.sampled_from((1, 2, 4))),
            stages=draw(st.integers(2, 16)),
            weight_load_path=draw(st.sampled_from(LOAD_PATHS)),
            scale_load_path=draw(st.sampled_from(LOAD_PATHS)),
            activation_load_path=draw(st.sampled_from(LOAD_PATHS)),
            scale_on="epilogue" if group_size == -1 else draw(st.sampled_from(("weight", "accumulator"))),
        )
    except ArgumentError:
        assume(False)
        raise


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group_size", 96),
        ("weight_load_path", "plain"),
        ("activation_load_path", "gather"),
        ("activation_load_path", "ldg"),
        ("scale_on", "epilogue"),
        ("tile_n", 96),
        ("tile_k", 32),
        ("consumer_registers", 240),
        ("warps_n", 16),
        ("slice_k", 8),
        ("tile_m", 12),
        ("tile_m", 0),
        ("tile_m", 256),
        ("tile_m", 40),
        ("stages", 1),
        ("stages", 17),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        replace(BASE, **{field: value})
    assert caught.value.field == field
    assert caught.value.got == value


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tile_n": 256, "warps_n": 1}, "warps_n"),
        ({"tile_n": 64, "warps_n": 8}, "warps_n"),
        ({"tile_k": 64, "slice_k": 2}, "slice_k"),
        ({"warps_n": 2, "consumer_registers": 232}, "consumer_registers"),
        ({"tile_n": 256, "tile_k": 256, "warps_n": 8, "slice_k": 4}, "slice_k"),
        ({"group_size": -1}, "scale_on"),
    ],
)
def test_fields_that_do_not_go_together(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        replace(BASE, **changes)
    assert caught.value.field == field


def test_an_unknown_dtype() -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError)):
        replace(BASE, dtype="float32")


@given(configs())
def test_shared_memory_has_no_overlap_and_no_gap_at_the_end(config: MarlinConfig) -> None:
    layout = config.smem_layout()
    for (_, offset, size), (_, following, _) in pairwise(layout):
        assert offset + size <= following
    assert layout[0][1] == 0
    assert config.smem_bytes == max(offset + size for _, offset, size in layout)
    assert len({name for name, _, _ in layout}) == len(layout)


@given(configs())
def test_every_slot_is_aligned_for_what_writes_it(config: MarlinConfig) -> None:
    """PTX ISA, cp.async.bulk.tensor: a destination is aligned to 128 bytes, in the 128-byte swizzle to 1024; 16 for
    vector accesses and stmatrix, 8 for mbarriers."""
    offsets = {name: offset for name, offset, _ in config.smem_layout()}
    k64 = config.tile_k // 64
    for stage in range(config.stages):
        box = config.tile_m * 128
        for i in range(k64):
            assert (offsets["activations"] + stage * config.activation_stage_bytes + i * box) % 1024 == 0
        for i in range(config.tile_n // 64):
            assert (offsets["weights"] + stage * config.weight_stage_bytes + i * k64 * 2048) % 128 == 0
        if config.has_stage_scales:
            assert (offsets.get("scales", 0) + stage * config.scale_stage_bytes) % 128 == 0
        if config.has_stage_zeros:
            assert (offsets.get("zeros", 0) + stage * config.zero_slot_bytes) % 128 == 0
    assert config.zero_slot_bytes >= config.zero_stage_bytes
    assert (offsets["staging"] | config.staging_bytes | config.staging_pitch_bytes) % 16 == 0
    assert offsets["slice_sums"] % 16 == 0
    assert (offsets["full_barriers"] | offsets["empty_barriers"]) % 8 == 0


def expected_bytes(config: MarlinConfig) -> int:
    """What the barrier of a stage will count: boxes of descriptors over arrays of this config's operands."""
    k, n, m = 256, 256, 256
    dtype, total = activation_type(config.dtype).numpy, 0
    if config.weight_load_path == "tma":
        qweight = np.zeros((n // 64 * k // 64, 2048), np.uint8)
        box = create_weight_tma_desc(qweight, config.tile_k // 64, encoder="codec")
        total += box.expected_bytes * (config.tile_n // 64)
    if config.has_stage_scales and config.scale_load_path == "tma":
        groups = config.groups_per_stage
        tables = [np.zeros((k // config.group_size, n), dtype)]
        tables += [np.zeros((k // config.group_size, n), np.uint8)] * config.has_stage_zeros
        boxes = [create_scale_tma_desc(t, config.tile_n, groups, whole_column=False, encoder="codec") for t in tables]
        total += sum(box.expected_bytes for box in boxes)
    if config.activation_load_path == "tma":
        x = np.zeros((m, k), dtype)
        box = create_activation_tma_desc(x, config.tile_m, encoder="codec")
        assert box.spec.swizzle == Swizzle.B128
        assert box.footprint_bytes == box.expected_bytes == config.tile_m * 128
        total += box.expected_bytes * (config.tile_k // 64)
    return total


@given(configs())
def test_a_stage_expects_what_its_boxes_deliver(config: MarlinConfig) -> None:
    assert config.transaction_bytes == expected_bytes(config)
    assert config.uses_tma == (config.transaction_bytes > 0)
    assert config.transaction_bytes < 1 << 20, "mbarrier's tx-count is limited to 2^20 - 1"


@given(configs())
def test_a_stages_bytes_are_the_parts_of_its_slot(config: MarlinConfig) -> None:
    parts = (
        config.weight_stage_bytes,
        config.activation_stage_bytes,
        config.scale_stage_bytes,
        config.zero_stage_bytes,
    )
    assert sum(size for _, size in config.stage_layout()) == sum(parts)
    if config.all_tma:
        assert config.transaction_bytes == sum(parts)
    assert parts[0] == config.tile_n * config.tile_k * 4 // 8
    assert parts[1] == config.tile_m * config.tile_k * 16 // 8


@given(configs())
def test_arrivals_and_threads(config: MarlinConfig) -> None:
    """One arrival for all of TMA, one of each producer thread where cp.async loads."""
    scales = {config.scale_load_path} if config.group_size != -1 else set()
    stage = {config.weight_load_path, config.activation_load_path} | scales
    by_hand = "cp_async" in stage
    producers = 32 if config.all_tma else 128
    assert config.full_arrivals == ("tma" in stage) + by_hand * producers
    assert config.full_arrivals >= 1
    assert config.threads == 32 * config.warps_n * config.slice_k + producers <= 1024


@given(configs())
def test_the_entry_is_a_c_identifier(config: MarlinConfig) -> None:
    assert config.entry.isidentifier()
    assert config.entry.isascii()


def test_entries_tell_operands_and_tiles_apart() -> None:
    changed = [
        {"dtype": "bfloat16"},
        {"group_size": 64},
        {"has_zeros": True},
        {"tile_m": 32},
        {"stages": 4},
        {"weight_load_path": "cp_async"},
        {"scale_load_path": "cp_async"},
        {"activation_load_path": "cp_async"},
        {"warps_n": 8, "consumer_registers": 232},
        {"warps_n": 8},
    ]
    entries = [BASE.entry, *(replace(BASE, **change).entry for change in changed)]  # type: ignore[arg-type]
    assert len(set(entries)) == len(entries)


def test_check_target() -> None:
    big = replace(BASE, stages=8)
    assert 99 * 1024 < big.smem_bytes <= 227 * 1024
    big.check_target(get_target("sm_90a"))
    with pytest.raises(ArgumentError, match="fewer stages"):
        big.check_target(get_target("sm_120a"))
    with pytest.raises(TargetError, match="setmaxnreg"):
        replace(BASE, warps_n=8, consumer_registers=232).check_target(get_target("sm_90"))


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_target_takes_a_small_spec_or_says_why(name: str) -> None:
    target = TARGETS[name]
    if all(target.has(f) for f in ("tma", "shared_cta_destination", "mma_sync", "stmatrix", "griddepcontrol")):
        BASE.check_target(target)
    else:
        with pytest.raises(CudaTmaError):
            BASE.check_target(target)
