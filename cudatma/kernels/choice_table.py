"""The configuration for each M of a shape, as a table of intervals.

Building a table takes a second or more, because the cost model ranks its candidates once for each interval of M. It is
kept in the artifact cache under a digest of everything that it depends on.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from cudatma.build.kernel import remembered
from cudatma.kernels import choosing
from cudatma.kernels.choosing import decide, interval_start, pinned_scope, tuning_files
from cudatma.kernels.family import Family, P, S
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.tuning_file import FILE_VARIABLE


@dataclass(frozen=True, slots=True)
class ChoiceTable:
    """The configurations of a shape for M = 1 to max_m; ``starts[i]`` is the first M that uses ``specs[i]``."""

    max_m: int
    starts: Sequence[int]
    specs: Sequence[Any]

    def at(self, m: int) -> Any:
        """Return the configuration for M rows, at most ``max_m``."""
        return self.specs[bisect_right(self.starts, m) - 1]

    def specs_up_to(self, m: int) -> Sequence[Any]:
        """Return the configurations that M from 1 to m use."""
        return self.specs[: bisect_right(self.starts, m)]


#: The tables of this process by shape, GPU and the variable that names the tuning file.
_tables: dict[Any, ChoiceTable] = {}


def choose(family: Family[P, S], problem: P, gpu: Gpu) -> S:
    """Return decide()'s configuration, from the shape's table if it covers M."""
    spec = pinned_scope.get()
    if spec is not None and type(spec) in family.kernels.values():
        return decide(family, problem, gpu).spec
    key = (family.name, problem.fixed, gpu, os.environ.get(FILE_VARIABLE))
    table = _tables.get(key)
    if table is not None and problem.m <= table.max_m:
        return cast("S", table.at(problem.m))
    first = interval_start(family, problem, gpu)
    at_start: Any = problem if first == problem.m else replace(problem, m=first)  # type: ignore[type-var]
    return cast("S", _at_start(family, at_start, gpu, key[-1]))


@lru_cache(maxsize=1024)
def _at_start(family: Family[Any, Any], problem: Any, gpu: Gpu, file: str | None) -> Any:
    return decide(family, problem, gpu).spec


def choice_table(family: Family[P, S], problem: P, gpu: Gpu, max_m: int) -> ChoiceTable:
    """Return a table of the problem's shape that covers ``max_m``, cached or newly built.

    choose() uses it afterwards.
    """
    file = os.environ.get(FILE_VARIABLE)
    key = (family.name, problem.fixed, gpu, file)
    table = _tables.get(key)
    if table is None or table.max_m < max_m:
        at_one: Any = replace(problem, m=1)  # type: ignore[type-var]
        facts = {
            "table": family.name,
            "problem": at_one,
            "gpu": gpu,
            "max_m": max_m,
            "code": _code_digest(),
            "tuning": [] if file == "none" else [_digest(path) for path in tuning_files(family)],
        }
        rows = remembered(facts, lambda: _rows(family, at_one, gpu, max_m))
        specs = [family.kernels[name](**fields) for _, name, fields in rows]
        table = _tables[key] = ChoiceTable(max_m, [start for start, _, _ in rows], specs)
    return table


def forget() -> None:
    """Drop the tables of this process, and read the tuning files again."""
    choosing.forget()
    _tables.clear()
    _at_start.cache_clear()


def _rows(family: Family[P, S], problem: Any, gpu: Gpu, max_m: int) -> list[tuple[int, str, dict[str, Any]]]:
    """Return (first M, kernel, fields) of each configuration, as JSON holds them."""
    rows: list[tuple[int, S]] = []
    m = max_m
    while m:
        first = interval_start(family, replace(problem, m=m), gpu)
        spec = decide(family, replace(problem, m=first), gpu).spec
        if rows and rows[-1][1] == spec:
            rows.pop()
        rows.append((first, spec))
        m = first - 1
    return [(first, family.kernel_name(spec), asdict(cast("Any", spec))) for first, spec in reversed(rows)]


@lru_cache(maxsize=1)
def _code_digest() -> str:
    """Digest the code that a choice depends on: cost models, candidates, specs, targets and element types."""
    kernels = Path(__file__).parent
    files = sorted([*kernels.rglob("*.py"), *kernels.parent.glob("*.py")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
