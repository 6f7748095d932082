"""Every kernel compiles with debug=True, and debug=False leaves no trace of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ptx_of import ptx_alone

from cudatma.build.render import render, template_root
from cudatma.kernels.registry import REGISTRY
from cudatma.runtime.hang import is_debug_ptx
from cudatma.target import get_target

_PRIMITIVES = sorted(path.name for path in (template_root() / "primitives").glob("*.cuh.j2"))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_kernel_compiles_with_debug(name: str) -> None:
    """The test compiles the first config for a target that runs it; ``cudatma dump all --debug`` compiles all
    configs."""
    entry = REGISTRY[name]
    target = next(target for target in ("sm_90a", "sm_120a", "sm_100a") if entry.configs(target))
    config = entry.configs(target)[0]
    text = render(entry.template, config, target, debug=True)
    ptx = ptx_alone(text, get_target(target))
    assert is_debug_ptx(ptx) == ("cudatma_debug_panel" in text)  # some kernels neither wait nor use TMA
    assert config.entry in ptx


@pytest.mark.parametrize("name", _PRIMITIVES)
def test_nothing_of_it_is_in_a_primitive_without_debug(name: str) -> None:
    source = f'//% include "primitives/{name}"'
    plain = render(source, None, "sm_90a", is_source=True)
    assert "debug" not in plain
    assert not re.search(r"\bline\b", re.sub(r"//.*", "", plain))


def test_nothing_of_it_is_in_a_kernel_without_debug() -> None:
    """The golden files contain a source of each template, without its primitives."""
    sources = list((Path(__file__).parents[1] / "golden" / "files").glob("*.cu"))
    assert len(sources) > 30
    for source in sources:
        text = source.read_text()
        assert "debug" not in text, source.name
        assert "__builtin_LINE" not in text, source.name
