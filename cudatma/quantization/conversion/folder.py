"""The folders of a conversion: what is checked before anything is written, and what is written beside the weights."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudatma.errors import ArgumentError, WeightFileError
from cudatma.quantization.conversion.journal import FILE
from cudatma.quantization.conversion.report import LayerReport
from cudatma.quantization.conversion.shard_writer import PARTIAL, write_text
from cudatma.quantization.layout_v1 import LAYOUT_VERSION

#: What transformers calls our packed layers.
METHOD = "cudatma"
#: Left free on the disk beyond what a conversion takes.
_SPARE_BYTES = 64_000_000
_INDEX = "model.safetensors.index.json"
#: Weights in other files, and descriptions of a quantization that the converted model no longer has.
_WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_STALE = ("quantize_config.json", "quant_config.json")


def check_folders(source: Path, out: Path) -> None:
    """ArgumentError where one folder is in the other."""
    inner, outer = out.resolve(), source.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise ArgumentError("out", str(out), f"a folder outside of {source}", "a conversion never changes its source")


def check_disk(out: Path, wanted_bytes: int) -> None:
    """WeightFileError unless the disk of a folder, which need not exist yet, has so many bytes left."""
    existing = out.absolute()
    while not existing.exists():
        existing = existing.parent
    needed = wanted_bytes + _SPARE_BYTES
    partial = (path.stat().st_size for path in out.glob(f".*{PARTIAL}")) if out.is_dir() else ()
    free = shutil.disk_usage(existing).free + sum(partial)
    if wanted_bytes and free < needed:
        got = f"{free / 1e9:.2f} GB free on its disk"
        raise WeightFileError(str(out), got, f"{needed / 1e9:.2f} GB or more", "name a folder on another disk")


def copy_files(source: Path, out: Path, converted: Iterable[str]) -> dict[str, str]:
    """Copy tokenizer, generation configuration and other files that hold no weights.

    converted: the names of the source's files that were converted. Returns what was not copied, and why.
    """
    known = {"config.json", FILE, _INDEX, *converted}
    left: dict[str, str] = {}
    for entry in sorted(source.iterdir()):
        if entry.name in known or entry.name.startswith("."):
            continue
        if not entry.is_file():
            left[entry.name] = "no file"
        elif entry.name in _STALE:
            left[entry.name] = "describes the former quantization"
        elif entry.name.endswith(_WEIGHT_ENDINGS):
            left[entry.name] = "other weights"
        else:
            _copy_file(entry, out / entry.name)
    return left


def _copy_file(source: Path, target: Path) -> None:
    aside = target.with_name(f".{target.name}{PARTIAL}")
    try:
        shutil.copyfile(source, aside)
        os.replace(aside, target)
    except OSError as error:
        raise WeightFileError(
            str(target), f"{error}", "a file that can be written", "check folder and space"
        ) from error


def write_index(out: Path, shards: Mapping[str, Mapping[str, int]]) -> None:
    """Write the index of several files, given the bytes of each tensor of each file."""
    if len(shards) == 1:
        return
    files = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    size = sum(sum(tensors.values()) for tensors in shards.values())
    content = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    write_text(out / _INDEX, json.dumps(content, indent=2) + "\n")


def write_config(out: Path, config: Mapping[str, Any], layers: Sequence[LayerReport], dtype: str) -> None:
    """Write the source's config.json with our quantization_config, last of all: it makes the folder a model's."""
    config = {name: value for name, value in config.items() if name != "compression_config"}
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = {
            name: value for name, value in config["text_config"].items() if name != "quantization_config"
        }
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    config["quantization_config"] = quantization_config({layer.name: layer.facts for layer in layers}, dtype)
    write_text(out / "config.json", json.dumps(config, indent=2) + "\n")


def quantization_config(layers: dict[str, dict[str, Any]], dtype: str) -> dict[str, Any]:
    """The quantization_config of a model with these packed layers and their facts (LayerReport.facts).

    The most common facts are named once; ``layers`` has what is different, by the layer's name.
    """
    common = json.loads(Counter(json.dumps(facts) for facts in layers.values()).most_common(1)[0][0])
    different = {
        name: {fact: value for fact, value in facts.items() if value != common[fact]} for name, facts in layers.items()
    }
    base = {"quant_method": METHOD, "layout_version": LAYOUT_VERSION, "bits": 4, "dtype": dtype}
    return {**base, **common, "layers": different}
