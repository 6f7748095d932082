"""Files of tuning entries: what they hold, reading them with suspicion, and writing them so that nothing is lost.

::

    {"schema": 3, "sections": [{"gpu": {..}, "entries": [{layer, m, kernel, revision, spec, us, rule_us}]}]}

A section holds what was measured on one class of GPUs; sections of other GPUs stay in the file untouched. An entry
holds for its kernel, spec and the kernel's ``revision``, which is raised whenever the kernel's timing changes.
docs/tuning.md describes every field.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cudatma.build.filelock import locked
from cudatma.build.regular_file import read_regular
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, TuneFileWarning, shown
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.marlin.former_names import renamed_entry
from cudatma.kernels.marlin.mma_sync import MmaSyncSpec
from cudatma.kernels.marlin.problem import AnyMarlinSpec, LinearShape
from cudatma.kernels.marlin.skinny import SkinnySpec
from cudatma.kernels.marlin.wgmma import WgmmaSpec
from cudatma.kernels.schedule import ceil_div
from cudatma.kernels.workspace import has_room
from cudatma.target import Target

SCHEMA = 3
#: Of files that differ in names alone: reading them renames.
_SCHEMA_OF_FORMER_NAMES = 2
FILE_VARIABLE = "CUDATMA_TUNE_FILE"
#: Value of the variable that turns every tuning entry off, the shipped ones too.
NOTHING = "none"
KERNELS: dict[str, type[AnyMarlinSpec]] = {"skinny": SkinnySpec, "wgmma": WgmmaSpec, "mma_sync": MmaSyncSpec}
_LAYER_FIELDS = ("group_size", "has_zeros", "dtype")
_PROBLEM_FIELDS = ("k", "n", "m", *_LAYER_FIELDS)
_LOCK_SECONDS = 60.0
#: Shapes that a command names.
_NAMED_SHAPES = 4


@dataclass(frozen=True, slots=True)
class GpuClass:
    """Where measurements hold: target, number of SMs, and highest clocks in MHz."""

    target: str
    multiprocessors: int
    sm_clock_mhz: int
    memory_clock_mhz: int

    @classmethod
    def of(cls, card: Gpu) -> GpuClass:
        return cls(card.target, card.multiprocessors, card.clock_class_mhz, card.memory_clock_mhz)

    def __str__(self) -> str:
        return f"{self.target}, {self.multiprocessors} SMs, {self.sm_clock_mhz} MHz, memory {self.memory_clock_mhz} MHz"


@dataclass(frozen=True, slots=True)
class Entry:
    """One layer at one M: the fastest configuration that gave right results.

    us: its time. rule_us: that of the configuration that the cost model chooses.
    """

    layer: LinearShape
    m: int
    spec: AnyMarlinSpec
    us: float
    rule_us: float

    def as_json(self) -> dict[str, Any]:
        kernel = kernel_name(self.spec)
        spec = {f.name: getattr(self.spec, f.name) for f in fields(self.spec) if f.name not in _LAYER_FIELDS}
        return asdict(self.layer) | {
            "m": self.m, "kernel": kernel, "revision": self.spec.revision, "spec": spec, "us": round(self.us, 3),
            "rule_us": round(self.rule_us, 3),
        }  # fmt: skip


def kernel_name(spec: AnyMarlinSpec) -> str:
    """``"skinny"``, ``"wgmma"`` or ``"mma_sync"``."""
    return next(name for name, kind in KERNELS.items() if type(spec) is kind)


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
    data = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.local/share"))
    return data / "cudatma" / "tuned.json"


def entries_for(path: Path, card: Gpu) -> list[dict[str, Any]]:
    """The entries of a file for this class of GPU, not yet parsed; none of a file that is not there.

    Raises OSError, ValueError with the reason for what is no such file.
    """
    try:
        sections = read_sections(path)
    except FileNotFoundError:
        return []
    mine = asdict(GpuClass.of(card))
    return [entry for section in sections if section["gpu"] == mine for entry in section["entries"]]


def parse_entry(raw: Any, target: Target) -> Entry:
    """An entry from its JSON. Raises ArgumentError, ArgumentTypeError, TargetError or KeyError if it cannot be run."""
    layer = LinearShape(*(raw[name] for name in ("k", "n", *_LAYER_FIELDS)))
    m, revision = _typed(raw, "m", int), _typed(raw, "revision", int)
    kernel = KERNELS.get(_typed(raw, "kernel", str))
    if kernel is None:
        raise ArgumentError("kernel", raw["kernel"], ", ".join(KERNELS))
    if revision != kernel.revision:
        raise ArgumentError("revision", revision, str(kernel.revision), f"the kernel changed; {retune_command([raw])}")
    if m < 1:
        raise ArgumentError("m", m, "1 and more")
    spec = _parse_spec(kernel, _typed(raw, "spec", dict), {name: raw[name] for name in _LAYER_FIELDS})
    spec.check_layer(layer.k)
    if ceil_div(layer.k, spec.block_k) < spec.cluster_k:
        raise ArgumentError("spec.cluster_k", spec.cluster_k, f"at most the stages of k = {layer.k}")
    if not has_room(spec, spec.blocks_per_sm):
        raise ArgumentError("spec.blocks_per_sm", spec.blocks_per_sm, "CTAs whose partial sums fit the workspace")
    spec.check_target(target)
    return Entry(layer, m, spec, _microseconds(raw, "us"), _microseconds(raw, "rule_us"))


def retune_command(entries: list[dict[str, Any]]) -> str:
    """What measures these entries again: entries of any schema, as far as they can be read. A file may be anybody's:
    only sizes and known names go into a command."""
    by_options: dict[str, list[dict[str, Any]]] = {}
    for raw in entries:
        if all(type(raw.get(name)) is int and 0 < raw[name] < 2**31 for name in ("k", "n", "m")):
            by_options.setdefault(_options(raw), []).append(raw)
    commands = []
    for options, alike in by_options.items():
        shapes = dict.fromkeys((raw["k"], raw["n"]) for raw in alike)
        named = "".join(f" --shape {k}x{n}" for k, n in list(shapes)[:_NAMED_SHAPES])
        more = " ..." if len(shapes) > _NAMED_SHAPES else ""
        sizes = ",".join(map(str, sorted({raw["m"] for raw in alike})))
        commands.append(f"cudatma tune{named}{more} --tokens {sizes}{options}")
    return "measure again with: " + ("; ".join(commands) or "cudatma tune")


def _options(raw: Mapping[str, Any]) -> str:
    """Of ``cudatma tune``, for an entry's layer; empty for the defaults."""
    dtype = " --dtype bfloat16" if raw.get("dtype") == "bfloat16" else ""
    size = raw.get("group_size")
    group = f" --group-size {size}" if type(size) is int and size != 128 else ""
    return dtype + group + (" --zeros" if raw.get("has_zeros") is True else "")


def _parse_spec(kernel: type[AnyMarlinSpec], raw: Mapping[str, Any], layer_fields: Mapping[str, Any]) -> AnyMarlinSpec:
    kinds = {f.name: {"int": int, "bool": bool, "str": str}[str(f.type)] for f in fields(kernel)}
    if unknown := sorted(set(raw) - set(kinds) | set(raw) & set(layer_fields)):
        raise ArgumentError("spec", ", ".join(unknown), f"fields of {kernel.__name__} that the layer does not give")
    given: dict[str, Any] = {name: _typed(raw, name, kinds[name]) for name in raw} | dict(layer_fields)
    missing = [f.name for f in fields(kernel) if f.name not in given]
    if missing:
        raise ArgumentError("spec", "no " + ", ".join(missing), f"every field of {kernel.__name__}")
    return kernel(**given)


def _typed(raw: Any, name: str, kind: type) -> Any:
    """A value of exactly this type: JSON's true is no number of CTAs."""
    value = raw[name]
    if type(value) is not kind:
        raise ArgumentTypeError(name, type(value).__name__, kind.__name__)
    return value


def _microseconds(raw: Any, name: str) -> float:
    value = raw[name]
    if type(value) not in (int, float) or not 0 < value < 1e9:
        raise ArgumentError(name, value, "microseconds, more than 0")
    return float(value)


def read_sections(path: Path) -> list[dict[str, Any]]:
    """The sections of a file. ValueError, with the reason, for what is no such file."""
    try:
        content = json.loads(read_regular(path).decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict) or "schema" not in content:
        raise ValueError("it is no file of tuning entries")
    if content["schema"] == 1:
        cells = [raw for section in _listed(content, "sections") for raw in _listed(section, "cells")]
        raise ValueError(f"an earlier version of cudatma wrote it, for other kernels; {retune_command(cells)}")
    if content["schema"] not in (SCHEMA, _SCHEMA_OF_FORMER_NAMES):
        raise ValueError(f"its schema is {shown(content['schema'])}, and this version of cudatma reads {SCHEMA}")
    sections = content.get("sections")
    if not isinstance(sections, list) or not all(map(_is_section, sections)):
        raise ValueError("its sections are damaged")
    if content["schema"] == _SCHEMA_OF_FORMER_NAMES:
        return [section | {"entries": [renamed_entry(raw) for raw in section["entries"]]} for section in sections]
    return sections


def _listed(value: object, name: str) -> list[dict[str, Any]]:
    """The objects of a list of an earlier file; whatever else it holds is left out."""
    found = value.get(name) if isinstance(value, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _is_section(section: object) -> bool:
    return (
        isinstance(section, dict)
        and isinstance(section.get("gpu"), dict)
        and isinstance(section.get("entries"), list)
        and all(isinstance(entry, dict) for entry in section["entries"])
    )


def store_entry(path: Path, gpu: GpuClass, entry: Entry) -> None:
    """Put an entry into the file, in place of an older one for the same layer and M; all else stays.

    Written aside and renamed, under a lock, so that many runs may share a file. What cannot be read as a file of tuning
    entries is renamed first, with a TuneFileWarning. Raises OSError, CacheError (a lock that never comes free).
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
        put_entry(sections, asdict(gpu), entry.as_json())
        write_sections(path, sections)


def put_entry(sections: list[dict[str, Any]], gpu: dict[str, Any], raw: dict[str, Any]) -> None:
    """Put an entry's JSON into the section of this GPU, in place of one for the same layer and M."""
    mine = next((section for section in sections if section["gpu"] == gpu), None)
    if mine is None:
        mine = {"gpu": gpu, "entries": []}
        sections.append(mine)
    mine["entries"] = [old for old in mine["entries"] if any(old.get(name) != raw[name] for name in _PROBLEM_FIELDS)]
    mine["entries"].append(raw)


def write_sections(path: Path, sections: list[dict[str, Any]]) -> None:
    """A whole file at once, an entry a line: written aside and renamed. Raises OSError."""
    parts = []
    for section in sections:
        entries = ",\n".join(json.dumps(entry) for entry in section["entries"])
        parts.append(f'{{"gpu": {json.dumps(section["gpu"])}, "entries": [\n{entries}\n]}}')
    _replace(path, f'{{"schema": {SCHEMA}, "sections": [\n' + ",\n".join(parts) + "\n]}\n")


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


def usable_entries(path: Path, card: Gpu, target: Target) -> tuple[list[Entry], list[str]]:
    """All usable entries of a file for a GPU, and what of it is not used and why, as lines of text. Never raises for
    what the file holds."""
    try:
        raws = entries_for(path, card)
    except (OSError, ValueError) as error:
        return [], [f"the whole file: {error}"]
    found, problems = [], []
    for raw in raws:
        try:
            found.append(parse_entry(raw, target))
        except (CudaTmaError, KeyError, TypeError, ValueError) as error:
            what = f"missing {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            sizes = ", ".join(f"{name} {shown(raw.get(name))}" for name in ("k", "n", "m"))
            problems.append(f"the entry {sizes}: {what}")
    return found, problems
