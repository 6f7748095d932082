"""Open a checkpoint, which is a safetensors file, an index of several files, or a folder with one of these."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from cudatma.errors import WeightFileError, counted, reason_of
from cudatma.quantization.safetensors_file import (
    SafetensorsFile,
    as_path,
    check_suffix,
    open_safetensors,
    similar_names,
)


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint:
    """The tensors in one or more safetensors files.

    Parameters
    ----------
    path : pathlib.Path
        The file, index or folder that was opened.
    files : dict of str to SafetensorsFile
        Maps the name of each tensor to the file that contains it.
    """

    path: Path
    files: dict[str, SafetensorsFile]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self.files))

    def __repr__(self) -> str:
        files = counted(len({file.path for file in self.files.values()}), "file")
        return f"Checkpoint({str(self.path)!r}, {counted(len(self.files), 'tensor')} in {files})"

    def shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's tensors, sorted by name.

        Parameters
        ----------
        layer : str
            The layer's name.

        Returns
        -------
        dict of str to tuple of int
            Shape of each tensor, keyed by the name without the layer's prefix.
        """
        start = f"{layer}."
        names = (name for name in self.names if name.startswith(start))
        return {name[len(start) :]: self.files[name].tensors[name].shape for name in names}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Parameters
        ----------
        name : str
            The tensor's name.

        Returns
        -------
        tuple of int
            The tensor's shape.
        """
        return self.files[name].tensors[name].shape

    def read(self, name: str) -> NDArray[Any]:
        """Read a tensor.

        Parameters
        ----------
        name : str
            The tensor's name.

        Returns
        -------
        numpy.ndarray
            The tensor. bf16 tensors have the dtype of ml_dtypes.

        Raises
        ------
        WeightFileError
            If there is no such tensor, or if the file cannot be read.
        """
        if name in self.files:
            return self.files[name].read(name)
        raise WeightFileError(name, "no such tensor", f"a tensor in {self.path}", similar_names(name, self.names))

    def read_if_present(self, name: str) -> NDArray[Any] | None:
        """Read a tensor, or return None if the checkpoint does not contain the tensor.

        Parameters
        ----------
        name : str
            The tensor's name.

        Returns
        -------
        numpy.ndarray or None
            The result of ``read``, or None.
        """
        return self.read(name) if name in self.files else None


def open_checkpoint(path: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
    """Open a checkpoint.

    Only the headers of the files are read, except for tensors that occur in two files. The values of these tensors are
    compared.

    Parameters
    ----------
    path : str, os.PathLike or Checkpoint
        A ``.safetensors`` file, a ``*.safetensors.index.json`` file, or a folder that contains one of these. In a
        folder with several such files, model.safetensors takes precedence over model.safetensors.index.json, as in
        transformers. A Checkpoint is returned unchanged.

    Returns
    -------
    Checkpoint
        All tensors in the files, including those that the index does not list.

    Raises
    ------
    WeightFileError
        If a file is missing or damaged, or if two files contain different values for one tensor.
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


#: Files that transformers loads from a folder. transformers loads the first file that exists.
MAIN_FILES = ("model.safetensors", "model.safetensors.index.json")


def _in_folder(folder: Path) -> Path:
    require_safetensors(folder)
    for name in MAIN_FILES:
        if (folder / name).is_file():
            return folder / name
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        files = sorted(folder.glob(pattern))
        if len(files) == 1:
            return files[0]
        if files:
            shown = ", ".join(file.name for file in files[:4])
            raise WeightFileError(str(folder), shown, "a folder with one checkpoint", "pass one of the files")
    raise WeightFileError(str(folder), "no .safetensors file", "a folder with a checkpoint", "check the path")


def require_safetensors(folder: Path) -> None:
    """Raise WeightFileError if a folder contains weights only in another file format."""
    entries = sorted(folder.iterdir())
    if not any(entry.suffix == ".safetensors" for entry in entries):
        for entry in entries:
            check_suffix(entry)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises WeightFileError if the file cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        got = f"a file that cannot be read ({reason_of(error)})"
        raise WeightFileError(str(path), got, "a readable file", "check the path") from error
    except (ValueError, RecursionError) as error:
        got = f"a file that cannot be parsed ({reason_of(error)})"
        raise WeightFileError(str(path), got, "a JSON file", "copy or download the file again") from error


def _sharded(index: Path) -> Checkpoint:
    content = read_json(index)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or any(not isinstance(name, str) for name in shards.values()):
        raise WeightFileError(
            f"{index}: weight_map", repr(shards)[:80], "an object that maps tensor names to file names"
        )
    files: dict[str, SafetensorsFile] = {}
    for tensor, name in shards.items():
        if name not in files:
            if Path(name).name != name:  # An index must not refer to files outside its folder.
                raise WeightFileError(f"{index}: weight_map[{tensor}]", name, "a file in the index's folder")
            files[name] = open_safetensors(index.parent / name)
        if tensor not in files[name].tensors:
            allowed = f"a tensor in {name}, as listed in {index}"
            raise WeightFileError(tensor, "no such tensor", allowed, "copy or download the shard again")
    return Checkpoint(index, files_by_tensor(files.values()))


def files_by_tensor(files: Iterable[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    """Map each tensor to its file. Raises WeightFileError if two files contain different values for one tensor."""
    owners: dict[str, SafetensorsFile] = {}
    for file in files:
        for name, entry in file.tensors.items():
            first = owners.setdefault(name, file)
            if first is file:
                continue
            other = first.tensors[name]
            is_same = (entry.dtype, entry.shape) == (other.dtype, other.shape)
            if not is_same or any(a != b for a, b in zip(first.raw(name), file.raw(name), strict=True)):
                got = f"different values in {first.path.name} and {file.path.name}"
                raise WeightFileError(
                    name, got, "the same in all files", "remove the file that belongs to another model"
                )
    return owners
