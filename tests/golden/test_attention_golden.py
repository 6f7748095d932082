"""Attention's sources, as text that is reviewed: each version once, with one kind of mask, and the other kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cudatma.kernels.attention.decode_spec import AttentionDecode, AttentionDecodeFp8
from cudatma.kernels.attention.problem import VERSION_NAMES
from cudatma.kernels.attention.sample import SMALL
from cudatma.kernels.attention.spec import AttentionSpec
from cudatma.kernels.attention.versions import VERSIONS, AttentionA3

#: Causal, with a window, with a softcap.
MASKS = {
    "phase1": (True, False, False),
    "a1": (False, False, False),
    "a2": (False, False, True),
    "a3": (True, True, False),
    "a4": (True, False, False),
    "p1": (True, False, False),
}
#: Boxes of TMA in pages, with sinks; rows by cp.async; an e4m3 cache; sequences of different lengths.
OTHERS: dict[str, AttentionSpec] = {
    "decode_pages": AttentionDecode("bfloat16", 64, 64, has_sink=True, is_paged=True, box_rows=16),
    "decode_rows": AttentionDecode("float16", 64, 64, is_paged=True, box_rows=0),
    "decode_fp8": AttentionDecodeFp8("bfloat16", 64, 64, is_paged=True, box_rows=16),
    "varlen": AttentionA3("bfloat16", 64, 64, True, is_varlen=True, **SMALL["a3"]),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_source(
    version: str, golden: Callable[[str, str], None], kernel_source: Callable[[str, Any, str], str]
) -> None:
    spec = VERSIONS[version]("bfloat16", 64, 64, *MASKS[version], **SMALL[version])
    golden(f"attention_{version}.cu", kernel_source(spec.template, spec, "sm_120a" if version == "p1" else "sm_90a"))


@pytest.mark.parametrize("name", OTHERS)
def test_the_source_of_others(
    name: str, golden: Callable[[str, str], None], kernel_source: Callable[[str, Any, str], str]
) -> None:
    spec = OTHERS[name]
    golden(f"attention_{name}.cu", kernel_source(spec.template, spec, "sm_90a"))


def test_every_version_has_a_name() -> None:
    assert tuple(VERSIONS) == VERSION_NAMES
