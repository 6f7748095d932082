"""The exported header and the example kernel, as text that is reviewed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from cudatma.build.render import render
from cudatma.kernels.data_movement.ragged_copy import RaggedCopySpec
from cudatma.tools.export_header import export_header

Golden = Callable[[str, str], None]
KernelSource = Callable[[str, Any, str], str]


def test_the_header(golden: Golden) -> None:
    golden("cudatma_sm_90a.cuh", export_header("sm_90a"))


def test_the_header_of_another_target(golden: Golden) -> None:
    """Lines that it has beside those of sm_90a, and the first ones of what it lacks."""
    lines = [export_header(target).splitlines() for target in ("sm_90a", "sm_120a")]
    changed = difflib.unified_diff(*lines, n=0, lineterm="")
    shown = [line for line in changed if re.match(r"\+(?!\+)|-(//|__device__|template)", line)]
    golden("cudatma_sm_120a.diff", "\n".join(shown) + "\n")


def test_the_tile_copy(golden: Golden, kernel_source: KernelSource, load_example: Callable[[str], ModuleType]) -> None:
    spec = load_example("tile_copy").TileCopySpec(4, box_rows=32, stages=3)
    golden("tile_copy_sm_90a.cu", kernel_source("kernels/tile_copy.cu.j2", spec, "sm_90a"))


def test_a_whole_source(golden: Golden) -> None:
    """The one golden that has its primitives, too."""
    golden("ragged_copy_sm_90a.cu", render("kernels/ragged_copy.cu.j2", RaggedCopySpec(2), "sm_90a"))


def test_a_changed_text_fails(golden: Golden, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        pytest.skip("this run writes the files")
    with pytest.raises(pytest.fail.Exception, match="-#pragma once"):
        golden("cudatma_sm_90a.cuh", export_header("sm_90a").replace("#pragma once\n", ""))
    with pytest.raises(pytest.fail.Exception, match="no golden file"):
        golden("none.cu", "")
