"""Read descriptions of launches from the command line or from a TOML or JSON file.

On the command line, an argument is one of

    x:float16[64,128]=random              pointer to an array of zeros, ones, arange, random, a number or a .npy file
    n:int32=64                            number
    map(x, box=64x64, swizzle=128B)       tensor map over the array x, with the box in NumPy order
    x                                     pointer to an array that another argument declares
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cudatma.build.files import read_source
from cudatma.descriptor import TensorMap
from cudatma.errors import ArgumentError, reason_of

_ARRAY = re.compile(r"(?P<name>\w+):(?P<dtype>\w+)\[(?P<shape>[\d,\s]*)\](?:=(?P<fill>.+))?")
_NUMBER = re.compile(r"(?:(?P<name>\w+):)?(?P<dtype>\w+)=(?P<value>.+)")
_MAP = re.compile(r"map\(\s*(?P<array>\w+)\s*(?P<options>(?:,\s*\w+\s*=\s*[\w.x]+\s*)*)\)")
_GRAMMAR = "name:dtype[shape]=fill, name:dtype=number, map(name, box=AxB, swizzle=...), or the name of an array"
_FIELDS = (
    *("kernel", "include_dirs", "defines", "options", "entry", "target"),
    *("grid", "block", "cluster", "shared_bytes", "programmatic", "arrays", "args"),
)
_ARRAY_FIELDS = ("dtype", "shape", "fill", "seed", "save", "expect", "tolerance")
_MAP_OPTIONS = ("box", "swizzle", "interleave", "l2_promotion", "oob_fill", "element_strides", "dtype")
_DTYPES = (
    "float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "int32", "uint32", "int8", "uint8",
    "int16", "uint16", "int64", "uint64", "bool",
)  # fmt: skip
#: Maximum size of an array in bytes.
MAX_ARRAY_BYTES = 1 << 30


@dataclass(slots=True)
class LaunchFile:
    """Description of a launch: the specified fields of _FIELDS, the arrays and the arguments."""

    launch: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    args: list[dict[str, Any]] = field(default_factory=list)
    folder: Path = Path()

    def add_argument(self, text: str) -> None:
        """Parse an ``--arg`` option and add the argument."""
        self.args.append(self._parse(text, "--arg"))

    def add_array(self, text: str) -> None:
        """Parse an ``--array`` option and add the array that the kernel accesses only through tensor maps."""
        if "array" not in self._parse(text, "--array"):
            raise ArgumentError("--array", text, "in the form NAME:DTYPE[SHAPE]=FILL")

    def _parse(self, text: str, option: str) -> dict[str, Any]:
        text = text.strip()
        if match := _MAP.fullmatch(text):
            options = dict(part.split("=", 1) for part in re.sub(r"\s", "", match["options"]).split(",") if part)
            _check_fields(options, _MAP_OPTIONS, option)
            return {"map": match["array"], **options}
        if match := _ARRAY.fullmatch(text):
            shape = [int(extent) for extent in match["shape"].split(",") if extent.strip()]
            self.arrays[match["name"]] = {"dtype": match["dtype"], "shape": shape, "fill": match["fill"] or "zeros"}
            return {"array": match["name"]}
        if match := _NUMBER.fullmatch(text):
            return {"value": match["value"], "type": match["dtype"]}
        if text in self.arrays:
            return {"array": text}
        raise ArgumentError(option, text, _GRAMMAR)

    def check_array(self, name: str, option: str) -> dict[str, Any]:
        """Return the description of a named array, or raise ArgumentError."""
        if name not in self.arrays:
            raise ArgumentError(option, name, ", ".join(self.arrays) or "omitted (the launch has no arrays)")
        return self.arrays[name]


def read_launch(path: Path) -> LaunchFile:
    """Read a launch file, .toml or .json. Raise ArgumentError if it cannot be read or has an unknown field."""
    try:
        text = read_source(path, "launch file")
        content = json.loads(text) if path.suffix == ".json" else _toml(text, path)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError("launch file", f"{str(path)!a} ({reason_of(error)})", "a TOML or JSON file") from error
    _check_fields(content, _FIELDS, "launch file")
    arrays, args = content.pop("arrays", {}), content.pop("args", [])
    _check_fields(arrays, None, "arrays")
    for name, described in arrays.items():
        _check_fields(described, _ARRAY_FIELDS, f"arrays.{name}")
        for field_name in ("save", "expect"):
            if not isinstance(file := described.get(field_name, ""), str):
                raise ArgumentError(f"arrays.{name}.{field_name}", file, "the path of a .npy file")
        if type(seed := described.get("seed", 0)) is not int or seed < 0:
            raise ArgumentError(f"arrays.{name}.seed", seed, "a nonnegative integer")
    if not isinstance(args, list):
        raise ArgumentError("args", type(args).__name__, "a list of tables with array, map or value")
    launch = LaunchFile(content, arrays, [], path.parent)
    for number, described in enumerate(args):
        if isinstance(described, str):
            launch.add_argument(described)
            continue
        _check_fields(described, ("array", "map", "value", "type", *_MAP_OPTIONS), f"args[{number}]")
        launch.args.append(described)
    return launch


def _toml(text: str, path: Path) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(text)
    raise ArgumentError(
        "launch file", path.name, "a .json file", "convert it to JSON, because Python 3.10 cannot read TOML"
    )


def _check_fields(table: Any, allowed: Sequence[str] | None, place: str) -> None:
    if not isinstance(table, Mapping):
        raise ArgumentError(place, type(table).__name__, "a table")
    for name in table:
        if allowed is not None and name not in allowed:
            raise ArgumentError(f"{place}: field name", name, ", ".join(allowed))


# ---- values


@dataclass(slots=True)
class Operands:
    """Arrays of a launch by name, and the value of each argument."""

    arrays: dict[str, npt.NDArray[Any]]
    values: list[Any]


def make_operands(launch: LaunchFile) -> Operands:
    """Create and fill the arrays, and return them with the arguments. Raise ArgumentError or DescriptorError."""
    arrays = {name: _array(name, described, launch.folder) for name, described in launch.arrays.items()}
    values = [_value(described, arrays, f"args[{number}]") for number, described in enumerate(launch.args)]
    return Operands(arrays, values)


def _dtype(name: Any, field: str) -> np.dtype[Any]:
    """Return the dtype with this name. A name includes the size, because float has different sizes in C and NumPy."""
    if name not in _DTYPES:
        raise ArgumentError(field, name, ", ".join(_DTYPES))
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name, name))
    return dtype


def _array(name: str, described: Mapping[str, Any], folder: Path) -> npt.NDArray[Any]:
    place = f"arrays.{name}"
    fill = described.get("fill", "zeros")
    if isinstance(fill, str) and fill.endswith(".npy") and "shape" not in described:
        return load_array(folder / fill, f"{place}.fill")
    dtype, shape = _dtype(described.get("dtype", "float32"), f"{place}.dtype"), _shape(described, place)
    if int(np.prod(shape, dtype=object)) * dtype.itemsize > MAX_ARRAY_BYTES:
        raise ArgumentError(f"{place}.shape", shape, f"the shape of an array of at most {MAX_ARRAY_BYTES} bytes")
    if fill == "random":
        return _random(shape, dtype, described.get("seed", 0))
    if fill == "arange":
        return np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    if isinstance(fill, str) and fill.endswith(".npy"):
        loaded = load_array(folder / fill, f"{place}.fill")
        if loaded.shape != shape or loaded.dtype.itemsize != dtype.itemsize:
            raise ArgumentError(
                f"{place}.fill", f"{loaded.dtype} {loaded.shape}", f"an array with dtype {dtype} and shape {shape}"
            )
        return np.ascontiguousarray(loaded).view(dtype)
    try:
        number = {"zeros": 0.0, "ones": 1.0}.get(fill) if isinstance(fill, str) else fill
        return np.full(shape, float(fill) if number is None else number).astype(dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{place}.fill", fill, "zeros, ones, arange, random, a number or a .npy file") from error


def _shape(described: Mapping[str, Any], place: str) -> tuple[int, ...]:
    shape = described.get("shape")
    extents = [shape] if isinstance(shape, int) else shape
    if not isinstance(extents, list) or not all(type(extent) is int and extent > 0 for extent in extents):
        raise ArgumentError(f"{place}.shape", shape, "a list of positive integers")
    return tuple(extents)


def _random(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> npt.NDArray[Any]:
    """Return normally distributed numbers for float types, and small integers for integer types."""
    random = np.random.default_rng(seed)
    if dtype.kind in "iub":
        return random.integers(0 if dtype.kind != "i" else -100, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
    return random.standard_normal(shape, np.float32).astype(dtype)


def load_array(path: Path, field: str) -> npt.NDArray[Any]:
    """Return the array of a .npy file, or raise ArgumentError."""
    if path.exists() and not path.is_file():
        raise ArgumentError(field, ascii(str(path)), "a regular .npy file")
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        got = f"{str(path)!a}, which cannot be read ({reason_of(error)})"
        raise ArgumentError(field, got, "a .npy file", "save the array with numpy.save") from error
    return np.ascontiguousarray(array)


def _value(described: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], place: str) -> Any:
    """Return an argument: a pointer, a tensor map or a number."""
    if "array" in described:
        return _named(described["array"], arrays, place)
    if "map" in described:
        options = {name: described[name] for name in _MAP_OPTIONS if name in described}
        if "box" not in options:
            raise ArgumentError(f"{place}.box", "no value", "the extents of the box in NumPy order, such as 64x64")
        box = _extents(options.pop("box"), f"{place}.box")
        if "element_strides" in options:
            options["element_strides"] = _extents(options["element_strides"], f"{place}.element_strides")
        return TensorMap.from_array(_named(described["map"], arrays, place), box, encoder="codec", **options)
    dtype = _dtype(described.get("type", "int32"), f"{place}.type")
    value = described.get("value")
    try:
        return dtype.type(int(str(value), 0) if dtype.kind in "iu" else float(str(value)))
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{place}.value", value, f"a number in the range of {dtype}") from error


def _named(name: str, arrays: Mapping[str, npt.NDArray[Any]], place: str) -> npt.NDArray[Any]:
    if not isinstance(name, str) or name not in arrays:
        raise ArgumentError(place, name, ", ".join(arrays) or "omitted (the launch has no arrays)")
    return arrays[name]


def _extents(value: Any, field: str) -> tuple[int, ...]:
    parts = value.split("x") if isinstance(value, str) else value
    try:
        return tuple(int(part) for part in (parts if isinstance(parts, list) else [parts]))
    except (TypeError, ValueError) as error:
        raise ArgumentError(field, value, "a list of extents in NumPy order, such as 64x64 or [64, 64]") from error
