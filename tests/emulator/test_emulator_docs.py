"""The guide's steps and mistakes, and the reports in docs/howto, match what the emulator does."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cudatma
from cudatma import TensorMap, cli
from cudatma.build.ptx_source import ptx_source
from cudatma.emulator import CAUSES, Report, load

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


# ---- docs/howto/emulate_a_kernel.md: its race is found where it says, and gone once repaired


FOLDER = Path(__file__).resolve().parents[2] / "docs" / "howto"
PAGE = (FOLDER / "emulate_a_kernel.md").read_text()


def add_tiles_source() -> str:
    return PAGE.partition("`add_tiles.cu.j2`:\n\n```cuda\n")[2].partition("```")[0]


def add_tiles(source: str, folder: Path, schedules: int) -> tuple[Report, float]:
    """The report, and the sum that the kernel computes of six tiles of ones."""
    path = folder / "add_tiles.cu.j2"
    path.write_text(source)
    x, out = np.ones((6, 32), np.float32), np.zeros(32, np.float32)
    args = (TensorMap.from_array(x, (1, 32), encoder="codec"), out)
    compiled = ptx_source(path)
    module = load(compiled.ptx, lines=compiled.lines)
    report = module.launch("add_tiles", 1, 64, args, arrays=(x,), schedules=schedules, hazards="collect")
    return report, float(out[0])


def test_the_race_is_found_at_the_line_that_the_page_names(tmp_path: Path) -> None:
    source = add_tiles_source()
    report, _ = add_tiles(source, tmp_path, 3)
    first = report.hazards[0]
    assert first.kind == "overwritten_while_read"
    assert re.fullmatch(r"tma_load\.cuh\.j2:\d+, inlined at add_tiles\.cu:23", first.source)
    assert "cp_async_bulk_tensor_2d_load" in first.source_text
    assert first.source.split(", ")[1] in PAGE


def words(shown: str) -> str:
    """Without white space and numbers: lines of PTX, registers and times differ between releases of NVRTC."""
    numbers = r"0x[0-9a-f]+|[\d.]+(?: m?s$)?|\s"  # a duration with its unit
    return re.sub(numbers, lambda found: "" if found[0].isspace() else "#", shown, flags=re.MULTILINE)


def test_the_page_shows_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("add_tiles.cu.j2").write_text(add_tiles_source())
    command, shown = re.search(r"^\$ cudatma (emulate add_tiles.*?)\n(add_tiles.*?)```", PAGE, re.S | re.M).groups()  # type: ignore[union-attr]
    assert cli.main(shlex.split(command.replace("\\\n", ""))) == 1
    assert words(capsys.readouterr().out) == words(shown)


@pytest.mark.slow
def test_the_page_on_tests_shows_what_pytest_prints(tmp_path: Path) -> None:
    page = (FOLDER / "test_a_kernel.md").read_text()
    (source,) = re.findall(r"`test_fetch.py`:\n\n```python\n(.*?)```", page, re.S)
    (shown,) = re.findall(r"without its wait:\n\n```\n(.*?)```", page, re.S)
    (tmp_path / "test_fetch.py").write_text(source.replace("mbarrier_wait_parity(bar, 0);", "", 1))
    command = [sys.executable, "-m", "pytest", "-p", "cudatma.pytest_plugin", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parents[1])}
    done = subprocess.run(
        [*command, "test_fetch.py::test_fetch"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert words(shown) in words(done.stdout)


def test_the_page_explains_every_kind_of_hazard() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE.partition("\n## Hazards\n")[2], re.M)
    assert sorted(re.findall(r"\w+", " ".join(rows))) == sorted(CAUSES)


def test_the_repair_that_the_page_names_is_one(tmp_path: Path) -> None:
    source = add_tiles_source()
    repaired = source.replace("&empty[slot]), lap & 1)", "&empty[slot]), (lap - 1) & 1)")
    assert repaired != source
    report, total = add_tiles(repaired, tmp_path, 20)
    assert report.is_clean
    assert total == 6
