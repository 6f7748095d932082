"""Attention's sources, as text that is reviewed: each template once, with other options in each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cudatma.build.render import render
from cudatma.kernels.attention.sample import small_config

FIELDS: dict[str, dict[str, Any]] = {
    "scalar": {"is_causal": True},
    "a1": {},
    "a2": {"has_softcap": True},
    "a3": {"is_causal": True, "has_window": True, "is_varlen": True},
    "a4": {"is_causal": True},
    "mma_sync": {"is_causal": True},
    "decode": {"has_sink": True, "is_paged": True, "box_rows": 16},
}


@pytest.mark.parametrize("version", FIELDS)
def test_the_source(version: str, golden: Callable[[str, str], None]) -> None:
    config = small_config(version, dtype="bfloat16", **FIELDS[version])
    golden(f"attention_{version}.cu", render(config.template, config, "sm_120a" if version == "mma_sync" else "sm_90a"))
