"""The file of tuned configurations: what it holds, reading it with suspicion, and writing it so that nothing is lost.

::

    {"schema": 1, "sections": [{"key": {card and versions}, "cells": [{layer, m, the choice, what was measured}]}]}

A section holds what was measured on one class of cards with one set of versions; sections of other cards or versions
stay in the file untouched. docs/tuning.md describes every field.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from cudatma.build import installed_nvrtc, remembered
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, TuneFileWarning
from cudatma.filelock import locked
from cudatma.kernels.marlin.card import Card
from cudatma.kernels.marlin.layer import AnyMarlinSpec, Choice, Layer
from cudatma.kernels.marlin.model import kernel_name
from cudatma.kernels.marlin.problem import ceil_div
from cudatma.kernels.marlin.spec import MarlinSpec
from cudatma.kernels.marlin.strip_spec import StripSpec
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.kernels.marlin.workspace import has_room
from cudatma.quantization.packed import LAYOUT_VERSION
from cudatma.render import template_texts
from cudatma.target import Target

SCHEMA = 1
FILE_VARIABLE = "CUDATMA_TUNE_FILE"
#: Value of the variable that turns every tuned configuration off, the shipped ones too.
NOTHING = "none"
_KERNELS: dict[str, type[AnyMarlinSpec]] = {"strip": StripSpec, "wgmma": WgmmaSpec, "portable": MarlinSpec}
_LAYER_FIELDS = ("dtype", "group_size", "has_zeros")
_MOST_BLOCKS = 4
_LOCK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TuneKey:
    """Where measurements hold: class of card (target, multiprocessors, highest clocks in MHz) and versions (of packed
    weights, of NVRTC, and a digest of the kernels' templates)."""

    target: str
    multiprocessors: int
    sm_clock_mhz: int
    memory_clock_mhz: int
    layout: int
    nvrtc: str
    templates: str

    def __str__(self) -> str:
        card = f"{self.target}, {self.multiprocessors} multiprocessors, {self.sm_clock_mhz} MHz"
        versions = f"layout {self.layout}, NVRTC {self.nvrtc}, templates {self.templates}"
        return f"{card}, memory {self.memory_clock_mhz} MHz; {versions}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One layer at one number of tokens: the fastest choice that gave right results.

    us: its time. rule_us: that of what choose() takes without tuning. record: all that was measured, as JSON.
    """

    layer: Layer
    m: int
    choice: Choice[AnyMarlinSpec]
    us: float
    rule_us: float
    record: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def as_json(self) -> dict[str, Any]:
        spec = {f.name: getattr(self.choice.spec, f.name) for f in fields(self.choice.spec)}
        choice = {"kernel": kernel_name(self.choice.spec), "spec": spec}
        choice |= {name: getattr(self.choice, name) for name in ("blocks_per_sm", "band", "divide")}
        return (
            asdict(self.layer) | {"m": self.m} | choice | {"us": self.us, "rule_us": self.rule_us} | dict(self.record)
        )


def tune_key(card: Card) -> TuneKey:
    """The key of this card with what is installed. Raises DriverError (no NVRTC), CacheError."""
    nvrtc = ".".join(map(str, installed_nvrtc()))
    return TuneKey(*_card_values(card), LAYOUT_VERSION, nvrtc, templates_digest())


def _card_values(card: Card) -> tuple[str, int, int, int]:
    return card.target, card.multiprocessors, card.clock_class_mhz, card.memory_clock_mhz


#: Parts so named leave no trace in a kernel that is not rendered for debugging.
_ONLY_DEBUG = "debug"


def _card_part(key: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(key.get(name) for name in ("target", "multiprocessors", "sm_clock_mhz", "memory_clock_mhz"))


@lru_cache(maxsize=1)
def templates_digest() -> str:
    """12 hexadecimal digits over all that the kernels' sources are made of, comment lines left out, and what only
    ``debug=True`` renders. Raises CacheError: for files that hold the same it is remembered."""
    texts = template_texts(*(kernel.template for kernel in _KERNELS.values()))
    content = hashlib.sha256(b"\0".join(texts.values())).hexdigest()
    return str(remembered({"digest of the Marlin templates, 2": content}, lambda: _templates_digest(texts)))


def _templates_digest(texts: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name in sorted(name for name in texts if not name.rpartition("/")[2].startswith(_ONLY_DEBUG)):
        lines = map(str.strip, texts[name].decode("utf-8").splitlines())
        kept = (line for line in lines if line and (line.startswith("//%") or not line.startswith("//")))
        total.update("".join(f"{line}\n" for line in kept).encode())
    return total.hexdigest()[:12]


def user_file() -> Path | None:
    """$CUDATMA_TUNE_FILE, else cudatma/tuned.json in $XDG_DATA_HOME or ~/.local/share; None where the variable says
    "none". Raises ArgumentError for a relative path."""
    named = os.environ.get(FILE_VARIABLE, "")
    if named == NOTHING:
        return None
    if named:
        path = Path(os.path.expanduser(named))
        if not path.is_absolute():
            raise ArgumentError(FILE_VARIABLE, named, f'an absolute path, or "{NOTHING}"')
        return path
    base = os.environ.get("XDG_DATA_HOME", "")
    # The XDG base directory specification says to ignore relative paths.
    return (
        (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.local/share"))) / "cudatma" / "tuned.json"
    )


def read_cells(path: Path, card: Card, target: Target, *, shipped: bool = False) -> tuple[list[Cell], list[str]]:
    """The usable cells of a file for a card, and what of it is not used and why, as lines of text.

    shipped: a table of cudatma's own, which also serves other minor versions of NVRTC, and whose cells for other
    versions are nobody's fault. Never raises for what the file holds; a file that is not there holds nothing.
    """
    try:
        sections = read_sections(path)
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError) as error:
        return [], [f"the whole file: {error}"]
    mine = [section for section in sections if _card_part(section["key"]) == _card_values(card)]
    if not mine:  # most often; NVRTC's version then is of no interest
        return [], []
    try:
        key = asdict(tune_key(card))
    except CudaTmaError as error:
        return [], [f"{len(mine)} sections of this card: {error}"]
    cells, problems = [], []
    for section in mine:
        if differences := _differences(section["key"], key, shipped):
            if not shipped:
                problems.append(f"{len(section['cells'])} cells measured with {differences}: run cudatma tune again")
            continue
        for index, raw in enumerate(section["cells"]):
            try:
                cells.append(parse_cell(raw, target))
            except (CudaTmaError, KeyError, TypeError, ValueError) as error:
                problems.append(f"cells[{index}]: {type(error).__name__}: {error}")
    return cells, problems


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], shipped: bool) -> str:
    """The versions in which a section differs from what is installed; empty where it can be used."""
    differ = [name for name in ours if theirs.get(name) != ours[name]]
    if shipped and "nvrtc" in differ and str(theirs.get("nvrtc")).split(".")[0] == ours["nvrtc"].split(".")[0]:
        differ.remove("nvrtc")
    return ", ".join(f"{name} {theirs.get(name)} (here {ours[name]})" for name in differ)


def parse_cell(raw: Any, target: Target) -> Cell:
    """A cell from its JSON. Raises ArgumentError, ArgumentTypeError, TargetError or KeyError if it cannot be run."""
    layer = Layer(*(_typed(raw, name, kind) for name, kind in
                    (("k", int), ("n", int), ("group_size", int), ("has_zeros", bool), ("dtype", str))))  # fmt: skip
    m, blocks, band = (_typed(raw, name, int) for name in ("m", "blocks_per_sm", "band"))
    kernel = _KERNELS.get(_typed(raw, "kernel", str))
    if kernel is None:
        raise ArgumentError("kernel", raw["kernel"], ", ".join(_KERNELS))
    spec = _parse_spec(kernel, _typed(raw, "spec", dict))
    for name in _LAYER_FIELDS:
        if getattr(spec, name) != getattr(layer, name):
            raise ArgumentError(f"spec.{name}", getattr(spec, name), f"{getattr(layer, name)!r}, as the layer says")
    if min(layer.k, layer.n, m) < 1 or band < 0 or not 1 <= blocks <= _MOST_BLOCKS:
        raise ArgumentError("cell", f"k {layer.k}, n {layer.n}, m {m}, band {band}, {blocks} blocks", "sizes from 1 up")
    if isinstance(spec, StripSpec) and spec.deep_box and layer.k % 64:
        raise ArgumentError("spec.deep_box", True, f"false: k = {layer.k} is no multiple of 64")
    if ceil_div(layer.k, spec.block_k) < spec.blocks_k:
        raise ArgumentError("spec.blocks_k", spec.blocks_k, f"at most the stages of k = {layer.k}")
    if not has_room(spec, blocks):
        raise ArgumentError("blocks_per_sm", blocks, "blocks whose partial sums fit the workspace")
    spec.check_target(target)
    choice = Choice(spec, blocks, band, _typed(raw, "divide", bool))
    return Cell(layer, m, choice, float(raw["us"]), float(raw["rule_us"]))


def _parse_spec(kernel: type[AnyMarlinSpec], raw: Mapping[str, Any]) -> AnyMarlinSpec:
    kinds = {f.name: {"int": int, "bool": bool, "str": str}[str(f.type)] for f in fields(kernel)}
    unknown = sorted(set(raw) - set(kinds))
    if unknown:
        raise ArgumentError("spec", ", ".join(unknown), f"fields of {kernel.__name__}")
    return kernel(**{name: _typed(raw, name, kinds[name]) for name in raw})


def _typed(raw: Any, name: str, kind: type) -> Any:
    """A value of exactly this type: JSON's true is no number of blocks."""
    value = raw[name]
    if type(value) is not kind:
        raise ArgumentTypeError(name, type(value).__name__, kind.__name__)
    return value


def read_sections(path: Path) -> list[dict[str, Any]]:
    """The sections of a file. ValueError, with the reason, for what is no such file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or "schema" not in content:
        raise ValueError("it is no file of tuned configurations")
    if content["schema"] != SCHEMA:
        raise ValueError(f"its schema is {content['schema']!r}, and this version of cudatma reads {SCHEMA}")
    sections = content.get("sections")
    if not isinstance(sections, list) or not all(map(_is_section, sections)):
        raise ValueError("its sections are damaged")
    return sections


def _is_section(section: object) -> bool:
    return (
        isinstance(section, dict)
        and isinstance(section.get("key"), dict)
        and isinstance(section.get("cells"), list)
        and all(isinstance(cell, dict) for cell in section["cells"])
    )


def store_cell(path: Path, key: TuneKey, cell: Cell) -> None:
    """Put a cell into the file, in place of an older one for the same layer and tokens; all else stays.

    Written aside and renamed, under a lock, so that many runs may share a file. What cannot be read as a file of tuned
    configurations is renamed first, with a TuneFileWarning. Raises OSError, CacheError (a lock that never comes free).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f"{path.name}.lock"), _LOCK_SECONDS):
        try:
            sections = read_sections(path)
        except FileNotFoundError:
            sections = []
        except ValueError as error:
            sections = []
            _set_aside(path, error)
        put_cell(sections, asdict(key), cell.as_json())
        write_sections(path, sections)


def put_cell(sections: list[dict[str, Any]], key: dict[str, Any], raw: dict[str, Any]) -> None:
    """Put a cell's JSON into the section of this key, in place of one for the same layer and tokens."""
    mine = next((section for section in sections if section["key"] == key), None)
    if mine is None:
        mine = {"key": key, "cells": []}
        sections.append(mine)
    names = ("k", "n", "m", *_LAYER_FIELDS)
    mine["cells"] = [old for old in mine["cells"] if any(old.get(name) != raw[name] for name in names)]
    mine["cells"].append(raw)


def write_sections(path: Path, sections: list[dict[str, Any]]) -> None:
    """A whole file at once: written aside and renamed. Raises OSError."""
    _replace(path, json.dumps({"schema": SCHEMA, "sections": sections}, indent=1) + "\n")


def _set_aside(path: Path, why: Exception) -> None:
    number = 1
    while (kept := path.with_name(f"{path.name}.unread-{number}")).exists():
        number += 1
    path.rename(kept)
    warnings.warn(f"{path}: {why}; it is kept as {kept.name}", TuneFileWarning, stacklevel=3)


def _replace(path: Path, text: str) -> None:
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
