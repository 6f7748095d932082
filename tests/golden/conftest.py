"""The golden fixture: one text file a test, under tests/golden/files, and ``--update-golden`` to write it. Primitives
stand in the golden headers alone."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from cudatma.build.render import render
from cudatma.tools.export_header import export_header

FILES = Path(__file__).parent / "files"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)`` compares text with ``files/name``; with ``--update-golden`` it writes the file."""

    def compare(name: str, text: str) -> None:
        path = FILES / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.is_file():
            pytest.fail(f"no golden file {path}; run pytest --update-golden, and review what it writes")
        wanted = path.read_text(encoding="utf-8")
        if text != wanted:
            lines = difflib.unified_diff(
                wanted.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm="", n=2
            )
            shown = "\n".join(list(lines)[:60])
            pytest.fail(f"{name} has changed; if that is meant, run pytest --update-golden and review it:\n{shown}")

    return compare


@lru_cache
def _header(target: str) -> frozenset[str]:
    return frozenset(_paragraphs(export_header(target)))


def _paragraphs(text: str) -> list[str]:
    return [part.strip("\n") for part in re.split(r"\n{2,}", text)]


@pytest.fixture
def kernel_source() -> Callable[[str, Any, str], str]:
    """``kernel_source(template, spec, target)``: the rendered source without the paragraphs that the target's exported
    header has as well."""

    def source(template: str, spec: Any, target: str) -> str:
        kept = [part for part in _paragraphs(render(template, spec, target)) if part not in _header(target)]
        return "\n\n".join(kept) + "\n"

    return source
