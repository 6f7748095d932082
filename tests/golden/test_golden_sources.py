"""The fixture itself, and that each kernel's template has a golden."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cudatma.kernels.registry import REGISTRY

Golden = Callable[[str, str], None]
FILES = Path(__file__).parent / "files"


def test_every_template_has_a_golden() -> None:
    shown = {path.read_text().partition(" for ")[0].removeprefix("// cudatma: ") for path in FILES.glob("*.cu")}
    assert shown == {entry.template for entry in REGISTRY.values()}


def test_a_changed_text_fails(golden: Golden, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        pytest.skip("this run writes the files")
    text = (FILES / "tile_copy.cu").read_text()
    with pytest.raises(pytest.fail.Exception, match="-using namespace cudatma;"):
        golden("tile_copy.cu", text.replace("using namespace cudatma;\n", ""))
    with pytest.raises(pytest.fail.Exception, match="no golden file"):
        golden("none.cu", "")
