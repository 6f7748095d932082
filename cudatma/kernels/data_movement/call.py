"""One call of an operation over arrays: where it runs, what its arrays must be. A launch that an earlier, equal call
planned runs again at new addresses.

The checks of a call and the encoding of its tensor maps cost ten times as much as its launch. What they depend on
beside the memory itself is the call's key: function, shapes, strides, dtypes, options, device, target, and addresses
modulo 16. A call whose key is known looks only at what can still be wrong: whether the arrays lie apart.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from cudatma import context
from cudatma.arrays import ArrayInfo, describe, empty_like_library, overlaps, place_name
from cudatma.backend import backend_for, device_remedy
from cudatma.build.kernel import default_target, wants_debug
from cudatma.descriptor import TensorMap
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.data_movement.ring import BLOCKS_PER_SM
from cudatma.kernels.launch import EmulatedReplay, Launch, PlanCache, Replay, relative
from cudatma.library_streams import stream_handle
from cudatma.runtime.streams import order_after_producers
from cudatma.target import Target, detect

#: CTAs of a launch on the emulator: enough to divide the work, few enough for rings to wrap.
_EMULATED_BLOCKS = 4
BACKENDS = ("cuda", "emulator", "reference")
#: Calls that are remembered, some 6 KB each.
MOST_CALLS = 1024
#: Alignment of addresses that TMA requires, and the most that any choice of a kernel depends on.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Place:
    """backend: "cuda", "emulator" or "reference". device: CUDA ordinal, None on the host. target: what kernels are
    compiled for. ctas: most CTAs of a persistent kernel's launch."""

    backend: str
    device: int | None
    target: Target
    ctas: int


def place_of(function: str, backend: str | None, first: ArrayInfo, *others: tuple[str, ArrayInfo]) -> Place:
    """Where the arrays lie and what runs there. ``first``'s argument is called "src" in errors.

    Raises ArgumentError for arrays of several places or of another place than the backend's; TargetError, DriverError.
    """
    chosen = backend_for(function, backend)
    for name, info in others:
        if info.device != first.device:
            raise ArgumentError(name, place_name(info.device), f"{place_name(first.device)}, where src lies")
    if (first.device is None) != (chosen != "cuda"):
        allowed = "the host with backend 'emulator' or 'reference', a CUDA device with 'cuda'"
        raise ArgumentError(
            "src.device", place_name(first.device), allowed, device_remedy("cupy.asarray moves it", first.device)
        )
    if first.device is None:
        return Place(chosen, None, default_target(), _EMULATED_BLOCKS)
    return _on_gpu(first.device)


@lru_cache(maxsize=64)
def _on_gpu(device: int) -> Place:
    return Place("cuda", device, detect(device), BLOCKS_PER_SM * sm_count(device))


def sm_count(device: int) -> int:
    """The SMs of a GPU."""
    return context.device(device).sm_count


def described(array: object, field: str) -> ArrayInfo:
    """An array whose elements are plain bytes. Raises ArgumentTypeError for Python objects."""
    info = describe(array, field)
    if info.dtype.hasobject:
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), "a dtype of plain bytes")
    return info


def check_out(out: ArrayInfo, source: ArrayInfo, shape: Sequence[int], field: str = "out") -> None:
    """ArgumentError unless ``out`` can take a result of this shape and the source's dtype: writable, no element twice,
    no byte of the source."""
    if out.shape != tuple(shape) or out.dtype != source.dtype:
        raise ArgumentError(field, f"{out.shape} of {out.dtype}", f"{tuple(shape)} of {source.dtype}")
    check_written(out, source, field)


def check_written(out: ArrayInfo, source: ArrayInfo, field: str) -> None:
    """ArgumentError for an array that may not be written to, has elements twice, or shares bytes with the source."""
    if out.readonly:
        raise ArgumentError(field, "a read-only array", "a writable array")
    if out.size_elems and any(s == 0 and n > 1 for n, s in zip(out.shape, out.strides_bytes, strict=True)):
        raise ArgumentError(field, f"strides {out.strides_bytes}", "an array whose elements lie apart")
    if overlaps(source, out):
        raise ArgumentError(field, "memory that overlaps the source", "memory of its own")


def tensor_map(info: ArrayInfo, box: Sequence[int], place: Place, **options: Any) -> TensorMap:
    """A tiled map over an array in its own order of axes, innermost last; options of TensorMap.from_array()."""
    axes = tuple(reversed(range(len(info.shape))))
    return TensorMap.from_array(info, box, axes=axes, target=place.target, **options)


@dataclass(frozen=True, slots=True)
class Known:
    """A launch that a call keeps for later calls.

    launches: in order. read: the part of the source that is read, without memory, placed relative to the source. reach:
    first byte and end of what is read, relative to the source, and of what is written, relative to the result; None
    where nothing is written. makes: shape of a result that the call made, and its address modulo 16; None where it was
    given.
    """

    launches: tuple[Replay | EmulatedReplay, ...]
    read: ArrayInfo
    reach: tuple[int, int, int, int] | None
    makes: tuple[tuple[int, ...], int] | None

    def are_apart(self, src: ArrayInfo, out: ArrayInfo) -> bool:
        """Whether nothing of ``out`` is read."""
        if self.reach is None:
            return True
        low, end, first, last = self.reach
        # Most arrays lie one after the other; overlaps() also knows windows of one buffer that lie side by side.
        if src.pointer + end <= out.pointer + first or out.pointer + last <= src.pointer + low:
            return True
        return not overlaps(replace(self.read, pointer=src.pointer + self.read.pointer), out)


#: Empty after a fork: a launch may have been running in another thread.
CALLS: PlanCache[Known] = PlanCache(MOST_CALLS)
context.after_fork(CALLS, PlanCache.clear)


class Call:
    """The arrays of one call, described, and where it runs.

    src, out: what the arrays are, out None as long as there is none. result: what the caller gets. is_known: whether
    again() serves it; else the function checks, plans and calls first().
    """

    __slots__ = ("_key", "_known", "_makes", "_read", "out", "place", "result", "src", "stream")

    def __init__(
        self,
        function: str,
        backend: str | None,
        src: ArrayInfo,
        out: Any,
        stream: object,
        *options: object,
        field: str = "out",
    ) -> None:
        """out: the caller's, or None. stream: None is the current one of torch, if an array is torch's, else CuPy's.
        options: whatever else decides the launch. field: the caller's name for out.

        Raises what describe(), place_of() and stream_handle() raise.
        """
        self.src, self.result, self._read, self._makes = src, out, src, out is None
        self.out = None if out is None else described(out, field)
        outs = () if self.out is None else ((field, self.out),)
        self.place = place_of(function, backend, src, *outs)
        self.stream = 0
        if self.place.device is not None:
            is_torch = src.kind == "torch" or (self.out is not None and self.out.kind == "torch")
            self.stream = stream_handle(stream, "torch" if is_torch else "cupy", self.place.device)
        self._key = self._key_of(function, options)
        self._known = None if self._key is None else CALLS.get(self._key)
        if self._known is not None and not self._fits(self._known):
            self._known = None

    @property
    def is_known(self) -> bool:
        return self._known is not None

    def _key_of(self, function: str, options: Iterable[object]) -> tuple[Any, ...] | None:
        """None where an option is of a kind that only the function's own checks understand."""
        place = self.place
        try:
            chosen = tuple([_plain(option) for option in options])
        except TypeError:
            return None
        out = None if self.out is None else _layout(self.out)
        where = place.backend, place.device, place.target.name, place.ctas, wants_debug(None)
        return function, _layout(self.src), out, chosen, where

    def _fits(self, known: Known) -> bool:
        """Make the result, if the caller gave none. False where the function has to look at the addresses."""
        if known.makes is not None:
            shape, remainder = known.makes
            if self._make(shape).pointer % _ALIGNMENT != remainder:
                return False
        return self.out is None or known.are_apart(self.src, self.out)

    def _make(self, shape: Sequence[int]) -> ArrayInfo:
        self.result = empty_like_library(self.src, shape, self.src.dtype, self.stream)
        self.out = described(self.result, "out")
        return self.out

    def take(self, shape: Sequence[int], read: ArrayInfo | None = None, *, dense: bool = False) -> ArrayInfo:
        """What the result is: a new array of this shape and the source's dtype, or the caller's, which is checked.

        read: the part of the source that is read, by default all. dense: it has to be in C order without gaps. Raises
        ArgumentError as check_out().
        """
        self._read = self.src if read is None else read
        if self._makes or self.out is None:
            return self._make(shape)
        check_out(self.out, self._read, shape)
        if dense and not self.out.is_contiguous:
            raise ArgumentError("out", f"strides {self.out.strides_bytes}", "an array in C order without gaps")
        return self.out

    def first(self, plans: Sequence[Launch], *tables: ArrayInfo) -> Any:
        """Launch what the function has planned, remember it, and return the result.

        tables: further arrays that the plans reach. Raises as Replay.
        """
        arrays = self._arrays(tables)
        launches = tuple([self._replay(planned, arrays) for planned in plans])
        self._run(launches, arrays)
        if self._key is not None:
            CALLS.put(self._key, self._known_by(launches))
        return self.result

    def _replay(self, launch: Launch, arrays: tuple[ArrayInfo, ...]) -> Replay | EmulatedReplay:
        """A launch that has its kernel loaded. Raises LaunchError where it would be loaded inside a capture."""
        launch.spec.check_target(self.place.target)
        device = self.place.device
        if device is None:
            return EmulatedReplay(launch, launch.kernel(self.place.target), arrays)
        kernel = launch.loaded(self.place.target, device, self.stream)
        return Replay(launch, kernel, device, [array.pointer for array in arrays], launch.moving)

    def _known_by(self, launches: tuple[Replay | EmulatedReplay, ...]) -> Known:
        read = relative(self._read, self.src)
        if self.out is None:
            return Known(launches, read, None, None)
        makes = (self.out.shape, self.out.pointer % _ALIGNMENT) if self._makes else None
        return Known(launches, read, (*read.extent, *relative(self.out, self.out).extent), makes)

    def again(self, *tables: ArrayInfo) -> Any:
        """Launch what is known for these arrays, and return the result. Raises as Replay.run()."""
        self._run(self._known.launches if self._known is not None else (), self._arrays(tables))
        return self.result

    def _run(self, launches: tuple[Replay | EmulatedReplay, ...], arrays: tuple[ArrayInfo, ...]) -> None:
        if self.place.device is not None:
            order_after_producers(self.stream, self.place.device, *arrays)
        addresses = tuple([array.pointer for array in arrays])
        for launch in launches:
            launch.run(addresses, self.stream)

    def _arrays(self, tables: tuple[ArrayInfo, ...]) -> tuple[ArrayInfo, ...]:
        return (self.src, *tables) if self.out is None else (self.src, self.out, *tables)


def _layout(info: ArrayInfo) -> tuple[Any, ...]:
    """What of an array a launch depends on."""
    return info.shape, info.strides_bytes, info.dtype, info.readonly, info.pointer % _ALIGNMENT


def _plain(option: object) -> object:
    """An option as a part of a key: words and whole numbers. TypeError for other types, which compare
    equal to these, as 1.0 to 1."""
    if option is None or option.__class__ is str or option.__class__ is int:
        return option
    if isinstance(option, list | tuple):
        return tuple(map(operator.index, option))
    raise TypeError
