"""When emulate_launches redirects the libraries of a program, and when it stops."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cudatma.programs.log import intercepting
from cudatma.programs.patches import Patches


def install(patches: Patches, sink: list[str]) -> None:
    module: Any = sys.modules["some_library"]
    patches.set(module, "launch", lambda: sink.append("launch"))
    if sink == ["refuse"]:
        raise RuntimeError("half installed")


@pytest.fixture
def installers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / "some_library.py").write_text("def launch(): raise RuntimeError('no GPU')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_library", raising=False)
    monkeypatch.setitem(sys.modules, "installer", ModuleType("installer"))
    monkeypatch.setattr(sys.modules["installer"], "install", install, raising=False)
    return {"some_library": "installer:install"}


def test_a_library_is_redirected_after_a_search_for_it(installers: dict[str, str]) -> None:
    outer: list[str] = []
    launches: list[str] = []
    with intercepting(installers, outer), intercepting(installers, launches):
        assert importlib.util.find_spec("some_library") is not None
        library: Any = importlib.import_module("some_library")
        library.launch()
    assert (outer, launches) == ([], ["launch"])
    with pytest.raises(RuntimeError, match="no GPU"):
        library.launch()


def test_a_failed_installation_is_undone(installers: dict[str, str]) -> None:
    library: Any = importlib.import_module("some_library")
    original, finders = library.launch, list(sys.meta_path)
    with pytest.raises(RuntimeError, match="half installed"), intercepting(installers, ["refuse"]):
        pass
    assert library.launch is original
    assert sys.meta_path == finders
