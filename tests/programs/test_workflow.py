"""The workflow that users copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudatma.cli import COMMANDS

yaml = pytest.importorskip("yaml")


def test_the_workflow_uploads_what_the_emulator_writes() -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "emulate.yml"
    steps = yaml.safe_load(path.read_text())["jobs"]["emulate"]["steps"]
    (words,) = [step["run"].split() for step in steps if step.get("run", "").startswith("cudatma ")]
    assert words[1] in COMMANDS
    (upload,) = [step["with"] for step in steps if "upload-sarif" in step.get("uses", "")]
    assert words[words.index("--sarif") + 1] == upload["sarif_file"]
