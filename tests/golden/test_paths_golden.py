"""The kernels beside the GEMM, as text that is reviewed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cudatma.build.render import render
from cudatma.kernels.marlin.dequantize import TEMPLATE as DEQUANTIZE
from cudatma.kernels.marlin.dequantize import DequantizeConfig
from cudatma.kernels.marlin.permute_columns import TEMPLATE as PERMUTE
from cudatma.kernels.marlin.permute_columns import PermuteColumnsConfig

SOURCES = {
    "permute_columns": (PERMUTE, PermuteColumnsConfig(True, 8192, rows=2)),
    "dequantize": (DEQUANTIZE, DequantizeConfig("bfloat16", 32, True, True)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_source(golden: Callable[[str, str], None], name: str) -> None:
    template, config = SOURCES[name]
    golden(f"{name}.cu", render(template, config, "sm_90a"))
