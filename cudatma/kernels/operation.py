"""Operation, the interface between ``run()`` in engine.py and a family's public function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from cudatma.arrays import ArrayInfo
from cudatma.kernels.arguments import FLAGS, PARTIALS, ROWS, Arguments, Sizes
from cudatma.kernels.gpu import H200, Gpu

P = TypeVar("P", bound=Hashable)
C = TypeVar("C", bound=Hashable)
#: Names of the results and of memory that the engine provides.
RESULTS, SPACES = ("out", "lse"), (PARTIALS, FLAGS, ROWS)


class Checked(NamedTuple, Generic[P]):
    """A valid call.

    Attributes
    ----------
    problem : P
        The computation, or None if the result has no elements.
    arrays : tuple[ArrayInfo or None, ...]
        Inputs in the operation's order.
    out : ArrayInfo or None
        The caller's result, or None to allocate a new array.
    shape, dtype
        Shape and dtype of the result. The shape is None if the operation has no result.
    lse : tuple[int, ...] or None
        Shape of a second result in fp32, or None.
    """

    problem: P
    arrays: tuple[ArrayInfo | None, ...]
    out: ArrayInfo | None
    shape: tuple[int, ...] | None
    dtype: Any
    lse: tuple[int, ...] | None = None


class Weight(NamedTuple):
    """Arrays of a weight, which are inputs of many calls.

    Attributes
    ----------
    format : Hashable
        Properties that a plan depends on, hashed by identity.
    addresses : tuple[int, ...]
        Addresses in the order of the operation's ``weight_arrays``.
    arrays : dict[str, ArrayInfo]
        The arrays, by name.
    extents : tuple[tuple[int, int], ...]
        Address of the first byte and address after the last byte of each array.
    begin, end : int
        Address of the first byte and address after the last byte of all arrays.
    """

    format: Hashable
    addresses: tuple[int, ...]
    arrays: dict[str, ArrayInfo]
    extents: tuple[tuple[int, int], ...]
    begin: int
    end: int

    @classmethod
    def of(cls, format: Hashable, names: Iterable[str], arrays: dict[str, ArrayInfo]) -> Weight:
        """Return the weight with these arrays. ``names`` are the operation's ``weight_arrays``."""
        addresses = tuple([arrays[name].pointer if name in arrays else 0 for name in names])
        extents = tuple([info.extent for info in arrays.values()])
        return cls(format, addresses, arrays, extents, min(extents)[0], max(end for _, end in extents))


class Operation(ABC, Generic[P, C]):
    """Interface between run() and a family, with one operation per public function.

    A problem must be frozen and hashable, and must not contain addresses. The results of all methods except check(),
    reference(), with_readable_inputs() and compute_without_kernel() must depend only on their arguments.
    """

    #: Name of the public function.
    name: ClassVar[str]
    #: Names of the inputs in the order of run(), and of a weight's arrays.
    inputs: ClassVar[tuple[str, ...]]
    weight_arrays: ClassVar[tuple[str, ...]] = ()
    #: Number of trailing axes of each input, and of out, that are part of a shape. The leading axes may differ from
    #: call to call. If None, all axes are part of the shape.
    fixed_axes: ClassVar[tuple[int | None, ...]] = ()
    #: Whether a launch treats the leading axes as one axis. The leading axes must then be contiguous.
    #: Otherwise resized() must check the strides of all axes except the last leading axis.
    joins_axes: ClassVar[bool] = True
    #: Number of SMs of the emulated GPU.
    emulated_sm_count: ClassVar[int] = H200.sm_count

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays whose addresses differ from call to call, in the order of a launch."""
        return (*self.inputs, *RESULTS)

    def named(self, checked: Checked[P]) -> dict[str, ArrayInfo]:
        """Return the inputs and the result of a call by name."""
        arrays = dict(zip(self.inputs, checked.arrays, strict=True)) | {"out": checked.out}
        return {name: info for name, info in arrays.items() if info is not None}

    def addresses(self, named: Mapping[str, ArrayInfo]) -> list[int]:
        """Return the addresses of these arrays in the order of ``names``, with 0 for a missing array."""
        return [info.pointer if (info := named.get(name)) else 0 for name in self.names]

    @abstractmethod
    def check(self, inputs: tuple[Any, ...], out: Any, options: Any, resource: Any) -> Checked[P]:
        """Validate a call. Raises ArgumentError or ArgumentTypeError. See run() for ``options`` and ``resource``."""

    @abstractmethod
    def configure(self, problem: P, gpu: Gpu, memo: dict[Any, Any]) -> C:
        """Return the configuration for a problem.

        The method must take constant time if the problem differs from an earlier problem only in M. Equal
        configurations should be the same object. All problems with the same plan_key() receive the same ``memo``.
        """

    @abstractmethod
    def kernels(self, problem: P, config: C) -> tuple[tuple[str, Any], ...]:
        """Return (template, config) of each kernel that a call launches, in order."""

    @abstractmethod
    def arguments(self, problem: P, config: C, gpu: Gpu, resident: tuple[int, ...]) -> tuple[Arguments, ...]:
        """Return the arguments of each launch, in order.

        ``resident`` contains the number of CTAs of each kernel that run at the same time.
        """

    @abstractmethod
    def reference(self, problem: P, arrays: Mapping[str, ArrayInfo]) -> None:
        """Compute the result with NumPy. The arrays must be in host memory."""

    def sizes_for(self, problem: P, config: C, gpu: Gpu, resident: tuple[int, ...]) -> Callable[[P], tuple[Sizes, ...]]:
        """Return a function that computes the Sizes of any problem with the same plan_key().

        The arguments() of such problems may differ only in their Sizes.
        """
        return lambda problem: tuple([launch.sizes for launch in self.arguments(problem, config, gpu, resident)])

    def plan_key(self, problem: P) -> Hashable:
        """Return the properties that all problems of a plan have in common."""
        return problem

    def resized(
        self, problem: P, shapes: Sequence[Any], strides_bytes: Sequence[Any], size_options: tuple[int, ...]
    ) -> tuple[P, tuple[int, ...], tuple[int, ...] | None] | None:
        """Return the problem with other sizes and the shapes of its results, or None if check() must validate the call.

        ``shapes`` contains the shapes of the inputs and of out, with None for each missing array. If ``joins_axes`` is
        False, ``strides_bytes`` contains their strides. Only leading axes may differ from this problem's call, and axes
        of one element must keep one element. See run() for ``size_options``.
        """
        return None

    def kernels_up_to(self, checked: Checked[P], max_m: int, gpu: Gpu) -> Iterable[tuple[str, Any]]:
        """Yield (template, config) of every kernel that calls like this one may launch at sizes up to ``max_m``.

        Kernels may be repeated. Only operations that warm_up() supports implement this method.
        """
        raise NotImplementedError

    def problems_up_to(self, checked: Checked[P], max_m: int, gpu: Gpu) -> Iterable[P]:
        """Yield the problems with this call's plan_key() whose launches are prepared for sizes up to ``max_m``."""
        return (checked.problem,)

    def alignment_masks(self, problem: P) -> tuple[int, ...]:
        """Return, for each input and for out, the bits of the address that must be 0 in a repeated call."""
        return (15,) * (len(self.inputs) + 1)

    def with_readable_inputs(self, checked: Checked[P], backend: str, stream: int | None) -> Checked[P]:
        """Return the call with every input that the kernels cannot read replaced by a copy, made on the stream."""
        return checked

    def compute_without_kernel(self, problem: P, arrays: Mapping[str, ArrayInfo], stream: int | None) -> bool:
        """Compute the result without a kernel if possible. Return whether the result was computed."""
        return False
