"""The dense GEMM's sources, as text that is reviewed: each version once, in all layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cudatma.kernels.gemm.problem import LAYOUTS, kernel_name
from cudatma.kernels.gemm.versions import VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_the_source(
    version: int | str, golden: Callable[[str, str], None], kernel_source: Callable[[str, Any, str], str]
) -> None:
    layout, target = (LAYOUTS[version % len(LAYOUTS)], "sm_90a") if isinstance(version, int) else ("CC", "sm_120a")
    spec = VERSIONS[version]("float16", layout)
    golden(f"gemm_{kernel_name(version)}.cu", kernel_source(spec.template, spec, target))


def test_the_source_with_scales_of_blocks(
    golden: Callable[[str, str], None], kernel_source: Callable[[str, Any, str], str]
) -> None:
    for version, by_tma, name in ((4, False, "block_scales"), (5, True, "block_scales_tma")):
        spec = VERSIONS[version]("float8_e4m3fn", "RC", 256, 128, 128, 3, 2, "bfloat16", "none", True, by_tma)
        golden(f"gemm_v{version}_{name}.cu", kernel_source(spec.template, spec, "sm_90a"))
