"""What a conversion has finished, kept in its folder so that it can go on after it was interrupted."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cudatma.errors import WeightFileError
from cudatma.quantization.checkpoint import read_json
from cudatma.quantization.conversion.report import LayerReport
from cudatma.quantization.conversion.shard_writer import PARTIAL, file_digest, write_text

FILE = "cudatma_conversion.json"
_FORMAT, _VERSION = "cudatma-conversion", 1
_ELSEWHERE = "name another folder, or remove this one"


@dataclass(frozen=True, slots=True)
class Shard:
    """A finished file. tensors: the bytes of each by its name."""

    bytes: int
    digest: str
    tensors: dict[str, int]
    layers: tuple[LayerReport, ...]


class Journal:
    """shards: the finished files by name. identity: of the source and the options; another one is another conversion.

    Nothing is written before begin().
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.path, self.identity = out / FILE, identity
        self.shards: dict[str, Shard] = {}
        if self.path.is_file():
            self._read()
        elif out.exists() and (not out.is_dir() or any(not _is_ours(entry) for entry in out.iterdir())):
            raise WeightFileError(str(out), "no conversion, and not empty", "a new or empty folder", _ELSEWHERE)

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """Make the folder, keep other processes out of it, and remove what an interrupted run left unfinished."""
        out = self.path.parent
        try:
            out.mkdir(parents=True, exist_ok=True)
            folder = os.open(out, os.O_RDONLY)
        except OSError as error:
            raise WeightFileError(str(out), f"{error}", "a folder that can be written", "name another") from error
        try:
            _lock(folder, out)
            for left in out.glob(f".*{PARTIAL}"):
                left.unlink()
            self._write()
            yield
        finally:
            os.close(folder)

    def keep_intact(self) -> Iterator[str]:
        """Check the finished files one by one, give the name of each, and forget those that are not as they were."""
        for name, shard in list(self.shards.items()):
            path = self.path.parent / name
            if not path.is_file() or path.stat().st_size != shard.bytes or file_digest(path) != shard.digest:
                del self.shards[name]
            yield name

    def add(self, name: str, shard: Shard) -> None:
        """Note a finished file."""
        self.shards[name] = shard
        self._write()

    def _write(self) -> None:
        shards = {name: asdict(shard) for name, shard in sorted(self.shards.items())}
        content = {"format": _FORMAT, "version": _VERSION, **self.identity, "shards": shards}
        write_text(self.path, json.dumps(content, indent=1) + "\n")

    def _read(self) -> None:
        content = read_json(self.path)
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
            raise WeightFileError(str(self.path), "another format", f"{_FORMAT}, version {_VERSION}", _ELSEWHERE)
        for part, wanted in self.identity.items():
            there, here = content.get(part), json.loads(json.dumps(wanted))
            if there != here:
                got, allowed = f"a conversion with other {part}", "the same source and options"
                if part == "options" and isinstance(there, dict):
                    got, allowed = f"{got}: {_without(there, here)}", f"{allowed}: {_without(here, there)}"
                raise WeightFileError(str(self.path), got, allowed, _ELSEWHERE)
        shards = content.get("shards")
        for name, shard in shards.items() if isinstance(shards, dict) else ():
            self.shards[name] = self._shard(name, shard)

    def _shard(self, name: str, value: Any) -> Shard:
        where = f"{self.path}: shards.{name}"
        if os.path.basename(name) != name or not name.endswith(".safetensors"):
            raise WeightFileError(where, name, "a .safetensors file in the folder", _ELSEWHERE)
        try:
            layers = tuple(LayerReport.from_dict(layer, where) for layer in value["layers"])
            tensors = {str(tensor): int(size) for tensor, size in value["tensors"].items()}
            return Shard(int(value["bytes"]), str(value["digest"]), tensors, layers)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, WeightFileError):
                raise
            raise WeightFileError(where, f"{error!r}", "what a conversion writes", _ELSEWHERE) from error


def _lock(folder: int, out: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise WeightFileError(str(out), "another conversion writes to it", "one at a time", "wait for it") from error


def _without(options: dict[str, Any], others: dict[str, Any]) -> str:
    """The options that are not the same in others."""
    return json.dumps({name: value for name, value in options.items() if name not in others or others[name] != value})


def _is_ours(entry: Path) -> bool:
    return entry.name.startswith(".") and entry.name.endswith(PARTIAL)
