"""`cudatma tune` without a GPU: only the bench that computes and times is a fake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_bench import FakeBench

from cudatma import cli
from cudatma.dtypes import BFLOAT16
from cudatma.errors import ArgumentError, CompileError, TuneFileWarning
from cudatma.kernels import choice
from cudatma.kernels.choice import Listed
from cudatma.kernels.gpu import H200
from cudatma.kernels.marlin.choose import MARLIN, decide
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.tuning import Entry, usable_entries
from tools import tune, tune_plan, tune_run
from tools.tune_check import difference

#: --jobs 1: nothing is compiled before it is measured, and here that computes nothing.
SHAPE = ["--shape", "4096x4096", "--m", "1,64", "--jobs", "1"]


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "tuned.json"
    monkeypatch.setenv("CUDATMA_TUNE_FILE", str(path))
    choice.forget()
    return path


def tuned(bench: FakeBench, *arguments: str) -> int:
    return tune.main([*SHAPE, *arguments], bench=bench, gpu=H200)


def entries(path: Path) -> dict[int, Entry]:
    found, problems = usable_entries(path, MARLIN, H200)
    assert not problems
    return {entry.problem.m: entry for entry in found}


def task_of(m: int, candidates: int = 12, dtype: str = "float16") -> tune_plan.Task:
    options = {"group_size": 128, "has_zeros": False, "dtype": dtype}
    return tune_plan.plan(MARLIN, [(4096, 4096)], [m], options, H200, candidates)[0]


def test_the_fastest_is_kept_and_then_chosen(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = task_of(64)
    wanted = task.candidates[5]
    bench = FakeBench(lambda one: 5.0 if one.config == wanted.config else 9.0)
    assert tuned(bench, "--json") == 0
    entry = entries(file)[64]
    assert (entry.config, entry.us, entry.rule_us) == (wanted.config, 5.0, 9.0)
    choice.forget()
    decision = decide(Problem(LinearShape(4096, 4096, 128, False, "float16"), 64), H200)
    assert (decision.source, decision.config) == ("tuned", wanted.config)
    record = json.loads(capsys.readouterr().out)["cells"][1]
    assert len(record["times_us"]) == 12
    assert record["times_us"][wanted.label] == 5.0
    assert "times_us" not in file.read_text(), "the file holds what is used"


def test_a_small_gain_does_not_replace_the_cost_models_choice(file: Path) -> None:
    bench = FakeBench(lambda one: 10.0 if one.label == bench.timed[-1][0] else 9.95)
    tuned(bench)
    for m, entry in entries(file).items():
        rule = task_of(m, 2).candidates[0]
        assert (entry.config, entry.us) == (rule.config, 10.0)


def test_of_many_candidates_the_fastest_at_screening_are_measured(file: Path) -> None:
    task = task_of(64, 40)
    rule, *others = task.candidates
    assert len(others) > 12
    wanted = others[-1]
    bench = FakeBench(lambda one: {rule.label: 9.0, wanted.label: 5.0}.get(one.label, 7.0))
    outcome = tune_run.tune_problem(task, bench, 1.0)
    (measured,) = bench.timed
    assert len(measured) == 12
    assert measured[:2] == [rule.label, wanted.label], "the untuned choice, whatever it takes, then the fastest"
    assert outcome.winner == wanted
    assert (len(outcome.times), len(outcome.glances)) == (12, len(others))
    # What looked faster for a moment does not win, and what cannot be timed is out, with its reason.
    first, second, *_ = others

    def look(one: Listed) -> float:
        if one is second:
            raise RuntimeError("no graph")
        return 1.0 if one is first else bench.us(one)

    bench.screen = look  # type: ignore[method-assign, assignment]
    again = tune_run.tune_problem(task, bench, 1.0)
    assert again.winner == wanted
    assert again.times[first.label] == 7.0
    assert "no graph" in again.dropped[second.label]


def put(value: float, *at: int) -> Callable[[Any], Any]:
    def spoil(x: Any) -> Any:
        x[at] = value
        return x

    return spoil


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        (put(100.0, 0, 3), "wrong results: 1 of"),
        (put(float("nan"), 0, 39), "wrong results: 1 of"),
        (lambda x: (x * 1.05).astype(x.dtype), "wrong results"),
        (lambda x: np.roll(x, 1, axis=1), "wrong results"),
        (lambda x: x[:, :8], "its shape is"),
        (CompileError("NVRTC refused kernel.cu", "error: no", "int x;"), "NVRTC refused kernel.cu"),
        (MemoryError(), "MemoryError"),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_candidate_with_wrong_results_is_dropped_and_reported(
    file: Path, capsys: pytest.CaptureFixture[str], spoilt: Any, why: str, dtype: str
) -> None:
    task = task_of(64, dtype=dtype)
    bad = task.candidates[1].label
    bench = FakeBench(lambda one: 1.0 if one.label == bad else 9.0)
    bench.spoil[bad] = spoilt
    assert tuned(bench, "--json", "--dtype", dtype) == 0
    assert bad not in bench.timed[1]
    assert entries(file)[64].us == 9.0
    shown = capsys.readouterr()
    assert why in json.loads(shown.out)["cells"][1]["dropped"][bad]
    assert f"dropped: {bad}: {why}" in shown.err


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_result_that_only_rounding_changes_is_correct(dtype: str) -> None:
    kind = np.float16 if dtype == "float16" else BFLOAT16
    exact = np.random.default_rng(0).standard_normal((700, 64)) * 30
    rounded = exact.astype(kind)
    again = (rounded.astype(np.float64) * (1 + 2.0 ** (-11 if dtype == "float16" else -8))).astype(kind)
    assert difference(rounded, again) == ""
    again[699, 63] = 35
    assert "1 of 44800" in difference(rounded, again)
    zero = np.zeros((2, 2), kind)
    assert difference(zero, zero) == ""


class _Stop:
    """An object that interrupts at the n-th problem."""

    def __init__(self, bench: FakeBench, number: int) -> None:
        self.bench, self.left, self.prepare = bench, number, bench.prepare

    def __call__(self, problem: Problem) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        self.prepare(problem)


def test_an_interrupted_run_keeps_what_it_has_and_goes_on(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = FakeBench()
    first.prepare = _Stop(first, 2)  # type: ignore[method-assign]
    assert tuned(first, "--json") == 130
    assert list(entries(file)) == [1]
    shown = capsys.readouterr()
    assert "interrupted; 1 problem stored; run the same command again to continue" in shown.err
    assert json.loads(shown.out)["interrupted"] is True
    rule = task_of(64, 2).candidates[0]
    second = FakeBench(lambda one: 9.0 if one.label == rule.label else 5.0)
    assert tuned(second, "--json") == 0
    assert [problem.m for problem in second.prepared] == [64]
    assert [cell["status"] for cell in json.loads(capsys.readouterr().out)["cells"]] == ["known", "tuned"]
    assert sorted(entries(file)) == [1, 64]
    third = FakeBench()
    assert tuned(third) == 0
    assert third.prepared == []
    assert tuned(third, "--again") == 0
    assert len(third.prepared) == 2


def test_a_problem_that_fails_does_not_end_the_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = FakeBench()
    rule = task_of(1, 2).candidates[0]
    bench.spoil[rule.label] = MemoryError("no room")
    assert tuned(bench) == 1
    assert list(entries(file)) == [64]
    assert "4096 x 4096, M = 1: failed: MemoryError: no room" in capsys.readouterr().err


def test_a_lost_gpu_ends_the_run_and_names_the_candidate(file: Path) -> None:
    task = task_of(64)
    bad = task.candidates[4].label

    class Lost(FakeBench):
        def result(self, candidate: Listed) -> Any:
            if candidate.label == bad:
                self.usable = False
                raise RuntimeError("CUDA_ERROR_ILLEGAL_INSTRUCTION")
            return super().result(candidate)

    with pytest.raises(tune_run.GpuLostError, match=f"--skip '{bad}'"):
        tuned(Lost())
    assert list(entries(file)) == [1]
    again = Lost()
    assert tuned(again, "--skip", bad) == 0
    assert sorted(entries(file)) == [1, 64]
    assert bad not in again.timed[0]


def test_entries_of_another_revision_are_measured_again(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned(FakeBench())
    file.write_text(file.read_text().replace('"revision": ', '"revision": 10'))
    bench = FakeBench()
    capsys.readouterr()
    tuned(bench)
    assert len(bench.prepared) == 2
    assert "cudatma tune marlin --shape 4096x4096 --m 64" in " ".join(capsys.readouterr().err.split())
    assert sorted(entries(file)) == [1, 64], "in place of the old ones"


def test_a_damaged_file_is_set_aside(file: Path) -> None:
    file.write_text("{ half")
    with pytest.warns(TuneFileWarning, match="renamed to tuned.json.unread-1"):
        assert tuned(FakeBench()) == 0
    assert file.with_name("tuned.json.unread-1").read_text() == "{ half"
    assert sorted(entries(file)) == [1, 64]


def test_the_plan_as_text_and_as_json(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    arguments = ["--model", "llama3-8b", "--m", "16", "--candidates", "4", "--dry-run", "--target", "sm_120a"]
    assert cli.main(["tune", *arguments, "--sm-count", "170"]) == 0
    shown = capsys.readouterr().out
    assert "4 problems for sm_120a, 170 SMs" in shown
    assert "4096 x 28672, M = 16: 4 candidates" in shown
    assert cli.main(["tune", *SHAPE, "--dry-run", "--json", "--target", "sm_90a", "--zeros", "--group-size", "64"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [(cell["k"], cell["m"], cell["has_zeros"], cell["group_size"]) for cell in plan] == [
        (4096, 1, True, 64),
        (4096, 64, True, 64),
    ]
    assert all(one["predicted_us"] > 0 for cell in plan for one in cell["candidates"])
    assert cli.main(["tune", "--shape", "4096x4096", "--m", "256", "--dry-run", "--target", "sm_90a"]) == 0
    assert "marlin_wgmma_f16_g128_fused_" in capsys.readouterr().out
    assert not file.exists()


@pytest.mark.parametrize(("kind", "size"), [("int4", 128), ("mxfp4", 32), ("nvfp4", 16), ("fp8", 128)])
def test_the_group_size_is_by_default_that_of_the_format(
    capsys: pytest.CaptureFixture[str], kind: str, size: int
) -> None:
    arguments = ["--target", "sm_90a", "--format", kind]
    assert cli.main(["tune", *SHAPE, "--dry-run", "--json", *arguments]) == 0
    assert {cell["group_size"] for cell in json.loads(capsys.readouterr().out)} == {size}
    assert cli.main(["explain", "marlin", "--m", "1", "--n", "4096", "--k", "4096", *arguments]) == 0
    assert f"groups of {size}" in capsys.readouterr().out


def test_wrong_options_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="--shape must be passed unless --model is"):
        tune.main([], FakeBench(), H200)
    for words in (["--model", "llama3-8b"], []):
        with pytest.raises(ArgumentError, match=r"KxN \(number of keys x head dimension\)"):
            tune.main(["attention", *words], FakeBench(), H200)
    with pytest.raises(ArgumentError, match="with --dry-run"):
        tune.main([*SHAPE, "--target", "sm_120a"], FakeBench(), H200)
    with pytest.raises(ArgumentError, match="--sm-count must be combined with --dry-run or --compile-only"):
        tune.main([*SHAPE, "--sm-count", "100"], FakeBench(), H200)
    for option, value in (
        ("--shape", "4096"),
        ("--shape", "0x4"),
        ("--m", "1,,2"),
        ("--m", "0"),
        ("--seconds", "-1"),
        ("--candidates", "0"),
        ("--model", "gpt-9"),
        ("--group-size", "100"),
        ("--dtype", "int8"),
    ):
        with pytest.raises(ArgumentError, match=f"{option}.* must be .*got {value}"):
            tune.main([*SHAPE, option, value], FakeBench(), H200)
    monkeypatch.setenv("CUDATMA_TUNE_FILE", "none")
    with pytest.raises(ArgumentError, match="unset CUDATMA_TUNE_FILE or pass --file"):
        tune.main(SHAPE, FakeBench(), H200)
