"""``cudatma emulate --coverage``: what it lists, its exit status, and files that are no PTX."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cudatma import cli

ROOT = Path(__file__).resolve().parents[2]
KERNEL = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry twice(.param .u64 p) {
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [p];
    ld.global.u32 %r1, [%rd1];
    add.u32 %r2, %r1, %r1;
    add.u32 %r2, %r2, %r1;
    EXTRA
    st.global.u32 [%rd1], %r2;
    ret;
}
"""
COVERED = {"ld.param.u64": 1, "ld.global.u32": 1, "add.u32": 2, "st.global.u32": 1, "ret": 1}


@pytest.fixture
def ptx(tmp_path: Path) -> Path:
    """A kernel that is covered."""
    path = tmp_path / "twice.ptx"
    path.write_text(KERNEL.replace("EXTRA", "// größe"), encoding="utf-8")
    return path


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """The same with an instruction that no PTX has, in line 11."""
    path = tmp_path / "strange.ptx"
    path.write_text(KERNEL.replace("EXTRA", "frobnicate.b32 %r2, %r1;"))
    return path


def test_a_covered_file(ptx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", "--coverage", str(ptx)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("6 instructions of 5 kinds are covered, 0 are not\n")
    assert "     2  add.u32" in shown
    assert cli.main(["emulate", "--coverage", str(ptx), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "complete": True,
        "covered_instructions": 6,
        "missing_instructions": 0,
        "covered": COVERED,
        "missing": [],
    }


def test_an_unknown_instruction_is_named_with_its_line(strange: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", "--coverage", str(strange)]) == 1
    shown = capsys.readouterr().out
    assert ", 1 are not" in shown
    assert "missing in twice: PTX line 11" in shown
    assert cli.main(["emulate", "--coverage", str(strange), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["covered"] == COVERED
    assert (found["complete"], found["missing_instructions"]) == (False, 1)
    (missing,) = found["missing"]
    assert (missing["function"], missing["line"]) == ("twice", 11)
    assert "frobnicate" in missing["text"] + missing["why"]


def test_standard_input(ptx: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(ptx.read_bytes())))
    assert cli.main(["emulate", "--coverage", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["covered"] == COVERED


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02\x01\x01\0\0", b"int main() {}\n", b"\xff" * 100, b".version"])
def test_what_is_no_ptx_is_one_line(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.ptx"
    path.write_bytes(content)
    assert cli.main(["emulate", "--coverage", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("cudatma: PtxError: PTX")


@pytest.mark.parametrize("name", ["nowhere.ptx", ".", "a\0b"])
def test_a_file_that_cannot_be_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", "--coverage", f"{tmp_path}/{name}"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("cudatma: ArgumentError: --coverage: got ")
    assert len(captured.err.splitlines()) == 1


def test_more_than_the_emulator_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools import emulate

    monkeypatch.setattr(emulate, "MAX_CHARS", 100)
    path = tmp_path / "big.ptx"
    path.write_bytes(b" " * 101)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        emulate.read_ptx(str(path))
    path.write_bytes(b" " * 100)
    assert emulate.read_ptx(str(path)) == " " * 100


def test_runs_as_a_file_from_anywhere(strange: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "emulate.py"), "--coverage", strange.name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "frobnicate" in done.stdout
