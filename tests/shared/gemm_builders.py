"""Configurations and problems of the dense GEMM for tests, by keyword."""

from __future__ import annotations

from typing import Any

from cudatma.kernels.gemm.config import GemmConfig
from cudatma.kernels.gemm.problem import Problem, element_bytes


def config(version: str, **fields: Any) -> GemmConfig:
    """Return a configuration of a version, by default with a tile of 64 x 64 and two stages.

    Each warpgroup has 64 rows, or 128 rows of a tile of 256. Versions v7 and mma_sync have one warpgroup.
    """
    given: dict[str, Any] = {"dtype": "float16", "layout": "RC", "tile_m": 64, "tile_n": 64, "stages": 2} | fields
    given.setdefault("tile_k", (64 if version == "mma_sync" else 128) // element_bytes(given["dtype"]))
    given.setdefault("warpgroups", 1 if version in ("v7", "mma_sync") else given["tile_m"] // 64 % 4 or 2)
    return GemmConfig.of(version, **given)


def problem(**fields: Any) -> Problem:
    """Return a problem, by default in fp16 with M = 100 and N = K = 4096."""
    return Problem(**({"m": 100, "n": 4096, "k": 4096, "dtype": "float16"} | fields))
