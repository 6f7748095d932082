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
from cudatma.kernels.data_movement.rows import RowsSpec
from cudatma.kernels.data_movement.specs import PLAIN, RUN, WINDOW, PlainSpec, RunSpec, WindowSpec
from cudatma.kernels.data_movement.transpose import TransposeSpec

SLOT = 16384
#: Name -> template, spec, target; together they have every branch of the templates.
SOURCES: dict[str, tuple[str, Any, str]] = {
    "window_copy": (WINDOW, WindowSpec("copy", 2, SLOT, 6, 3, "evict_first", "evict_first"), "sm_90a"),
    "window_add": (WINDOW, WindowSpec("add", 1, SLOT, 3, 1), "sm_120a"),
    "run_copy": (RUN, RunSpec("copy", "b8", SLOT, 6, 3), "sm_90a"),
    "run_max": (RUN, RunSpec("max", "bf16", SLOT, 6, 3, "evict_last"), "sm_90a"),
    "plain_copy": (PLAIN, PlainSpec(4, 3, 32), "sm_90a"),
    "transpose_1": ("kernels/transpose.cu.j2", TransposeSpec(1, 1, 1, 3, 2), "sm_90a"),
    "transpose_2": ("kernels/transpose.cu.j2", TransposeSpec(2, 2, 1, 3, 2), "sm_90a"),
    "transpose_8": ("kernels/transpose.cu.j2", TransposeSpec(8, 4, 2, 2, 1), "sm_120a"),
    "gather_table": ("kernels/gather_boxes.cu.j2", GatherSpec(3, "table", SLOT, 6, 3), "sm_90a"),
    "gather_grid": ("kernels/gather_boxes.cu.j2", GatherSpec(2, "grid", SLOT, 6, 3), "sm_90a"),
    "im2col": ("kernels/im2col.cu.j2", Im2colCopySpec(4, SLOT, 6, 3), "sm_90a"),
    "broadcast": ("kernels/broadcast.cu.j2", BroadcastSpec(4, SLOT, 6, 3), "sm_90a"),
    "prefetch_boxes": ("kernels/prefetch.cu.j2", PrefetchSpec(2), "sm_90a"),
    "prefetch_run": ("kernels/prefetch.cu.j2", PrefetchSpec(0), "sm_90a"),
    "rows_gather": ("kernels/rows.cu.j2", RowsSpec("gather", SLOT, 6, 3), "sm_120a"),
    "rows_scatter": ("kernels/rows.cu.j2", RowsSpec("scatter", SLOT, 6, 3), "sm_100a"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_source(golden: Callable[[str, str], None], name: str) -> None:
    template, spec, target = SOURCES[name]
    text = render(template, spec, target)
    # The primitives before it are in the golden header.
    opening, _, _ = text.partition("namespace cudatma {")
    kernel = text[text.index("using namespace cudatma;") :]
    golden(f"data_movement/{name}.cu", f"{opening}{kernel}")
