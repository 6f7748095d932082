"""Files of tuning entries: what they hold, validation when they are read, and writing that loses nothing.

::

    {"schema": 5, "sections": [{"gpu": {..}, "entries": [{family, problem, kernel, revision, spec, us, rule_us}]}]}

A section holds what was measured on one class of GPUs; sections of other GPUs stay in the file unchanged. An entry
holds for its kernel, spec and the kernel's ``revision``, which is raised whenever the kernel's timing changes.
docs/tuning.md describes every field.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic

from cudatma.build.files import locked, read_regular
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, TuneFileWarning, shown
from cudatma.kernels.family import Family, P, S
from cudatma.kernels.gpu import Gpu
from cudatma.target import Target, get_target

SCHEMA = 5
FILE_VARIABLE = "CUDATMA_TUNE_FILE"
#: Value of the variable that turns every tuning entry off, the shipped ones too.
NOTHING = "none"
_LOCK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class GpuClass:
    """Where measurements hold: target, number of SMs, and highest clocks in MHz."""

    target: str
    sm_count: int
    sm_clock_mhz: int
    memory_clock_mhz: int

    @classmethod
    def of(cls, gpu: Gpu) -> GpuClass:
        return cls(gpu.target, gpu.sm_count, gpu.clock_class_mhz, gpu.memory_clock_mhz)

    def __str__(self) -> str:
        return f"{self.target}, {self.sm_count} SMs, {self.sm_clock_mhz} MHz, memory {self.memory_clock_mhz} MHz"


@dataclass(frozen=True, slots=True)
class Entry(Generic[P, S]):
    """One problem: the fastest configuration that gave right results.

    us: its time. rule_us: that of the configuration that the cost model chooses.
    """

    problem: P
    spec: S
    us: float
    rule_us: float

    def as_json(self, family: Family[P, S]) -> dict[str, Any]:
        """As the file keeps it."""
        others = (*family.problem_fields, "version")
        spec = {f.name: getattr(self.spec, f.name) for f in _fields(family.config) if f.name not in others}
        return {"family": family.name} | self.problem.as_json() | {
            "kernel": self.spec.version, "revision": self.spec.revision, "spec": spec,
            "us": round(self.us, 3), "rule_us": round(self.rule_us, 3),
        }  # fmt: skip


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


def entries_for(path: Path, family: Family[P, S], gpu: Gpu) -> list[dict[str, Any]]:
    """A family's entries of a file for this class of GPU, not yet parsed; none of a file that is not there.

    Raises OSError; ValueError, with the reason, for a file that holds no tuning entries.
    """
    try:
        sections = read_sections(path)
    except FileNotFoundError:
        return []
    mine = asdict(GpuClass.of(gpu))
    entries = (entry for section in sections if section["gpu"] == mine for entry in section["entries"])
    return [entry for entry in entries if entry.get("family") == family.name]


def parse_entry(raw: Mapping[str, Any], family: Family[P, S], target: Target) -> Entry[P, S]:
    """An entry from its JSON. Raises ArgumentError, ArgumentTypeError, TargetError or KeyError if it cannot be run."""
    problem = family.read_problem(raw)
    revision, kernel = _typed(raw, "revision", int), _typed(raw, "kernel", str)
    if kernel not in family.kernels:
        raise ArgumentError("kernel", kernel, ", ".join(family.kernels), retune_command(problem, family))
    if revision != family.config.revision:
        remedy = f"the kernel changed; {retune_command(problem, family)}"
        raise ArgumentError("revision", revision, str(family.config.revision), remedy)
    given = {name: raw[name] for name in family.problem_fields} | {"version": kernel}
    spec = _parse_spec(family.config, _typed(raw, "spec", dict), given)
    spec.check(problem, target)
    return Entry(problem, spec, _microseconds(raw, "us"), _microseconds(raw, "rule_us"))


def retune_command(problem: P, family: Family[P, S]) -> str:
    """What measures a problem again."""
    raw = problem.as_json()
    changed = [(option.flag, raw[option.name]) for option in family.options if raw[option.name] != option.default]
    options = "".join(f" {flag}" if value is True else f" {flag} {value}" for flag, value in changed)
    return f"measure again with: cudatma tune {family.name} --shape {raw['k']}x{raw['n']} --m {raw['m']}{options}"


def _fields(kernel: type[Any]) -> tuple[Field[Any], ...]:
    return fields(kernel)


def _parse_spec(kernel: type[S], raw: Mapping[str, Any], given_by_problem: Mapping[str, Any]) -> S:
    kinds = {f.name: {"int": int, "bool": bool, "str": str}[str(f.type)] for f in _fields(kernel)}
    if unknown := sorted(set(raw) - set(kinds) | set(raw) & set(given_by_problem)):
        raise ArgumentError("spec", ", ".join(unknown), f"fields of {kernel.__name__} that the problem does not give")
    given: dict[str, Any] = {name: _typed(raw, name, kinds[name]) for name in raw} | dict(given_by_problem)
    missing = [f.name for f in _fields(kernel) if f.name not in given]
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
    """The sections of a file. ValueError, with the reason, for one that holds no tuning entries."""
    try:
        content = json.loads(read_regular(path).decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(content, dict) or type(content.get("schema")) is not int:
        raise ValueError("it is no file of tuning entries")
    if 0 < content["schema"] < SCHEMA:
        raise ValueError("an earlier version of cudatma wrote it; measure again with: cudatma tune")
    if content["schema"] != SCHEMA:
        raise ValueError(f"its schema is {shown(content['schema'])}, and this version of cudatma reads {SCHEMA}")
    sections = content.get("sections")
    if not isinstance(sections, list) or not all(map(_is_section, sections)):
        raise ValueError("its sections are damaged")
    return sections


def _is_section(section: object) -> bool:
    return (
        isinstance(section, dict)
        and isinstance(section.get("gpu"), dict)
        and isinstance(section.get("entries"), list)
        and all(isinstance(entry, dict) for entry in section["entries"])
    )


def store_entry(path: Path, gpu: GpuClass, family: Family[P, S], entry: Entry[P, S]) -> None:
    """Put an entry into the file, in place of an older one for the same problem; other entries stay.

    Written aside and renamed, under a lock: many runs may share a file. What cannot be read as a file of tuning
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
        put_entry(sections, asdict(gpu), entry.as_json(family), ("family", *entry.problem.as_json()))
        write_sections(path, sections)


def put_entry(
    sections: list[dict[str, Any]], gpu: dict[str, Any], raw: dict[str, Any], problem_fields: Sequence[str]
) -> None:
    """Put an entry's JSON into the section of this GPU, in place of one with the same problem fields."""
    mine = next((section for section in sections if section["gpu"] == gpu), None)
    if mine is None:
        mine = {"gpu": gpu, "entries": []}
        sections.append(mine)
    mine["entries"] = [old for old in mine["entries"] if any(old.get(name) != raw[name] for name in problem_fields)]
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
    path = path.resolve()  # a link stays one
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with aside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, aside)  # others may share it
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def usable_entries(path: Path, family: Family[P, S], gpu: Gpu) -> tuple[list[Entry[P, S]], list[str]]:
    """A family's usable entries of a file for a GPU, and what of it is not used and why, as lines of text. Never raises
    for what the file holds."""
    try:
        raws = entries_for(path, family, gpu)
    except (OSError, ValueError) as error:
        return [], [f"the whole file: {error}"]
    found, problems = [], []
    for raw in raws:
        try:
            found.append(parse_entry(raw, family, get_target(gpu.target)))
        except (CudaTmaError, KeyError, TypeError, ValueError) as error:
            problems.append(f"the entry {entry_sizes(raw, family)}: {entry_fault(error)}")
    return found, problems


def entry_sizes(raw: Mapping[str, Any], family: Family[Any, Any]) -> str:
    """Which entry it is, in words."""
    return ", ".join(f"{name} {shown(raw.get(name))}" for name in (*family.index, "m"))


def entry_fault(error: Exception) -> str:
    """What parse_entry() found wrong, in a line."""
    return f"missing {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
