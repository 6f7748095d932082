"""Base class of this package's operations. The configuration of such an operation is the list of its launches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar

from cudatma.arrays import ArrayInfo, dense_strides
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.kernels.arguments import Arguments
from cudatma.kernels.data_movement.ring import CTAS_PER_SM
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.operation import Checked, Operation
from cudatma.target import Target, get_target

P = TypeVar("P", bound=Hashable)
_MAX_PLANS = 1024


class LaunchLimits(NamedTuple):
    """The target of a launch and the maximum number of CTAs, which is CTAS_PER_SM times the number of SMs."""

    target: Target
    ctas: int


class Movement(Operation[P, tuple[Arguments, ...]]):
    """An operation that moves data between arrays.

    plan() chooses how the bytes are split among CTAs, and a ring that suits this split.
    """

    inputs: ClassVar[tuple[str, ...]] = ("src",)
    #: With this small number, rings wrap around even for small arrays.
    emulated_sm_count: ClassVar[int] = 2

    @abstractmethod
    def plan(self, problem: P, limits: LaunchLimits) -> tuple[Arguments, ...]:
        """Return the launches in order. Raises DescriptorError or ArgumentError."""

    def configure(self, problem: P, gpu: Gpu, memo: dict[Any, Any]) -> tuple[Arguments, ...]:
        """Return the launches. Raises DescriptorError, ArgumentError or TargetError."""
        return _planned(self, problem, gpu.target, gpu.sm_count)

    def kernels(self, problem: P, config: tuple[Arguments, ...]) -> tuple[tuple[str, Any], ...]:
        return tuple([(launch.template, launch.config) for launch in config])

    def arguments(
        self, problem: P, config: tuple[Arguments, ...], gpu: Gpu, resident: tuple[int, ...]
    ) -> tuple[Arguments, ...]:
        return config


@lru_cache(maxsize=_MAX_PLANS)
def _planned(operation: Movement[Any], problem: Any, target: str, sm_count: int) -> tuple[Arguments, ...]:
    limits = LaunchLimits(get_target(target), CTAS_PER_SM * sm_count)
    launches = operation.plan(problem, limits)
    for launch in launches:
        launch.config.check_target(limits.target)
    return launches


def layout(info: ArrayInfo) -> ArrayInfo:
    """Return the properties of an array on which a launch depends.

    The address is reduced modulo 16, and no reference to the memory is kept.
    """
    return ArrayInfo(
        info.pointer % TMA_ALIGNMENT_BYTES, info.shape, info.strides_bytes, info.dtype, None, None, "layout"
    )


def checked(
    make: Callable[..., P],
    arrays: tuple[ArrayInfo, ...],
    out: ArrayInfo | None,
    shape: tuple[int, ...],
    *others: Any,
) -> Checked[P]:
    """Return a valid call, whose result is ``out`` or, if ``out`` is None, a new array in C order.

    ``make`` is the class of the problem. Its fields are the layouts of the source and the result, and ``others``.
    ``arrays`` contains the inputs, beginning with the source.
    """
    src = arrays[0]
    new = ArrayInfo(0, shape, dense_strides(shape, src.dtype), src.dtype, None, None, "layout")
    problem = make(layout(src), new if out is None else layout(out), *others)
    return Checked(problem, arrays, out, shape, src.dtype)
