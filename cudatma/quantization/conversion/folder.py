"""Check the folders of a conversion, write the files without weights, and record finished files in a journal.

With the journal, an interrupted conversion can continue.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cudatma.errors import ArgumentError, WeightFileError, reason_of
from cudatma.quantization.checkpoint import read_json
from cudatma.quantization.conversion.report import LayerReport
from cudatma.quantization.conversion.shards import file_digest, write_text
from cudatma.quantization.layout_v1 import LAYOUT_VERSION
from cudatma.quantization.safetensors_file import PARTIAL, replaced
from cudatma.quantization.statement import MODELOPT_FILE
from cudatma.quantization.weight_format import weight_format

FILE = "cudatma_conversion.json"
_FORMAT, _VERSION = "cudatma-conversion", 1
_ELSEWHERE = "choose another folder, or remove this folder"


@dataclass(frozen=True, slots=True)
class Shard:
    """A finished file and the size of each of its tensors in bytes."""

    bytes: int
    digest: str
    tensors: dict[str, int]
    layers: tuple[LayerReport, ...]


class Journal:
    """Finished files of a conversion, by name.

    begin() creates the folder.

    Parameters
    ----------
    out : pathlib.Path
        The folder of the converted model.
    identity : dict
        Digests of the source files, and the options. WeightFileError is raised if the journal contains a different
        identity.
    source_name : str
        Name of the source's folder, for error messages.
    """

    def __init__(self, out: Path, identity: dict[str, Any], source_name: str) -> None:
        self.path, self.identity, self.source_name = out / FILE, identity, source_name
        self.shards: dict[str, Shard] = {}
        if self.path.is_file():
            self._read()
        elif out.exists() and (not out.is_dir() or any(not _is_ours(entry) for entry in out.iterdir())):
            got = "a folder with files that no conversion wrote"
            raise WeightFileError(str(out), got, "a new or empty folder", "choose another folder")

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """Create the folder, lock it against other processes, and remove unfinished files.

        If an error occurs before any file is finished, the journal and a folder that this call created are removed.
        """
        out = self.path.parent
        existed = out.exists()
        try:
            out.mkdir(parents=True, exist_ok=True)
            folder = os.open(out, os.O_RDONLY)
        except OSError as error:
            got = f"a folder that cannot be created or opened ({reason_of(error)})"
            raise WeightFileError(str(out), got, "a writable folder", "choose another folder") from error
        try:
            _lock(folder, out)
            for left in out.glob(f".*{PARTIAL}"):
                left.unlink()
            self._write()
            try:
                yield
            except BaseException:
                if not self.shards:
                    self.path.unlink(missing_ok=True)
                    if not existed and not any(out.iterdir()):
                        out.rmdir()
                raise
        finally:
            os.close(folder)

    def keep_intact(self) -> Iterator[str]:
        """Yield the name of each finished file, and remove it from the journal if the file has changed."""
        for name, shard in list(self.shards.items()):
            path = self.path.parent / name
            if not path.is_file() or path.stat().st_size != shard.bytes or file_digest(path) != shard.digest:
                del self.shards[name]
            yield name

    def add(self, name: str, shard: Shard) -> None:
        """Add a finished file and write the journal."""
        self.shards[name] = shard
        self._write()

    def _write(self) -> None:
        shards = {name: asdict(shard) for name, shard in sorted(self.shards.items())}
        content = {"format": _FORMAT, "version": _VERSION, "source_name": self.source_name}
        content |= {**self.identity, "shards": shards}
        write_text(self.path, json.dumps(content, indent=1) + "\n")

    def _read(self) -> None:
        content = read_json(self.path)
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
            raise WeightFileError(
                str(self.path),
                "a file in another format",
                f"a file in the format {_FORMAT}, version {_VERSION}",
                _ELSEWHERE,
            )
        for part, expected in self.identity.items():
            stored, current = content.get(part), json.loads(json.dumps(expected))
            if stored != current:
                got, allowed = f"a conversion with different {part}", "a conversion with the same source and options"
                if part == "source":
                    got = f"a conversion with another source, {content.get('source_name', 'unnamed')}"
                if part == "options" and isinstance(stored, dict):
                    got, allowed = f"{got}: {_without(stored, current)}", f"{allowed}: {_without(current, stored)}"
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
            got = f"an invalid entry ({type(error).__name__}: {reason_of(error)})"
            raise WeightFileError(where, got, "an entry that cudatma convert wrote", _ELSEWHERE) from error


def _lock(folder: int, out: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise WeightFileError(
            str(out), "a folder in use", "a folder that no other conversion is writing", "wait for that conversion"
        ) from error


def _without(options: dict[str, Any], others: dict[str, Any]) -> str:
    """Return, as JSON, the options that are missing or different in ``others``."""
    return json.dumps({name: value for name, value in options.items() if name not in others or others[name] != value})


def _is_ours(entry: Path) -> bool:
    return entry.name.startswith(".") and entry.name.endswith(PARTIAL)


#: The quant_method of converted models.
METHOD = "cudatma"
#: Free disk space, in bytes, to leave after a conversion.
_SPARE_BYTES = 64_000_000
_INDEX = "model.safetensors.index.json"
#: Suffixes of other weight files, and files that describe the quantization that the conversion replaces.
_WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_STALE = ("quantize_config.json", "quant_config.json", "quantization_config.json", MODELOPT_FILE)


def check_folders(source: Path, out: Path) -> None:
    """Raise ArgumentError if one folder contains the other."""
    inner, outer = out.resolve(), source.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise ArgumentError("out", str(out), f"a folder outside {source}", "choose a folder outside the source")


def check_disk(out: Path, required_bytes: int) -> None:
    """Raise WeightFileError unless the folder's disk has ``required_bytes`` free. The folder need not exist."""
    existing = out.absolute()
    while not existing.exists():
        existing = existing.parent
    needed = required_bytes + _SPARE_BYTES
    partial = (path.stat().st_size for path in out.glob(f".*{PARTIAL}")) if out.is_dir() else ()
    free = shutil.disk_usage(existing).free + sum(partial)
    if required_bytes and free < needed:
        got = f"a disk with {free / 1e9:.2f} GB free"
        allowed = f"on a disk with at least {needed / 1e9:.2f} GB free"
        raise WeightFileError(str(out), got, allowed, "choose a folder on another disk")


def copy_files(source: Path, out: Path, converted: Iterable[str]) -> dict[str, str]:
    """Copy the tokenizer, generation configuration and other files without weights.

    ``converted`` contains the names of the converted source files. Returns a dict that maps each folder entry that was
    not copied to the reason.
    """
    known = {"config.json", FILE, _INDEX, *converted}
    skipped: dict[str, str] = {}
    for entry in sorted(source.iterdir()):
        if entry.name in known or entry.name.startswith("."):
            continue
        if not entry.is_file():
            skipped[entry.name] = "is not a file"
        elif entry.name in _STALE:
            skipped[entry.name] = "describes the original quantization"
        elif entry.name.endswith(_WEIGHT_ENDINGS):
            skipped[entry.name] = "contains other weights"
        else:
            _copy_file(entry, out / entry.name)
    return skipped


def _copy_file(source: Path, target: Path) -> None:
    try:
        file = source.open("rb")
    except OSError as error:
        got = f"a file that cannot be read ({reason_of(error)})"
        raise WeightFileError(str(source), got, "a readable file", "check its permissions") from error
    with file, replaced(target) as aside, aside.open("wb") as copy:
        shutil.copyfileobj(file, copy)


def write_index(out: Path, shards: Mapping[str, Mapping[str, int]]) -> None:
    """Write the index of several files. ``shards`` contains the size in bytes of each tensor in each file."""
    if len(shards) == 1:
        return
    files = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    size = sum(sum(tensors.values()) for tensors in shards.values())
    content = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    write_text(out / _INDEX, json.dumps(content, indent=2) + "\n")


def write_config(out: Path, config: Mapping[str, Any], layers: Sequence[LayerReport], dtype: str) -> None:
    """Write the source's config.json with cudatma's quantization_config.

    This file must be written last, because programs treat a folder with config.json as a complete model.
    """
    config = _without_sections(config)
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = _without_sections(config["text_config"])
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    config["quantization_config"] = quantization_config({layer.name: layer.facts for layer in layers}, dtype)
    write_text(out / "config.json", json.dumps(config, indent=2) + "\n")


def _without_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the sections that describe the original quantization."""
    return {name: value for name, value in config.items() if name not in ("quantization_config", "compression_config")}


def quantization_config(layers: dict[str, dict[str, Any]], dtype: str) -> dict[str, Any]:
    """Return the quantization_config for packed layers, given their facts (LayerReport.facts).

    The result contains the most common facts, but omits the format if it is int4. The entry ``layers`` maps a layer's
    name to the facts that differ from the most common facts.
    """
    common = json.loads(Counter(json.dumps(facts) for facts in layers.values()).most_common(1)[0][0])
    different = {
        name: {fact: value for fact, value in facts.items() if value != common.get(fact)}
        for name, facts in layers.items()
    }
    if common.get("format") == "int4":
        del common["format"]
    bits = weight_format(common.get("format", "int4")).bits
    base = {"quant_method": METHOD, "layout_version": LAYOUT_VERSION, "bits": bits, "dtype": dtype}
    return {**base, **common, "layers": different}
