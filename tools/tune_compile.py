"""Compile all candidates of the tuner before the first measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cudatma.build.prebuild import compile_all
from cudatma.errors import CompileError, counted, duration
from cudatma.kernels.choice import Listed

from .tune_plan import Task
from .tune_run import one_line


@dataclass(slots=True)
class Kernels:
    """Result of compile_tasks().

    ``refused`` maps each candidate with a kernel that does not compile to the compiler's error. ``seconds`` is the wall
    time.
    """

    ready: int = 0
    refused: dict[Listed[Any], str] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        ready = f"{counted(self.ready, 'kernel')} ready after {duration(self.seconds)}"
        refused = len({candidate.label for candidate in self.refused})
        return f"{ready}, {counted(refused, 'candidate')} did not compile"

    @property
    def labels(self) -> dict[str, str]:
        """The compiler's error for each candidate that does not compile."""
        return {candidate.label: why for candidate, why in self.refused.items()}


def kernels_of(tasks: Sequence[Task], skip: Collection[str] = ()) -> dict[Any, list[Listed[Any]]]:
    """Return the configs of all kernels to compile, and the candidates that launch each kernel.

    ``skip`` contains labels of candidates to leave out. The untuned choice is never left out, because every
    problem needs it.
    """
    users: dict[Any, list[Listed[Any]]] = {}
    for task in tasks:
        for index, candidate in enumerate(task.candidates):
            if index == 0 or candidate.label not in skip:
                for kernel in candidate.kernels:
                    users.setdefault(kernel, []).append(candidate)
    return users


def compile_tasks(
    users: Mapping[Any, Sequence[Listed[Any]]], target: str, jobs: int, advance: Callable[[], None] = lambda: None
) -> Kernels:
    """Compile the result of kernels_of() into the artifact cache. Call ``advance`` after each kernel.

    Raise the errors of compile_all(), or KeyboardInterrupt. Compiled kernels stay in the cache.
    """
    kernels, began = Kernels(), time.perf_counter()

    def count(kernel: Any, refusal: CompileError | None) -> None:
        if refusal is None:
            kernels.ready += 1
        else:
            kernels.refused |= dict.fromkeys(users[kernel], one_line(refusal))
        advance()

    compile_all([(kernel.template, kernel) for kernel in users], target, jobs, count)
    kernels.seconds = time.perf_counter() - began
    return kernels
