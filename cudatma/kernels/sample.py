"""Made-up operands: a registry kernel ready to be run on the emulator, as `cudatma emulate NAME` runs it, and what the
tuner launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError

if TYPE_CHECKING:
    from cudatma.emulator import Report
    from cudatma.kernels.choice import Listed
    from cudatma.runtime.launch import Kernel

#: relative_error() that one rounding to the dtype, after fp32 accumulation, must keep.
LIMITS = {"float16": 1e-3, "bfloat16": 6e-3}
#: All copies of an operand together, several times any L2; while one is read, it pushes another out. Even the
#: most copies of a tiny operand fit L2, but no load of it is slow.
_ROTATION_BYTES, _MIN_COPIES, _MAX_COPIES = 350_000_000, 2, 200
#: Number of random values, which are repeated. A prime: no two rows or columns are equal.
_POOL = 1_048_573

#: launch(i) enqueues a kernel that reads the i-th copy.
Launch = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One launch.

    title: what is run, in a line. kernel: compiled. run: launches it on the emulator, with the options of
    ``EmulatedModule.launch``. error: relative_error() of the last schedule, against float64; limit: what it may be
    at most.
    """

    title: str
    kernel: Kernel
    run: Callable[..., Report]
    error: Callable[[], float]
    limit: float


def sample_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy's, by its name. ArgumentError for no dtype."""
    try:
        return np.dtype(dtype)
    except TypeError as error:
        raise ArgumentError("dtype", dtype, "a NumPy dtype") from error


def relative_error(result: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> float:
    """||result - reference|| / ||reference||."""
    return float(np.linalg.norm(result.astype(np.float64) - reference) / np.linalg.norm(reference))


class Trial(Protocol):
    """A family's operands on a device.

    out: the result, which every launch writes. copies: of the operand that stays cold. prepare(problem): makes
    operands; those of the previous problem may be freed. launcher(candidate, copies, stream): launches the candidate on
    so many of the copies, as a call of the family's function would; its kernel is loaded now. Raises LaunchError if it
    would not be launched as it says.
    """

    @property
    def device(self) -> int: ...
    @property
    def out(self) -> Any: ...
    @property
    def copies(self) -> int: ...
    def prepare(self, problem: Any) -> None: ...
    def launcher(self, candidate: Listed[Any], copies: int, stream: int) -> Launch: ...


def cold_copies(size_bytes: int) -> int:
    """How many copies of an operand keep each of them cold."""
    return min(_MAX_COPIES, max(_MIN_COPIES, _ROTATION_BYTES // size_bytes + 1))


def in_turn(launches: Sequence[Callable[[], None]]) -> Launch:
    """launch(i) is the i-th of these, round and round."""

    def launch(index: int) -> None:
        launches[index % len(launches)]()

    return launch


def random_rows(rows: int, columns: int, dtype: str, seed: int) -> Any:
    """(rows, columns) of normally distributed fp16 or bf16 on CuPy's current device. Rows begin at multiples of 16
    bytes, as TMA wants them. seed: another one for each operand."""
    import cupy

    kind = activation_type(dtype).numpy
    bits = np.random.default_rng(seed).standard_normal(_POOL, dtype=np.float32).astype(kind).view(np.uint16)
    return cupy.asarray(np.resize(bits, (rows, -(-columns // 8) * 8))).view(kind)[:, :columns]


def empty_rows(rows: int, columns: int, dtype: str) -> Any:
    """(rows, columns) of fp16 or bf16, contiguous, on CuPy's current device."""
    import cupy

    return cupy.empty((rows, columns), np.uint16).view(activation_type(dtype).numpy)
