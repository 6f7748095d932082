"""Rules of the configs of the data movement kernels, and shared memory of the tile copy."""

from __future__ import annotations

from typing import Any

import pytest

from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.data_movement.ragged_copy import RaggedCopyConfig
from cudatma.kernels.data_movement.tile_copy import TileCopyConfig
from cudatma.kernels.data_movement.transpose import TransposeConfig
from cudatma.target import get_target

TRANSPOSE = {"element_bytes": 4, "squares_y": 2, "squares_x": 2, "stages": 3, "transposed_tiles": 2}


@pytest.mark.parametrize(
    ("kind", "wrong", "field"),
    [
        *((TransposeConfig, TRANSPOSE | {name: value}, name) for name, value in (
            ("element_bytes", 3), ("squares_y", 0), ("squares_x", 9), ("stages", 0), ("transposed_tiles", 17),
            ("warps", 32), ("raster_group", 0))),
        *((kind, {"element_bytes": 4} | {name: value}, name)
          for kind in (RaggedCopyConfig, TileCopyConfig) for name, value in (
            ("element_bytes", 3), ("box_rows", 257), ("box_columns", 6), ("stages", 1))),
        (TileCopyConfig, {"element_bytes": 4, "box_columns": 0}, "box_columns"),
        (RaggedCopyConfig, {"element_bytes": 4, "stages": 5}, "maps"),
    ],
)  # fmt: skip
def test_a_config_that_the_kernel_cannot_run(kind: Any, wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        kind(**wrong)
    assert caught.value.field == field


def test_shared_memory_of_the_tile_copy() -> None:
    config = TileCopyConfig(2, box_rows=32, box_columns=128, stages=3)
    assert config.smem_layout() == [("tiles", 0, 3 * 32 * 128 * 2), ("barriers", 3 * 32 * 128 * 2, 2 * 3 * 8)]
    assert config.smem_bytes == 3 * 32 * 128 * 2 + 48
    assert [size for _, size in config.stage_layout()] == [32 * 128 * 2]
    with pytest.raises(ArgumentError, match="at most 6 stages"):
        TileCopyConfig(4, stages=7).check_target(get_target("sm_120a"))


def test_the_ragged_copy_edits_tensor_maps() -> None:
    with pytest.raises(TargetError, match="tensormap_replace"):
        RaggedCopyConfig(2).check_target(get_target("sm_90"))
