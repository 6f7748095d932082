"""The dense GEMM's sources, as text that is reviewed: each version once, in all layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gemm_builders import config

from cudatma.kernels.gemm.config import PRESETS

#: Layouts, RC unless they are named, and tiles of versions that do not have the wide one.
LAYOUT = {"v1": "RR", "v2": "CR", "v3": "CC", "v5": "RR", "v6": "CR", "v7": "CC", "mma_sync": "CC"}
WIDE: dict[str, Any] = {"tile_m": 128, "tile_n": 256, "stages": 3, "warpgroups": 2}
TILES = {"v7": {"tile_m": 128, "tile_n": 128, "stages": 4}, "mma_sync": WIDE | {"stages": 4}}


@pytest.mark.parametrize("version", PRESETS)
def test_the_source(
    version: str, golden: Callable[[str, str], None], kernel_source: Callable[[str, Any, str], str]
) -> None:
    made = config(version, layout=LAYOUT.get(version, "RC"), **TILES.get(version, WIDE))
    target = "sm_90a" if made.has_wgmma else "sm_120a"
    golden(f"gemm_{version}.cu", kernel_source(made.template, made, target))


@pytest.mark.parametrize(("version", "by_tma"), [("v4", False), ("v5", True)])
def test_the_source_with_scales_of_blocks(
    version: str, by_tma: bool, golden: Callable[[str, str], None], kernel_source: Callable[[str, Any, str], str]
) -> None:
    tile = {"tile_m": 256, "tile_n": 128, "stages": 3}
    made = config(version, dtype="float8_e4m3fn", block_scales=True, scales_by_tma=by_tma, **tile)
    name = f"gemm_{version}_block_scales{'_tma' if by_tma else ''}.cu"
    golden(name, kernel_source(made.template, made, "sm_90a"))
