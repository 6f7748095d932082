"""The kernels beside the GEMM, as text that is reviewed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cudatma.build.render import render
from cudatma.kernels.marlin.dequantize import TEMPLATE as DEQUANTIZE
from cudatma.kernels.marlin.dequantize import DequantizeSpec
from cudatma.kernels.marlin.permute_columns import TEMPLATE as PERMUTE
from cudatma.kernels.marlin.permute_columns import PermuteColumnsSpec

SOURCES = {
    "permute_columns": (PERMUTE, PermuteColumnsSpec(True, 8192, rows=2)),
    "dequantize": (DEQUANTIZE, DequantizeSpec("bfloat16", 32, True, True)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_source(golden: Callable[[str, str], None], name: str) -> None:
    template, spec = SOURCES[name]
    golden(f"{name}.cu", render(template, spec, "sm_90a"))
