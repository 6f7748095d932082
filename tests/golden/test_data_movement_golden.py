"""The sources of the operations over arrays, as text that is reviewed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cudatma.build.render import render
from cudatma.kernels.data_movement.broadcast import BroadcastSpec
from cudatma.kernels.data_movement.gather import GatherSpec
from cudatma.kernels.data_movement.im2col import Im2colCopySpec
from cudatma.kernels.data_movement.prefetch import PrefetchSpec
from cudatma.kernels.data_movement.ragged_copy import RaggedCopySpec
from cudatma.kernels.data_movement.rows import RowsSpec
from cudatma.kernels.data_movement.specs import PLAIN, RUN, WINDOW, PlainSpec, RunSpec, WindowSpec
from cudatma.kernels.data_movement.tile_copy import TileCopySpec
from cudatma.kernels.data_movement.transpose import TransposeSpec

SLOT = 16384
#: Name -> template, spec, target.
SOURCES: dict[str, tuple[str, Any, str]] = {
    "window_copy": (WINDOW, WindowSpec("copy", 2, SLOT, 6, 3, "evict_first", "evict_first"), "sm_90a"),
    "run_copy": (RUN, RunSpec("copy", "b8", SLOT, 6, 3), "sm_90a"),
    "plain_copy": (PLAIN, PlainSpec(4, 3, 32), "sm_90a"),
    "transpose": ("kernels/transpose.cu.j2", TransposeSpec(1, 1, 1, 3, 2), "sm_90a"),
    "gather_boxes": ("kernels/gather_boxes.cu.j2", GatherSpec(3, "table", SLOT, 6, 3), "sm_90a"),
    "im2col": ("kernels/im2col.cu.j2", Im2colCopySpec(4, SLOT, 6, 3), "sm_90a"),
    "broadcast": ("kernels/broadcast.cu.j2", BroadcastSpec(4, SLOT, 6, 3), "sm_90a"),
    "prefetch": ("kernels/prefetch.cu.j2", PrefetchSpec(2), "sm_90a"),
    "rows": ("kernels/rows.cu.j2", RowsSpec("gather", SLOT, 6, 3), "sm_100a"),
    "ragged_copy": ("kernels/ragged_copy.cu.j2", RaggedCopySpec(2), "sm_90a"),
    "tile_copy": ("kernels/tile_copy.cu.j2", TileCopySpec(4, box_rows=32, stages=3), "sm_90a"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_source(golden: Callable[[str, str], None], name: str) -> None:
    golden(f"{name}.cu", render(*SOURCES[name]))
