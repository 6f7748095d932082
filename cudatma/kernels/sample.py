"""Random operands for `cudatma emulate NAME` and for the tuner."""

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

#: Limits of relative_error() for one rounding to the dtype after fp32 accumulation.
LIMITS = {"float16": 1e-3, "bfloat16": 6e-3}
#: Total number of bytes of all copies of an operand, which is several times the size of any L2, so that each copy
#: evicts another. Even the maximum number of copies of a tiny operand fits in L2, but loading a tiny operand takes
#: almost no time.
_ROTATION_BYTES, _MIN_COPIES, _MAX_COPIES = 350_000_000, 2, 200
#: Number of random values, which are repeated to fill an operand. The number is prime, so that no two rows or columns
#: are equal.
_POOL = 1_048_573

#: launch(i) enqueues a kernel that reads the i-th copy.
Launch = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One launch with random operands.

    Attributes
    ----------
    title : str
        One-line description.
    kernel : Kernel
        The compiled kernel.
    run : callable
        Function that launches the kernel on the emulator, with the options of ``EmulatedModule.launch``.
    error : callable
        relative_error() of the last schedule, compared with float64.
    limit : float
        Maximum allowed error.
    """

    title: str
    kernel: Kernel
    run: Callable[..., Report]
    error: Callable[[], float]
    limit: float


def sample_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype with this name. Raises ArgumentError for an unknown name."""
    try:
        return np.dtype(dtype)
    except TypeError as error:
        raise ArgumentError("dtype", dtype, "the name of a NumPy dtype") from error


def relative_error(result: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> float:
    """Return ||result - reference|| / ||reference||."""
    return float(np.linalg.norm(result.astype(np.float64) - reference) / np.linalg.norm(reference))


class Trial(Protocol):
    """Random operands of a family on a device, for the tuner.

    Attributes
    ----------
    out : Any
        Result of every launch.
    copies : int
        Number of copies of the operand that must be cold in L2.
    prepare(problem)
        Creates the operands of a problem. The operands of the previous problem may be freed.
    launcher(candidate, copies, stream)
        Loads the candidate's kernel, and returns a function that launches the kernel on one of ``copies`` copies in the
        same way as a call to the family's function. Raises LaunchError if the call would launch another kernel.
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
    """Return the number of copies of an operand that keeps each copy cold in L2."""
    return min(_MAX_COPIES, max(_MIN_COPIES, _ROTATION_BYTES // size_bytes + 1))


def in_turn(launches: Sequence[Callable[[], None]]) -> Launch:
    """Return a function of i that calls ``launches[i % len(launches)]``."""

    def launch(index: int) -> None:
        launches[index % len(launches)]()

    return launch


def random_rows(rows: int, columns: int, dtype: str, seed: int) -> Any:
    """Return a (rows, columns) array of normally distributed fp16 or bf16 values on CuPy's current device.

    Rows begin at multiples of 16 bytes, as TMA requires. Use a different ``seed`` for each operand.
    """
    import cupy

    kind = activation_type(dtype).numpy
    bits = np.random.default_rng(seed).standard_normal(_POOL, dtype=np.float32).astype(kind).view(np.uint16)
    return cupy.asarray(np.resize(bits, (rows, -(-columns // 8) * 8))).view(kind)[:, :columns]


def empty_rows(rows: int, columns: int, dtype: str) -> Any:
    """Return an uninitialized, contiguous fp16 or bf16 array (rows, columns) on CuPy's current device."""
    import cupy

    return cupy.empty((rows, columns), np.uint16).view(activation_type(dtype).numpy)
