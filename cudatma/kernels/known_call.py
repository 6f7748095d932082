"""Calls like an earlier one, of any family, whose arrays differ in their addresses only: the hot path.

Reads the few attributes of CuPy arrays and torch tensors that a launch depends on, and nothing else: full checks cost
more than the launch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cudatma.arrays import ArrayInfo
from cudatma.library_streams import current_stream, stream_handle, working_on

_PLAIN = (int, float, bool, str, type(None))
#: Bits of an address that are 0 at multiples of 16 bytes, where TMA and copies of whole vectors begin.
_OFF_16 = 15
#: CuPy's array class and torch's, once they have been seen.
_libraries: dict[type, str] = {}


def library_of_tensor(x: Any) -> str:
    """``"cupy"``, ``"torch"``, or ``""`` for an array that only the full checks can read."""
    kind = type(x)
    known = _libraries.get(kind)
    if known is None:
        modules = sys.modules
        if "cupy" in modules and kind is modules["cupy"].ndarray:
            known = "cupy"
        elif "torch" in modules and kind is modules["torch"].Tensor:
            known = "torch"
        else:
            return ""
        _libraries[kind] = known
    return known


def call_key(arrays: Sequence[Any], options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The library, and what else a launch depends on; None where the arrays are not all of CuPy or torch, or an option
    is no plain value."""
    kind = type(arrays[0])
    library = library_of_tensor(arrays[0])
    if not library or not all(type(option) in _PLAIN for option in options):
        return None
    facts: list[Any] = [library]
    for array in arrays:
        if array is None:
            facts.append(None)
        elif type(array) is not kind:
            return None
        elif library == "cupy":
            facts.append((array.shape, array.strides, array.dtype, array.data.device_id))
        elif array.requires_grad:
            return None
        else:
            try:
                facts.append((array.shape, array.stride(), array.dtype, array.device))
            except RuntimeError:  # a nested tensor has none of them
                return None
    return (*facts, options, tuple([type(option) for option in options]))


def address_of(library: str, array: Any) -> int:
    return int(array.data.ptr if library == "cupy" else array.data_ptr())


def new_result(library: str, like: Any, shape: tuple[int, ...], dtype: Any, stream: int) -> Any:
    """An uninitialized result on an array's device, allocated on the stream of the launch."""
    if library == "torch":
        with working_on(library, like.device.index, stream):
            return like.new_empty(shape, dtype=dtype)
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(like.data.device_id), working_on(library, like.data.device_id, stream):
        return cupy.empty(shape, dtype)


class Launcher(Protocol):
    """A Replay, or what adds a workspace to one. Addresses are those of the arrays that are read, 0 for what there is
    not, of the result, and of a second result: lse, or the one of the output's tensor map."""

    @property
    def device(self) -> int: ...
    def run(self, addresses: tuple[int, ...], stream: int) -> None: ...


@dataclass(frozen=True, slots=True)
class KnownCall:
    """replay: the launch. shape, dtype: of a result that the call makes. lse: the same of lse, None where it is not
    wanted. result_bytes, extents: bytes of the result, and of each array that is read, from its first element on; the
    last of ``extents`` is 0. masks: bits of the addresses, of the result's last, that have to be 0."""

    replay: Launcher
    shape: tuple[int, ...]
    dtype: Any
    lse: tuple[tuple[int, ...], Any] | None
    result_bytes: int
    extents: tuple[int, ...]
    masks: tuple[int, ...]

    @classmethod
    def of(
        cls,
        replay: Launcher,
        out: Any,
        shape: tuple[int, ...],
        arrays: Sequence[ArrayInfo | None],
        aligned: int,
        lse: tuple[tuple[int, ...], Any] | None = None,
    ) -> KnownCall:
        """Of a launch that wrote ``out``. arrays: what is read, then the result. aligned: so many of the first, and the
        result, are at multiples of 16 bytes; the others at multiples of their elements."""
        *extents, size = [0 if info is None else info.extent[1] - info.pointer for info in arrays]
        others = [0 if info is None else info.dtype.itemsize - 1 for info in arrays[aligned:-1]]
        return cls(replay, shape, out.dtype, lse, size, (*extents, 0), (*[_OFF_16] * aligned, *others, _OFF_16))

    def run(self, library: str, arrays: Sequence[Any], stream: Any) -> Any:
        """What the call gives back; None, and nothing is launched, where the full checks have to look. arrays: what is
        read, and the result. Alignment and overlap are all that addresses can still get wrong."""
        like, out, device = arrays[0], arrays[-1], self.replay.device
        handle = current_stream(library, device) if stream is None else stream_handle(stream, library, device)
        if out is None:
            out = new_result(library, like, self.shape, self.dtype, handle)
            arrays = (*arrays[:-1], out)
        places = [0 if array is None else address_of(library, array) for array in arrays]
        to = places[-1]
        end = to + self.result_bytes
        for place, extent, mask in zip(places, self.extents, self.masks):  # noqa: B905 (a keyword takes time)
            if place & mask or (place < end and to < place + extent):
                return None
        if self.lse is None:
            self.replay.run((*places, to), handle)
            return out
        lse = new_result(library, like, *self.lse, handle)
        self.replay.run((*places, address_of(library, lse)), handle)
        return out, lse


def addresses(arrays: Sequence[ArrayInfo | None]) -> tuple[int, ...]:
    """Of a Launcher; 0 for None."""
    return tuple([0 if info is None else info.pointer for info in arrays])
