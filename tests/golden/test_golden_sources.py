"""The exported header and the example kernel, as text that is reviewed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from cudatma.kernels.ragged_copy import RaggedCopySpec
from cudatma.render import render
from cudatma.tools.export_header import export_header

Golden = Callable[[str, str], None]


@pytest.mark.parametrize("target", ["sm_90a", "sm_120a"])
def test_the_header(golden: Golden, target: str) -> None:
    golden(f"cudatma_{target}.cuh", export_header(target))


def test_the_tile_copy(golden: Golden, load_example: Callable[[str], ModuleType]) -> None:
    spec = load_example("tile_copy").TileCopySpec(4, box_rows=32, stages=3)
    golden("tile_copy_sm_90a.cu", render("kernels/tile_copy.cu.j2", spec, "sm_90a"))


def test_the_ragged_copy(golden: Golden) -> None:
    golden("ragged_copy_sm_90a.cu", render("kernels/ragged_copy.cu.j2", RaggedCopySpec(2), "sm_90a"))


def test_a_changed_text_fails(golden: Golden, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        pytest.skip("this run writes the files")
    with pytest.raises(pytest.fail.Exception, match="-#pragma once"):
        golden("cudatma_sm_90a.cuh", export_header("sm_90a").replace("#pragma once\n", ""))
    with pytest.raises(pytest.fail.Exception, match="no golden file"):
        golden("none.cu", "")
