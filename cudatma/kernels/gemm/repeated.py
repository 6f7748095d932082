"""The hot path of gemm: a call like an earlier one, whose arrays differ in their addresses only.

Reads the few attributes of CuPy arrays and torch tensors that a launch depends on, and nothing else: full checks cost
more than the launch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from cudatma import context
from cudatma.kernels.gemm.matrices import ALIGNMENT
from cudatma.kernels.replay import PlanCache, Replay
from cudatma.kernels.tensor_library import library_of_tensor
from cudatma.library_streams import current_stream, stream_handle, working_on

#: The arrays of a call in this order, and what else it asks for.
Arrays = tuple[Any, Any, Any, Any, Any, Any]  # a, b, out, bias, a_scale, b_scale
_PLAIN = (int, float, bool, str, type(None))


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
            out = _new_result(library, a, self.shape, self.dtype, handle)
            arrays = (a, b, out, *optional)
        places = [0 if array is None else _address(library, array) for array in arrays]
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


def call_key(arrays: Arrays, options: tuple[Any, ...]) -> tuple[Any, ...] | None:
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
            facts.append((array.shape, array.stride(), array.dtype, array.device))
    return (*facts, options, tuple([type(option) for option in options]))


def _address(library: str, array: Any) -> int:
    return int(array.data.ptr if library == "cupy" else array.data_ptr())


def _new_result(library: str, a: Any, shape: tuple[int, ...], dtype: Any, stream: int) -> Any:
    """An uninitialized result on a's device, allocated on the stream of the launch."""
    if library == "torch":
        with working_on(library, a.device.index, stream):
            return a.new_empty(shape, dtype=dtype)
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(a.data.device_id), working_on(library, a.data.device_id, stream):
        return cupy.empty(shape, dtype)
