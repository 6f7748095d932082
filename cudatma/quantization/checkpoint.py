"""A checkpoint: one safetensors file, a sharded one through its index, or the folder that holds either."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from cudatma.errors import WeightFileError, counted
from cudatma.quantization.safetensors_file import (
    SafetensorsFile,
    as_path,
    check_suffix,
    open_safetensors,
    similar_names,
)


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint:
    """Tensors of one or several files by name. path: what was opened."""

    path: Path
    files: dict[str, SafetensorsFile]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, sorted."""
        return tuple(sorted(self.files))

    def __repr__(self) -> str:
        files = counted(len({file.path for file in self.files.values()}), "file")
        return f"Checkpoint({str(self.path)!r}, {counted(len(self.files), 'tensor')} in {files})"

    def shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        """The tensors of a layer by their name without it, sorted, with their shapes."""
        start = f"{layer}."
        names = (name for name in self.names if name.startswith(start))
        return {name[len(start) :]: self.files[name].tensors[name].shape for name in names}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.files[name].tensors[name].shape

    def read(self, name: str) -> NDArray[Any]:
        """A tensor as a NumPy array (bf16 through ml_dtypes). Raises WeightFileError."""
        if name in self.files:
            return self.files[name].read(name)
        raise WeightFileError(name, "no such tensor", f"a tensor of {self.path}", similar_names(name, self.names))

    def read_if_present(self, name: str) -> NDArray[Any] | None:
        """read(), or None where there is no such tensor."""
        return self.read(name) if name in self.files else None


def open_checkpoint(path: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
    """Open a ``.safetensors`` file, a ``*.safetensors.index.json`` or a folder with one of them.

    In a folder with several, this takes the file that transformers takes: model.safetensors, else its index. A
    checkpoint holds all tensors of its files, including those that the index does not name. A Checkpoint is returned
    unchanged. This reads only headers, and tensors that two files hold. Raises WeightFileError.
    """
    if isinstance(path, Checkpoint):
        return path
    path = as_path(path)
    if path.is_dir():
        path = _in_folder(path)
    if path.suffix == ".json":
        return _sharded(path)
    file = open_safetensors(path)
    return Checkpoint(path, dict.fromkeys(file.tensors, file))


#: The files that transformers loads from a folder, the first that exists.
MAIN_FILES = ("model.safetensors", "model.safetensors.index.json")


def _in_folder(folder: Path) -> Path:
    require_safetensors(folder)
    for name in MAIN_FILES:
        if (folder / name).is_file():
            return folder / name
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            shown = ", ".join(file.name for file in found[:4])
            raise WeightFileError(str(folder), shown, "one checkpoint in a folder", "name the file or its index")
    raise WeightFileError(str(folder), "no .safetensors file", "a folder with a checkpoint", "check the path")


def require_safetensors(folder: Path) -> None:
    """Raise WeightFileError for a folder whose weights are in files of another kind."""
    entries = sorted(folder.iterdir())
    if not any(entry.suffix == ".safetensors" for entry in entries):
        for entry in entries:
            check_suffix(entry)


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises WeightFileError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightFileError(str(path), f"{error}", "a readable file", "check the path") from error
    except (ValueError, RecursionError) as error:
        raise WeightFileError(str(path), f"{error}", "JSON", "copy or download the file again") from error


def _sharded(index: Path) -> Checkpoint:
    content = read_json(index)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or any(not isinstance(name, str) for name in shards.values()):
        raise WeightFileError(f"{index}: weight_map", repr(shards)[:80], "an object of tensor name: file name")
    opened: dict[str, SafetensorsFile] = {}
    for tensor, name in shards.items():
        if name not in opened:
            if Path(name).name != name:  # an index must not lead out of its folder
                raise WeightFileError(f"{index}: weight_map[{tensor}]", name, "a file in the folder of the index")
            opened[name] = open_safetensors(index.parent / name)
        if tensor not in opened[name].tensors:
            raise WeightFileError(tensor, f"not in {name}", f"what {index} says", "copy or download the shard again")
    return Checkpoint(index, files_by_tensor(opened.values()))


def files_by_tensor(files: Iterable[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    """Return the file of each tensor. Raises WeightFileError if two files hold different values of one tensor."""
    found: dict[str, SafetensorsFile] = {}
    for file in files:
        for name, entry in file.tensors.items():
            first = found.setdefault(name, file)
            if first is file:
                continue
            other = first.tensors[name]
            is_same = (entry.dtype, entry.shape) == (other.dtype, other.shape)
            if not is_same or any(a != b for a, b in zip(first.raw(name), file.raw(name), strict=True)):
                got = f"other values in {first.path.name} than in {file.path.name}"
                raise WeightFileError(name, got, "one value", "remove the file that does not belong to the model")
    return found
