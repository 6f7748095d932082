"""The guide: every step runs and is free of hazards, every mistake is named, and mended it is none."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cudatma

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
STEPS = sorted(path.name for path in (GUIDE / "steps").glob("s[0-9]*.py"))
MISTAKES = sorted(path.stem for path in (GUIDE / "mistakes").glob("m[0-9]*.py"))


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imports as in a script, which finds the modules of its folder."""
    before = set(sys.modules)
    for folder in ("steps", "mistakes"):
        monkeypatch.syspath_prepend(str(GUIDE / folder))
    yield
    for name in set(sys.modules) - before:
        if str(GUIDE) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", STEPS)
def test_a_step(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints that its result is right, after 20 schedules (of the largest step, 5) without a hazard."""
    monkeypatch.setenv("CUDATMA_BACKEND", "emulator")
    emulate, schedules = cudatma.Kernel.emulate, 5 if name == "s9_gemm.py" else 20

    def thoroughly(self: cudatma.Kernel, *args: Any, **options: Any) -> Any:
        return emulate(self, *args, **{**options, "schedules": schedules})

    monkeypatch.setattr(cudatma.Kernel, "emulate", thoroughly)
    runpy.run_path(str(GUIDE / "steps" / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert "wrong" not in printed
    assert name == "s1_descriptor.py" or "right, on the emulator" in printed


@pytest.mark.sweep(10)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake(name: str) -> None:
    mistake = importlib.import_module(name).MISTAKE
    if hasattr(mistake, "kernel"):
        assert mistake.kernel.count(mistake.wrong) == 1
    assert mistake.try_it().startswith(mistake.says)
    assert mistake.try_it(mended=True) == ""


def test_the_page_is_what_the_files_say() -> None:
    page = importlib.import_module("page")
    assert page.PAGE.read_text(encoding="utf-8") == page.text(), "run python docs/guide/mistakes/page.py"


def test_all_files_are_in_the_table() -> None:
    table = (GUIDE / "README.md").read_text(encoding="utf-8")
    for name in STEPS:
        assert f"](steps/{name})" in table
