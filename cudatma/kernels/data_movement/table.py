"""Small tables of integers for kernels. Lists and host arrays are uploaded for one launch."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cudatma.arrays import ArrayInfo, describe, with_cupy
from cudatma.errors import ArgumentError, ArgumentTypeError, shown
from cudatma.kernels.engine import library_for
from cudatma.kernels.host import host_array
from cudatma.library_streams import stream_handle, working_on

_INT32 = 1 << 31
_WORDS = "signed 32-bit integers"


class Table(NamedTuple):
    """A table of signed 32-bit integers.

    Attributes
    ----------
    values : NDArray[np.int32] or None
        Rows of the table, or None if the rows are only on the device.
    given : Any
        Array on the device, or None if the table must be uploaded.
    """

    values: NDArray[np.int32] | None
    given: Any

    def on_device(self, src: ArrayInfo, out: object, stream: object) -> Any:
        """Return the table as an int32 array of the source's library and device.

        The upload is ordered on the call's stream. ``out`` is the argument of the call.
        """
        words = self.values
        if self.given is not None or words is None:
            return self.given
        device = src.device
        if device is None:
            return words
        handle = stream_handle(stream, library_for(src, None if out is None else describe(out, "out")), device)
        if src.kind == "torch":
            with working_on("torch", device, handle):
                return sys.modules["torch"].from_numpy(words).to(f"cuda:{device}")
        return with_cupy("cupy.asarray", lambda cupy: _uploaded(cupy, words, device, handle))


def _uploaded(cupy: Any, words: NDArray[np.int32], device: int, stream: int) -> Any:
    with cupy.cuda.Device(device), working_on("cupy", device, stream):
        return cupy.asarray(words)


def int_table(values: Any, columns: int | None, src: ArrayInfo, check: bool, field: str = "starts") -> Table:
    """Return a table of signed 32-bit integers of shape (rows, columns), or (rows,) if ``columns`` is None.

    An array must be on the device of ``src``, the operation's source. ``check`` determines whether a table
    on the device is read back. Raises ArgumentTypeError or ArgumentError.
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
        try:
            table = np.asarray(values)
        except ValueError:  # The rows have different lengths.
            raise ArgumentError(
                field, "rows of different lengths", f"an array of integers with shape {shape}"
            ) from None
        if table.size == 0:
            table = table.reshape(0) if columns is None else table.reshape(0, columns)
            table = table.astype(np.int32)
        # NumPy stores ints of more than 64 bits as objects.
        is_long = table.dtype == object and all(isinstance(value, int) for value in table.flat)
        if table.dtype.kind not in "iu" and not is_long:
            raise ArgumentTypeError(field, str(table.dtype), _WORDS)
        _check_shape(table.shape, columns, shape, field)
        if table.size:
            low, high = int(table.min()), int(table.max())
            if low < -_INT32 or high >= _INT32:
                raise ArgumentError(field, f"{shown(low)} to {shown(high)}", _WORDS)
        return Table(table.astype(np.int32, order="C"), None)
    if on_device.device != src.device or on_device.dtype != np.int32 or not on_device.is_contiguous:
        got = f"{on_device.dtype} on device {on_device.device}"
        raise ArgumentError(field, got, "an int32 array in C order on the device of src, or ints on the host")
    _check_shape(on_device.shape, columns, shape, field)
    return Table(_read(on_device) if check else None, values)


def _check_shape(got: tuple[int, ...], columns: int | None, shape: str, field: str) -> None:
    if len(got) != (1 if columns is None else 2) or (columns is not None and got[1] != columns):
        raise ArgumentError(f"{field}.shape", got, shape)


def _read(info: ArrayInfo) -> NDArray[np.int32]:
    """Read a device table on the current stream of its library."""
    owner: Any = info.owner
    if info.kind == "torch":
        values = owner.cpu().numpy()
    else:
        values = with_cupy("cupy.asnumpy", lambda cupy: cupy.asnumpy(cupy.asarray(owner)))
    return np.asarray(values)
