"""One launch of a family's kernel, with its arguments, for a GPU and for the emulator; and the same launch again with
other addresses, which is how every repeated call runs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from ctypes import addressof
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from cudatma import context
from cudatma.arrays import ArrayInfo
from cudatma.build.kernel import load_kernel, wants_debug
from cudatma.descriptor import TensorMap
from cudatma.descriptor.driver import replace_address
from cudatma.kernels.host import host_bytes
from cudatma.runtime.launch import Kernel, LaunchPlan
from cudatma.runtime.loading import refuse_capture
from cudatma.target import Target

if TYPE_CHECKING:
    from cudatma.emulator import Report


@dataclass(frozen=True, slots=True)
class Launch:
    """template, spec: of the kernel; the spec has ``entry``, ``threads`` and ``smem_bytes``.

    grid: CTAs. args: in the kernel's order: numbers, bytes, tensor maps, addresses, and ArrayInfo, whose ``pointer`` is
    passed. touched: arrays that the kernel reaches. cluster: CTAs of a cluster, 1 for none. shared_bytes: dynamic
    shared memory of a CTA where it is to have more than ``spec.smem_bytes``. programmatic: a programmatic dependent of
    the launch before it.
    """

    template: str
    spec: Any
    grid: int | tuple[int, ...]
    args: tuple[Any, ...]
    touched: tuple[ArrayInfo, ...]
    cluster: int = 1
    shared_bytes: int = 0
    programmatic: bool = False

    @property
    def moving(self) -> tuple[int, ...]:
        """Indices of the arguments that are tensor maps or arrays."""
        return tuple(index for index, value in enumerate(self.args) if isinstance(value, ArrayInfo | TensorMap))

    def kernel(self, target: Target) -> Kernel:
        """Compiled, or found in the cache."""
        return _kernel(self.template, self.spec, target, wants_debug(None))

    def loaded(self, target: Target, device: int, stream: int) -> Kernel:
        """The kernel, which plan() loads on a device. LaunchError if it is not there yet and the stream, by its handle,
        is capturing a graph."""
        kernel = self.kernel(target)
        if not kernel.is_loaded(device):
            with context.using(device) as driver:
                refuse_capture(driver, stream, kernel.entry, device)
        return kernel

    def plan(self, kernel: Kernel, device: int) -> LaunchPlan:
        """Checked and marshalled for a device, with ``kernel`` loaded there."""
        return kernel.plan(
            self.grid, self.spec.threads, self.values, programmatic=self.programmatic, device=device, **self._shape()
        )

    def emulate(self, target: Target, *, kernel: Kernel | None = None, **options: Any) -> Report:
        """Run it on the emulator. kernel: None compiles it. options: of ``EmulatedModule.launch``. A programmatic
        dependent runs as if the kernel before it wrote each of its arrays, unless the options name them."""
        arrays = tuple(host_bytes(info) for info in self.touched if info.size_elems)
        chosen = self.kernel(target) if kernel is None else kernel
        given: dict[str, Any] = {"arrays": arrays, "target": target} | self._shape()
        if self.programmatic:
            given["produced_by_previous"] = arrays
        given |= options
        return chosen.emulate(self.grid, self.spec.threads, self.values, **given)

    @property
    def values(self) -> list[Any]:
        """The arguments, arrays as their addresses."""
        return [value.pointer if isinstance(value, ArrayInfo) else value for value in self.args]

    def _shape(self) -> dict[str, Any]:
        shared = max(self.spec.smem_bytes, self.shared_bytes)
        return {"cluster": self.cluster if self.cluster > 1 else None, "shared_bytes": shared}


@lru_cache(maxsize=256)
def _kernel(template: str, spec: Any, target: Target, debug: bool) -> Kernel:
    """load_kernel() without the digests of all that a kernel depends on, which cost more than a launch."""
    return load_kernel(template, spec, target, debug=debug)


T = TypeVar("T")


class Replay:
    """A launch that can be repeated with other array addresses, if these are congruent to the first ones modulo 16.

    Keeps no array alive. Safe from many threads: each launch takes a set of marshalled arguments for itself, and a set
    is added when several threads launch at the same time.
    """

    __slots__ = ("_first", "_idle", "_split", "device")

    def __init__(
        self,
        launch: Launch,
        kernel: Kernel,
        device: int,
        bases: Sequence[int],
        arguments: Sequence[int | None],
        steady: int = 0,
    ) -> None:
        """Marshal a launch. Raises what Kernel.plan() raises.

        bases: addresses of the call's arrays now. arguments: for each array, the index of the argument that holds its
        address, at any offset, or None. steady: the number of trailing arrays whose addresses are passed to run()
        separately.
        """
        plan = launch.plan(kernel, device)
        self.device, self._split = device, len(bases) - steady
        places = _places(launch.args, bases, arguments, kernel.target.tensormap_knows_allocation)
        self._first = _Instance(plan, places, self._split, device)
        self._idle = [self._first]

    def run(self, addresses: tuple[int, ...], stream: int, steady: tuple[int, ...] = ()) -> None:
        """Launch on a stream, by its handle, with the arrays at these addresses, in the order of ``bases``.

        steady: the addresses of the trailing arrays. Passing the same tuple object again skips their update.
        Raises DriverError, LaunchError (a forked process), PipelineHang (debug).
        """
        try:
            instance = self._idle.pop()
        except IndexError:
            instance = self._first.twin()
        try:
            instance.run(addresses, stream, steady)
        finally:
            self._idle.append(instance)


class _Instance:
    """One set of marshalled arguments, which one thread uses at a time."""

    __slots__ = ("_addresses", "_device", "_launch", "_maps", "_places", "_plan", "_split", "_steady",
                 "_steady_words", "_words")  # fmt: skip

    def __init__(self, plan: LaunchPlan, places: Sequence[_Place], split: int, device: int) -> None:
        self._plan, self._places, self._split, self._device = plan, places, split, device
        self._launch = plan.launch
        #: Addresses of the last launch; None where an argument may hold anything.
        self._addresses: tuple[int, ...] | None = None
        self._steady: tuple[int, ...] | None = None
        words = [place.word(plan.arguments) for place in places if not place.by_driver]
        self._words = [word for word in words if word[1] < split]
        self._steady_words = [(word, index - split, offset) for word, index, offset in words if index >= split]
        self._maps = [place.map(plan.arguments) for place in places if place.by_driver]

    def twin(self) -> _Instance:
        """Return another set of arguments for the same launch."""
        return _Instance(self._plan.twin(), self._places, self._split, self._device)

    def run(self, addresses: tuple[int, ...], stream: int, steady: tuple[int, ...]) -> None:
        # The same address may belong to another allocation by now: the driver reads it each time.
        if addresses != self._addresses or steady is not self._steady or self._maps:
            self._move(addresses, steady)
        self._launch(stream)

    def _move(self, addresses: tuple[int, ...], steady: tuple[int, ...]) -> None:
        """Write the addresses into the arguments."""
        if addresses != self._addresses:
            self._addresses = None  # if a write fails below
            for word, index, offset in self._words:
                word[0] = addresses[index] + offset
        if steady is not self._steady:
            self._steady = None
            for word, index, offset in self._steady_words:
                word[0] = steady[index] + offset
        if self._maps:
            every = addresses + steady
            with context.using(self._device):  # the driver looks the allocation up in the current context
                for address, index, offset in self._maps:
                    replace_address(address, every[index] + offset)
        self._addresses, self._steady = addresses, steady


#: (the argument's word, index of the array, offset from its base); a tensor map begins with its address.
_Word: TypeAlias = tuple[Any, int, int]


@dataclass(frozen=True, slots=True)
class _Place:
    """Which argument holds which array's address, and at what offset from its base.

    by_driver: whether it is a tensor map that also encodes its allocation, so that only the driver may change it.
    """

    argument: int
    array: int
    offset: int
    by_driver: bool

    def word(self, values: Sequence[Any]) -> _Word:
        return memoryview(values[self.argument]).cast("B").cast("Q"), self.array, self.offset

    def map(self, values: Sequence[Any]) -> tuple[int, int, int]:
        """(host address of the map, index of the array, offset)"""
        return addressof(values[self.argument]), self.array, self.offset


def _places(
    args: Sequence[Any], bases: Sequence[int], arguments: Sequence[int | None], knows_allocation: bool
) -> list[_Place]:
    """Return what has to be written before a launch. args: as they were given."""
    return [
        _Place(at, array, _address(args[at]) - base, knows_allocation and isinstance(args[at], TensorMap))
        for array, (base, at) in enumerate(zip(bases, arguments, strict=True))
        if at is not None
    ]


def _address(argument: Any) -> int:
    if isinstance(argument, ArrayInfo):
        return argument.pointer
    return int(argument.address if isinstance(argument, TensorMap) else argument)


class PlanCache(dict[Hashable, T]):
    """Plans that calls keep for later calls, by what determines a launch: the newest, at most ``most`` of them.

    Looked up without a lock. Safe from many threads.
    """

    __slots__ = ("__weakref__", "most")
    __hash__ = object.__hash__  # type: ignore[assignment]  # by identity, for context.after_fork()

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def put(self, key: Hashable, plan: T) -> None:
        """Keep a plan. Drops the older half where there are ``most`` already."""
        if len(self) >= self.most:
            for old in list(self)[: max(1, self.most // 2)]:
                self.pop(old, None)
        self[key] = plan
