"""Checks of arguments that several families share."""

from __future__ import annotations

import ctypes
import numbers
import operator
import sys
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo, is_torch, overlaps, place_name
from cudatma.backend import device_remedy
from cudatma.errors import ArgumentError, ArgumentTypeError


@lru_cache(maxsize=64)
def _typed_fields(kind: Any) -> tuple[tuple[str, type], ...]:
    types = {"int": int, "str": str, "bool": bool}
    return tuple((field.name, types[str(field.type)]) for field in fields(kind) if str(field.type) in types)


def check_field_types(value: Any) -> None:
    """Raise ArgumentTypeError for a dataclass field declared as int, str or bool whose value has another type."""
    cls: Any = type(value)
    for name, kind in _typed_fields(cls):
        if type(given := getattr(value, name)) is not kind:
            raise ArgumentTypeError(name, type(given).__name__, kind.__name__)


def checked_flag(value: Any, field: str) -> bool:
    """Convert a Python or NumPy bool to a bool. Raises ArgumentTypeError for other types."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(field, type(value).__name__, "bool")
    return bool(value)


def check_backend(info: ArrayInfo, field: str, chosen: str) -> None:
    """Raise ArgumentError unless an array is in memory that the backend uses. ``field`` is the argument's name."""
    device = info.device
    if (device is None) != (chosen != "cuda"):
        allowed = f"{'a CUDA device' if chosen == 'cuda' else 'the host'} for backend {chosen!r}"
        remedy = device_remedy("move the array with cupy.asarray", device)
        raise ArgumentError(f"{field}.device", place_name(device), allowed, remedy)


def check_place(info: ArrayInfo, field: str, first: ArrayInfo, first_field: str, function: str) -> None:
    """Raise ArgumentError if an array is not on the device of the call's first array, or if it requires a gradient."""
    if info.device != first.device:
        where = f"{place_name(first.device)} (the device of {first_field})"
        raise ArgumentError(f"{field}.device", place_name(info.device), where)
    check_gradient(info.owner, field, function)


def check_out(
    info: ArrayInfo, dtype: Any, allowed: str, shape: tuple[int, ...], read: Mapping[str, ArrayInfo], function: str
) -> None:
    """Raise ArgumentTypeError if ``out`` has the wrong dtype, and ArgumentError if ``out`` is otherwise invalid.

    ``allowed`` describes the dtype. The array must have this shape, be writable and on the device of the first input,
    and share no memory with the inputs.
    """
    if info.dtype != dtype:
        raise ArgumentTypeError("out.dtype", str(info.dtype), allowed)
    if info.shape != shape:
        raise ArgumentError("out.shape", info.shape, f"{shape}")
    first, first_info = next(iter(read.items()))
    check_place(info, "out", first_info, first, function)
    if info.readonly:
        raise ArgumentError("out", "a read-only array", "a writable array")
    check_own_memory(info, read)


def check_own_memory(out: ArrayInfo, read: Mapping[str, ArrayInfo]) -> None:
    """Raise ArgumentError if ``out`` shares memory with one of these arrays, whose names appear in the message."""
    for name, other in read.items():
        if overlaps(out, other):
            raise ArgumentError("out", f"memory that overlaps {name}", "an array with its own memory")


def check_gradient(array: Any, field: str, function: str) -> None:
    """Raise ArgumentError for a tensor that requires a gradient or has a tangent."""
    torch: Any = sys.modules.get("torch")
    if getattr(array, "requires_grad", False) and torch.is_grad_enabled():
        remedy = f"call {function} under torch.no_grad() or detach the tensor, because {function} has no backward pass"
        raise ArgumentError(field, "a tensor that requires grad", "a tensor that does not require grad", remedy)
    if has_tangents() and is_torch(array) and torch.autograd.forward_ad.unpack_dual(array).tangent is not None:
        remedy = f"unpack the dual tensor, because {function} has no derivative"
        raise ArgumentError(field, "a tensor with a tangent", "a tensor without a tangent", remedy)


def has_tangents() -> bool:
    """Return whether torch is currently computing derivatives in forward mode."""
    forward_ad = sys.modules.get("torch.autograd.forward_ad")
    return forward_ad is not None and forward_ad._current_level >= 0


def real_number(value: Any, field: str) -> float:
    """Convert a real number to a float. Raises ArgumentTypeError for other types."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(field, type(value).__name__, "a real number")
    return as_fp32(value, field)


def checked_count(value: Any, field: str, allowed: str) -> int:
    """Convert a nonnegative integer to an int. Raises ArgumentError or ArgumentTypeError for other values."""
    try:
        count = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        count = None
    if count is None:
        raise ArgumentTypeError(field, type(value).__name__, allowed)
    if count < 0:
        raise ArgumentError(field, count, allowed)
    return count


def as_fp32(value: Any, field: str) -> float:
    """Round a number to fp32. Raises ArgumentError if the number exceeds the range of float64."""
    try:
        return ctypes.c_float(float(value)).value
    except OverflowError as error:
        raise ArgumentError(field, "a larger number", "within the range of float64") from error
