"""Plan a run of `cudatma tune`, with problems and their candidates. The functions have no side effects."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cudatma.kernels.choice import Listed, shortlist
from cudatma.kernels.family import MAX_EXTENT, Family
from cudatma.kernels.gpu import Gpu

from .model_layers import model_shapes

M_VALUES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Task:
    """A problem and its candidates. The first candidate is the untuned choice."""

    problem: Any
    candidates: tuple[Listed[Any], ...]

    def __str__(self) -> str:
        return f"{self.problem.k} x {self.problem.n}, M = {self.problem.m}"

    def as_dict(self) -> dict[str, Any]:
        listed = [
            {"label": candidate.label, "predicted_us": candidate.cost.us, "bound": candidate.cost.bound}
            for candidate in self.candidates
        ]
        problem: dict[str, Any] = self.problem.as_json()
        return problem | {"candidates": listed}


def plan(
    family: Family[Any, Any],
    shapes: Iterable[tuple[int, int]],
    m_values: Iterable[int],
    options: Mapping[str, Any],
    gpu: Gpu,
    candidates: int,
) -> list[Task]:
    """Return the problems of a run with their candidates, one for each combination of shape and M.

    ``options`` are the family's options by name.
    """
    tasks = []
    for k, n in dict.fromkeys(shapes):
        for m in sorted(set(m_values)):
            problem = family.read_problem({"m": m, "n": n, "k": k, **options})
            tasks.append(Task(problem, tuple(shortlist(family, problem, gpu, candidates))))
    return tasks


def shapes_of(shapes: Sequence[tuple[int, int]], models: Sequence[str], gpus: int = 1) -> list[tuple[int, int]]:
    """Return ``shapes`` and the shapes of the models, sharded across ``gpus`` GPUs, without duplicates.

    Raise ArgumentError if a model's layers cannot be sharded across the GPUs.
    """
    return list(dict.fromkeys([*shapes, *(shape for model in models for shape in model_shapes(model, gpus))]))


def parse_shape(text: str) -> tuple[int, int]:
    """Parse ``"8192x28672"`` into (8192, 28672). Raise argparse's ArgumentTypeError for other text."""
    k, separator, n = text.lower().partition("x")
    if not (separator and k.isdecimal() and n.isdecimal() and 0 < int(k) <= MAX_EXTENT and 0 < int(n) <= MAX_EXTENT):
        raise argparse.ArgumentTypeError(
            f"must be KxN, such as 8192x28672, with K and N from 1 to {MAX_EXTENT}, got {text}"
        )
    return int(k), int(n)


def parse_m_values(text: str) -> list[int]:
    """Parse ``"1,16,64"`` into [1, 16, 64]. Raise argparse's ArgumentTypeError for other text."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= MAX_EXTENT for part in parts):
        allowed = f"a list of values of M from 1 to {MAX_EXTENT}, separated by commas, such as 1,16,64"
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")
    return [int(part) for part in parts]
