"""The tuner's first phase: kernels that are compiled before the measurement, compiler errors, and filling a cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_bench import FakeBench

from cudatma.errors import CompileError
from cudatma.kernels import choice
from cudatma.kernels.gpu import H200
from cudatma.kernels.marlin.choose import MARLIN
from cudatma.kernels.marlin.problem import Problem
from tools import tune, tune_compile, tune_plan
from tools.tune_compile import kernels_of

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ["--shape", "4096x4096", "--m", "1,64"]
COMPILE = [*SHAPE, "--compile-only", "--target", "sm_90a"]


def tasks(candidates: int = 12) -> list[tune_plan.Task]:
    options = {"group_size": 128, "has_zeros": False, "dtype": "float16"}
    return tune_plan.plan(MARLIN, [(4096, 4096)], [1, 64], options, H200, candidates)


def configs_of(tasks: list[tune_plan.Task]) -> list[Any]:
    return [kernel.in_form("none") for kernel in kernels_of(tasks)]


@dataclass
class Compiler:
    """Replacement for compile_all() that compiles nothing, rejects some kernels, and may stop early.

    It receives candidates in their launched (fused) form; ``calls`` and ``refuses`` contain them in their listed form.
    """

    refuses: set[Any] = field(default_factory=set)
    stops_after: int = 10_000
    calls: list[tuple[list[Any], str, int]] = field(default_factory=list)

    def __call__(self, orders: list[tuple[str, Any]], target: str, jobs: int, tell: Callable[..., None]) -> None:
        assert all(template == config.template for template, config in orders)
        launched = [config for _, config in orders]
        assert all(config == config.in_form("as_stored") for config in launched)
        configs = [config.in_form("none") for config in launched]
        self.calls.append((configs, target, jobs))
        for config, listed in list(zip(launched, configs, strict=True))[: self.stops_after]:
            refused = CompileError(f"{listed.entry} would be slow", "a log", "int x;")
            tell(config, refused if listed in self.refuses else None)
        if self.stops_after < len(configs):
            raise KeyboardInterrupt


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(tune_compile, "compile_all", made)
    return made


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("CUDATMA_TUNE_FILE", str(tmp_path / "tuned.json"))
    choice.forget()
    return tmp_path / "tuned.json"


def tuned(bench: FakeBench, *arguments: str) -> int:
    return tune.main([*SHAPE, "--jobs", "3", *arguments], bench=bench, gpu=H200)


def test_every_candidate_is_compiled_once_and_before_all_measuring(
    compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    class Late(FakeBench):
        def prepare(self, problem: Problem) -> None:
            assert len(compiler.calls) == 1
            super().prepare(problem)

    assert tuned(Late()) == 0
    wanted = [one.config for task in tasks() for one in task.candidates]
    configs, target, jobs = compiler.calls[0]
    assert (set(configs), target, jobs) == (set(wanted), "sm_90a", 3)
    assert len(set(configs)) == len(configs)
    assert f"{len(configs)} kernels ready after" in capsys.readouterr().err


def test_only_problems_that_are_still_to_be_measured(compiler: Compiler) -> None:
    tune.main(["--shape", "4096x4096", "--m", "1", "--jobs", "1"], bench=FakeBench(), gpu=H200)
    assert not compiler.calls, "one process compiles each in its turn"
    assert tuned(FakeBench()) == 0
    assert compiler.calls[0][0] == configs_of(tasks()[1:])
    assert tuned(FakeBench()) == 0
    assert len(compiler.calls) == 1, "nothing left to be measured"
    assert tuned(FakeBench(), "--again") == 0
    assert compiler.calls[1][0] == configs_of(tasks())


def test_a_refusal_is_why_a_candidate_is_dropped_and_the_gpu_never_sees_it(
    compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tasks()[1].candidates[3]
    compiler.refuses = {bad.config}
    seen = []

    class Watched(FakeBench):
        def result(self, candidate: Any) -> Any:
            seen.append(candidate.config)
            return super().result(candidate)

    assert tuned(Watched(), "--json") == 0
    assert seen
    assert bad.config not in seen
    cell = json.loads(capsys.readouterr().out)["cells"][1]
    assert cell["dropped"][bad.label] == f"{bad.config.entry} would be slow"
    assert bad.label not in cell["times_us"]


def test_an_interrupt_while_it_compiles(compiler: Compiler, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiler.stops_after = 2
    bench = FakeBench()
    assert tuned(bench, "--json") == 130
    assert not bench.prepared
    assert not file.exists()
    assert "interrupted; 0 problems stored" in capsys.readouterr().err
    assert tune.main(COMPILE) == 130
    assert "the compiled kernels stay in the cache" in capsys.readouterr().err


def test_only_compiling_needs_no_gpu_and_no_file(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDATMA_TUNE_FILE", "none")
    bad = tasks()[1].candidates[2]
    compiler.refuses = {bad.config}
    assert tune.main([*COMPILE, "--json", "--jobs", "1"]) == 0
    assert compiler.calls == [(configs_of(tasks()), "sm_90a", 1)]
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    assert record["refused"] == {bad.label: f"{bad.config.entry} would be slow"}
    assert (record["kernels"], record["sm_count"]) == (len(configs_of(tasks())) - 1, 132)
    assert f"does not compile: {bad.label}: " in shown.err
    compiler.refuses = {tasks()[0].candidates[0].config}
    assert tune.main(COMPILE) == 1, "a problem that cannot be tuned"


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.1, 0.8])
def test_ctrl_c_ends_all_processes_quietly(seconds: float, tmp_path: Path) -> None:
    """As from a terminal, the signal goes to every process of the group while they start and while they compile."""
    command = [sys.executable, "-m", "cudatma.cli", "tune", *COMPILE, "--jobs", "2"]
    environment = os.environ | {"CUDATMA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    )
    assert running.stderr is not None
    while not running.stderr.readline().startswith("into "):
        assert running.poll() is None
    time.sleep(seconds)
    os.killpg(running.pid, signal.SIGINT)
    said = running.communicate(timeout=60)[1]  # ends when the last process that could write has ended
    assert running.returncode == 130
    assert said.rstrip().endswith("the compiled kernels stay in the cache; run the same command again to continue")
    assert "Traceback" not in said
    assert "Error" not in said


def test_what_is_skipped_is_not_compiled_but_the_rules_choice_is(compiler: Compiler) -> None:
    rule, one, *_ = tasks()[1].candidates
    assert tuned(FakeBench(), "--skip", one.label, "--skip", rule.label) == 0
    configs = compiler.calls[0][0]
    assert one.config not in configs
    assert rule.config in configs
