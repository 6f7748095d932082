"""Measure the candidates of each problem, and store the fastest candidate with a correct result.

The loop accesses the GPU through a Bench, so that tests can run without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from cudatma.errors import CudaTmaError, LaunchError, duration
from cudatma.kernels.choice import Listed
from cudatma.kernels.family import Family
from cudatma.kernels.tuning import Entry, GpuClass, store_entry

from .tune_check import difference
from .tune_plan import Task

#: Minimum speedup. A smaller speedup is noise, so the untuned choice stays.
_MIN_GAIN = 0.01
#: Maximum number of candidates to measure: the untuned choice, and the fastest candidates in screening.
_FINALISTS = 12
_NONE: Mapping[Any, str] = MappingProxyType({})


class Bench(Protocol):
    """A GPU with the operands of one problem."""

    def prepare(self, problem: Any) -> None:
        """Create operands. The operands of the previous problem may be freed."""

    def result(self, candidate: Listed[Any]) -> Any:
        """Return the candidate's result (m, n), in memory that the next call may overwrite.

        Raise an error if the kernel does not compile, the launch fails, or two runs have different results.
        """

    def keep(self, result: Any) -> Any:
        """Return a copy of a result. Later calls do not overwrite the copy."""

    def screen(self, candidate: Listed[Any]) -> float:
        """Return the time of one launch in microseconds, from a short measurement."""

    def times(self, candidates: Sequence[Listed[Any]], seconds: float) -> list[float]:
        """Return the time per launch of each candidate in microseconds, with weights that are not in L2.

        Measuring all candidates takes about ``seconds`` in total.
        """

    def is_usable(self) -> bool:
        """Return whether the GPU still works. After a trap, every call fails."""


@dataclass(slots=True)
class Outcome:
    """Outcome of a problem.

    ``status`` is ``"tuned"`` (another candidate is faster than the untuned choice), ``"kept"`` (no candidate is
    faster), ``"known"`` (measured before) or ``"failed"``. ``times`` contains the time of each candidate in
    microseconds. ``glances`` contains the time of each candidate except the untuned choice in screening. It is empty if
    there are few candidates. ``dropped`` contains the reason for each candidate that was dropped.
    """

    task: Task
    status: str
    winner: Listed[Any] | None = None
    us: float = 0.0
    rule_us: float = 0.0
    times: dict[str, float] = field(default_factory=dict)
    glances: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        record: dict[str, Any] = self.task.problem.as_json() | {"status": self.status}
        record |= {"winner": None if self.winner is None else self.winner.label, "us": self.us, "rule_us": self.rule_us}
        return record | {"times_us": self.times, "glances_us": self.glances, "dropped": self.dropped}

    def __str__(self) -> str:
        task = str(self.task)
        if self.status == "known":
            return f"{task}: already measured"
        if self.winner is None:
            why = next(iter(self.dropped.values()), "no candidate could be measured")
            return f"{task}: failed: {why}"
        time, rule_time = duration(1e-6 * self.us), duration(1e-6 * self.rule_us)
        gain = f"{time}, the untuned choice {rule_time} ({self.rule_us / self.us:.2f} x)"
        return f"{task}: {self.status}: {gain}, {self.winner.label}"


class GpuLostError(LaunchError):
    """A candidate destroyed the CUDA context, so that every later launch in this process fails."""


def run(
    tasks: Sequence[Task],
    bench: Bench,
    path: Path,
    family: Family[Any, Any],
    gpu: GpuClass,
    *,
    seconds: float,
    known: Collection[Any] = (),
    skip: Collection[str] = (),
    refused: Mapping[Any, str] = _NONE,
    show: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Tune the problems in order, and store each outcome before the next problem begins.

    ``seconds`` is the measuring time per problem. ``known`` contains problems to skip. ``skip`` contains labels of
    candidates to leave out. ``refused`` maps candidates that do not compile to the reason. ``show`` is called with each
    outcome. Raise GpuLostError, OSError for the file, or KeyboardInterrupt. Finished measurements stay in the file.
    """
    outcomes = []
    for task in tasks:
        if task.problem in known:
            outcome = Outcome(task, "known")
        else:
            outcome = tune_problem(task, bench, seconds, skip, refused)
            if outcome.winner is not None:
                store_entry(path, gpu, family, _entry(outcome, outcome.winner))
        outcomes.append(outcome)
        show(outcome)
    return outcomes


def tune_problem(
    task: Task,
    bench: Bench,
    seconds: float,
    skip: Collection[str] = (),
    refused: Mapping[Any, str] = _NONE,
) -> Outcome:
    """Measure one problem. The result of the first candidate, the untuned choice, is the reference."""
    outcome = Outcome(task, "failed")
    rule, *others = task.candidates
    if rule in refused:
        outcome.dropped[rule.label] = refused[rule]
        return outcome
    try:
        bench.prepare(task.problem)
        reference = bench.keep(bench.result(rule))
    except Exception as error:  # For example, the GPU is out of memory. Other problems may fit.
        _require_gpu(bench, rule)
        outcome.dropped[rule.label] = one_line(error)
        return outcome
    correct = [rule]
    for candidate in others:
        if candidate.label in skip:
            outcome.dropped[candidate.label] = "skipped by --skip"
            continue
        if candidate in refused:
            outcome.dropped[candidate.label] = refused[candidate]
            continue
        try:
            problem = difference(reference, bench.result(candidate))
        except Exception as error:
            _require_gpu(bench, candidate)
            problem = one_line(error)
        if problem:
            outcome.dropped[candidate.label] = problem
        else:
            correct.append(candidate)
    if len(correct) > _FINALISTS:
        correct = _finalists(correct, bench, outcome)
    try:
        times = bench.times(correct, seconds)
    except Exception as error:
        _require_gpu(bench, rule)
        outcome.dropped[rule.label] = one_line(error)
        return outcome
    outcome.times = {candidate.label: us for candidate, us in zip(correct, times, strict=True)}
    outcome.rule_us = times[0]
    best = min(range(len(times)), key=times.__getitem__)
    if times[best] > outcome.rule_us * (1 - _MIN_GAIN):
        best = 0
    outcome.winner, outcome.us = correct[best], times[best]
    outcome.status = "tuned" if best else "kept"
    return outcome


def _finalists(candidates: Sequence[Listed[Any]], bench: Bench, outcome: Outcome) -> list[Listed[Any]]:
    """Return the untuned choice, then the fastest candidates in screening.

    Drop candidates that cannot be timed.
    """
    rule, *others = candidates
    for candidate in others:
        try:
            outcome.glances[candidate.label] = bench.screen(candidate)
        except Exception as error:
            _require_gpu(bench, candidate)
            outcome.dropped[candidate.label] = one_line(error)
    timed = [candidate for candidate in others if candidate.label in outcome.glances]
    return [rule, *sorted(timed, key=lambda candidate: outcome.glances[candidate.label])[: _FINALISTS - 1]]


def _entry(outcome: Outcome, winner: Listed[Any]) -> Entry[Any, Any]:
    """Return an outcome's entry for the tuning file."""
    return Entry(outcome.task.problem, winner.config, outcome.us, outcome.rule_us)


def _require_gpu(bench: Bench, candidate: Listed[Any]) -> None:
    if not bench.is_usable():
        remedy = f"run again with --skip '{candidate.label}'; the measurements are stored"
        raise GpuLostError("candidate", candidate.label, "a candidate that leaves the GPU usable", remedy)


def one_line(error: BaseException) -> str:
    """Return the cause of an error in one line."""
    lines = str(error).strip().splitlines()
    kind = "" if isinstance(error, CudaTmaError) and lines else f"{type(error).__name__}: "
    return f"{kind}{lines[0] if lines else ''}"[:300]
