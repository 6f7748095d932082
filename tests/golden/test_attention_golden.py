"""Attention's sources, as text that is reviewed: each version once, with one kind of mask, and the other kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cudatma.kernels.attention.config import AttentionConfig
from cudatma.kernels.attention.sample import small_config

CONFIGS: dict[str, AttentionConfig] = {
    name: small_config(**{"dtype": "bfloat16"} | fields)
    for name, fields in {
        "scalar": {"version": "scalar", "is_causal": True},
        "a1": {"version": "a1"},
        "a2": {"version": "a2", "has_softcap": True},
        "a3": {"version": "a3", "is_causal": True, "has_window": True},
        "a4": {"version": "a4", "is_causal": True},
        "mma_sync": {"version": "mma_sync", "is_causal": True},
        "varlen": {"version": "a3", "is_causal": True, "is_varlen": True},
        "decode_pages": {"version": "decode", "has_sink": True, "is_paged": True, "box_rows": 16},
        "decode_rows": {"version": "decode", "dtype": "float16", "is_paged": True, "box_rows": 0},
        "decode_fp8": {"version": "decode_fp8", "is_paged": True, "box_rows": 16},
    }.items()
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_source(
    name: str, golden: Callable[[str, str], None], kernel_source: Callable[[str, Any, str], str]
) -> None:
    config, target = CONFIGS[name], "sm_120a" if name == "mma_sync" else "sm_90a"
    golden(f"attention_{name}.cu", kernel_source(config.template, config, target))
