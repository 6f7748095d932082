"""`cudatma emulate program.py`: what it prints, the program's arguments, and the exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cudatma import cli
from cudatma.emulator import Report
from cudatma.emulator.machine import scheduler

pytest.importorskip("triton")

PROGRAM = """
import sys
import numpy as np, triton, triton.language as tl

@triton.jit
def add_up(x_ptr, total_ptr, ATOMIC: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0))
    if ATOMIC:
        tl.atomic_add(total_ptr, x)
    else:
        tl.store(total_ptr, tl.load(total_ptr) + x)

x, total = np.arange(4.0), np.zeros(1)
for _ in range(2):
    add_up[4,](x, total, "--atomic" in sys.argv)
print("argv", sys.argv[1:], "total", total[0], __name__)
if "--fail" in sys.argv:
    raise SystemExit(3)
if "--raise" in sys.argv:
    raise KeyError("mine")
if "--unreadable" in sys.argv:
    Mine = type("Mine", (), {"dtype": x.dtype, "data_ptr": lambda self: 16})
    add_up[4,](Mine(), total, True)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_hazards_are_printed_once_with_their_lines(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, log = tmp_path / "page.html", tmp_path / "log.sarif"
    options = ["--schedules", "1", "--html", str(page), "--sarif", str(log)]
    assert cli.main(["emulate", *options, program, "--schedules", "7"]) == 1
    printed = capsys.readouterr().out
    assert "argv ['--schedules', '7'] total 12.0 __main__" in printed
    assert printed.count("program.py:15: add_up (triton), grid 4x1x1: ") == 2
    assert printed.count("source: tl.store(total_ptr, tl.load(total_ptr) + x)") == 1
    assert printed.splitlines()[-3].startswith("launches: 2, hazards: ")
    assert page.read_text().count('href="#launch-1"') == 2, "equal reports have one section"
    assert "writes total_ptr[0]" in page.read_text()
    (run,) = json.loads(log.read_text())["runs"]
    location = run["results"][0]["locations"][0]["physicalLocation"]
    assert (location["artifactLocation"]["uri"], location["region"]["startLine"]) == (Path(program).as_uri(), 11)


def test_child_processes_are_reported(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open(program, "a") as file:
        file.write("import subprocess\nsubprocess.run([sys.executable, '-c', ''])\nsubprocess.run(['true'])\n")
    assert cli.main(["emulate", program, "--atomic"]) == 0
    assert "child processes whose launches are not counted: 1\n" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "status"), [("--fail", 3), ("--raise", 1), ("--unreadable", 1), ("--fine", 0)])
def test_the_exit_status_is_the_program_s(
    word: str, status: int, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["emulate", "--target", "sm_120a", program, "--atomic", word]) == status
    captured = capsys.readouterr()
    assert "launches: 2, hazards: 0" in captured.out
    if word == "--unreadable":
        assert re.match(r"cudatma: triton launch of add_up at .*program.py:23: x_ptr must be .*got Mine", captured.err)
    if word == "--raise":
        first, place = captured.err[captured.err.index("Traceback") :].splitlines()[:2]
        assert first.startswith("Traceback")
        assert program in place


def test_json_and_a_name_that_no_kernel_has(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", "--json", program]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [launch["kernel"] for launch in data["launches"]] == ["add_up", "add_up"]
    assert not data["passed"]
    assert data["launches"][0].keys() >= Report("add_up", 1).as_dict().keys()
    assert {hazard["kind"] for hazard in data["launches"][0]["hazards"]} >= {"global_race"}
    assert cli.main(["emulate", "--only", "missing", program]) == 1
    assert "'missing'" in capsys.readouterr().err


def test_a_program_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", "nowhere.py"]) == 2
    assert "program must be an existing Python file, got nowhere.py" in capsys.readouterr().err


def test_the_step_limit_is_an_option(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "LAST_STEPS", 0)
    assert cli.main(["emulate", "--step-limit", "1", program]) == 1
    assert "has not completed after" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--html", "{0}"], ["--sarif", "{0}"], ["--html", "{1}", "--sarif", "{1}"]])
def test_a_report_replaces_no_input_and_no_other_report(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(3)\n")
    given = [option.format(program, tmp_path / "report") for option in options]
    assert cli.main(["emulate", *given, str(program)]) == 2
    assert re.search(
        r"--(html|sarif) must be a file (that is not an input|other than that of)", capsys.readouterr().err
    )
    assert program.read_text() == "raise SystemExit(3)\n"
