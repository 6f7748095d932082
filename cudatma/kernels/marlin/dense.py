"""The dense path of marlin_gemm: a weight dequantised once into memory that the caller allows, multiplied by cuBLAS.

Whether a call comes here depends on its tokens and its budget alone, so that the bits of a result do not depend on what
ran before. Which copies are kept does: the least recently used go first, and are made again when they are needed.
"""

from __future__ import annotations

import threading
import weakref

from cudatma import context
from cudatma.arrays import ArrayInfo
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, ArgumentTypeError, LaunchError, check
from cudatma.kernels.marlin.cublas import choose_product
from cudatma.kernels.marlin.dequantize import dense_pitch_bytes, dequantize_into
from cudatma.kernels.marlin.operands import Rows
from cudatma.kernels.workspace import is_capturing, refuse_in_capture
from cudatma.quantization import PackedWeight
from cudatma.runtime.device_memory import DeviceMemory
from cudatma.target import Target

#: Tokens from which the dense product is taken, where no row below says better. Not a measurement: from about there
#: both are bound by the tensor cores, so that dequantising in the GEMM can only cost. docs/performance/marlin_paths.md
DEFAULT_FROM_TOKENS = 2048
#: Target's name -> tokens from which the dense product was measured faster.
FROM_TOKENS: dict[str, int] = {"sm_90a": 1024}

_KEY = "dense copy"
_ELEMENT_BYTES = 2


def check_budget(dense_bytes: object) -> int:
    """A budget in bytes; ArgumentTypeError or ArgumentError for what is none."""
    if type(dense_bytes) is not int:
        raise ArgumentTypeError("dense_bytes", type(dense_bytes).__name__, "an int, bytes of device memory")
    if dense_bytes < 0:
        raise ArgumentError("dense_bytes", dense_bytes, "0 and up", "0 keeps the weight packed")
    return dense_bytes


def dense_nbytes(w: PackedWeight) -> int:
    """Device memory that the dequantised weight takes: K N 2, rows padded to 16 bytes."""
    return w.shape[0] * dense_pitch_bytes(w.shape[1])


def serves_dense(w: PackedWeight, rows: int, dense_bytes: int, target: Target) -> bool:
    """Whether a call with so many tokens and this budget takes the dense path."""
    return rows >= FROM_TOKENS.get(target.name, DEFAULT_FROM_TOKENS) and dense_nbytes(w) <= dense_bytes


class DenseCopy:
    """A dequantised weight on its device. Freed with the object, when no product on the device reads it any more.

    info: the array (K, N). in_graph: whether a captured graph reads it; it then stays as long as the weight does.
    """

    __slots__ = ("__weakref__", "in_graph", "info", "memory")

    def __init__(self, w: PackedWeight, device: int) -> None:
        # cuMemFree, which frees it, waits for the device. [CUDA C++ Programming Guide, Stream Ordered Memory Allocator]
        self.memory = DeviceMemory(dense_nbytes(w), device)
        strides = (dense_pitch_bytes(w.shape[1]), _ELEMENT_BYTES)
        kind = activation_type(w.dtype).numpy
        self.info = ArrayInfo(self.memory.pointer, w.shape, strides, kind, device, self.memory, "cupy")
        self.in_graph = False


_lock = threading.Lock()
#: Device -> weights that have a copy there, the least recently used first.
_recent: dict[int, list[weakref.ref[PackedWeight]]] = {}


def dense_copy(w: PackedWeight, dense_bytes: int, stream: int) -> DenseCopy:
    """The weight's copy. Where there is none yet it is made on ``stream`` and waited for, and others go for its room.

    Raises LaunchError where it would be made inside a graph capture, and where copies that captured graphs read leave
    too little of the budget; DriverError (no memory).
    """
    device = w.device or 0
    with _lock:
        captured = is_capturing(device, stream)
        copy: DenseCopy | None = w.attachments.get(_KEY)
        if copy is None:
            if captured:
                refuse_in_capture(device, stream, "a weight that is dequantised")
            _make_room(device, dense_nbytes(w), dense_bytes)
            copy = DenseCopy(w, device)
            dequantize_into(w, copy.info, stream)
            # Calls on any stream may follow.
            with context.using(device) as driver, context.outside_captures(driver):
                check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
            w.attachments[_KEY] = copy
        copy.in_graph |= captured
        others = [ref for ref in _recent.get(device, []) if ref() is not None and ref() is not w]
        _recent[device] = [*others, weakref.ref(w)]
        return copy


def dense_bytes_in_use(device: int) -> int:
    """Memory that the dequantised weights of a device take."""
    with _lock:
        return sum(dense_nbytes(w) for w in _holders(device))


def _holders(device: int) -> list[PackedWeight]:
    """Weights that still are, and still have a copy; the least recently used first."""
    alive = [ref() for ref in _recent.get(device, [])]
    return [w for w in alive if w is not None and _KEY in w.attachments]


def _make_room(device: int, wanted: int, dense_bytes: int) -> None:
    """Drop copies, the least recently used first, until ``wanted`` more bytes fit the budget."""
    holders = _holders(device)
    fixed = sum(dense_nbytes(w) for w in holders if w.attachments[_KEY].in_graph)
    if fixed + wanted > dense_bytes:
        got = f"{dense_bytes}, of which copies that captured graphs read take {fixed}"
        raise LaunchError("dense_bytes", got, f"{fixed + wanted} or more", "raise the budget, or drop those weights")
    used = sum(dense_nbytes(w) for w in holders)
    for w in holders:
        if used + wanted <= dense_bytes:
            return
        if not w.attachments[_KEY].in_graph:
            del w.attachments[_KEY]
            used -= dense_nbytes(w)


def dense_gemm(x: Rows, w: PackedWeight, out: Rows, bias: ArrayInfo | None, dense_bytes: int, stream: int) -> None:
    """out = x W + bias by cuBLAS, for operands that were checked and have a token at least.

    torch's tensors are multiplied by torch, all others through CuPy. Raises LaunchError as dense_copy() does, and
    inside a graph capture for what is not torch's; DriverError (no cuBLAS, no memory).
    """
    product = choose_product(x, out, bias, stream)
    copy = dense_copy(w, dense_bytes, stream)
    product(x, copy.info, out, bias, stream)
