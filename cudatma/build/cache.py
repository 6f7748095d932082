"""Cache of build artifacts in one private folder, which many processes may use at the same time.

::

    root/                    0700, $CUDATMA_CACHE_DIR or $XDG_CACHE_HOME/cudatma or ~/.cache/cudatma
      entries/<key>/         kernel.cu kernel.ptx kernel.cubin log.txt config.json manifest.json
      failed/<key>/          artifacts of the latest failed compilations
      facts/<key>/           small results that are slow to compute
      locks/<key>            exists while a process builds the key
      tmp/                   entries that are being written or discarded

An entry is written to tmp/ and renamed into place, so that every entry is either complete or absent. The manifest
contains the size and the SHA-256 of each file. An entry that does not match its manifest is a miss. Locks are flock(2)
locks, which end with the process. If the folder cannot be written, the cache is kept in the memory of the process.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from cudatma.build.files import locked, read_regular
from cudatma.errors import ArgumentError, ArgumentTypeError, CacheError

SCHEMA = 1
DIRECTORY_VARIABLE, SIZE_VARIABLE = "CUDATMA_CACHE_DIR", "CUDATMA_CACHE_SIZE_MB"
_DEFAULT_SIZE_MB = 1024
_ROOMS = ("entries", "failed", "facts", "locks", "tmp")
_MANIFEST, _FACT = "manifest.json", "fact.json"
# Error numbers of a rename to an existing folder or file.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_STORE_TURNS = 16
_KEY = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
#: Age in seconds above which files in tmp/ belong to killed processes.
_ABANDONED_SECONDS = 3600
_FAILURES_KEPT = 16
#: Pruning stops at this fraction of the limit, so that not every put() has to prune.
_PRUNE_TO = 0.9


def canonical(value: Any) -> Any:
    """Convert a value to JSON data that are the same in every process.

    A dataclass becomes its class and init fields, an enum or dtype becomes its name, a set becomes a sorted list, and
    bytes become their digest. Raises ArgumentTypeError for any other type.
    """
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return {"enum": f"{type(value).__qualname__}.{value.name}"}
    if is_dataclass(value) and not isinstance(value, type):
        kept = {f.name: canonical(getattr(value, f.name)) for f in fields(value) if f.init}
        return {"class": f"{type(value).__module__}.{type(value).__qualname__}", "fields": kept}
    if isinstance(value, bytes):
        return {"sha256": hashlib.sha256(value).hexdigest()}
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise ArgumentTypeError("key", value, "a mapping with string keys")
        return {name: canonical(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(part) for part in value]
    if isinstance(value, frozenset | set):
        return {"set": sorted((canonical(part) for part in value), key=lambda part: json.dumps(part, sort_keys=True))}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, np.generic):
        return canonical(value.item())
    raise ArgumentTypeError(
        "key", type(value).__name__, "a number, string, bytes, enum, dtype or dataclass, or a container of these types"
    )


def digest(parts: Mapping[str, Any]) -> str:
    """Return the key of an entry, the SHA-256 hash of the canonical JSON of ``parts`` as 64 hexadecimal digits."""
    text = json.dumps(canonical(parts), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Artifact:
    """A cache entry: key, folder (None for an entry in memory), and verified contents of its files."""

    key: str
    folder: Path | None
    files: Mapping[str, bytes] = field(repr=False)

    def text(self, name: str) -> str:
        """Return a file as text.

        Raises CacheError if the entry does not contain the file.
        """
        return self.read(name).decode()

    def read(self, name: str) -> bytes:
        """Return a file's bytes.

        Raises CacheError if the entry does not contain the file.
        """
        if name not in self.files:
            raise CacheError(
                f"cache entry {self.key} has no file {name}; its files are {', '.join(sorted(self.files))}"
            )
        return self.files[name]


def default_root() -> Path:
    """Return the default folder of the cache.

    The folder is $CUDATMA_CACHE_DIR if this variable is set, otherwise $XDG_CACHE_HOME/cudatma or ~/.cache/cudatma.
    Raises CacheError if $CUDATMA_CACHE_DIR is a relative path.
    """
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        path = Path(os.path.expanduser(named))  # a path with an unknown user stays relative
        if not path.is_absolute():
            raise CacheError(f"{DIRECTORY_VARIABLE} must be an absolute path, got {named}")
        return path
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification requires that relative paths are ignored.
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))) / "cudatma"


def size_limit_bytes() -> int:
    """Return the size limit of the cache in bytes.

    The limit in megabytes is $CUDATMA_CACHE_SIZE_MB if this variable is set, otherwise 1024. Raises CacheError if the
    variable is not a nonnegative integer.
    """
    text = os.environ.get(SIZE_VARIABLE, "").strip() or str(_DEFAULT_SIZE_MB)
    if not text.isdecimal() or len(text) > 12:
        raise CacheError(f"{SIZE_VARIABLE} must be from 0 to 999999999999 (megabytes), got {text}")
    return int(text) * 1_000_000


class Cache:
    """Cache of artifacts in the folder ``root``, by default default_root().

    The constructor raises CacheError if another user owns or can write to the folder or one of its parent folders,
    because kernels in the folder run on the user's GPU. If the folder cannot be created or written, the cache uses
    memory instead and issues one RuntimeWarning. ``folder`` is then None.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, *, limit_bytes: int | None = None) -> None:
        self.root = default_root() if root is None else Path(root)
        self.limit_bytes = size_limit_bytes() if limit_bytes is None else limit_bytes
        self._memory: dict[str, Artifact] = {}
        self.folder: Path | None = self.root
        try:
            own = [self.root, *(self.root / name for name in _ROOMS)]
            for part in (*reversed(self.root.parents), *own):
                if not part.is_dir():
                    part.mkdir(mode=0o700, exist_ok=True)
            for part in _holders(own):
                _require_safe(part, self.root)
            for part in own:
                _require_private(part)
            tempfile.TemporaryFile(dir=self.root / "tmp").close()
        except OSError as error:
            self._to_memory(error)

    def _to_memory(self, error: OSError) -> None:
        self.folder = None
        warnings.warn(
            f"cudatma keeps compiled kernels only in memory because {self.root} is not writable ({error}); {_REMEDY}",
            RuntimeWarning,
            stacklevel=3,
        )

    def get(self, key: str) -> Artifact | None:
        """Return an entry, or None if the entry is absent or its files do not match the manifest."""
        path = self._path("entries", key)
        if self.folder is None:
            return self._memory.get(key)
        files = _read_verified(path)
        if files is None:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # pruning orders entries by this time of last use
        return Artifact(key, path, files)

    def put(self, key: str, files: Mapping[str, bytes]) -> Artifact:
        """Store an entry, and prune the cache to its limit.

        An existing complete entry with this key is kept, and a damaged entry is replaced. If there is no space or no
        permission, the new entry is kept in memory and a RuntimeWarning is issued.
        """
        path = self._path("entries", key)
        _check_names(files)
        if self.folder is not None:
            try:
                self._store(path, files)
            except OSError as error:
                self._to_memory(error)
            else:
                with contextlib.suppress(OSError):
                    self._prune(spare=path)
                return Artifact(key, path, dict(files))
        return self._memory.setdefault(key, Artifact(key, None, dict(files)))

    def keep_failure(self, key: str, files: Mapping[str, bytes]) -> Path | None:
        """Keep the artifacts of a failed compilation, and return their folder, or None if it cannot be written."""
        path = self._path("failed", key)
        _check_names(files)
        if self.folder is None:
            return None
        try:
            self._discard(path)  # the same key may fail again with another header
            self._store(path, files)
            for old in _oldest_first(self.root / "failed")[:-_FAILURES_KEPT]:
                self._discard(old)
        except OSError:
            return None
        return path

    def recall(self, key: str) -> Any:
        """Return the JSON data that remember() stored under the key, or None."""
        path = self._path("facts", key)
        files = None if self.folder is None else _read_verified(path)
        return None if files is None else json.loads(files[_FACT])

    def remember(self, key: str, fact: Any) -> None:
        """Store a small amount of JSON data that is slow to compute, if the folder is writable."""
        path = self._path("facts", key)
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self._store(path, {_FACT: json.dumps(fact).encode()})

    @contextlib.contextmanager
    def lock(self, key: str, *, timeout_s: float = 600.0) -> Iterator[None]:
        """Lock a key, so that only one of the processes and threads that use this folder builds the entry.

        The lock ends with the process that holds it. The function does nothing if the cache is in memory or if the file
        system does not support locks. Raises CacheError if the lock is not free within ``timeout_s`` seconds.
        """
        path = self._path("locks", key)
        if self.folder is None:
            yield
            return
        with locked(path, timeout_s):
            yield

    def _path(self, folder: str, key: str) -> Path:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ArgumentError("key", key, "a string of 64 hexadecimal digits, as returned by digest()")
        return self.root / folder / key

    def _store(self, path: Path, files: Mapping[str, bytes]) -> None:
        """Write an entry to tmp/, then rename it into place."""
        aside = Path(tempfile.mkdtemp(dir=self.root / "tmp"))
        try:
            for name, data in files.items():
                (aside / name).write_bytes(data)
            (aside / _MANIFEST).write_bytes(_manifest(files))
            # Other processes may store or discard the same key between any two steps, so try several times.
            for turn in range(_STORE_TURNS):
                try:
                    aside.rename(path)
                    return
                except OSError as error:
                    if error.errno not in _TAKEN:
                        raise
                if _read_verified(path) is not None:
                    return
                self._discard(path)
                time.sleep(0.001 * turn)
            raise OSError(f"{path} cannot be read because other processes replace it too often")
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _discard(self, path: Path) -> None:
        """Remove an entry. The entry is renamed first, so that no process reads a part of it."""
        grave = Path(tempfile.mkdtemp(dir=self.root / "tmp"))
        with contextlib.suppress(FileNotFoundError):
            path.rename(grave / path.name)
        shutil.rmtree(grave, ignore_errors=True)

    def _prune(self, spare: Path) -> None:
        """Discard the least recently used entries until the others fit, and remove files of killed processes."""
        now = time.time()
        for left in _oldest_first(self.root / "tmp"):
            if now - _modified(left) > _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        entries = [(path, _size(path)) for path in _oldest_first(self.root / "entries")]
        total = sum(size for _, size in entries)
        if total <= self.limit_bytes:
            return
        for path, size in entries:
            if total <= self.limit_bytes * _PRUNE_TO:
                return
            if path != spare:
                self._discard(path)
                total -= size


_REMEDY = f"set {DIRECTORY_VARIABLE} to a folder that only you can write"


def _holders(own: Sequence[Path]) -> Iterator[Path]:
    """Yield every other folder in which a user could replace one of ``own``.

    These folders are the parents of ``own``, and the parents of the targets of symbolic links among them.
    """
    waiting = [path.absolute() for path in own]
    listed, visited = set(waiting), set[Path]()
    while waiting:
        parts = waiting.pop()
        for part in (parts, *parts.parents):
            if part in visited:
                continue
            visited.add(part)
            if part != parts and part not in listed:
                yield part
            if part.is_symlink():
                waiting.append(Path(os.path.normpath(part.parent.resolve() / part.readlink())))


def _require_safe(folder: Path, root: Path) -> None:
    """Raise CacheError if another user, other than root, owns the folder or can replace this user's files in it."""
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()):
        owner = f"{folder}, which contains {root}, belongs to user {status.st_uid}, not to user {os.geteuid()} or root"
        raise CacheError(f"{owner}; {_REMEDY}")
    is_open = status.st_mode & 0o002 or (status.st_mode & 0o020 and not _is_own_group(status.st_gid))
    if is_open and not status.st_mode & stat.S_ISVTX:
        mode = f"{status.st_mode & 0o7777:04o}"
        raise CacheError(
            f"{folder}, which contains {root}, is writable by other users (mode {mode}); run chmod go-w {folder}, or "
            f"{_REMEDY}"
        )


def _is_own_group(group: int) -> bool:
    """Return whether this user is the only member of a group, as is usual in distributions with a umask of 002."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == name and set(entry.gr_mem) <= {name}


def _require_private(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise CacheError(f"{folder} belongs to user {status.st_uid}, not to user {os.geteuid()}; {_REMEDY}")
    if status.st_mode & 0o022:
        mode = f"{status.st_mode & 0o777:04o}"
        raise CacheError(f"{folder} is writable by other users (mode {mode}); run chmod 700 {folder}, or {_REMEDY}")


def _check_names(files: Mapping[str, bytes]) -> None:
    for name in files:
        if not _FILE_NAME.fullmatch(name) or name == _MANIFEST:
            raise ArgumentError("key of files", name, f"a file name without a folder, other than {_MANIFEST}")


def _manifest(files: Mapping[str, bytes]) -> bytes:
    listed = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    return json.dumps({"schema": SCHEMA, "files": listed}, sort_keys=True, indent=1).encode()


def _read_verified(path: Path) -> dict[str, bytes] | None:
    """Return all files of an entry, or None if one of them does not match the manifest."""
    try:
        manifest = json.loads(read_regular(path / _MANIFEST))
        if manifest["schema"] != SCHEMA:
            return None
        files: dict[str, bytes] = {}
        for name, facts in manifest["files"].items():
            if not _FILE_NAME.fullmatch(name):
                return None
            data = read_regular(path / name)
            if len(data) != facts["bytes"] or hashlib.sha256(data).hexdigest() != facts["sha256"]:
                return None
            files[name] = data
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return files


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _oldest_first(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=_modified)


def _size(path: Path) -> int:
    total = 0
    with contextlib.suppress(OSError), os.scandir(path) as inside:
        for item in inside:
            with contextlib.suppress(OSError):
                total += item.stat(follow_symlinks=False).st_size
    return total
