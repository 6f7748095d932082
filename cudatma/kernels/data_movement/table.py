"""Small tables of ints that a kernel reads: from a list or a host array, uploaded for one launch, or already there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.arrays import ArrayInfo, describe, with_cupy
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.data_movement.call import Place
from cudatma.kernels.host import host_array
from cudatma.library_streams import working_on


@dataclass(frozen=True, slots=True)
class Table:
    """rows: of the table. values: what it holds, (rows, columns) int64; None where the device alone knows.

    info: the array on the device that was given, None for one that must be uploaded. kind: the library that uploads it.
    """

    rows: int
    values: NDArray[np.int64] | None
    info: ArrayInfo | None
    kind: str

    def host(self) -> NDArray[np.int64]:
        """The values, read back if need be."""
        if self.values is not None:
            return self.values
        return np.empty((0, 0), np.int64) if self.info is None else _read(self.info)

    @contextlib.contextmanager
    def on_device(self, place: Place, stream: int) -> Iterator[ArrayInfo]:
        """The table as int32 where the kernel runs, allocated and freed in the order of its stream, by its handle."""
        if self.info is not None:
            yield self.info
            return
        words = np.ascontiguousarray(self.host(), np.int32)
        if place.device is None:
            yield describe(words, "table")
            return
        if self.kind == "torch":
            with working_on("torch", place.device, stream):
                yield describe(sys.modules["torch"].from_numpy(words).to(f"cuda:{place.device}"), "table")
            return
        yield with_cupy("cupy.asarray", lambda cupy: describe(_uploaded(cupy, words, place.device, stream), "table"))


def _uploaded(cupy: Any, words: NDArray[np.int32], device: int | None, stream: int) -> Any:
    with cupy.cuda.Device(device), working_on("cupy", device, stream):
        return cupy.asarray(words)


def int_table(values: Any, columns: int | None, array: ArrayInfo, check: bool, field: str = "starts") -> Table:
    """A table of (rows, columns) ints, or (rows,) where columns is None. ``array``: an array of the operation.

    check: read a table on the device back. Raises ArgumentTypeError, ArgumentError.
    """
    shape = "(rows,)" if columns is None else f"(rows, {columns})"
    on_device = None
    if not isinstance(values, np.ndarray | list | tuple):
        info = describe(values, field)
        if info.device is not None:
            on_device = info
        else:
            values = host_array(info)
    if on_device is None:
        made = np.asarray(values)
        if made.size == 0:
            made = made.reshape(0) if columns is None else made.reshape(0, columns)
            made = made.astype(np.int64)
        if made.dtype.kind not in "iu":
            raise ArgumentTypeError(field, str(made.dtype), "ints")
        _check_shape(made.shape, columns, shape, field)
        return Table(len(made), made.astype(np.int64), None, array.kind)
    if on_device.device != array.device or on_device.dtype != np.int32 or not on_device.is_contiguous:
        got = f"{on_device.dtype} on device {on_device.device}"
        raise ArgumentError(field, got, "int32 in C order on the device of src, or ints on the host")
    _check_shape(on_device.shape, columns, shape, field)
    return Table(on_device.shape[0], _read(on_device) if check else None, on_device, array.kind)


def _check_shape(found: tuple[int, ...], columns: int | None, shape: str, field: str) -> None:
    if len(found) != (1 if columns is None else 2) or (columns is not None and found[1] != columns):
        raise ArgumentError(f"{field}.shape", found, shape)


def _read(info: ArrayInfo) -> NDArray[np.int64]:
    """A table on the device, as it is when its library's stream has reached this point."""
    owner: Any = info.owner
    if info.kind == "torch":
        found = owner.cpu().numpy()
    else:
        found = with_cupy("cupy.asnumpy", lambda cupy: cupy.asnumpy(cupy.asarray(owner)))
    return np.asarray(found).astype(np.int64)
