"""Attention's sources, as text that is reviewed: each version once, with one kind of mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cudatma.kernels.attention.sample import SMALL
from cudatma.kernels.attention.versions import VERSIONS

#: Causal, with a window, with a softcap.
MASKS = {
    "phase1": (True, False, False),
    "a1": (False, False, False),
    "a2": (False, False, True),
    "a3": (True, True, False),
    "a4": (True, False, False),
    "p1": (True, False, False),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_source(
    version: str, golden: Callable[[str, str], None], kernel_source: Callable[[str, Any, str], str]
) -> None:
    spec = VERSIONS[version]("bfloat16", 64, 64, *MASKS[version], **SMALL[version])
    golden(f"attention_{version}.cu", kernel_source(spec.template, spec, "sm_120a" if version == "p1" else "sm_90a"))
