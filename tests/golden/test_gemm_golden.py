"""The dense GEMM's source, as text that is reviewed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cudatma.kernels.gemm.wgmma import WgmmaSpec


def test_the_source(golden: Callable[[str, str], None], kernel_source: Callable[[str, Any, str], str]) -> None:
    spec = WgmmaSpec("float16", 128, 2, 4)
    golden("gemm_wgmma.cu", kernel_source(spec.template, spec, "sm_90a"))
