"""The hot path of attention_decode and attention_varlen: a call like an earlier one, whose arrays differ in their
addresses only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cudatma import context
from cudatma.kernels.attention.tensors import ALIGNMENT
from cudatma.kernels.known_call import address_of, new_result
from cudatma.kernels.replay import PlanCache, Replay
from cudatma.kernels.stream_workspaces import stream_workspace
from cudatma.library_streams import current_stream, stream_handle

#: The arrays of a call in this order: q, k_cache, v_cache, seqlens, page_table, out; of attention_varlen q, k, v,
#: cu_seqlens_q, cu_seqlens_k, out.
Arrays = tuple[Any, Any, Any, Any, Any, Any]
_INT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class DecodeReplay:
    """A launch, and the partial sums that it needs of a workspace; 0 for none."""

    replay: Replay
    device: int
    partials_bytes: int

    def run(self, addresses: tuple[int, ...], stream: int) -> None:
        """addresses: of the arrays that are read, the result and lse, 0 for what there is not."""
        if not self.partials_bytes:
            self.replay.run((*addresses, 0, 0), stream)
            return
        space = stream_workspace(self.device, stream, self.partials_bytes)
        self.replay.run((*addresses, space.partials_pointer, space.flags_pointer), stream)


@dataclass(frozen=True, slots=True)
class KnownCall:
    """replay: the launch. shape: of a result that the call makes. lse_shape, lse_dtype: of lse; the dtype is None where
    it is not wanted. extents: bytes of each array from its first element on."""

    replay: DecodeReplay
    shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    lse_dtype: Any
    extents: tuple[int, ...]

    def run(self, library: str, arrays: Arrays, stream: Any) -> Any:
        """What the call gives back; None, and nothing is launched, where the full checks have to look. Alignment and
        overlap are all that addresses can still get wrong."""
        *read, out = arrays
        q, device = read[0], self.replay.device
        handle = current_stream(library, device) if stream is None else stream_handle(stream, library, device)
        if out is None:
            out = new_result(library, q, self.shape, q.dtype, handle)
        places = tuple([0 if array is None else address_of(library, array) for array in read])
        to, extents = address_of(library, out), self.extents
        end = to + extents[5]
        for place, extent in zip(places, extents, strict=False):
            if place < end and to < place + extent:
                return None
        if (places[0] | places[1] | places[2] | to) % ALIGNMENT or (places[3] | places[4]) % _INT32_BYTES:
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
