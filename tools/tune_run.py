"""The tuner's loop: measure the candidates of each cell, keep what is right and fastest, write it down at once.

It knows a GPU only as a Bench, so that all of it runs in tests without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from cudatma.errors import CudaTmaError, LaunchError
from cudatma.kernels.family import Family
from cudatma.kernels.shortlist import Listed
from cudatma.kernels.tuning_file import Entry, GpuClass, store_entry

from .tune_check import difference
from .tune_plan import Task

#: What beats the cost model's choice by less is noise, and the cost model's choice stays.
_LEAST_GAIN = 0.01
#: Of more candidates so many, the fastest at a short look, are measured, and the cost model's choice.
_FINALISTS = 12
_NONE: Mapping[Any, str] = MappingProxyType({})


class Bench(Protocol):
    """A GPU with one problem's operands on it."""

    def prepare(self, problem: Any) -> None:
        """Make operands; those of the problem before may go."""

    def result(self, candidate: Listed[Any]) -> Any:
        """(m, n) as the candidate computes it, in memory that the next call may write over. Raises whatever goes
        wrong: a compiler that refuses, a launch that fails, two runs that differ."""

    def keep(self, result: Any) -> Any:
        """A copy of a result that stays."""

    def screen(self, candidate: Listed[Any]) -> float:
        """Microseconds of one launch, as one short look shows them."""

    def times(self, candidates: Sequence[Listed[Any]], seconds: float) -> list[float]:
        """Microseconds of one launch of each, weights cold in L2, in about so many seconds altogether."""

    def is_usable(self) -> bool:
        """Whether the GPU still works: after a trap nothing does."""


@dataclass(slots=True)
class Outcome:
    """What became of a cell. status: ``"tuned"`` (another choice is faster), ``"kept"`` (none is), ``"known"``
    (measured before), ``"failed"``. times: candidate -> us. glances: the same of all but the cost model's choice, at a
    short look, where they were many. dropped: candidate -> why it did not count."""

    task: Task
    status: str
    winner: Listed[Any] | None = None
    us: float = 0.0
    rule_us: float = 0.0
    times: dict[str, float] = field(default_factory=dict)
    glances: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        cell: dict[str, Any] = self.task.problem.as_json() | {"status": self.status}
        cell |= {"winner": None if self.winner is None else self.winner.label, "us": self.us, "rule_us": self.rule_us}
        return cell | {"times_us": self.times, "glances_us": self.glances, "dropped": self.dropped}

    def __str__(self) -> str:
        task = str(self.task)
        if self.status == "known":
            return f"{task}: measured before"
        if self.winner is None:
            why = next(iter(self.dropped.values()), "nothing could be measured")
            return f"{task}: failed: {why}"
        gain = f"{self.us:.4g} us, the cost model's choice {self.rule_us:.4g} ({self.rule_us / self.us:.2f} x)"
        return f"{task}: {self.status}: {gain}, {self.winner.label}"


class GpuLostError(LaunchError):
    """A candidate took the GPU's context down: nothing runs in this process any more."""


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
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Tune the cells in order; each is in the file before the next begins.

    seconds: of measuring, a cell. known: cells to pass over. skip: labels of candidates to leave out. refused: what
    does not compile, and why. tell: is given each outcome when it is there. Raises GpuLostError, OSError (the file),
    KeyboardInterrupt; what was measured stays.
    """
    outcomes = []
    for task in tasks:
        if task.problem in known:
            outcome = Outcome(task, "known")
        else:
            outcome = tune_cell(task, bench, seconds, skip, refused)
            if outcome.winner is not None:
                store_entry(path, gpu, family, _entry(outcome, outcome.winner))
        outcomes.append(outcome)
        tell(outcome)
    return outcomes


def tune_cell(
    task: Task,
    bench: Bench,
    seconds: float,
    skip: Collection[str] = (),
    refused: Mapping[Any, str] = _NONE,
) -> Outcome:
    """Measure one cell. The first candidate, the cost model's choice, says what a right result is."""
    outcome = Outcome(task, "failed")
    rule, *others = task.candidates
    if rule.spec in refused:
        outcome.dropped[rule.label] = refused[rule.spec]
        return outcome
    try:
        bench.prepare(task.problem)
        reference = bench.keep(bench.result(rule))
    except Exception as error:  # too little memory, a compiler that is not there: another cell may work
        _require_gpu(bench, rule)
        outcome.dropped[rule.label] = one_line(error)
        return outcome
    right = [rule]
    for candidate in others:
        if candidate.label in skip:
            outcome.dropped[candidate.label] = "skipped, as asked"
            continue
        if candidate.spec in refused:
            outcome.dropped[candidate.label] = refused[candidate.spec]
            continue
        try:
            problem = difference(reference, bench.result(candidate), task.problem.layer.dtype)
        except Exception as error:
            _require_gpu(bench, candidate)
            problem = one_line(error)
        if problem:
            outcome.dropped[candidate.label] = problem
        else:
            right.append(candidate)
    if len(right) > _FINALISTS:
        right = _finalists(right, bench, outcome)
    try:
        times = bench.times(right, seconds)
    except Exception as error:
        _require_gpu(bench, rule)
        outcome.dropped[rule.label] = one_line(error)
        return outcome
    outcome.times = {candidate.label: us for candidate, us in zip(right, times, strict=True)}
    outcome.rule_us = times[0]
    best = min(range(len(times)), key=times.__getitem__)
    if times[best] > outcome.rule_us * (1 - _LEAST_GAIN):
        best = 0
    outcome.winner, outcome.us = right[best], times[best]
    outcome.status = "tuned" if best else "kept"
    return outcome


def _finalists(right: Sequence[Listed[Any]], bench: Bench, outcome: Outcome) -> list[Listed[Any]]:
    """The cost model's choice first, then the fastest others at a short look; what cannot be timed is dropped."""
    rule, *others = right
    for candidate in others:
        try:
            outcome.glances[candidate.label] = bench.screen(candidate)
        except Exception as error:
            _require_gpu(bench, candidate)
            outcome.dropped[candidate.label] = one_line(error)
    seen = [candidate for candidate in others if candidate.label in outcome.glances]
    return [rule, *sorted(seen, key=lambda one: outcome.glances[one.label])[: _FINALISTS - 1]]


def _entry(outcome: Outcome, winner: Listed[Any]) -> Entry[Any, Any]:
    """An outcome as the file keeps it."""
    return Entry(outcome.task.problem, winner.spec, outcome.us, outcome.rule_us)


def _require_gpu(bench: Bench, candidate: Listed[Any]) -> None:
    if not bench.is_usable():
        remedy = f"what was measured is kept; run again with --skip '{candidate.label}'"
        raise GpuLostError("candidate", candidate.label, "one that leaves the GPU usable", remedy)


def one_line(error: BaseException) -> str:
    """What was wrong, as short as a record wants it."""
    lines = str(error).strip().splitlines()
    kind = "" if isinstance(error, CudaTmaError) and lines else f"{type(error).__name__}: "
    return f"{kind}{lines[0] if lines else ''}"[:300]
