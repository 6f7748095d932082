"""What the JSON files of a model's folder say of its quantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cudatma.errors import WeightFileError
from cudatma.quantization.checkpoint import read_json

#: Where tools write it; a later file's values win, except for the format of GPTQ's zero points, which may not differ.
_FILES = ("quantize_config.json", "config.json")
#: Keys of config.json that hold it, the present name first.
_KEYS = ("quantization_config", "compression_config")


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json. WeightFileError where there is none, or no JSON object in it."""
    content = read_json(folder / "config.json")
    if not isinstance(content, dict):
        raise WeightFileError(str(folder / "config.json"), type(content).__name__, "a JSON object")
    return content


def quantization_section(folder: Path) -> dict[str, Any]:
    """The quantization_config of a folder, from quantize_config.json and config.json; empty where neither has one.

    Raises WeightFileError for files that are no JSON, and where the two contradict each other.
    """
    merged: dict[str, Any] = {}
    said: dict[str, str] = {}
    for file in _FILES:
        if not (folder / file).is_file():
            continue
        content = read_json(folder / file)
        section = _inside(content) if file == "config.json" else content
        if not isinstance(section, dict):
            continue
        merged |= section
        if section.get("checkpoint_format") is not None:
            said[file] = str(section["checkpoint_format"])
    if len(set(said.values())) > 1:
        got = ", ".join(f"{stored} in {file}" for file, stored in said.items())
        remedy = "correct the wrong file, or read its layers by load_gptq(zero_point_format='v1' or 'v2')"
        raise WeightFileError(f"{folder}: checkpoint_format", got, "one of them", remedy)
    return merged


def _inside(content: Any) -> Any:
    """The section of config.json, which models of text and images keep with their text model."""
    if not isinstance(content, dict):
        return None
    text = content.get("text_config")
    for holder in (content, text if isinstance(text, dict) else {}):
        for key in _KEYS:
            if holder.get(key) is not None:
                return holder[key]
    return None
