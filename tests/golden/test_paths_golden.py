"""The kernels beside the GEMM, in each way of reading and writing, as text that is reviewed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cudatma.kernels.marlin.dequantize import TEMPLATE as DEQUANTIZE
from cudatma.kernels.marlin.dequantize import DequantizeSpec
from cudatma.kernels.marlin.permute_columns import TEMPLATE as PERMUTE
from cudatma.kernels.marlin.permute_columns import PermuteColumnsSpec

Golden = Callable[[str, str], None]
KernelSource = Callable[[str, Any, str], str]

SOURCES = {
    "permute_columns_staged": (PERMUTE, PermuteColumnsSpec(True, 8192, rows=2)),
    "permute_columns_copy": (PERMUTE, PermuteColumnsSpec(False)),
    "dequantize_tiles": (DEQUANTIZE, DequantizeSpec("float16", 128, False, stages=3)),
    "dequantize_rows_zeros": (DEQUANTIZE, DequantizeSpec("bfloat16", 32, True, True)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_source(golden: Golden, kernel_source: KernelSource, name: str) -> None:
    template, spec = SOURCES[name]
    golden(f"{name}_sm_90a.cu", kernel_source(template, spec, "sm_90a"))
