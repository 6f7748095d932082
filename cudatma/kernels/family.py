"""Protocols that each kernel family implements, and that the shared code in kernels/ uses.

A family defines a computation (Problem), the configurations that can run it and their predicted costs, and a file of
measured exceptions. All families share the code that chooses, tunes, explains, dumps and launches.
docs/howto/add_a_kernel.md describes how to write a family.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cudatma.kernels.config import Config
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.schedule import Schedule
from cudatma.kernels.version import Versions

#: Largest size of a problem.
MAX_EXTENT = 2**31 - 1


class Problem(Protocol):
    """A computation (a frozen dataclass).

    Attributes
    ----------
    m : int
        Size that varies from call to call.
    n, k : int
        The other two sizes of the product.
    fixed : Hashable
        All other properties on which the choice depends. Problems with the same ``fixed`` share a choice table.
    constraint : str
        Reason why only some configurations are allowed, or "" if all are allowed.
    description : str
        Description of the problem in words.
    as_json()
        Returns the form in which tuning entries store the problem.
    """

    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def fixed(self) -> Hashable: ...
    @property
    def constraint(self) -> str: ...
    @property
    def description(self) -> str: ...
    def as_json(self) -> dict[str, Any]: ...


P = TypeVar("P", bound=Problem)
S = TypeVar("S", bound=Config)


@dataclass(frozen=True, slots=True)
class Option:
    """Command-line option for a field of a problem.

    Attributes
    ----------
    name : str
        Name of the field in as_json().
    default : Any
        Default value. The flag of a bool takes no value.
    allowed : tuple[Any, ...]
        Allowed values, or empty to allow every number that the problem accepts.
    help : str
        Text for --help.
    """

    name: str
    default: Any
    allowed: tuple[Any, ...]
    help: str

    @property
    def flag(self) -> str:
        """Command-line flag, named like the argument of the public function (--causal, not --is-causal)."""
        return "--" + self.name.removeprefix("has_").removeprefix("is_").replace("_", "-")


class SizeNames(NamedTuple):
    """Meanings of a problem's sizes. ``has_models``: whether k and n are those of a model's linear layer."""

    m: str
    n: str
    k: str
    has_models: bool = False


LINEAR_SIZES = SizeNames("rows of the result", "columns of the result", "inner dimension", has_models=True)


def _unchanged(config: Any) -> Any:
    return config


_Copied = TypeVar("_Copied")


def resized_copy(problem: _Copied, **sizes: Any) -> _Copied:
    """Return a copy of a frozen dataclass with other values for these fields, without checking the values.

    The class must not have slots.
    """
    copy: _Copied = object.__new__(problem.__class__)
    copy.__dict__.update(problem.__dict__, **sizes)
    return copy


def _with_m(problem: _Copied, m: int) -> _Copied:
    return resized_copy(problem, m=m)


def _never(config: object) -> bool:
    return False


#: Configurations that may run a shape, with their predicted times in microseconds at each M.
Times = Sequence[tuple[S, NDArray[np.float64]]]


@dataclass(frozen=True, slots=True, eq=False)
class Family(Generic[P, S]):
    """A kernel family: all parts that choosing, tuning and explaining require.

    Attributes
    ----------
    name : str
        Name of the family.
    config : type
        Class of the family's configs.
    kernels : tuple of str
        Names of the kernels, which are the values of ``version`` in their configs.
    read_problem : callable
        Returns the problem for a tuning entry's JSON.
    times : callable
        ``times(problem, ms, gpu)`` returns each configuration that may run problems of this shape, with its predicted
        time in microseconds at each M in the int64 array ``ms``, or inf where the configuration cannot run. No
        configuration occurs twice. ``problem.m`` is ignored. ``times(problem, [m], gpu)`` agrees with ``config.cost()``
        at M. Among configurations with equal times, the first one is chosen. Configurations that take at least 25%
        longer than the cheapest one at every M may be missing. Raises TargetError or ArgumentError if a call with this
        shape would raise it.
    schedule : callable
        ``schedule(kernel, problem, gpu)`` returns the distribution of a launched kernel's work among CTAs, for
        explanations. ``kernel`` is an element of ``config.launches()``.
    trial : str
        Object reference, ``"module:class"``, to a Trial (sample.py). The tuner creates the Trial with a device ordinal.
    index : tuple of str
        Fields whose values must be equal in a tuning entry and in a problem for the entry to apply.
    problem_fields : tuple of str
        Fields of a config that come from the problem.
    table : Path, optional
        File with the measured exceptions that ship with cudatma.
    options : tuple of Option
        Command-line options for fields of a problem other than m, n and k.
    launched : callable
        Maps a chosen config to the config that is compiled.
    versions : Versions, optional
        Versions of the family's kernels that a caller may name.
    sizes : SizeNames
        Meanings of m, n and k on command lines.
    rule : callable, optional
        ``rule(problem, gpu)`` returns the config for a problem without a tuning entry. By default, this is the cheapest
        config on the menu.
    with_m : callable
        ``with_m(problem, m)`` returns the problem with another M. By default, its field ``m`` is replaced.
    shape : callable, optional
        Maps a problem to the problem for which the choice table is built. By default, this is the same problem with
        ``m`` = 1.
    is_shared : callable
        Returns whether menus prefer a config because many shapes use it, so that all shapes together need fewer
        kernels.
    """

    name: str
    config: type[S]
    kernels: tuple[str, ...]
    read_problem: Callable[[Mapping[str, Any]], P]
    times: Callable[[P, NDArray[np.int64], Gpu], Times[S]]
    schedule: Callable[[Any, P, Gpu], Schedule]
    trial: str
    index: tuple[str, ...] = ()
    problem_fields: tuple[str, ...] = ()
    table: Path | None = None
    options: tuple[Option, ...] = ()
    launched: Callable[[Any], Any] = _unchanged
    versions: Versions | None = None
    sizes: SizeNames = LINEAR_SIZES
    rule: Callable[[P, Gpu], S] | None = None
    with_m: Callable[[P, int], P] = _with_m
    shape: Callable[[P], P] | None = None
    is_shared: Callable[[S], bool] = _never
