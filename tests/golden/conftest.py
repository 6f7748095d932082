"""The golden fixture compares text with files in tests/golden/files; ``--update-golden`` writes the files."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

FILES = Path(__file__).parent / "files"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return ``golden(name, text)``, which compares text with ``files/name`` or, with ``--update-golden``, writes the
    file."""

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
