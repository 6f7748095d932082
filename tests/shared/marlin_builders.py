"""Functions that return configurations of marlin_gemm's kernels for tests."""

from __future__ import annotations

from typing import Any

from cudatma.kernels.marlin.config import MarlinConfig

_WEIGHT: dict[str, Any] = {"dtype": "float16", "group_size": 128, "has_zeros": False}

#: Load paths of the mma.sync kernel.
BY_CP_ASYNC = dict.fromkeys(("weight_load_path", "scale_load_path", "activation_load_path"), "cp_async")


def skinny(**fields: Any) -> MarlinConfig:
    """Return a configuration of the skinny kernel, for symmetric fp16 weights in groups of 128 by default."""
    return MarlinConfig(version="skinny", **_WEIGHT | fields)


def wgmma(**fields: Any) -> MarlinConfig:
    """Return a configuration of the wgmma kernel.

    By default, it has one warpgroup of 64 columns, and commit groups of two wgmmas, of which one group is in flight.
    """
    columns = {"warpgroups": 1, "tile_n": 64 * fields.get("warpgroups", 1)}
    return MarlinConfig(version="wgmma", **_WEIGHT | columns | {"mmas_per_commit": 2, "commits_in_flight": 1} | fields)


def mma_sync(**fields: Any) -> MarlinConfig:
    """Return a configuration of the mma.sync kernel. With one scale per column, it scales results, not weights."""
    scale_on = "epilogue" if fields.get("group_size") == -1 else "weight"
    return MarlinConfig(version="mma_sync", **_WEIGHT | {"scale_on": scale_on} | fields)
