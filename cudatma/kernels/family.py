"""What a kernel family is: the protocols that the shared parts of kernels/ are written over.

A family defines what a caller computes (a Problem), which configurations can compute it with which predicted costs,
and where its measured exceptions are. Choosing, tuning, explaining, dumping and launching are written once, for all
families. docs/adding_a_kernel.md describes one.
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
    """What a caller computes: a frozen dataclass.

    m: the size that changes from call to call; n, k: the other two of a product. fixed: everything else that the choice
    depends on; problems with the same ``fixed`` share a choice table. constraint: why only some configurations may
    serve, in words; empty where all may. description: of the problem, in words. as_json(): as tuning entries keep it.
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
    """A field of a problem besides its sizes, as command lines name it.

    name: of the field in as_json(). default: where the command line says nothing; of a bool, the flag takes no value.
    allowed: its values; none: any number that the problem takes. help: in words.
    """

    name: str
    default: Any
    allowed: tuple[Any, ...]
    help: str

    @property
    def flag(self) -> str:
        """Of the command line, which names a flag as the public functions do: causal, not is_causal."""
        return "--" + self.name.removeprefix("has_").removeprefix("is_").replace("_", "-")


def _unchanged(config: Any) -> Any:
    return config


_Copied = TypeVar("_Copied")


def resized_copy(problem: _Copied, **sizes: Any) -> _Copied:
    """Return a copy of a frozen dataclass without slots with other values of these fields, without its checks."""
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
    """A kernel family: what the shared code of choosing, tuning and explaining needs to know of it.

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
        ignored. ``times(problem, [m], gpu)`` agrees with ``config.cost()`` at M. The order decides between equal times.
        It may leave out configurations that take at least 25 % longer than the cheapest at every M. It raises what a
        call with this shape must raise: TargetError or ArgumentError.
    trial : str
        Object reference, ``"module:class"``, of a Trial (sample.py), which the tuner creates with a device's ordinal.
    index : tuple of str
        Fields of a tuning entry that must equal a problem's for the entry to serve it.
    problem_fields : tuple of str
        Fields of a config that the problem gives.
    table : Path, optional
        The measured exceptions that ship.
    options : tuple of Option
        Fields of a problem besides m, n and k that command lines take.
    launched : callable
        Returns the config that is compiled for a chosen one.
    versions : Versions, optional
        Versions of its kernels that a caller may name.
    sizes : str
        Names of k and n in command lines; "": those of a layer.
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
