"""Read safetensors files. The header is checked once, and each tensor is read on request.

The format (huggingface.co/docs/safetensors) has three parts: the length of the header (8 bytes, little-endian), the
header (JSON with dtype, shape and data_offsets [begin, end) for each tensor), and the data. This module exists because
the NumPy functions of the safetensors library do not support bf16 and do not report which part of a file is damaged.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cudatma.dtypes import BFLOAT16
from cudatma.errors import ArgumentTypeError, WeightFileError, alternatives, reason_of, shown

#: NumPy type of each type name in the format. The data is little-endian.
_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": BFLOAT16,
    "BOOL": np.dtype("?"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    **{f"F{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
}
FLOAT_DTYPES = ("F16", "BF16", "F32", "F64")
#: Maximum header length that the format allows, in bytes.
_MAX_HEADER_BYTES = 100_000_000
_COPY_AGAIN = "copy or download the file again"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Header entry of a tensor: its dtype as spelled in the file, its shape, and its byte range [begin, end)."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A safetensors file whose header has been read.

    Attributes
    ----------
    path : pathlib.Path
        The file.
    tensors : dict of str to TensorEntry
        The tensors, by name.
    metadata : dict of str to str
        The header's metadata.
    """

    path: Path
    tensors: dict[str, TensorEntry] = field(repr=False)
    metadata: dict[str, str] = field(repr=False)

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor as a NumPy array, or raise WeightFileError. bf16 arrays have the dtype of ml_dtypes."""
        entry = self.tensors.get(name)
        if entry is None:
            raise WeightFileError(name, "no such tensor", f"a tensor in {self.path}", similar_names(name, self.tensors))
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            allowed = f"a tensor with dtype {alternatives(sorted(_DTYPES))}"
            raise WeightFileError(name, f"dtype {entry.dtype} in {self.path}", allowed)
        self.check_bytes(name)
        count = math.prod(entry.shape)
        try:
            data = np.fromfile(self.path, dtype=dtype, count=count, offset=entry.begin)
        except OSError as error:
            got = f"a tensor in {self.path} that cannot be read ({reason_of(error)})"
            raise WeightFileError(name, got, "a tensor in a readable file", _COPY_AGAIN) from error
        if data.size != count:
            got = f"a truncated tensor in {self.path}"
            raise WeightFileError(name, got, f"a tensor with {count} elements", _COPY_AGAIN)
        try:
            return data.reshape(entry.shape)
        except ValueError as error:
            got = f"{shown(entry.shape)} in {self.path}"
            raise WeightFileError(f"{name}.shape", got, "a shape that NumPy supports", _COPY_AGAIN) from error

    def check_bytes(self, name: str) -> None:
        """Raise WeightFileError unless a tensor's size in bytes matches its shape.

        Tensors with unsupported dtypes are not checked.
        """
        entry = self.tensors[name]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            return
        required, stored = math.prod(entry.shape) * dtype.itemsize, entry.end - entry.begin
        if required != stored:
            allowed = f"{required} bytes for {entry.dtype} {entry.shape}"
            raise WeightFileError(name, f"{stored} bytes in {self.path}", allowed, _COPY_AGAIN)

    def raw(self, name: str, chunk_bytes: int = 1 << 24) -> Iterator[bytes]:
        """Yield a tensor's bytes in chunks, or raise WeightFileError."""
        entry = self.tensors[name]
        remaining = entry.end - entry.begin
        try:
            with self.path.open("rb") as file:
                file.seek(entry.begin)
                while remaining and (chunk := file.read(min(remaining, chunk_bytes))):
                    remaining -= len(chunk)
                    yield chunk
        except OSError as error:
            got = f"a tensor in {self.path} that cannot be read ({reason_of(error)})"
            raise WeightFileError(name, got, "a tensor in a readable file", _COPY_AGAIN) from error
        if remaining:
            got = f"a tensor in {self.path} that lacks {remaining} bytes"
            raise WeightFileError(name, got, "a complete tensor", _COPY_AGAIN)


#: Maps the suffixes of other kinds of weight files to a description and a remedy.
_OTHER_FILES = {
    (".bin", ".pt", ".pth"): (
        "a torch pickle file",
        "convert the file with safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')",
    ),
    (".gguf",): (
        "a GGUF file",
        "convert the original float checkpoint with `cudatma convert --quantize`",
    ),
    (".npz",): ("a NumPy or MLX file", "convert the float checkpoint with `cudatma convert --quantize`"),
}


def check_suffix(path: Path) -> None:
    """Raise WeightFileError if the suffix of a file belongs to another kind of weight file."""
    for suffixes, (what, remedy) in _OTHER_FILES.items():
        if path.suffix.lower() in suffixes and path.is_file():
            raise WeightFileError(str(path), what, "a .safetensors file", remedy)


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile:
    """Read and check the header of a safetensors file. Raises WeightFileError if the header is invalid."""
    path = as_path(path)
    check_suffix(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            is_whole = size >= 8 and 2 <= length <= min(size - 8, _MAX_HEADER_BYTES)
            text = file.read(length) if is_whole else b""
    except OSError as error:
        got = f"a file that cannot be read ({reason_of(error)})"
        raise WeightFileError(str(path), got, "a readable safetensors file", "check the path") from error
    if not is_whole:
        got = f"a file of {size} bytes" + (f" with a header of {length} bytes" if size >= 8 else "")
        raise WeightFileError(str(path), got, "a safetensors file with a complete header", _COPY_AGAIN)
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        got = f"a header that cannot be parsed ({reason_of(error)})"
        raise WeightFileError(str(path), got, "a safetensors file with a JSON header", _COPY_AGAIN) from error
    if not isinstance(header, dict):
        got = f"a header of type {type(header).__name__}"
        raise WeightFileError(str(path), got, "a safetensors file whose header is a JSON object", _COPY_AGAIN)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise WeightFileError(f"{path}: __metadata__", repr(metadata)[:80], "an object with string values", _COPY_AGAIN)
    data_at = 8 + length
    tensors = {name: _entry(path, name, value, data_at, size) for name, value in header.items()}
    _check_order(path, tensors, data_at, size)
    return SafetensorsFile(path, tensors, metadata)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the format's name for a NumPy dtype."""
    return next(name for name, known in _DTYPES.items() if known == dtype)


def as_path(path: object) -> Path:
    """Return a path from a str or os.PathLike.

    Raises ArgumentTypeError for another type, and WeightFileError if no file can have this path (for example, if the
    path is too long, contains a NUL, or leads through a loop of symbolic links).
    """
    try:
        checked = Path(path)  # type: ignore[arg-type]
    except TypeError as error:
        raise ArgumentTypeError("path", type(path).__name__, "a str or an os.PathLike") from error
    try:
        checked.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # A NUL or an unpaired surrogate raises ValueError.
        got = f"{str(checked)!r} ({reason_of(error)})"
        raise WeightFileError("path", got, "the path of a file or folder") from error
    return checked


#: Suffix of temporary files.
PARTIAL = ".cudatma-partial"


def temporary_name() -> str:
    """Return a short, random name for a temporary file."""
    return f".{secrets.token_hex(8)}{PARTIAL}"


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces the file at ``path`` when the block ends without an error.

    Readers therefore see either the complete old file or the complete new file. If ``path`` is a symbolic link, its
    target is replaced. Raises WeightFileError instead of OSError, and removes the temporary file after an error.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise WeightFileError(str(path), "a folder", "the path of a file")
    aside = target.with_name(temporary_name())
    try:
        yield aside
        os.replace(aside, target)
    except OSError as error:
        remedy = "check the folder and the free space"
        got = f"a file that cannot be written ({reason_of(error)})"
        raise WeightFileError(str(path), got, "a writable file", remedy) from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def _entry(path: Path, name: str, value: Any, data_at: int, size: int) -> TensorEntry:
    place = f"{path}: {name}"
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        raise WeightFileError(place, repr(value)[:80], "an object with dtype, shape and data_offsets", _COPY_AGAIN)
    shape, offsets = _extents(value.get("shape")), _extents(value.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WeightFileError(
            place,
            repr(value)[:80],
            "an object with nonnegative sizes in shape and a range in data_offsets",
            _COPY_AGAIN,
        )
    begin, end = data_at + offsets[0], data_at + offsets[1]
    if end > size:
        raise WeightFileError(
            place, f"data up to byte {end}", f"inside the file, which ends at byte {size}", _COPY_AGAIN
        )
    return TensorEntry(value["dtype"], shape, begin, end)


def _check_order(path: Path, tensors: dict[str, TensorEntry], data_at: int, size: int) -> None:
    """Raise WeightFileError unless the data of all tensors is contiguous and ends at the end of the file."""
    end = data_at
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            got = f"data from byte {entry.begin}"
            allowed = f"data from byte {end} (the end of the previous tensor)"
            raise WeightFileError(f"{path}: {name}", got, allowed, _COPY_AGAIN)
        end = entry.end
    if end != size:
        raise WeightFileError(str(path), f"{size} bytes", f"{end} bytes (the size in its header)", _COPY_AGAIN)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{next(name for name in unique if counts[name] > 1)!r} occurs twice")
    return unique


def _extents(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or any(type(extent) is not int or extent < 0 for extent in value):
        return None
    return tuple(value)


def similar_names(name: str, names: Iterable[str]) -> str:
    """Return a remedy that lists names with the same last part as a missing name."""
    ending = name.rpartition(".")[2]
    similar = [other for other in names if other.rpartition(".")[2] == ending]
    return (
        f"use a name such as {', '.join(similar[:4])}" if similar else f"check the name; no name ends with {ending!r}"
    )
