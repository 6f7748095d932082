"""A fake GPU for tests of the tuner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cudatma.dtypes import BFLOAT16
from cudatma.kernels.choice import Listed


class FakeBench:
    """A bench that computes nothing. The correct result is ``x``, and ``us`` returns the time of a candidate.

    ``spoil`` maps the label of a candidate to a wrong result or an error to raise.
    """

    def __init__(self, us: Callable[[Listed], float] = lambda one: one.cost.us) -> None:
        self.us = us
        self.spoil: dict[str, Any] = {}
        self.prepared: list[Any] = []
        self.timed: list[list[str]] = []
        self.usable = True
        self.x: Any = None

    def prepare(self, problem: Any) -> None:
        self.prepared.append(problem)
        kind, m = np.float16 if problem.as_json()["dtype"] == "float16" else BFLOAT16, problem.m
        self.x = np.random.default_rng(m).standard_normal((m, 40)).astype(kind)

    def result(self, candidate: Listed) -> Any:
        spoilt = self.spoil.get(candidate.label)
        if isinstance(spoilt, BaseException):
            raise spoilt
        return self.x.copy() if spoilt is None else spoilt(self.x.copy())

    def keep(self, result: Any) -> Any:
        return result.copy()

    def screen(self, candidate: Listed) -> float:
        return self.us(candidate)

    def times(self, candidates: Sequence[Listed], seconds: float) -> list[float]:
        self.timed.append([one.label for one in candidates])
        return [self.us(one) for one in candidates]

    def is_usable(self) -> bool:
        return self.usable
