"""Checks that several data movement operations share."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo, describe, overlaps, place_name
from cudatma.errors import ArgumentError, ArgumentTypeError, counted, shown

_INT64 = 1 << 63


def described(array: object, field: str) -> ArrayInfo:
    """Return the ArrayInfo of an array. Raises ArgumentTypeError if its elements are Python objects."""
    info = describe(array, field)
    if info.dtype.hasobject:
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), "a dtype without Python objects")
    return info


def check_out(
    out: object, src: ArrayInfo, shape: tuple[int, ...], read: ArrayInfo | None = None, *, dense: bool = False
) -> ArrayInfo | None:
    """Return the caller's ``out``, or None. Raises ArgumentError unless it has this shape and the source's dtype.

    ``read`` is the part of the source that the kernel reads, by default the whole source. If ``dense``, out must be in
    C order.
    """
    if out is None:
        return None
    info = described(out, "out")
    check_device(info, src, "out")
    if info.shape != shape or info.dtype != src.dtype:
        raise ArgumentError(
            "out", f"shape {info.shape}, dtype {info.dtype}", f"an array with shape {shape} and dtype {src.dtype}"
        )
    check_written(info, src if read is None else read, "out")
    if dense and not info.is_contiguous:
        raise ArgumentError("out", f"strides {info.strides_bytes}", "an array in C order without gaps")
    return info


def check_device(out: ArrayInfo, src: ArrayInfo, field: str) -> None:
    """Raise ArgumentError if the result is not on the source's device."""
    if out.device != src.device:
        raise ArgumentError(field, place_name(out.device), f"{place_name(src.device)} (the device of src)")


def check_written(out: ArrayInfo, source: ArrayInfo, field: str) -> None:
    """Raise ArgumentError if ``out`` is read-only, has elements that share memory, or shares bytes with the source."""
    if out.readonly:
        raise ArgumentError(field, "a read-only array", "a writable array")
    if not out.is_disjoint:
        raise ArgumentError(f"{field}.strides", out.strides_bytes, "free of overlaps")
    if overlaps(source, out):
        raise ArgumentError(field, "memory that overlaps the source", "an array with its own memory")


def check_size(shape: tuple[int, ...], dtype: np.dtype[Any], field: str) -> None:
    """Raise an ArgumentError for the option ``field`` unless an array of this shape is addressable."""
    # Libraries also reject an empty array if its other axes are too large.
    if prod(max(extent, 1) for extent in shape) * dtype.itemsize >= _INT64:
        got = f"a result of shape ({', '.join(map(shown, shape))})"
        raise ArgumentError(field, got, "small enough that the result has fewer than 2**63 bytes")


def whole_numbers(field: str, values: object, count: int) -> tuple[int, ...]:
    """Return a tuple of ``count`` ints. Raises ArgumentTypeError or ArgumentError."""
    try:
        numbers = tuple(operator.index(value) for value in values)  # type: ignore[attr-defined]
    except TypeError as error:
        raise ArgumentTypeError(field, repr(values), f"a sequence of {counted(count, 'int')}, one per axis") from error
    if len(numbers) != count:
        raise ArgumentError(field, numbers, f"a sequence of {counted(count, 'int')}, one per axis")
    return numbers


def as_key(*options: Any) -> Any:
    """Convert options to a tuple for a call's key, with sequences of ints as tuples.

    If an option is not an int, str, None or a sequence of ints, the result is a list, which is not hashable, so that
    check() validates every call. Such options may compare equal although they have different meanings.
    """
    key = []
    for option in options:
        if isinstance(option, Sequence) and not isinstance(option, str):
            try:
                option = tuple([operator.index(value) for value in option])
            except TypeError:
                return list(options)
        elif option.__class__ not in (int, str, type(None)):
            return list(options)
        key.append(option)
    return tuple(key)
