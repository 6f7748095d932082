"""A fake CuPy, whose arrays have addresses but no memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from cudatma.arrays import dense_strides

MIB = 1 << 20
#: Address of the next array that is created without an address.
heap = [1 << 32]


class Array:
    """The attributes of a CuPy array that cudatma reads. ``values`` is its memory, if it has any."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any = np.float16,
        address: int | None = None,
        *,
        strides: tuple[int, ...] | None = None,
        device: int = 0,
        values: Any = None,
    ) -> None:
        if address is None:
            heap[0] += 16 * MIB
            address = heap[0]
        self.shape, self.dtype, self.ndim, self.values = tuple(shape), np.dtype(dtype), len(shape), values
        self.strides = dense_strides(self.shape, self.dtype) if strides is None else strides
        self.data = SimpleNamespace(ptr=address, device_id=device)

    def __repr__(self) -> str:
        return f"{self.dtype}{self.shape} at {self.data.ptr:#x} of {self.data.device_id}"

    def __getitem__(self, index: object) -> Array:
        return self  # a view of all of it

    def at(self, address: int) -> Array:
        """Return a copy of this array object with another address."""
        return Array(self.shape, self.dtype, address, strides=self.strides, device=self.data.device_id)


def fake_cupy(
    empty: Callable[[tuple[int, ...], Any], Array],
    current: Callable[[], int] = lambda: 0,
    external_stream: Callable[[int, int], Any] = lambda handle, device: contextlib.nullcontext(),
) -> Any:
    """Return a module that creates arrays with ``empty``, and whose current stream has the handle ``current()``."""
    cupy: Any = ModuleType("cupy")
    cupy.ndarray, cupy.empty = Array, empty
    cupy.asarray = lambda words: empty(words.shape, words.dtype)
    cupy.cuda = SimpleNamespace(
        Device=lambda ordinal: contextlib.nullcontext(),
        ExternalStream=external_stream,
        get_current_stream=lambda device: SimpleNamespace(ptr=current()),
        runtime=SimpleNamespace(CUDARuntimeError=type("E", (Exception,), {}), getDevice=lambda: 0),
    )
    return cupy
