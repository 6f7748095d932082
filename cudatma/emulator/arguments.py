"""Kernel arguments to the bytes of the parameter buffer."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudatma.emulator.memory import GlobalMemory
from cudatma.emulator.program import Program
from cudatma.errors import ArgumentError, ArgumentTypeError


def pack_arguments(program: Program, args: Sequence[Any], memory: GlobalMemory) -> bytes:
    """The parameter buffer of a kernel; arrays are mapped into ``memory``.

    A NumPy array is passed as a pointer, or by value where the parameter has its size and is wider than 8 bytes; ints,
    floats, bools and NumPy scalars by the parameter's size; bytes and objects with ``__bytes__`` or ``descriptor``
    (tensor maps) by value. Raises ArgumentError for a wrong count or size and ArgumentTypeError for a type that cannot
    be passed.
    """
    params = program.function.params
    if len(args) != len(params):
        raise ArgumentError("args", f"{len(args)} arguments", f"{len(params)} for kernel {program.function.name}")
    buffer = bytearray(program.param_bytes)
    for position, (param, value) in enumerate(zip(params, args, strict=True)):
        raw = _encode(value, param.size_bytes, f"args[{position}]", memory)
        offset = program.param_offsets[param.name]
        buffer[offset : offset + len(raw)] = raw
    return bytes(buffer)


def _encode(value: Any, size: int, name: str, memory: GlobalMemory) -> bytes:
    if isinstance(value, np.ndarray):
        if size != 8:
            if value.nbytes == size:
                return value.tobytes()
            raise ArgumentError(
                name, f"an array of {value.nbytes} bytes", f"a value of {size} bytes, or a pointer parameter"
            )
        return memory.add(value, name).to_bytes(8, "little")
    register_array(value, name, memory)
    if isinstance(value, np.generic):
        return _sized(value.tobytes(), size, name)
    if isinstance(value, bool | int):
        if not -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
            raise ArgumentError(name, value, f"an integer of {size} bytes")
        return (int(value) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
    if isinstance(value, float):
        if size not in (2, 4, 8):
            raise ArgumentError(name, value, f"a value of {size} bytes")
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
    if isinstance(value, bytes | bytearray | memoryview):
        return _sized(bytes(value), size, name)
    for attribute in ("data", "descriptor", "bytes"):
        found = getattr(value, attribute, None)
        if isinstance(found, bytes | bytearray | memoryview | ctypes.Array):
            return _sized(bytes(found), size, name)
    if hasattr(value, "__bytes__"):
        return _sized(bytes(value), size, name)
    raise ArgumentTypeError(name, type(value).__name__, "a NumPy array, a number, bytes or a tensor map")


def register_array(value: Any, name: str, memory: GlobalMemory) -> None:
    """Map the array that a tensor map was made of."""
    for attribute in ("array", "tensor", "owner"):
        found = getattr(value, attribute, None)
        if isinstance(found, np.ndarray):
            memory.add(found, name)


def _sized(raw: bytes, size: int, name: str) -> bytes:
    if len(raw) != size:
        raise ArgumentError(name, f"{len(raw)} bytes", f"{size} bytes")
    return raw
