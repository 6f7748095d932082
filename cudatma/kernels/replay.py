"""Repeat a launch with other addresses and sizes by patching words of its marshaled arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import addressof
from dataclasses import replace
from typing import Any

from cudatma import context
from cudatma.descriptor import check_target, codec, driver
from cudatma.kernels.arguments import Arguments, At, Map, Sizes, Value, with_fields
from cudatma.runtime.launch import Kernel, LaunchPlan

#: (64-bit words of the argument, index of the array, offset from the array's first byte). The first word of a tensor
#: map is its address.
_Word = tuple[Any, int, int]


class _Agreement(dict[Any, bool]):
    """Results of comparing the codec with the driver, keyed by kind of tensor map and stored in the Runtime."""


class Replay:
    """A repeatable launch on a device, with other addresses and sizes.

    The object does not keep arrays alive. It is thread-safe: threads that launch at the same time use separate sets of
    marshaled arguments.

    Parameters
    ----------
    arguments : Arguments
        Arguments of the launch. Later sizes must belong to the same shape and configuration.
    kernel : Kernel
        The compiled kernel, which is loaded at its first use.
    device : int
        Ordinal of the device.
    names : sequence of str
        Names of the arrays whose addresses are passed to ``run()``.
    addresses : mapping of str to int
        Current addresses of all arrays, with which the driver encodes tensor maps.
    spaces, steady : sequence of str, optional
        Names of the arrays whose addresses rarely change: the workspace's arrays and a weight's arrays.
    """

    __slots__ = ("_first", "_idle", "config", "device")

    def __init__(
        self,
        arguments: Arguments,
        kernel: Kernel,
        device: int,
        names: Sequence[str],
        addresses: Mapping[str, int],
        spaces: Sequence[str] = (),
        weight_arrays: Sequence[str] = (),
    ) -> None:
        self.device, self.config = device, arguments.config
        self._first = _Instance(arguments, kernel, device, (names, spaces, weight_arrays), addresses)
        self._idle = [self._first]

    def run(
        self,
        sizes: Sizes,
        addresses: Sequence[int],
        stream: int,
        spaces: tuple[int, ...] = (),
        weight_addresses: tuple[int, ...] = (),
    ) -> None:
        """Launch the kernel on the stream with this handle, with arrays at these addresses.

        ``spaces`` and ``weight_addresses`` contain the addresses of the workspace and of the weight. The caller must
        not modify ``addresses`` afterwards. If ``sizes``, ``spaces`` or ``weight_addresses`` is the same object as in
        the previous launch, its update is skipped. Raises DriverError, LaunchError (in a forked process) or
        PipelineHang (with debug=True).
        """
        try:
            instance = self._idle.pop()
        except IndexError:
            instance = self._first.copy()
        try:
            if sizes is not instance.sizes:
                instance.resize(sizes)
            if addresses != instance.addresses:
                instance.addresses = None
                for word, index, offset in instance.words:
                    word[0] = addresses[index] + offset
                instance.addresses = addresses
            if spaces is not instance.spaces:
                instance.spaces = None
                for word, index, offset in instance.space_words:
                    word[0] = spaces[index] + offset
                instance.spaces = spaces
            if weight_addresses is not instance.weight_addresses:
                instance.weight_addresses = None
                for word, index, offset in instance.weight_words:
                    word[0] = weight_addresses[index] + offset
                instance.weight_addresses = weight_addresses
            for tensor_map in instance.by_driver:
                tensor_map.encode((addresses, spaces, weight_addresses))
            instance.launch(stream)
        finally:
            self._idle.append(instance)


class _Instance:
    """One set of marshaled arguments, used by one thread at a time."""

    __slots__ = (
        *("_given", "_maps", "_plan", "_smem_bytes", "_values", "addresses", "by_driver", "launch", "sizes"),
        *("space_words", "spaces", "weight_addresses", "weight_words", "words"),
    )

    def __init__(
        self,
        arguments: Arguments,
        kernel: Kernel,
        device: int,
        names: tuple[Sequence[str], Sequence[str], Sequence[str]],
        addresses: Mapping[str, int],
        plan: LaunchPlan | None = None,
    ) -> None:
        self._given = arguments, kernel, device, names, addresses
        #: Addresses of the last launch, or None if they are unknown.
        self.addresses: Sequence[int] | None = None
        self.spaces: tuple[int, ...] | None = None
        self.weight_addresses: tuple[int, ...] | None = None
        if plan is None:
            for tensor_map in arguments.maps:
                check_target(tensor_map.spec, kernel.target)
            plan = kernel.plan(
                arguments.sizes.grid,
                arguments.config.threads,
                arguments.at(addresses, lambda spec: driver.encode(spec, device)),
                cluster=arguments.cluster if arguments.cluster > 1 else None,
                shared_bytes=arguments.shared_bytes,
                programmatic=arguments.sizes.programmatic,
                device=device,
            )
        self._plan, self.launch = plan, plan.launch
        self.sizes: Sizes | None = arguments.sizes
        self._smem_bytes = arguments.config.smem_bytes
        places = {name: (group, at) for group, inside in enumerate(names) for at, name in enumerate(inside)}
        words: tuple[list[_Word], list[_Word], list[_Word]] = [], [], []
        by_driver = kernel.target.tensormap_knows_allocation
        self._maps: list[_SizedMap] = []
        values: dict[int, Any] = {}
        for parameter, value in zip(arguments.parameters, plan.arguments, strict=True):
            if isinstance(parameter, Map):
                if by_driver or parameter.sized:
                    self._maps.append(_SizedMap(parameter, value, places[parameter.array], device))
                is_word = not by_driver
            elif isinstance(parameter, Value):
                is_struct = isinstance(arguments.sizes.values[parameter.place], bytes)
                values[parameter.place] = memoryview(value).cast("B") if is_struct else value
                is_word = False
            else:
                is_word = isinstance(parameter, At) and parameter.array in places
            if is_word:
                group, at = places[parameter.array]
                words[group].append((_words(value, "Q"), at, parameter.offset_bytes))
        self._values = [values[place] for place in range(len(values))]
        self.by_driver = self._maps if by_driver else []
        self.words, self.space_words, self.weight_words = words

    def copy(self) -> _Instance:
        """Return another set of arguments for the same launch."""
        copy = _Instance(*self._given, plan=self._plan.twin())
        # Another thread may be modifying the original arguments.
        copy.sizes = None
        copy.resize(self._given[0].sizes)
        return copy

    def resize(self, sizes: Sizes) -> None:
        """Write other sizes into the arguments."""
        plan, old = self._plan, self.sizes
        self.sizes = None
        for place, given in zip(self._values, sizes.values):  # noqa: B905 (a keyword argument takes time)
            if given.__class__ is bytes:
                place[:] = given
            else:
                place.value = given
        if self._maps and (old is None or sizes.fields != old.fields):
            begin = 0
            for tensor_map in self._maps:
                end = begin + tensor_map.count
                tensor_map.fields = sizes.fields[begin:end]
                if not self.by_driver:
                    tensor_map.write()
                begin = end
        plan.reshape(sizes.grid, max(self._smem_bytes, sizes.shared_bytes), sizes.programmatic)
        self.sizes = sizes


class _SizedMap:
    """Tensor map among the arguments, with the values of its size-dependent fields."""

    __slots__ = (
        *("_agrees", "_bytes", "_device", "_kind", "_map", "_place", "_pointer", "_write", "_written"),
        *("count", "fields"),
    )

    def __init__(self, tensor_map: Map, value: Any, place: tuple[int, int], device: int) -> None:
        """Read the initial values.

        ``place`` contains the index of the group with the array's name, and the index of the name in this group.
        """
        spec: Any = tensor_map.spec
        self._map, self._place, self._device = tensor_map, place, device
        self.count = len(tensor_map.sized)
        self.fields: tuple[int, ...] = ()
        self._written: tuple[int, ...] = ()
        self._pointer = addressof(value)
        self._bytes = memoryview(value).cast("B")
        self._write = codec.field_writer(_words(value, "I"), self._bytes, spec, tensor_map.sized)
        self._kind = spec.dtype, spec.rank, spec.swizzle, spec.interleave, tensor_map.sized
        self._agrees = False

    def write(self) -> None:
        """Write the fields. For each kind of map, the first result is compared with the driver's encoding."""
        if not self._agrees:
            agreement: dict[Any, bool] = context.runtime().part(_Agreement)
            agrees = agreement.get(self._kind)
            if not agrees:
                raw = self._encoded(int.from_bytes(self._bytes[:8], "little"))
            if agrees is None:
                self._write(self.fields)
                agrees = agreement[self._kind] = bytes(self._bytes) == raw
            if not agrees:
                self._bytes[:] = raw
                return
            self._agrees = True
        self._write(self.fields)

    def encode(self, addresses: tuple[Sequence[int], ...]) -> None:
        """Encode the map with the driver for new fields and a new address, which may be in another allocation."""
        group, at = self._place
        address = addresses[group][at] + self._map.offset_bytes
        if self.fields != self._written:
            self._bytes[:], self._written = self._encoded(address), self.fields
        else:
            with context.using(self._device):  # The driver looks up the allocation in the current context.
                driver.replace_address(self._pointer, address)

    def _encoded(self, address: int) -> bytes:
        return driver.encode(replace(with_fields(self._map, self.fields).spec, address=address), self._device)


def _words(value: Any, kind: Any) -> Any:
    return memoryview(value).cast("B").cast(kind)
