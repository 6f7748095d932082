"""Configurations that take precedence over the cost model because the caller pinned or measured them.

Measured exceptions are tuning entries. Entries in the user's file take precedence over entries in the shipped table.
Each file is read once per process. An entry was measured for one problem. The entry also applies to nearby values of M
(see nearest()) if its tile divides M into the same number of tiles, because the work is then the same. If no entry for
the same problem applies, an entry with the same index fields (K and N for Marlin) is adapted to the other fields of the
problem, because the work is divided in the same way.

Reading a file validates it, and writing a file preserves all entries::

    {"schema": 5, "sections": [{"gpu": {..}, "entries": [{family, problem, kernel, revision, config, us, rule_us}]}]}

A section holds the measurements for one class of GPUs. Sections of other GPUs are not changed. An entry is valid for
its kernel, its config and the kernel's ``revision``, which is incremented whenever the kernel's timing changes. ``us``
and ``rule_us`` are the times of the entry and of the untuned choice in the same run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic

from cudatma.build.files import locked, read_regular
from cudatma.context import Cache, runtime
from cudatma.errors import (
    ArgumentError,
    ArgumentTypeError,
    CudaTmaError,
    TargetError,
    TuneFileWarning,
    quoted,
    shown,
)
from cudatma.kernels.config import Config
from cudatma.kernels.family import Family, P, S
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.schedule import ceil_div
from cudatma.target import Target, get_target

SCHEMA = 5
FILE_VARIABLE = "CUDATMA_TUNE_FILE"
#: Value of the environment variable that disables all tuning entries, including the shipped entries.
NOTHING = "none"
_LOCK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class GpuClass:
    """A class of GPUs for which measurements are valid, given by target, number of SMs and maximum clocks in MHz."""

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
    """The fastest configuration with correct results for one problem.

    Attributes
    ----------
    us : float
        Time of this configuration in microseconds.
    rule_us : float
        Time of the untuned choice in microseconds.
    """

    problem: P
    config: S
    us: float
    rule_us: float

    def as_json(self, family: Family[P, S]) -> dict[str, Any]:
        """Return the entry as it is stored in the file. Config fields with default values are omitted."""
        others = (*family.problem_fields, "version")
        values = {f.name: (getattr(self.config, f.name), f.default) for f in _fields(family.config)}
        config = {name: value for name, (value, default) in values.items() if name not in others and value != default}
        return {"family": family.name} | self.problem.as_json() | {
            "kernel": self.config.version, "revision": self.config.revision, "config": config,
            "us": round(self.us, 3), "rule_us": round(self.rule_us, 3),
        }  # fmt: skip


def user_file() -> Path | None:
    """Return the path of the user's tuning file, or None if $CUDATMA_TUNE_FILE is "none".

    The path is $CUDATMA_TUNE_FILE if it is set. Otherwise it is cudatma/tuned.json in $XDG_DATA_HOME, or in
    ~/.local/share if $XDG_DATA_HOME is not set. Raises ArgumentError if $CUDATMA_TUNE_FILE is a relative path.
    """
    named = os.environ.get(FILE_VARIABLE, "")
    if named == NOTHING:
        return None
    if named:
        path = Path(os.path.expanduser(named))
        if not path.is_absolute():
            raise ArgumentError(FILE_VARIABLE, named, f'an absolute path or "{NOTHING}"')
        return path
    base = os.environ.get("XDG_DATA_HOME", "")
    # The XDG base directory specification requires that relative paths are ignored.
    data = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.local/share"))
    return data / "cudatma" / "tuned.json"


def entries_for(path: Path, family: Family[P, S], gpu: Gpu) -> list[dict[str, Any]]:
    """Return a family's unparsed entries in a file for this class of GPUs. A missing file has no entries.

    Raises OSError, or ValueError with the reason if the file is not a tuning file.
    """
    try:
        sections = read_sections(path)
    except FileNotFoundError:
        return []
    gpu_class = asdict(GpuClass.of(gpu))
    entries = (entry for section in sections if section["gpu"] == gpu_class for entry in section["entries"])
    return [entry for entry in entries if entry.get("family") == family.name]


def parse_entry(raw: Mapping[str, Any], family: Family[P, S], target: Target) -> Entry[P, S]:
    """Parse an entry. Raises ArgumentError, ArgumentTypeError, TargetError or KeyError for an unusable entry."""
    problem = family.read_problem(raw)
    revision, kernel = _typed(raw, "revision", int), _typed(raw, "kernel", str)
    if kernel not in family.kernels:
        raise ArgumentError("kernel", kernel, quoted(family.kernels), retune_command(problem, family))
    if revision != family.config.revision:
        remedy = f"{retune_command(problem, family)}, because the kernel has changed"
        raise ArgumentError("revision", revision, str(family.config.revision), remedy)
    given = {name: raw[name] for name in family.problem_fields} | {"version": kernel}
    config = _parse_config(family.config, _typed(raw, "config", dict), given)
    config.check(problem, target)
    return Entry(problem, config, _microseconds(raw, "us"), _microseconds(raw, "rule_us"))


def retune_command(problem: P, family: Family[P, S]) -> str:
    """Return the command that measures a problem again."""
    raw = problem.as_json()
    changed = [(option.flag, raw[option.name]) for option in family.options if raw[option.name] != option.default]
    options = "".join(f" {flag}" if value is True else f" {flag} {value}" for flag, value in changed)
    return f"run `cudatma tune {family.name} --shape {raw['k']}x{raw['n']} --m {raw['m']}{options}` to measure again"


def _fields(kernel: type[Any]) -> tuple[Field[Any], ...]:
    return fields(kernel)


def _parse_config(kernel: type[S], raw: Mapping[str, Any], given_by_problem: Mapping[str, Any]) -> S:
    kinds = {f.name: {"int": int, "bool": bool, "str": str}[str(f.type)] for f in _fields(kernel)}
    if unknown := sorted(set(raw) - set(kinds) | set(raw) & set(given_by_problem)):
        raise ArgumentError(
            "config",
            ", ".join(unknown),
            f"a mapping that contains only fields of {kernel.__name__} that the problem does not determine",
        )
    given: dict[str, Any] = {name: _typed(raw, name, kinds[name]) for name in raw} | dict(given_by_problem)
    missing = [f.name for f in _fields(kernel) if f.name not in given and f.default is MISSING]
    if missing:
        allowed = f"a mapping with a value for every required field of {kernel.__name__}"
        raise ArgumentError("config", "no value for " + ", ".join(missing), allowed)
    return kernel(**given)


def _typed(raw: Any, name: str, kind: type) -> Any:
    """Return a value that must have exactly this type. A bool is not accepted as an int."""
    value = raw[name]
    if type(value) is not kind:
        raise ArgumentTypeError(name, type(value).__name__, kind.__name__)
    return value


def _microseconds(raw: Any, name: str) -> float:
    value = raw[name]
    if type(value) not in (int, float) or not 0 < value < 1e9:
        raise ArgumentError(name, value, "a positive number of microseconds")
    return float(value)


def read_sections(path: Path) -> list[dict[str, Any]]:
    """Return the sections of a file. Raises ValueError with the reason if the file is not a tuning file."""
    try:
        content = json.loads(read_regular(path).decode())
    except RecursionError as error:
        raise ValueError("the JSON in the file is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"the file is not JSON: {error}") from error
    if not isinstance(content, dict) or type(content.get("schema")) is not int:
        raise ValueError("the file contains no tuning entries")
    if 0 < content["schema"] < SCHEMA:
        raise ValueError("the file was written by an earlier version of cudatma; run `cudatma tune` to measure again")
    if content["schema"] != SCHEMA:
        raise ValueError(
            f"the file has schema {shown(content['schema'])}, but this version of cudatma reads schema {SCHEMA}"
        )
    sections = content.get("sections")
    if not isinstance(sections, list) or not all(map(_is_section, sections)):
        raise ValueError("the sections of the file are corrupt")
    return sections


def _is_section(section: object) -> bool:
    return (
        isinstance(section, dict)
        and isinstance(section.get("gpu"), dict)
        and isinstance(section.get("entries"), list)
        and all(isinstance(entry, dict) for entry in section["entries"])
    )


def store_entry(path: Path, gpu: GpuClass, family: Family[P, S], entry: Entry[P, S]) -> None:
    """Store an entry in the file, and replace an older entry for the same problem. Other entries are kept.

    The function locks the file while it writes a temporary file and renames it, because several runs may share the
    file. An invalid file is first renamed, with a TuneFileWarning. Raises OSError, or CacheError if the lock times out.
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
    """Put an entry's JSON into the section of this GPU, and replace an entry with the same problem fields."""
    section = next((section for section in sections if section["gpu"] == gpu), None)
    if section is None:
        section = {"gpu": gpu, "entries": []}
        sections.append(section)
    others = [old for old in section["entries"] if any(old.get(name) != raw[name] for name in problem_fields)]
    section["entries"] = [*others, raw]


def write_sections(path: Path, sections: list[dict[str, Any]]) -> None:
    """Write the whole file, one entry per line, atomically. Raises OSError."""
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
    warnings.warn(f"{path}: {why}; the file was renamed to {kept.name}", TuneFileWarning, stacklevel=3)


def _replace(path: Path, text: str) -> None:
    path = path.resolve()  # A symbolic link remains a link.
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with aside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, aside)  # Other users may share the file.
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def usable_entries(path: Path, family: Family[P, S], gpu: Gpu) -> tuple[list[Entry[P, S]], list[str]]:
    """Return the usable entries, and the reason why each other entry is unusable."""
    try:
        raws = entries_for(path, family, gpu)
    except (OSError, ValueError) as error:
        return [], [f"the whole file: {error}"]
    entries, problems = [], []
    for raw in raws:
        try:
            entries.append(parse_entry(raw, family, get_target(gpu.target)))
        except (CudaTmaError, KeyError, TypeError, ValueError) as error:
            problems.append(f"the entry {entry_sizes(raw, family)}: {entry_fault(error)}")
    return entries, problems


def entry_sizes(raw: Mapping[str, Any], family: Family[Any, Any]) -> str:
    """Return a description of an entry by its sizes."""
    return ", ".join(f"{name} {shown(raw.get(name))}" for name in (*family.index, "m"))


def entry_fault(error: Exception) -> str:
    """Return an error of parse_entry() as one line."""
    return f"field {error} is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]


#: Configuration that pinned() has set.
pinned_scope: ContextVar[Any] = ContextVar("pinned configuration", default=None)
#: An entry with at least this number of tiles applies up to twice its M, because one more tile hardly changes the work.
_MANY_TILES = 8
#: Maximum ratio of an entry's M to the smallest M to which the entry applies.
_LARGER_M = 1.25


@contextlib.contextmanager
def pinned(config: object) -> Iterator[None]:
    """Use a config for every call to its function inside the ``with`` block.

    The tuner uses this function to launch each candidate.

    Parameters
    ----------
    config : Config
        A config of gemm, marlin_gemm, attention or marlin_moe. Decode versions apply to attention_decode. Calls whose
        options determine the configuration are not affected.

    Raises
    ------
    ArgumentTypeError
        If ``config`` is not a Config.
    """
    if not isinstance(config, Config):
        allowed = "a config of gemm, attention, marlin_gemm or marlin_moe"
        raise ArgumentTypeError("config", type(config).__name__, allowed)
    token = pinned_scope.set(config)
    try:
        yield
    finally:
        pinned_scope.reset(token)


def pinned_config(family: Family[P, S], problem: P, gpu: Gpu, versions: Collection[str] | None = None) -> S | None:
    """Return the pinned config if its version is one of ``versions``, by default the family's kernels.

    Returns None if no such config is pinned, or if the problem has a constraint. Raises ArgumentError or TargetError if
    the config does not support the problem.
    """
    config = pinned_scope.get()
    if not isinstance(config, family.config) or problem.constraint:
        return None
    if config.version not in (family.kernels if versions is None else versions):
        return None
    given = problem.as_json()
    for name in family.problem_fields:
        if (got := getattr(config, name)) != given[name]:
            raise ArgumentError(
                f"pinned config: {name}", got, f"{given[name]} (the value in the problem)", "pin another config"
            )
    config.check(problem, get_target(gpu.target))
    return config


def entry_points(family: Family[P, S], problem: P, gpu: Gpu) -> list[int]:
    """Return the sorted values of M at which another tuning entry may begin to apply to a problem of this shape."""
    if problem.constraint or os.environ.get(FILE_VARIABLE) == NOTHING:
        return []
    raw = problem.as_json()
    index = tuple(raw[name] for name in family.index)
    entries = [entry for path, _ in _files(family) for entry in _entries(path, family, gpu, index)]
    measured = {entry.problem.m for entry in entries}
    points = {point for m in measured for point in (math.ceil(m / _LARGER_M), m, 2 * m)}
    # Problems with other fields use the entry with the nearest M, so the choice changes halfway between two entries.
    points |= {half for a in measured for b in measured if a < b for half in (ceil_div(a + b, 2), (a + b) // 2 + 1)}
    for entry in entries:
        tiles = ceil_div(entry.problem.m, entry.config.tile_m)
        points |= {1 + entry.config.tile_m * count for count in (tiles - 1, tiles, _MANY_TILES - 1)}
    return sorted(points)


@dataclass(frozen=True, slots=True)
class Match:
    """An entry and the file that contains the entry.

    Attributes
    ----------
    shipped : bool
        Whether the file ships with cudatma.
    exact : bool
        Whether the entry differs from the problem only in M. Otherwise, the entry was adapted.
    """

    entry: Entry[Any, Any]
    path: Path
    shipped: bool
    exact: bool = True


def lookup(family: Family[P, S], problem: P, gpu: Gpu) -> Match | None:
    """Return the tuning entry that applies to a problem, or None.

    The user's entries take precedence over the shipped entries.

    An invalid file does not raise an error. Each ignored part causes one TuneFileWarning per process.
    """
    if os.environ.get(FILE_VARIABLE) == NOTHING:
        return None
    raw = problem.as_json()
    index = tuple(raw[name] for name in family.index)
    files = [(_entries(path, family, gpu, index), path, shipped) for path, shipped in _files(family)]
    for entries, path, shipped in files:
        same = [entry for entry in entries if entry.problem.fixed == problem.fixed]
        if (match := nearest(same, problem.m)) is not None:
            return Match(match, path, shipped)
    for entries, path, shipped in files:
        if (adapted := _adapted_entry(entries, problem, get_target(gpu.target))) is not None:
            return Match(adapted, path, shipped, exact=False)
    return None


def every_entry_config(family: Family[P, S], problem: P, gpu: Gpu) -> Iterator[S]:
    """Yield the configurations of all tuning entries for the GPU, of any size, adapted to a problem."""
    if problem.constraint or os.environ.get(FILE_VARIABLE) == NOTHING:
        return
    target = get_target(gpu.target)
    for path, _ in _files(family):
        for index in _by_index(path, family, gpu):
            for entry in _entries(path, family, gpu, index):
                with contextlib.suppress(ArgumentError, TargetError):
                    config = entry.config.adapted(problem)
                    if config is not None:
                        config.check(problem, target)
                        yield config


def _adapted_entry(entries: Sequence[Entry[Any, Any]], problem: Any, target: Target) -> Entry[Any, Any] | None:
    """Return an entry for another problem with the same index fields, with the config adapted to this problem."""
    by_fixed: dict[Any, list[Entry[Any, Any]]] = {}
    for entry in entries:
        by_fixed.setdefault(entry.problem.fixed, []).append(entry)

    def distance(entry: Entry[Any, Any]) -> tuple[int, str]:
        return abs(entry.problem.m - problem.m), repr(entry.problem.fixed)

    candidates = (nearest(group, problem.m) for group in by_fixed.values())
    for entry in sorted(filter(None, candidates), key=distance):
        with contextlib.suppress(ArgumentError, TargetError):
            config = entry.config.adapted(problem)
            if config is not None:
                config.check(problem, target)
                return replace(entry, config=config)
    return None


def nearest(entries: Sequence[Entry[Any, Any]], m: int) -> Entry[Any, Any] | None:
    """Return the entry that applies to M, or None. All entries must differ only in M.

    An entry applies to M if its tile divides M into the same number of tiles as the entry's M, at most a quarter
    larger than M. An entry with at least 8 tiles applies up to twice its M. Among these entries, the one with the
    largest M up to the requested M takes precedence, followed by the one with the smallest M above it.
    """
    serving = [entry for entry in entries if _serves(entry, m)]
    below = [entry for entry in serving if entry.problem.m <= m]
    if below:
        return max(below, key=lambda entry: entry.problem.m)
    return min(serving, key=lambda entry: entry.problem.m, default=None)


def _serves(entry: Entry[Any, Any], m: int) -> bool:
    measured = entry.problem.m
    here, there = ceil_div(m, entry.config.tile_m), ceil_div(measured, entry.config.tile_m)
    if here == there:
        return bool(measured <= _LARGER_M * m)
    return bool(min(here, there) >= _MANY_TILES and measured <= m < 2 * measured)


def _files(family: Family[Any, Any]) -> list[tuple[Path, bool]]:
    try:
        path = user_file()
    except ArgumentError as error:
        _warn(str(error))
        path = None
    table = shipped(family)
    return ([] if path is None else [(path, False)]) + ([] if table is None else [(table, True)])


def shipped(family: Family[Any, Any]) -> Path | None:
    """Return the table that ships with a family."""
    return family.table


class _Read:
    """Contents of tuning files and the warnings already issued about them, which the Runtime holds.

    Each file is read once.
    """

    #: choice.forget() drops this cache.
    holds_choices = True

    def __init__(self) -> None:
        self.by_index: Cache[dict[tuple[Any, ...], list[dict[str, Any]]]] = Cache(16)
        self.entries: Cache[list[Entry[Any, Any]]] = Cache(256)
        self.warned: Cache[bool] = Cache(64)


def _read() -> _Read:
    part: _Read = runtime().part(_Read)
    return part


def _by_index(path: Path, family: Family[Any, Any], gpu: Gpu) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Return a file's unparsed entries, keyed by index fields. _entries() parses the entries that a problem needs."""
    read, key = _read(), (path, family, gpu)
    by_index = read.by_index.get(key)
    if by_index is not None:
        return by_index
    by_index = {}
    try:
        raws = entries_for(path, family, gpu)
    except (OSError, ValueError) as error:
        _warn(f"{path} is ignored: {error}")
        raws = []
    for raw in raws:
        index = tuple(raw.get(name) for name in family.index)
        if all(type(size) is int for size in index):
            by_index.setdefault(index, []).append(raw)
        else:
            sizes = ", ".join(f"{name} {shown(size)}" for name, size in zip(family.index, index, strict=True))
            _warn(f"{path}: the entry {sizes} is ignored because its sizes must be integers")
    read.by_index.put(key, by_index)
    return by_index


def _entries(path: Path, family: Family[Any, Any], gpu: Gpu, index: tuple[Any, ...]) -> list[Entry[Any, Any]]:
    """Return the usable entries with these index fields."""
    read, key = _read(), (path, family, gpu, index)
    entries = read.entries.get(key)
    if entries is not None:
        return entries
    entries, target = [], get_target(gpu.target)
    for raw in _by_index(path, family, gpu).get(index, []):
        try:
            entries.append(parse_entry(raw, family, target))
        except (CudaTmaError, KeyError, TypeError, ValueError) as error:
            _warn(f"{path}: the entry {entry_sizes(raw, family)} is ignored: {entry_fault(error)}")
    read.entries.put(key, entries)
    return entries


def _warn(text: str) -> None:
    """Issue a warning unless the same warning was already issued."""
    warned = _read().warned
    if text not in warned:
        warned.put(text, True)
        warnings.warn(text, TuneFileWarning, stacklevel=2)
