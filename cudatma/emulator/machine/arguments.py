"""Convert kernel arguments to the bytes of the parameter buffer."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudatma.emulator.machine.memory import GlobalMemory
from cudatma.emulator.machine.program import Program
from cudatma.emulator.ptx.model import Variable
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, counted, reason_of

_CTYPES = (ctypes.Structure, ctypes.Union, ctypes.Array, ctypes._SimpleCData, ctypes._Pointer)


def pack_arguments(program: Program, args: Sequence[Any], memory: GlobalMemory, names: Sequence[str]) -> bytes:
    """Return the parameter buffer of a kernel, and map array arguments into ``memory``.

    - A NumPy array is passed by address, unless the parameter has the size of the array and is not 8 bytes wide.
    - None is a null pointer.
    - A number is converted to the width of the parameter, and to a float if PTX declares a float.
    - NumPy scalars and structures (``numpy.void``), ctypes objects, bytes, and objects with ``__bytes__`` or
      ``descriptor`` (tensor maps) are passed by value.

    ``names`` contains the argument names for messages. Raise ArgumentError if the number of arguments or a size is
    wrong, and ArgumentTypeError if the type of an argument is not supported.
    """
    params = program.function.params
    if len(args) != len(params):
        raise ArgumentError(
            "args",
            counted(len(args), "argument"),
            f"a sequence of {counted(len(params), 'value')} for kernel {program.function.name}",
        )
    buffer = bytearray(program.param_bytes)
    for name, param, value in zip(names, params, args, strict=False):
        raw = _encode(value, param, name, memory)
        offset = program.param_offsets[param.name]
        buffer[offset : offset + len(raw)] = raw
    return bytes(buffer)


def _encode(value: Any, param: Variable, name: str, memory: GlobalMemory) -> bytes:
    size = param.size_bytes
    if isinstance(value, np.ndarray):
        if size != 8:
            if value.nbytes == size:
                return value.tobytes()
            raise ArgumentError(
                name,
                f"an array of {value.nbytes} bytes",
                f"a value of {size} bytes (the parameter is not a pointer)",
            )
        return memory.add(value, name).to_bytes(8, "little")
    if value is None and size == 8:
        return bytes(8)
    register_array(value, name, memory)
    is_float = param.kind in ("f16", "f32", "f64")
    if isinstance(value, float | np.floating) and param.kind[0] in "us":
        raise ArgumentError(name, float(value), f"a {size}-byte integer for a .{param.kind} parameter")
    if isinstance(value, np.bool_ | np.integer) and (value.nbytes != size or is_float):
        value = int(value)
    if isinstance(value, np.floating) and value.nbytes != size:
        value = float(value)
    if isinstance(value, np.generic):
        return _sized(value.tobytes(), size, name)
    if isinstance(value, bool | int) and not is_float:
        if not -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
            raise ArgumentError(name, value, f"a {size}-byte integer")
        return (int(value) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
    if isinstance(value, bool | int | float):
        return _float_bytes(value, size, name)
    if isinstance(value, _CTYPES):
        return _sized(memoryview(value).tobytes(), size, name)
    if isinstance(value, bytes | bytearray | memoryview):
        return _sized(bytes(value), size, name)
    for attribute in ("data", "descriptor", "bytes"):
        content = _attribute(value, attribute)
        if isinstance(content, bytes | bytearray | memoryview | ctypes.Array):
            return _sized(bytes(content), size, name)
    try:
        if hasattr(value, "__bytes__"):
            return _sized(bytes(value), size, name)
    except CudaTmaError:
        raise
    except Exception as error:  # The conversion is the caller's code and may raise any exception.
        got = f"{type(value).__name__}, whose conversion fails ({reason_of(error)})"
        raise ArgumentTypeError(name, got, "an object that converts to bytes") from error
    raise ArgumentTypeError(name, type(value).__name__, "a NumPy array, a number, bytes or a tensor map")


def _float_bytes(value: float, size: int, name: str) -> bytes:
    if size not in (2, 4, 8):
        raise ArgumentError(name, value, f"a number (the parameter is a {size}-byte float)")
    try:
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
    except OverflowError:
        raise ArgumentError(name, value, f"a number that fits in a {size}-byte float") from None


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute of an argument, or None if it is missing or accessing it raises an exception."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def register_array(value: Any, name: str, memory: GlobalMemory) -> None:
    """Map the array from which a tensor map was created."""
    for attribute in ("array", "tensor", "owner"):
        array = _attribute(value, attribute)
        if isinstance(array, np.ndarray):
            memory.add(array, name)


def _sized(raw: bytes, size: int, name: str) -> bytes:
    if len(raw) != size:
        raise ArgumentError(name, f"{len(raw)} bytes", f"{size} bytes")
    return raw
