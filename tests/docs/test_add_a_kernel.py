"""docs/howto/add_a_kernel.md is correct: its files exist, its excerpts are current, and the family needs no other
changes.

test_docs_run.py runs the commands of the page.
"""

from __future__ import annotations

import re

import pytest
from test_docs_run import ROOT, Block, blocks_of

PAGE = ROOT / "docs" / "howto" / "add_a_kernel.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXCERPTS = [block for block in blocks_of(PAGE) if not block.language]
#: A path from the top of the checkout, in backquotes.
_PATH = re.compile(r"`((?:cudatma|ptx_templates|tests|tools|benchmarks|docs)/[\w./]*)`")
#: How a module names the family: an import of it, a path of its files, its kernel.
_FAMILY = re.compile(r"\bkernels[./]gemm\b|\bkernels import gemm\b|gemm_v\d|parts/gemm_")
FOLDER = ROOT / "cudatma" / "kernels" / "gemm"


def test_every_file_of_the_page_exists() -> None:
    named = set(_PATH.findall(TEXT))
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("block", EXCERPTS, ids=lambda block: f"line{block.line}")
def test_an_excerpt_stands_in_the_file_that_is_named_before_it(block: Block) -> None:
    path = _PATH.findall(block.before)[-1]
    assert f"\n{block.text}" in (ROOT / path).read_text(encoding="utf-8")


def test_the_family_touches_the_registry_and_the_public_names_alone() -> None:
    """Other code mentions a family only in the registry, the public names and the integrations."""
    modules = [path for part in ("cudatma", "tools", "ptx_templates") for path in (ROOT / part).rglob("*.*")]
    naming = {
        path.relative_to(ROOT).as_posix()
        for path in modules
        if path.suffix in (".py", ".j2") and FOLDER not in path.parents and not path.name.startswith("gemm_")
        if ROOT / "cudatma" / "integrations" not in path.parents
        if _FAMILY.search(path.read_text("utf-8"))
    }
    assert naming == {"cudatma/kernels/registry.py", "cudatma/__init__.py"}
