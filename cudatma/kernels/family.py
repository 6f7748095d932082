"""The protocols of a kernel family, on which the shared parts of kernels/ are written.

A family defines a computation (Problem), the configurations that can run it with their predicted costs, and the place
of its measured exceptions. Choosing, tuning, explaining, dumping and launching are written once, for all families.
docs/howto/add_a_kernel.md describes one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cudatma.kernels.config import KernelConfig
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.version import Versions

#: Largest size of a problem.
MAX_EXTENT = 2**31 - 1


class Problem(Protocol):
    """A computation: a frozen dataclass.

    m: the size that changes from call to call. n, k: the other two sizes of a product. fixed: everything else that the
    choice depends on; problems with the same ``fixed`` share a choice table. constraint: why only some configurations
    may serve, in words; empty without a constraint. description: the problem in words. as_json(): its form in tuning
    entries.
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
S = TypeVar("S", bound=KernelConfig)


@dataclass(frozen=True, slots=True)
class Option:
    """A field of a problem besides its sizes, for command lines.

    name: the field's name in as_json(). default: the value if the option is not given; for a bool, the flag takes no
    value. allowed: allowed values; empty for any number that the problem takes. help: the text of --help.
    """

    name: str
    default: Any
    allowed: tuple[Any, ...]
    help: str

    @property
    def flag(self) -> str:
        """The flag on command lines. It has the name of the public functions' argument: --causal, not --is-causal."""
        return "--" + self.name.removeprefix("has_").removeprefix("is_").replace("_", "-")


def _unchanged(config: Any) -> Any:
    return config


_Copied = TypeVar("_Copied")


def resized_copy(problem: _Copied, **sizes: Any) -> _Copied:
    """Return a copy of a frozen dataclass without slots with other values of these fields, skipping its checks."""
    copy: _Copied = object.__new__(problem.__class__)
    copy.__dict__.update(problem.__dict__, **sizes)
    return copy


def _with_m(problem: _Copied, m: int) -> _Copied:
    return resized_copy(problem, m=m)


def _never(config: object) -> bool:
    return False


#: The configurations that may serve a shape, and their predicted microseconds at each M.
Times = Sequence[tuple[S, NDArray[np.float64]]]


@dataclass(frozen=True, slots=True, eq=False)
class Family(Generic[P, S]):
    """A kernel family: everything that the shared code of choosing, tuning and explaining uses.

    Attributes
    ----------
    name : str
    config : type
        The class of its configs.
    kernels : tuple of str
        Names of the kernels, ``version`` in their configs.
    read_problem : callable
        Returns the problem of a tuning entry's JSON.
    times : callable
        ``times(problem, ms, gpu)`` returns every configuration that may serve problems of this shape, each once, with
        its predicted microseconds at each M of the int64 array ``ms``; inf where it cannot run. ``problem.m`` is
        ignored. ``times(problem, [m], gpu)`` agrees with ``config.cost()`` at M. Of equal times, the first wins.
        Configurations that take at least 25 % longer than the cheapest at every M may be missing. Raises the errors of
        a call with this shape: TargetError or ArgumentError.
    trial : str
        Object reference, ``"module:class"``, of a Trial (sample.py), which the tuner creates with a device's ordinal.
    index : tuple of str
        Fields that a tuning entry and a problem must share for the entry to serve the problem.
    problem_fields : tuple of str
        Fields of a config that come from the problem.
    table : Path, optional
        File of the measured exceptions that ship.
    options : tuple of Option
        Fields of a problem besides m, n and k that command lines take.
    launched : callable
        Returns the compiled config for a chosen one.
    versions : Versions, optional
        Versions of its kernels that a caller may name.
    sizes : str
        Names of k and n in command lines; "" for the sizes of a layer.
    with_m : callable
        ``with_m(problem, m)`` returns the problem with another M. By default, its field ``m`` is replaced.
    shape : callable, optional
        Returns the problem for which the choice table of a problem is built. By default, the same one with ``m`` = 1.
    is_shared : callable
        Whether menus prefer a config because many shapes use it, so that they need fewer kernels together.
    """

    name: str
    config: type[S]
    kernels: tuple[str, ...]
    read_problem: Callable[[Mapping[str, Any]], P]
    times: Callable[[P, NDArray[np.int64], Gpu], Times[S]]
    trial: str
    index: tuple[str, ...] = ()
    problem_fields: tuple[str, ...] = ()
    table: Path | None = None
    options: tuple[Option, ...] = ()
    launched: Callable[[Any], Any] = _unchanged
    versions: Versions | None = None
    sizes: str = ""
    with_m: Callable[[P, int], P] = _with_m
    shape: Callable[[P], P] | None = None
    is_shared: Callable[[S], bool] = _never
