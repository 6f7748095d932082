"""The hot path of gemm: a call like an earlier one, whose arrays differ in their addresses only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cudatma import context
from cudatma.kernels.gemm.matrices import ALIGNMENT
from cudatma.kernels.known_call import address_of, new_result
from cudatma.kernels.replay import PlanCache, Replay
from cudatma.library_streams import current_stream, stream_handle

#: The arrays of a call in this order.
Arrays = tuple[Any, Any, Any, Any, Any, Any]  # a, b, out, bias, a_scale, b_scale


@dataclass(frozen=True, slots=True)
class KnownCall:
    """replay: the launch. shape, dtype: of a result that the call makes. extents: bytes of each array from its first
    element on."""

    replay: Replay
    shape: tuple[int, ...]
    dtype: Any
    extents: tuple[int, ...]

    def run(self, library: str, arrays: Arrays, stream: Any) -> Any:
        """The result; None, and nothing is launched, where the full checks have to look. Alignment and overlap are all
        that addresses can still get wrong."""
        a, b, out, *optional = arrays
        device = self.replay.device
        handle = current_stream(library, device) if stream is None else stream_handle(stream, library, device)
        if out is None:
            out = new_result(library, a, self.shape, self.dtype, handle)
            arrays = (a, b, out, *optional)
        places = [0 if array is None else address_of(library, array) for array in arrays]
        at_a, at_b, to, *others = places
        end = to + self.extents[2]
        for index, place in enumerate(places):
            if index != 2 and place < end and to < place + self.extents[index]:
                return None
        if (at_a | at_b | to) % ALIGNMENT or others[0] % self.dtype.itemsize or (others[1] | others[2]) % 4:
            return None
        self.replay.run((at_a, at_b, to, to, *others), handle)
        return out


#: By their keys.
KNOWN_CALLS: PlanCache[KnownCall] = PlanCache(1024)
context.after_fork(KNOWN_CALLS, PlanCache.clear)
