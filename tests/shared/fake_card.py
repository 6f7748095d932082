"""A device of the fake driver with a fake CuPy, for scripts that fake_driver.wrong_cases() runs."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from fake_cupy import MIB as MIB
from fake_cupy import Array, fake_cupy
from fake_cupy import heap as heap
from fake_driver import Counts, Record, Setup, Stream

library = ctypes.CDLL("libcuda.so.1")
record, setup = Record.in_dll(library, "fake_record"), Setup.in_dll(library, "fake_setup")
counts, streams = Counts.in_dll(library, "fake_counts"), (Stream * 64).in_dll(library, "fake_streams")
capability, encoded, replaced = (
    ctypes.c_int.in_dll(library, f"fake_{name}") for name in ("capability", "encoded", "replaced")
)
ctypes.c_int.in_dll(library, "fake_most_threads").value = 1024
#: CuPy's current stream, and the streams on which it has allocated.
current, allocated_on = [7], []


class Foreign:
    """An array of a library that names its stream."""

    def __init__(self, shape: Sequence[int], stream: int | None, dtype: Any = np.float32) -> None:
        inner = Array(shape, dtype)
        self.__cuda_array_interface__ = {
            "shape": inner.shape,
            "typestr": inner.dtype.str,
            "data": (inner.data.ptr, False),
            "version": 3,
            "stream": stream,
        }


def empty(shape: Sequence[int], dtype: Any) -> Array:
    allocated_on.append(current[0])
    return Array(shape, dtype)


@contextlib.contextmanager
def external_stream(handle: int, device: int) -> Iterator[None]:
    before, current[0] = current[0], handle
    yield
    current[0] = before


cupy = fake_cupy(empty, lambda: current[0], external_stream)
sys.modules["cupy"] = cupy


def set_stream(index: int, handle: int, number: int, capture: int = 0) -> None:
    """Set a stream's id, and the graph into which the stream is captured."""
    streams[index].handle, streams[index].id, streams[index].capture = handle, number, capture


def waits(function: Callable[[], object]) -> tuple[int, int] | None:
    """Return the waiting stream and the stream for which it waits in a call, or None if no stream waits."""
    record.recorded_on = record.waited_on = 0
    function()
    assert record.events == 0
    return (record.waited_on - 1, record.recorded_on) if record.waited_on else None
