"""What a kernel family is: the protocols that the shared parts of kernels/ are written over.

A family defines what a caller computes (a Problem), which configurations may serve it (specs, as candidates with their
predicted costs), and where its measured exceptions are. Choosing, tuning, explaining, dumping and launching are written
once, for all families. docs/adding_a_kernel.md walks through a small one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from cudatma.kernels.cost import Candidate, Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.version import Versions
from cudatma.target import Target

#: Largest size of a problem.
MAX_EXTENT = 2**31 - 1


@runtime_checkable
class KernelSpec(Protocol):
    """What every kernel's spec has. A spec is a frozen dataclass; ``entry`` names its ``extern "C"`` function.

    A spec may also offer, and reports show:
    ``threads`` (int: threads of one CTA), ``smem_bytes`` (int: dynamic shared memory of one CTA),
    ``smem_layout()`` -> list of (name, offset_bytes, size_bytes): what stands where in dynamic shared memory,
    ``stage_layout()`` -> list of (what, size_bytes): what one pipeline stage holds,
    ``check_target(target)``: raises where the target cannot run it.
    """

    @property
    def entry(self) -> str: ...


class Problem(Protocol):
    """What a caller computes: a frozen dataclass.

    m: the size that changes from call to call; n, k: the other two of a product. fixed: everything but m. constraint:
    why only some configurations may serve, in words; empty where all may. description: of the problem, in words.
    as_json(): as tuning entries keep it.
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


class TunedSpec(KernelSpec, Protocol):
    """A spec that may be chosen, measured and kept in a tuning table.

    template: of its kernel. revision: raised whenever the kernel's timing changes by more than measured choices are
    worth, 2 %. later_fields: fields that entries of tuning files may lack, and what the kernel did before it had them.
    block_m: rows of M of a tile. blocks_per_sm: CTAs that share an SM.
    cost(problem, gpu): predicted time. check(problem, target): raises ArgumentError or TargetError where the kernel
    cannot run. adapted(problem): the same tile for another problem's fixed part, None where the tile does not carry
    over. variants(problem): changes of fields that are worth measuring for the same tile.
    """

    revision: ClassVar[int]
    later_fields: ClassVar[Mapping[str, Any]]

    @property
    def template(self) -> str: ...
    @property
    def block_m(self) -> int: ...
    @property
    def blocks_per_sm(self) -> int: ...
    def cost(self, problem: Any, gpu: Gpu) -> Cost: ...
    def check(self, problem: Any, target: Target) -> None: ...
    def adapted(self, problem: Any) -> Any: ...
    def variants(self, problem: Any) -> Iterator[Mapping[str, Any]]: ...


P = TypeVar("P", bound=Problem)
S = TypeVar("S", bound=TunedSpec)


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


def imported(place: str) -> Any:
    """What ``"module:name"`` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _unchanged(spec: Any) -> Any:
    return spec


@dataclass(frozen=True, slots=True, eq=False)
class Family(Generic[P, S]):
    """name: of the family. kernels: its specs' classes by the kernels' names. read_problem(raw): a problem from a
    tuning entry. candidates(problem, gpu): the configurations that may serve. trial: ``"module:class"``, a Trial
    (sample.py), which the tuner makes of a device's ordinal. index: fields of a tuning entry that must be a problem's
    for the entry to serve it. spec_fields: fields of a spec that the problem gives. table: the measured exceptions that
    ship; None for none. options: fields of a problem besides m, n and k, for command lines. launched: a chosen spec ->
    the one that is compiled for it. versions: of its kernels, and who may ask for one; None where it has none. shape:
    what k and n are, for command lines; "": a layer's. interval: maps M to the first M of the interval in which
    the cheapest candidate stays the same; by default, each M is an interval.
    """

    name: str
    kernels: Mapping[str, type[S]]
    read_problem: Callable[[Mapping[str, Any]], P]
    candidates: Callable[[P, Gpu], Sequence[Candidate[S]]]
    trial: str
    index: tuple[str, ...] = ()
    spec_fields: tuple[str, ...] = ()
    table: Path | None = None
    options: tuple[Option, ...] = ()
    launched: Callable[[Any], Any] = _unchanged
    versions: Versions[Any] | None = None
    shape: str = ""
    interval: Callable[[int], int] = _unchanged

    def kernel_name(self, spec: object) -> str:
        """The name of a spec's kernel."""
        return next(name for name, kind in self.kernels.items() if type(spec) is kind)
