"""Plan the files of a conversion, and write each file with at most one tensor in memory.

The header precedes the data, but its content is known only after the data has been written. Space for the header is
therefore reserved and padded with blanks, which the format allows. Tensors are contiguous, but readers expect each
tensor to begin at a multiple of its element size. Tensors that would misalign the next tensor are therefore written
last, in order of decreasing element size.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import WeightFileError, reason_of
from cudatma.quantization.conversion.inventory import natural
from cudatma.quantization.conversion.source import Source
from cudatma.quantization.importing import file_group_size, packed_group_size
from cudatma.quantization.layout_v1 import BLOCK, BLOCK_BYTES, blocks, group_count, row_blocks
from cudatma.quantization.safetensors_file import SafetensorsFile, dtype_name, replaced, temporary_name
from cudatma.quantization.weight_format import WeightFormat

_ALIGNED_BYTES = 8
_METADATA = {"format": "pt"}  # transformers rejects files without this entry.
_CHUNK_BYTES = 1 << 24

_Late = tuple[int, str, str, tuple[int, ...], Callable[[], Iterable[Any]]]


def header_room(tensors: Iterable[tuple[str, int]]) -> int:
    """Return an upper bound on the header size in bytes, from the name and the number of dimensions of each tensor."""
    needed = 64 + sum(len(json.dumps(name)) + 96 + 21 * dimensions for name, dimensions in tensors)
    return -(-needed // _ALIGNED_BYTES) * _ALIGNED_BYTES


class ShardWriter:
    """Context manager that writes a temporary safetensors file.

    finish() renames the file into place. If the context exits before finish() is called, the file is
    removed.

    Raises
    ------
    WeightFileError
        If the file cannot be written.
    """

    def __init__(self, path: Path, room_bytes: int) -> None:
        self.path, self.room_bytes = path, room_bytes
        self.aside = path.with_name(temporary_name())
        self.entries: dict[str, Any] = {}
        self._late: list[_Late] = []
        self._digest, self._end = hashlib.blake2b(digest_size=16), 0
        try:
            self._file = self.aside.open("xb")
            self._file.seek(8 + room_bytes)
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(OSError):  # close() retries a failed write.
            self._file.close()
        self.aside.unlink(missing_ok=True)

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Write an array in C order."""
        data = array.reshape(-1).view(np.uint8)
        chunks = [data[begin : begin + _CHUNK_BYTES] for begin in range(0, data.size, _CHUNK_BYTES)]
        self._add(name, dtype_name(array.dtype), array.shape, array.nbytes, lambda: chunks)

    def copy(self, name: str, source: SafetensorsFile) -> None:
        """Copy a tensor of any type from another file."""
        entry = source.tensors[name]
        self._add(name, entry.dtype, entry.shape, entry.end - entry.begin, lambda: source.raw(name))

    def finish(self) -> tuple[int, str]:
        """Write the remaining tensors, rename the file into place, and return its size and its file_digest()."""
        for _, name, dtype, shape, chunks in sorted(self._late, key=lambda late: -late[0]):
            self._write(name, dtype, shape, chunks)
        header = json.dumps({"__metadata__": _METADATA, **self.entries}, separators=(",", ":")).encode()
        if len(header) > self.room_bytes:
            raise WeightFileError(
                str(self.path),
                f"a header of {len(header)} bytes",
                f"a file with a header of at most {self.room_bytes} bytes",
            )
        first = self.room_bytes.to_bytes(8, "little") + header.ljust(self.room_bytes)
        try:
            self._file.seek(0)
            self._file.write(first)
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self.aside, self.path)
        except OSError as error:
            raise self._error(error) from error
        return len(first) + self._end, _joined(first, self._digest)

    def _add(
        self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int, chunks: Callable[[], Iterable[Any]]
    ) -> None:
        if nbytes % _ALIGNED_BYTES:
            elements = int(np.prod(shape, dtype=np.int64)) or 1
            self._late.append((nbytes // elements, name, dtype, shape, chunks))
        else:
            self._write(name, dtype, shape, chunks)

    def _write(self, name: str, dtype: str, shape: tuple[int, ...], chunks: Callable[[], Iterable[Any]]) -> None:
        begin = self._end
        try:
            for chunk in chunks():
                self._file.write(chunk)
                self._digest.update(chunk)
                self._end += len(chunk)
        except OSError as error:
            raise self._error(error) from error
        self.entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, self._end]}

    def _error(self, error: OSError) -> WeightFileError:
        got = f"a file that cannot be written ({reason_of(error)})"
        return WeightFileError(str(self.path), got, "a writable file", "check the folder and the free space")


def file_digest(path: Path) -> str:
    """Return a file's digest, as ShardWriter.finish() does. Raises WeightFileError if the file cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            length = file.read(8)
            first = length + file.read(min(int.from_bytes(length, "little"), path.stat().st_size))
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        got = f"a file that cannot be read ({reason_of(error)})"
        raise WeightFileError(str(path), got, "a readable file", "check the path") from error
    return _joined(first, digest)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. Raises WeightFileError if the file cannot be written."""
    with replaced(path) as aside, aside.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _joined(first: bytes, data: Any) -> str:
    """Combine a file's header and the digest of its data into the digest of the file."""
    return hashlib.blake2b(first + data.digest(), digest_size=16).hexdigest()


#: Maximum number of dimensions of each array of a packed layer. The names do not include the layer's prefix.
ARRAYS = {"qweight": 2, "scales": 2, "zeros": 2, "perm": 1, "tensor_scale": 2}


@dataclass(frozen=True, slots=True)
class Unit:
    """A weight to pack or a tensor to copy.

    ``layers`` contains the names of the layers that are packed as this weight, and is empty for a tensor to copy.
    ``source`` contains the names of the tensors in the checkpoint.
    """

    name: str
    layers: tuple[str, ...]
    source: tuple[str, ...]
    max_bytes: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A file, its units in order, and the number of bytes to reserve for its header."""

    name: str
    units: tuple[Unit, ...]
    room_bytes: int

    @property
    def max_bytes(self) -> int:
        """Upper bound on the file's size in bytes."""
        return 8 + self.room_bytes + sum(unit.max_bytes for unit in self.units)


def plan_shards(source: Source, shard_bytes: int, kind: WeightFormat, group_size: int) -> list[ShardPlan]:
    """Distribute the units among files of at most about ``shard_bytes``, in the model's order.

    A unit is never split between files. ``kind`` and ``group_size`` apply to the layers of a float checkpoint. The plan
    depends only on the source and the options.
    """
    units = []
    for name, layers in source.inventory.packed.items():
        weights = [tensor for layer in layers for tensor in source.layers[layer].values()]
        bias = [group.bias] if (group := source.inventory.experts.get(name)) and group.bias else []
        max_bytes = _packed_bytes(source, name, layers[0], kind.bits, group_size) + source.tensor_bytes(bias)
        units.append(Unit(name, layers, (*weights, *bias), max_bytes))
    packed = {tensor for unit in units for tensor in unit.source} | source.inventory.left_out.keys()
    others = [name for name in source.checkpoint.names if name not in packed]
    units += [Unit(name, (), (name,), source.tensor_bytes([name])) for name in others]
    shards: list[list[Unit]] = []
    filled = shard_bytes
    for unit in sorted(units, key=lambda unit: natural(unit.name)):
        if filled + unit.max_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += unit.max_bytes
    return [
        ShardPlan(_file_name(number, len(shards)), tuple(shard), header_room(_tensors(source, shard)))
        for number, shard in enumerate(shards, 1)
    ]


def _packed_bytes(source: Source, name: str, layer: str, bits: int, group_size: int) -> int:
    """Return an upper bound on the size of a packed weight, whose first layer is ``layer``.

    ``bits`` and ``group_size`` apply to a float checkpoint.
    """
    *experts, k, n = source.sizes(name)
    if source.statement is not None:
        facts, kind = source.inventory.facts[layer], source.statement.format
        size = kind.group_size or packed_group_size(file_group_size(k, facts.extent.groups, facts.group_size))
        group_size, bits = size, kind.bits
    columns, groups = math.prod(experts) * blocks(n) * BLOCK, group_count(k, group_size)
    return (
        columns // BLOCK * row_blocks(k, bits) * BLOCK_BYTES + groups * columns * 3 + 4 * k
    )  # A scale has two bytes, and a zero point has one byte.


def _tensors(source: Source, shard: list[Unit]) -> list[tuple[str, int]]:
    files: Mapping[str, object] = source.checkpoint.files
    arrays = (ARRAYS | {"bias": 2}).items()
    tensors = [(f"{unit.name}.{part}", size) for unit in shard if unit.layers for part, size in arrays]
    for unit in shard:
        if not unit.layers and unit.name in files:
            tensors.append((unit.name, len(source.checkpoint.files[unit.name].tensors[unit.name].shape)))
    return tensors


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
