"""The dense path of marlin_gemm: a weight dequantized once into memory that the caller allows, multiplied by cuBLAS.

M and the budget alone decide whether a call takes this path: the bits of a result do not depend on earlier calls. Which
copies are kept does depend on them: the least recently used are dropped first, and made again when they are needed.
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

#: M from which the dense product is taken on targets that FROM_M lacks. Not measured: from about there the tensor cores
#: bound both, and dequantizing in the GEMM can only cost time. docs/performance/marlin_paths.md
DEFAULT_FROM_M = 2048
#: Target's name -> M from which the dense product was measured faster.
FROM_M: dict[str, int] = {"sm_90a": 1024}

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
    """Device memory that the dequantized weight takes: K N 2, rows padded to 16 bytes."""
    return w.shape[0] * dense_pitch_bytes(w.shape[1])


def serves_dense(w: PackedWeight, rows: int, dense_bytes: int, target: Target) -> bool:
    """Whether a call with ``rows`` rows of x and this budget takes the dense path."""
    return rows >= FROM_M.get(target.name, DEFAULT_FROM_M) and dense_nbytes(w) <= dense_bytes


class DenseCopy:
    """A dequantized weight on its device. Freed with the object, when no product on the device reads it any more.

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
    """The weight's copy. Where there is none yet, it is made on ``stream`` and waited for; older copies are
    dropped until it fits the budget.

    Raises LaunchError where it would be made inside a graph capture, and where copies that captured graphs read leave
    too little of the budget; DriverError (no memory).
    """
    device = w.device or 0
    with _lock:
        captured = is_capturing(device, stream)
        copy: DenseCopy | None = w.attachments.get(_KEY)
        if copy is None:
            if captured:
                refuse_in_capture(device, stream, "a weight that is dequantized")
            _make_room(device, dense_nbytes(w), dense_bytes)
            copy = DenseCopy(w, device)
            dequantize_into(w, copy.info, stream)
            # The next call may be on any stream, which waits for none.
            with context.using(device) as driver, context.outside_captures(driver):
                check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
            w.attachments[_KEY] = copy
        copy.in_graph |= captured
        others = [ref for ref in _recent.get(device, []) if ref() is not None and ref() is not w]
        _recent[device] = [*others, weakref.ref(w)]
        return copy


def dense_bytes_in_use(device: int) -> int:
    """Memory that the dequantized weights of a device take."""
    with _lock:
        return sum(dense_nbytes(w) for w in _holders(device))


def _holders(device: int) -> list[PackedWeight]:
    """Weights that are alive and have a copy; the least recently used first."""
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
    """out = x W + bias by cuBLAS, for checked operands with one row or more.

    torch multiplies its own tensors, CuPy those of any other library. Raises LaunchError as dense_copy() does, and
    inside a graph capture for what is not torch's; DriverError (no cuBLAS, no memory).
    """
    product = choose_product(x, out, bias, stream)
    copy = dense_copy(w, dense_bytes, stream)
    product(x, copy.info, out, bias, stream)
