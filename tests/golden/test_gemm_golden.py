"""The dense GEMM's sources, as text that is reviewed: each version once, in all layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cudatma.kernels.gemm.problem import LAYOUTS
from cudatma.kernels.gemm.versions import VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_the_source(
    version: int, golden: Callable[[str, str], None], kernel_source: Callable[[str, Any, str], str]
) -> None:
    spec = VERSIONS[version]("float16", LAYOUTS[version % len(LAYOUTS)])
    golden(f"gemm_v{version}.cu", kernel_source(spec.template, spec, "sm_90a"))
