"""Convert Python values to ctypes objects that contain the bytes of a kernel's parameters.

The widths and kinds come from the parameters in the kernel's PTX, never from the values. A Python int is therefore
converted to the width of its parameter. An int that does not fit raises an error. Source: PTX ISA, "Kernel Function
Parameters" and ".entry".
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.arrays import describe, is_torch, producer_of
from cudatma.backend import device_remedy
from cudatma.dtypes import BFLOAT16
from cudatma.errors import ArgumentTypeError, CompileError, LaunchError, counted

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
#: Pattern of an entry, which is anchored at the start of a line so that comments do not match.
_ENTRY = re.compile(r"^(?:[ \t]*\.(?:visible|weak))?[ \t]*\.entry[ \t]+([\w$%]+)\s*(?:\(([^)]*)\))?", re.MULTILINE)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z])(\d+)\s+"
    r"(?:\.ptr\s+(?:\.(?:global|shared|const|local|param)\s+)?(?:\.align\s+\d+\s+)?)?"
    r"([\w$%]+)\s*(?:\[\s*(\d+)\s*\])?\s*$"
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kernel.

    Attributes
    ----------
    name : str
        Name in the PTX.
    kind : str
        "int" for integers, booleans and pointers, "float", or "bytes" for a structure or array that is passed by value,
        such as a tensor map or a __half.
    size_bytes : int
        Width of the parameter in bytes.
    """

    name: str
    kind: str
    size_bytes: int

    @property
    def is_pointer_wide(self) -> bool:
        return self.kind == "int" and self.size_bytes == 8


def entries(ptx: str) -> dict[str, tuple[Parameter, ...]]:
    """Return the kernels in a PTX text with their parameters, in the order of the text.

    Raises CompileError if a parameter list cannot be parsed.
    """
    kernels, at = dict[str, tuple[Parameter, ...]](), ptx.find(".entry")
    while at >= 0:  # str.find is faster than a search for the regular expression
        if match := _ENTRY.match(ptx, ptx.rfind("\n", 0, at) + 1):
            kernels[match[1]] = _parameters(match[1], _COMMENT.sub(" ", match[2] or ""))
        at = ptx.find(".entry", at + 1)
    return kernels


def _parameters(entry: str, text: str) -> tuple[Parameter, ...]:
    return tuple(_parameter(entry, part) for part in text.split(",") if part.strip())


def _parameter(entry: str, text: str) -> Parameter:
    match = _PARAMETER.search(text.strip())
    if match is None:
        raise CompileError(f"the PTX of {entry} has a parameter that cannot be parsed: {text.strip()}")
    letter, bits, name, count = match.groups()
    if count is not None:
        return Parameter(name, "bytes", int(count) * int(bits) // 8)
    return Parameter(name, "float" if letter == "f" else "int", int(bits) // 8)


TENSOR_MAP_BYTES = 128
_TensorMapWords = ctypes.c_uint64 * (TENSOR_MAP_BYTES // 8)
_INTEGERS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}
_FLOATS = {4: ctypes.c_float, 8: ctypes.c_double}
_CTYPES = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)
_FLOAT32_MAX = 3.4028234663852886e38


@dataclass(slots=True)
class Arguments:
    """Marshaled arguments of a launch.

    Attributes
    ----------
    values : list
        One ctypes object per parameter. Changing an object in place changes the next launch.
    device : int or None
        Ordinal of the device of all arrays and tensor maps, or None if there are no arrays or tensor maps.
    kind : str
        Library whose current stream is the default: "torch" if an argument is a torch tensor or a tensor map of a torch
        tensor, otherwise "cupy".
    producers : list of int
        Handles of the array producers' streams.
    """

    values: list[Any]
    device: int | None
    kind: str
    producers: list[int]

    def addresses(self) -> ctypes.Array[ctypes.c_void_p]:
        """Return the array of pointers to the values for cuLaunchKernelEx. The values must outlive this array."""
        return (ctypes.c_void_p * len(self.values))(*[ctypes.addressof(value) for value in self.values])


def marshal(parameters: Sequence[Parameter], args: Sequence[object]) -> Arguments:
    """Return the arguments of a launch in the form that the kernel expects.

    Pointers accept device arrays from any library and None (null). Parameters of 128 bytes accept tensor maps (objects
    with ``.data`` of 128 bytes and ``.device``), and structures accept bytes. Other values may be int, bool, float,
    NumPy scalars or ctypes objects. Raises LaunchError if the number, the width, the range or the kind of an argument
    is wrong, or if arrays are on different devices.
    """
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise LaunchError("args", type(args).__name__, "a tuple or list with one value per parameter")
    if len(args) != len(parameters):
        names = ", ".join(f"{p.name}: {p.size_bytes} B" for p in parameters)
        listed = f" ({names})" if names else ""
        allowed = f"a sequence of {counted(len(parameters), 'argument')}{listed}"
        raise LaunchError("args", counted(len(args), "argument"), allowed)
    marshaled = Arguments([], None, "cupy", [])
    for index, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        marshaled.values.append(_value(parameter, value, f"args[{index}]", marshaled))
    return marshaled


def _value(parameter: Parameter, value: Any, field: str, into: Arguments) -> Any:
    if isinstance(value, bool | np.bool_):
        return _integer(parameter, int(value), field)
    if isinstance(value, np.generic):  # checked before float, because np.float64 is a float
        return _numpy_scalar(parameter, value, field)
    if isinstance(value, int):
        return _integer(parameter, value, field) if parameter.kind == "int" else _float(parameter, value, field)
    if isinstance(value, float):
        return _float(parameter, value, field)
    if value is None:
        if not parameter.is_pointer_wide:
            raise _not_a_pointer(parameter, "None", field)
        return ctypes.c_uint64(0)
    if isinstance(value, _CTYPES):
        return _sized(parameter, value, ctypes.sizeof(value), field)
    if isinstance(value, bytes | bytearray):
        return (ctypes.c_uint8 * len(value)).from_buffer_copy(_sized(parameter, value, len(value), field))
    if parameter.size_bytes == TENSOR_MAP_BYTES and parameter.kind == "bytes":
        return _tensor_map(parameter, value, field, into)
    return _array(parameter, value, field, into)


def _expected(parameter: Parameter) -> str:
    """Return "a 4-byte int for n", or "a value of 16 bytes for s" if the parameter is a structure."""
    size, kind = parameter.size_bytes, parameter.kind
    value = f"a value of {size} bytes" if kind == "bytes" else f"{'an' if size == 8 else 'a'} {size}-byte {kind}"
    return f"{value} for {parameter.name}"


def _sized(parameter: Parameter, value: Any, size: int, field: str) -> Any:
    if size != parameter.size_bytes:
        got = f"{type(value).__name__} of {size} bytes"
        raise LaunchError(field, got, f"a value of {parameter.size_bytes} bytes for {parameter.name}")
    return value


def _integer(parameter: Parameter, value: int, field: str) -> Any:
    bits = 8 * parameter.size_bytes
    if parameter.kind != "int":
        remedy = "pass a NumPy or ctypes value of the parameter's type"
        raise LaunchError(field, value, _expected(parameter), remedy)
    if not -(1 << (bits - 1)) <= value < 1 << bits:
        raise LaunchError(field, value, f"-2**{bits - 1} to 2**{bits} - 1 for {parameter.name}")
    return _INTEGERS[parameter.size_bytes](value & ((1 << bits) - 1))


def _float(parameter: Parameter, value: float, field: str) -> Any:
    if parameter.kind != "float" or parameter.size_bytes not in _FLOATS:
        allowed = _expected(parameter)
        raise LaunchError(
            field, value, allowed, "pass a NumPy scalar of the parameter's type, or an int for an integer parameter"
        )
    try:
        number = float(value)
    except OverflowError as error:
        got = f"an int of {int(value).bit_length()} bits"
        raise LaunchError(field, got, f"within the range of a float for {parameter.name}") from error
    if parameter.size_bytes == 4 and _FLOAT32_MAX < abs(number) < float("inf"):
        raise LaunchError(field, value, f"a float of at most {_FLOAT32_MAX:g} for {parameter.name}")
    return _FLOATS[parameter.size_bytes](number)


def _numpy_scalar(parameter: Parameter, value: Any, field: str) -> Any:
    dtype = value.dtype
    _sized(parameter, value, dtype.itemsize, field)
    kind = "float" if dtype.kind == "f" or dtype == BFLOAT16 else "int" if dtype.kind in "iu" else "bytes"
    # A "bytes" parameter accepts any scalar of its width, because the compiler treats __half and __nv_bfloat16 as
    # structures.
    if parameter.kind not in (kind, "bytes"):
        raise LaunchError(field, f"{value!r} ({dtype})", _expected(parameter), "convert the scalar")
    ctype = (_INTEGERS if parameter.kind == "int" else _FLOATS if parameter.kind == "float" else {}).get(dtype.itemsize)
    return (ctype or ctypes.c_uint8 * dtype.itemsize).from_buffer_copy(value.tobytes())


def _tensor_map(parameter: Parameter, value: Any, field: str, into: Arguments) -> Any:
    try:
        data = memoryview(value.data)
        device = value.device
    except (AttributeError, TypeError, BufferError, RuntimeError):
        data = None
    if data is None or isinstance(value, np.ndarray) or data.nbytes != TENSOR_MAP_BYTES or not data.contiguous:
        allowed = f"a TensorMap or {TENSOR_MAP_BYTES} bytes for {parameter.name}"
        raise LaunchError(
            field,
            type(value).__name__,
            allowed,
            "pass the TensorMap itself, because the parameter is __grid_constant__",
        )
    if is_torch(getattr(value, "owner", None)):
        into.kind = "torch"
    _note_producer(into, producer_of(getattr(value, "owner", None)))
    _same_device(into, device, field)
    return _TensorMapWords.from_buffer_copy(data)


def _not_a_pointer(parameter: Parameter, got: str, field: str) -> LaunchError:
    allowed = _expected(parameter)
    return LaunchError(field, got, allowed, "check the order of the arguments")


def _array(parameter: Parameter, value: Any, field: str, into: Arguments) -> Any:
    try:
        info = describe(value, field)
    except ArgumentTypeError as error:
        allowed = "a device array, TensorMap, int, float, bool, NumPy scalar, ctypes object, bytes or None"
        remedy = "pass a TensorMap to a parameter of type const __grid_constant__ TensorMap"
        raise LaunchError(field, error.got, allowed, remedy) from error
    if not parameter.is_pointer_wide:
        raise _not_a_pointer(parameter, f"an array of {info.dtype}", field)
    if info.device is None:
        raise LaunchError(
            field, "an array in host memory", "an array on the GPU", device_remedy("copy it with cupy.asarray")
        )
    if info.kind == "torch":
        into.kind = "torch"
    _note_producer(into, info.producer)
    _same_device(into, info.device, field)
    return ctypes.c_uint64(info.pointer)


def _note_producer(into: Arguments, producer: int | None) -> None:
    if producer is not None:
        into.producers.append(producer)


def _same_device(into: Arguments, device: int | None, field: str) -> None:
    if device is None:
        return
    if into.device is not None and into.device != device:
        raise LaunchError(
            field, f"an array on device {device}", f"on device {into.device} (the device of the previous arguments)"
        )
    into.device = device
