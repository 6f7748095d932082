"""Compile all candidates of the tuner before the first measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from cudatma.build.prebuild import compile_all
from cudatma.errors import CompileError, counted, duration
from cudatma.kernels.family import Family

from .tune_plan import Task
from .tune_run import one_line


@dataclass(slots=True)
class Kernels:
    """Result of compile_tasks().

    ``refused`` maps each config that does not compile to the compiler's error. ``seconds`` is the wall time.
    """

    ready: int = 0
    refused: dict[Any, str] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        ready = f"{counted(self.ready, 'kernel')} ready after {duration(self.seconds)}"
        return f"{ready}, {len(self.refused)} did not compile"

    def labels(self, tasks: Sequence[Task]) -> dict[str, str]:
        """Return the compiler's error for each candidate that does not compile."""
        listed = [candidate for task in tasks for candidate in task.candidates if candidate.config in self.refused]
        return {candidate.label: self.refused[candidate.config] for candidate in listed}


def configs_of(tasks: Sequence[Task], skip: Collection[str] = ()) -> list[Any]:
    """Return the distinct configs of the tasks' candidates.

    ``skip`` contains labels of candidates to leave out. The cost model's choice is never left out, because every
    problem needs it.
    """
    configs: dict[Any, None] = {}
    for task in tasks:
        rule, *others = task.candidates
        configs[rule.config] = None
        configs |= dict.fromkeys(candidate.config for candidate in others if candidate.label not in skip)
    return list(configs)


def compile_tasks(
    configs: Sequence[Any],
    family: Family[Any, Any],
    target: str,
    jobs: int,
    advance: Callable[[], None] = lambda: None,
) -> Kernels:
    """Compile the kernels of a family's candidates into the artifact cache. Call ``advance`` after each kernel.

    Raise the errors of compile_all(), or KeyboardInterrupt. Compiled kernels stay in the cache.
    """
    kernels, began = Kernels(), time.perf_counter()
    chosen = {family.launched(config): config for config in configs}

    def count(config: Any, refusal: CompileError | None) -> None:
        if refusal is None:
            kernels.ready += 1
        else:
            kernels.refused[chosen[config]] = one_line(refusal)
        advance()

    compile_all([(config.template, config) for config in chosen], target, jobs, count)
    kernels.seconds = time.perf_counter() - began
    return kernels
