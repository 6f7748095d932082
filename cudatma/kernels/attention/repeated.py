"""The hot path of attention, attention_decode and attention_varlen: a call like an earlier one, whose arrays differ in
their addresses only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from cudatma import context
from cudatma.arrays import ArrayInfo
from cudatma.build.kernel import debug_scope
from cudatma.kernels.attention.tensors import ALIGNMENT
from cudatma.kernels.choosing import pinned_scope
from cudatma.kernels.known_call import address_of, call_key, new_result
from cudatma.kernels.replay import PlanCache, Replay
from cudatma.kernels.stream_workspaces import stream_workspace
from cudatma.library_streams import current_stream, stream_handle

_INT32_BYTES = 4


class Launcher(Protocol):
    """A Replay, or what adds a workspace to one. Addresses are those of the arrays that are read, the result and lse,
    0 for what there is not."""

    @property
    def device(self) -> int: ...
    def run(self, addresses: tuple[int, ...], stream: int) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkspaceReplay:
    """A launch that needs partial sums or counters of its stream's workspace."""

    replay: Replay
    device: int
    partials_bytes: int

    def run(self, addresses: tuple[int, ...], stream: int) -> None:
        space = stream_workspace(self.device, stream, self.partials_bytes)
        self.replay.run((*addresses, space.partials_pointer, space.flags_pointer), stream)


@dataclass(frozen=True, slots=True)
class KnownCall:
    """replay: the launch. shape: of a result that the call makes. lse_shape, lse_dtype: of lse; the dtype is None where
    it is not wanted. extents: bytes of each array from its first element on."""

    replay: Launcher
    shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    lse_dtype: Any
    extents: tuple[int, ...]

    def run(self, library: str, arrays: tuple[Any, ...], stream: Any) -> Any:
        """What the call gives back; None, and nothing is launched, where the full checks have to look. arrays: q, k, v,
        what else is read, of four bytes each element, and the result. Alignment and overlap are all that addresses can
        still get wrong."""
        *read, out = arrays
        device = self.replay.device
        handle = current_stream(library, device) if stream is None else stream_handle(stream, library, device)
        if out is None:
            out = new_result(library, read[0], self.shape, read[0].dtype, handle)
        places = tuple([0 if array is None else address_of(library, array) for array in read])
        to, extents = address_of(library, out), self.extents
        end = to + extents[-1]
        for place, extent in zip(places, extents, strict=False):
            if place < end and to < place + extent:
                return None
        q, k, v, *integers = places
        if (q | k | v | to) % ALIGNMENT or any(place % _INT32_BYTES for place in integers):
            return None
        if self.lse_dtype is None:
            self.replay.run((*places, to, 0), handle)
            return out
        lse = new_result(library, read[0], self.lse_shape, self.lse_dtype, handle)
        self.replay.run((*places, to, address_of(library, lse)), handle)
        return out, lse


def extents(arrays: tuple[ArrayInfo | None, ...]) -> tuple[int, ...]:
    """Of a KnownCall; 0 for None."""
    return tuple([0 if info is None else info.extent[1] - info.pointer for info in arrays])


def addresses(arrays: tuple[ArrayInfo | None, ...]) -> tuple[int, ...]:
    """Of a Replay; 0 for None."""
    return tuple([0 if info is None else info.pointer for info in arrays])


def argument_indices(names: tuple[str, ...], read: Iterable[str], has_lse: bool) -> list[int | None]:
    """Where a launch's arguments, by name, have the addresses of what is read, the result, lse, partial sums and
    counters; None where there is no such argument."""
    found = {name.removesuffix("_map").removesuffix("_rows"): index for index, name in enumerate(names)}
    counters = found.get("counters", found.get("tile_counter"))
    return [*(found.get(name) for name in (*read, "output", "lse" if has_lse else "", "partials")), counters]


#: By their keys.
KNOWN_CALLS: PlanCache[KnownCall] = PlanCache(1024)
context.after_fork(KNOWN_CALLS, PlanCache.clear)


def repeated(
    arrays: tuple[Any, ...], window: Any, options: tuple[Any, ...], backend: str | None, stream: Any
) -> tuple[tuple[Any, ...] | None, Any]:
    """A call's key in KNOWN_CALLS, None where it gets none, and what it gives back if it is like an earlier one."""
    if window is None:
        window = (None, None)
    if backend is not None or type(window) is not tuple:
        return None, None
    if debug_scope.get() is not None or pinned_scope.get() is not None:
        return None, None
    key = call_key(arrays, (*window, *options))
    known = None if key is None else KNOWN_CALLS.get(key)
    return key, None if key is None or known is None else known.run(key[0], arrays, stream)
