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
from cudatma.kernels.marlin.config import Feeds, Layer, choose
from cudatma.kernels.marlin.problem import schedule
from cudatma.kernels.marlin.stage import GROUP_SIZES
from cudatma.kernels.marlin.strip_config import choose_strip, dump_specs, strip_serves
from cudatma.kernels.marlin.strip_spec import StripSpec
from cudatma.target import TARGETS, get_target

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
        ("blocks_per_sm", 3),
    ],
)  # fmt: skip
def test_rules(field: str, value: object) -> None:
    with pytest.raises((ArgumentError, TypeError)) as raised:
        StripSpec(**{**BASE, field: value})
    assert field in str(raised.value)


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
    boxes += depth * create_activation_tma_desc(x, of.block_m, **options).expected_bytes
    assert boxes == of.transaction_bytes
    for name, offset, size in of.smem_layout():
        assert offset % (8 if "barriers" in name else 128) == 0, name
        assert size % of.stages == 0 or name == "depth_reduction"


@given(
    k=st.integers(1, 40000), n=st.integers(1, 200000), m=st.integers(1, 32), processors=st.integers(1, 300),
    group_size=st.sampled_from(GROUP_SIZES), has_zeros=st.booleans(), target=st.sampled_from((SM90A, SM120A)),
)  # fmt: skip
def test_every_layer_gets_a_ring_that_fits(
    k: int, n: int, m: int, processors: int, group_size: int, has_zeros: bool, target: Any
) -> None:
    layer = Layer(k, n, group_size, has_zeros, "float16")
    choice = choose_strip(layer, m, target, processors)
    spec = choice.spec
    spec.check_target(target)
    work = schedule(spec, m, n, k, processors)
    assert work.blocks == work.tiles_m * work.tiles_n
    assert work.partial_blocks == 0
    assert (work.tiles_n - 1) * spec.block_n < n <= work.tiles_n * spec.block_n


def test_who_serves() -> None:
    wide, narrow = Layer(8192, 28672, 128, False, "float16"), Layer(8192, 1024, 128, False, "float16")
    assert strip_serves(wide, 16, SM90A, 132, Feeds())
    assert not strip_serves(wide, 17, SM90A, 132, Feeds())  # wgmma's
    assert strip_serves(wide, 32, SM120A, 188, Feeds())
    assert not strip_serves(wide, 33, SM120A, 188, Feeds())
    assert not strip_serves(narrow, 1, SM90A, 132, Feeds())  # most of the card would have no strip
    assert not strip_serves(wide, 1, SM90A, 132, Feeds(activation="gather"))
    assert isinstance(choose(wide, 1, SM90A, 132, Feeds()).spec, StripSpec)


@pytest.mark.parametrize("name", TARGETS)
def test_dump_specs(name: str) -> None:
    target = get_target(name)
    specs = dump_specs(target)
    assert bool(specs) == (target.has("tma") and target.has("mma_sync"))
    for spec in specs:
        spec.check_target(target)
    assert len({spec.entry for spec in specs}) == len(specs)
