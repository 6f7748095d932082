"""Validate the arguments of marlin_gemm, and convert x and out to rows with a pitch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudatma.arrays import ArrayInfo, describe, place_name
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.checks import check_gradient, check_own_memory
from cudatma.quantization import PackedWeight

_ELEMENT_BYTES = 2
#: Maximum number of rows, because the device counts rows in 32 bits.
MAX_ROWS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Rows:
    """2D view (rows, columns) of an array (..., columns), with its address, number of rows and row pitch."""

    info: ArrayInfo
    rows: int
    pitch_bytes: int

    @property
    def is_vectorised(self) -> bool:
        """Whether the pitch is a multiple of 16 bytes, which TMA and 16-byte accesses require."""
        return self.pitch_bytes % TMA_ALIGNMENT_BYTES == 0

    @property
    def is_aligned(self) -> bool:
        """Whether every row starts at a multiple of 16 bytes."""
        return self.is_vectorised and self.info.pointer % TMA_ALIGNMENT_BYTES == 0


def check_weight(w: object) -> PackedWeight:
    """Return ``w``, or raise ArgumentTypeError if ``w`` is not a PackedWeight."""
    if not isinstance(w, PackedWeight):
        raise ArgumentTypeError("w", type(w).__name__, "PackedWeight", "create a weight with quantize() or an importer")
    return w


def _rows(info: ArrayInfo, columns: int, field: str) -> Rows:
    """Merge the leading dimensions of an array into rows. Raises ArgumentError if the rows have no common pitch."""
    if not info.shape or info.shape[-1] != columns:
        raise ArgumentError(
            f"{field}.shape", info.shape, f"(..., {columns})", "pass an array whose last dimension matches the weight"
        )
    if columns > 1 and info.size_elems and info.strides_bytes[-1] != _ELEMENT_BYTES:
        raise ArgumentError(
            f"{field}.strides",
            info.strides_bytes,
            f"{_ELEMENT_BYTES} bytes in the last dimension",
            "pass a contiguous copy",
        )
    rows, pitch = 1, 0
    # From the innermost leading dimension outwards, each dimension must continue where the inner dimension ends.
    for extent, stride in zip(reversed(info.shape[:-1]), reversed(info.strides_bytes[:-1]), strict=True):
        if extent == 1:
            continue
        if rows > 1 and stride != rows * pitch and info.size_elems:
            raise ArgumentError(
                f"{field}.strides",
                info.strides_bytes,
                "strides that allow the leading dimensions to be merged into rows of one pitch",
                "reshape or copy the array",
            )
        pitch = stride if rows == 1 else pitch
        rows *= extent
    if rows > MAX_ROWS:
        raise ArgumentError(f"{field}.shape", info.shape, f"a shape with at most {MAX_ROWS} rows", "split the batch")
    pitch = columns * _ELEMENT_BYTES if rows <= 1 else pitch
    if pitch < 0 and info.size_elems:
        raise ArgumentError(f"{field}.strides", info.strides_bytes, "nonnegative", "pass a contiguous copy")
    if pitch % _ELEMENT_BYTES and info.size_elems:
        raise ArgumentError(
            f"{field}.strides",
            info.strides_bytes,
            "multiples of the element size",
            "pass a contiguous copy",
        )
    return Rows(info, rows, pitch)


def _check_common(info: ArrayInfo, w: PackedWeight, field: str) -> None:
    if info.dtype.name != w.dtype or not info.dtype.isnative:
        remedy = f"convert {field} to {w.dtype} or quantize the weight with another dtype (float16 or bfloat16)"
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), f"{w.dtype} (the weight's dtype)", remedy)
    if info.device != w.device:
        got, required = place_name(info.device), f"{place_name(w.device)} (the device of w)"
        remedy = "move the weight with w.to_device()" if w.device is None else f"move {field} to the weight's device"
        raise ArgumentError(f"{field}.device", got, required, remedy)
    check_gradient(info.owner, field, "marlin_gemm")


def _check_aligned(rows: Rows, field: str, alignment: int) -> None:
    if rows.info.size_elems and (rows.info.pointer % alignment or not rows.info.pointer):
        raise ArgumentError(
            f"{field}.pointer",
            hex(rows.info.pointer),
            f"a nonzero multiple of {alignment} bytes",
            "begin the view at an aligned element or pass a copy",
        )


def check_input(x: object, w: PackedWeight) -> Rows:
    """Return x as rows of K.

    Raises ArgumentError or ArgumentTypeError for an invalid shape, dtype, device, layout or alignment.
    """
    info = describe(x, "x")
    _check_common(info, w, "x")
    rows = _rows(info, w.shape[0], "x")
    _check_aligned(rows, "x", _ELEMENT_BYTES)
    return rows


def check_output(out: object, x: Rows, w: PackedWeight) -> Rows:
    """Return out as rows of N.

    out must have the leading shape of x. The rows of out must not overlap each other or x.
    """
    info = describe(out, "out")
    _check_common(info, w, "out")
    shape = (*x.info.shape[:-1], w.shape[1])
    if info.shape != shape:
        raise ArgumentError("out.shape", info.shape, str(shape))
    if info.readonly:
        raise ArgumentError("out", "a read-only array", "a writable array")
    rows = _rows(info, w.shape[1], "out")
    if rows.rows > 1 and rows.pitch_bytes < w.shape[1] * _ELEMENT_BYTES:
        raise ArgumentError("out.strides", info.strides_bytes, "free of overlaps between rows")
    if info.device is not None:
        _check_aligned(rows, "out", TMA_ALIGNMENT_BYTES)
    check_own_memory(info, {"x": x.info})
    return rows


def check_bias(bias: object, w: PackedWeight, out: ArrayInfo | None) -> ArrayInfo:
    """Return the bias as a described array. Raises ArgumentError or ArgumentTypeError.

    The bias must be dense, have shape (N,) and the weight's dtype, be on the weight's device, and not overlap ``out``.
    """
    info = describe(bias, "bias")
    _check_common(info, w, "bias")
    if info.shape != (w.shape[1],):
        raise ArgumentError("bias.shape", info.shape, f"({w.shape[1]},)")
    if not info.is_contiguous or info.pointer % np.dtype(np.uint16).itemsize:
        raise ArgumentError("bias.strides", info.strides_bytes, "contiguous", "pass a contiguous copy")
    if out is not None:
        check_own_memory(out, {"bias": info})
    return info
