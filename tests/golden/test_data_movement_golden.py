"""The sources of the operations over arrays, as text that is reviewed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cudatma.build.render import render
from cudatma.kernels.data_movement.broadcast import BroadcastConfig
from cudatma.kernels.data_movement.configs import PLAIN, RUN, WINDOW, PlainConfig, RunConfig, WindowConfig
from cudatma.kernels.data_movement.gather import GatherConfig
from cudatma.kernels.data_movement.im2col import Im2colCopyConfig
from cudatma.kernels.data_movement.prefetch import PrefetchConfig
from cudatma.kernels.data_movement.ragged_copy import RaggedCopyConfig
from cudatma.kernels.data_movement.rows import RowsConfig
from cudatma.kernels.data_movement.tile_copy import TileCopyConfig
from cudatma.kernels.data_movement.transpose import TransposeConfig

SLOT = 16384
#: Name -> template, config, target.
SOURCES: dict[str, tuple[str, Any, str]] = {
    "window_copy": (WINDOW, WindowConfig("copy", 2, SLOT, 6, 3, "evict_first", "evict_first"), "sm_90a"),
    "run_copy": (RUN, RunConfig("copy", "b8", SLOT, 6, 3), "sm_90a"),
    "plain_copy": (PLAIN, PlainConfig(4, 3, 32), "sm_90a"),
    "transpose": ("kernels/transpose.cu.j2", TransposeConfig(1, 1, 1, 3, 2), "sm_90a"),
    "gather_boxes": ("kernels/gather_boxes.cu.j2", GatherConfig(3, "table", SLOT, 6, 3), "sm_90a"),
    "im2col": ("kernels/im2col.cu.j2", Im2colCopyConfig(4, SLOT, 6, 3), "sm_90a"),
    "broadcast": ("kernels/broadcast.cu.j2", BroadcastConfig(4, SLOT, 6, 3), "sm_90a"),
    "prefetch": ("kernels/prefetch.cu.j2", PrefetchConfig(2), "sm_90a"),
    "rows": ("kernels/rows.cu.j2", RowsConfig("gather", SLOT, 6, 3), "sm_100a"),
    "ragged_copy": ("kernels/ragged_copy.cu.j2", RaggedCopyConfig(2), "sm_90a"),
    "tile_copy": ("kernels/tile_copy.cu.j2", TileCopyConfig(4, box_rows=32, stages=3), "sm_90a"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_source(golden: Callable[[str, str], None], name: str) -> None:
    golden(f"{name}.cu", render(*SOURCES[name]))
