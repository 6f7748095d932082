"""The dense GEMM's sources, as text that is reviewed: each version once, in all layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gemm_builders import config

from cudatma.build.render import render
from cudatma.kernels.gemm.config import PRESETS

#: Fields by version. Layouts are RC unless they are named.
FIELDS: dict[str, dict[str, Any]] = {
    "v1": {"layout": "RR"},
    "v2": {"layout": "CR"},
    "v3": {"layout": "CC"},
    "v4": {},
    "v5": {"dtype": "float8_e4m3fn", "block_scales": True, "scales_by_tma": True, "tile_m": 256, "tile_n": 128},
    "v6": {"layout": "CR"},
    "v7": {"layout": "CC", "tile_n": 128, "stages": 4, "warpgroups": 1},
    "mma_sync": {"layout": "CC", "stages": 4},
}


@pytest.mark.parametrize("version", PRESETS)
def test_the_source(version: str, golden: Callable[[str, str], None]) -> None:
    made = config(version, **{"tile_m": 128, "tile_n": 256, "stages": 3, "warpgroups": 2} | FIELDS[version])
    golden(f"gemm_{version}.cu", render(made.template, made, "sm_90a" if made.has_wgmma else "sm_120a"))
