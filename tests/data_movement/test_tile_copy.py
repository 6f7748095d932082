"""The spec of the tile copy: its rules, and what it says about shared memory."""

from __future__ import annotations

from typing import Any

import pytest

from cudatma.errors import ArgumentError
from cudatma.kernels.data_movement.tile_copy import TEMPLATE, TileCopySpec, dump_specs
from cudatma.kernels.registry import kernel
from cudatma.target import TARGETS, get_target


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"element_bytes": 3}, "element_bytes"),
        ({"element_bytes": 4, "box_rows": 257}, "box_rows"),
        ({"element_bytes": 4, "box_columns": 0}, "box_columns"),
        ({"element_bytes": 4, "box_columns": 6}, "box_columns"),
        ({"element_bytes": 4, "stages": 1}, "stages"),
    ],
)
def test_a_spec_that_the_kernel_cannot_run(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        TileCopySpec(**wrong)
    assert caught.value.field == field


def test_shared_memory() -> None:
    spec = TileCopySpec(2, box_rows=32, box_columns=128, stages=3)
    assert spec.smem_layout() == [("tiles", 0, 3 * 32 * 128 * 2), ("barriers", 3 * 32 * 128 * 2, 2 * 3 * 8)]
    assert spec.smem_bytes == 3 * 32 * 128 * 2 + 48
    assert [size for _, size in spec.stage_layout()] == [32 * 128 * 2]
    with pytest.raises(ArgumentError, match="at most 6 stages"):
        TileCopySpec(4, stages=7).check_target(get_target("sm_120a"))


@pytest.mark.parametrize("target", TARGETS)
def test_the_representative_spec_runs_on_every_target(target: str) -> None:
    specs = dump_specs(get_target(target))
    assert kernel("tile_copy").specs(target) == specs
    assert kernel("tile_copy").template == TEMPLATE
    for spec in specs:
        spec.check_target(get_target(target))
    assert len(specs) == 1
