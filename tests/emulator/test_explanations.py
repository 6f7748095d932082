"""``cudatma explain``: each kind of hazard has a broken and a fixed kernel, and problems have a kernel and a time."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import cudatma
from cudatma import cli
from cudatma.emulator import CAUSES
from cudatma.emulator.hazards.explanation import FOLDER

pytestmark = pytest.mark.usefixtures("without_ptxas")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Run a command with --json and return its output."""
    cli.main([*arguments, "--json"])
    shown = capsys.readouterr()
    assert shown.out, shown.err
    return json.loads(shown.out)


def test_every_kind_is_explained() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(CAUSES)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("kind", CAUSES)
def test_the_broken_kernel_has_the_hazard_and_the_fixed_one_has_none(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explanation = cudatma.explain(kind)
    assert cli.main(["explain", kind, "--out", str(tmp_path)]) == 0
    assert str(explanation) in capsys.readouterr().out
    reports = [
        run(capsys, "emulate", str(tmp_path / version / explanation.file), *shlex.split(explanation.launch))
        for version in ("broken", "fixed")
    ]
    broken, fixed = ([finding["kind"] for finding in report["hazards"] + report["warnings"]] for report in reports)
    assert broken[:1] == [kind]
    assert fixed == []


def test_the_list_and_a_misspelled_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {kind} " in listed for kind in CAUSES)
    assert [explanation["kind"] for explanation in run(capsys, "explain")] == list(CAUSES)
    assert cli.main(["explain", "data_rase"]) == 2
    assert "got data_rase (did you mean data_race?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "kernel"),
    [
        ("marlin --m 1 --n 4096 --k 4096 --target sm_90a", "skinny"),
        ("gemm --m 4096 --n 4096 --k 4096 --target sm_120a", "mma_sync"),
        ("attention --q-length 4096 --k-length 4096 --head-dim 128 --heads 16 --causal --target sm_90a", "a4"),
        ("experts --m 64 --n 768 --k 2048 --experts 128 --top-k 8 --target sm_90a", "skinny"),
    ],
)
def test_a_problem_is_explained(arguments: str, kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "explain", *arguments.split())["kernel"] == kernel
    assert cli.main(["explain", *arguments.split(), "--sm-count", "60"]) == 0
    assert "60 SMs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("marlin", "--m must be passed with marlin; pass --m, --n and --k"),
        ("gemm --m 1 --n 8", "--k must be passed"),
        ("trap --m 1 --n 8 --k 8", "--m must be combined with marlin, gemm, attention"),
    ],
)
def test_sizes_belong_to_problems(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *arguments.split()]) == 2
    assert says in capsys.readouterr().err
