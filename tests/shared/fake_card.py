"""A device of the fake driver, and a CuPy whose arrays live on it: for scripts that fake_driver.wrong_cases() runs.

Arrays have addresses and no memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from fake_driver import Counts, Record, Setup, Stream

from cudatma.arrays import dense_strides

MIB = 1 << 20
library = ctypes.CDLL("libcuda.so.1")
record, setup = Record.in_dll(library, "fake_record"), Setup.in_dll(library, "fake_setup")
counts, streams = Counts.in_dll(library, "fake_counts"), (Stream * 64).in_dll(library, "fake_streams")
capability, encoded, replaced = (
    ctypes.c_int.in_dll(library, f"fake_{name}") for name in ("capability", "encoded", "replaced")
)
ctypes.c_int.in_dll(library, "fake_most_threads").value = 1024
#: Where the next array without an address is.
heap = [1 << 32]
#: The stream that CuPy works on, and those it allocated on.
current, allocated_on = [7], []


class Array:
    """The attributes of a CuPy array that cudatma reads. By default it has memory of its own."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any = np.float32,
        *,
        address: int | None = None,
        pitch_bytes: int = 0,
        device: int = 0,
    ) -> None:
        if address is None:
            heap[0] += 16 * MIB
            address = heap[0]
        self.shape, self.dtype, self.ndim = tuple(shape), np.dtype(dtype), len(shape)
        self.data = types.SimpleNamespace(ptr=address, device_id=device)
        dense = dense_strides(self.shape, self.dtype)
        self.strides = (*dense[:-2], pitch_bytes, dense[-1]) if pitch_bytes else dense

    def __getitem__(self, index: object) -> Array:
        return self  # a view of all of it


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


cupy: Any = types.ModuleType("cupy")
cupy.ndarray, cupy.empty = Array, empty
cupy.asarray = lambda words: empty(words.shape, words.dtype)
cupy.cuda = types.SimpleNamespace(
    Device=lambda ordinal: contextlib.nullcontext(),
    ExternalStream=external_stream,
    get_current_stream=lambda device: types.SimpleNamespace(ptr=current[0]),
    runtime=types.SimpleNamespace(CUDARuntimeError=type("E", (Exception,), {}), getDevice=lambda: 0),
)
sys.modules["cupy"] = cupy


def set_stream(index: int, handle: int, number: int, capture: int = 0) -> None:
    """Set what the driver knows of a stream: its id, and the graph that it is captured into."""
    streams[index].handle, streams[index].id, streams[index].capture = handle, number, capture


def waits(function: Callable[[], object]) -> tuple[int, int] | None:
    """Return (the stream that waited, for which) of a call, None if none did."""
    record.recorded_on = record.waited_on = 0
    function()
    assert record.events == 0
    return (record.waited_on - 1, record.recorded_on) if record.waited_on else None


def in_a_forked_child(work: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
