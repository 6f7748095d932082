"""The hot path of attention: a call like an earlier one, whose arrays differ in their addresses only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cudatma import context
from cudatma.kernels.attention.tensors import ALIGNMENT
from cudatma.kernels.known_call import address_of, call_key, new_result
from cudatma.kernels.replay import PlanCache, Replay
from cudatma.library_streams import current_stream, stream_handle

#: The arrays of a call in this order: q, k, v, out.
Arrays = tuple[Any, Any, Any, Any]


@dataclass(frozen=True, slots=True)
class KnownCall:
    """replay: the launch. shape: of a result that the call makes. lse_shape, lse_dtype: of lse; the dtype is None where
    it is not wanted. extents: bytes of each array from its first element on."""

    replay: Replay
    shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    lse_dtype: Any
    extents: tuple[int, int, int, int]

    def run(self, library: str, arrays: Arrays, stream: Any) -> Any:
        """What the call gives back; None, and nothing is launched, where the full checks have to look. Alignment and
        overlap are all that addresses can still get wrong."""
        q, k, v, out = arrays
        device = self.replay.device
        handle = current_stream(library, device) if stream is None else stream_handle(stream, library, device)
        if out is None:
            out = new_result(library, q, self.shape, q.dtype, handle)
        places = address_of(library, q), address_of(library, k), address_of(library, v)
        to, extents = address_of(library, out), self.extents
        end = to + extents[3]
        for place, extent in zip(places, extents, strict=False):
            if place < end and to < place + extent:
                return None
        if (places[0] | places[1] | places[2] | to) % ALIGNMENT:
            return None
        if self.lse_dtype is None:
            self.replay.run((*places, to, 0), handle)
            return out
        lse = new_result(library, q, self.lse_shape, self.lse_dtype, handle)
        self.replay.run((*places, to, address_of(library, lse)), handle)
        return out, lse


#: By their keys.
KNOWN_CALLS: PlanCache[KnownCall] = PlanCache(1024)
context.after_fork(KNOWN_CALLS, PlanCache.clear)


def known_key(arrays: tuple[Any, ...], window: Any, options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """call_key() of a call with a window, as it is given."""
    if window is None:
        window = (None, None)
    elif type(window) is not tuple:
        return None
    return call_key(arrays, (*window, *options))
