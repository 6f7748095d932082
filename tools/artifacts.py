"""Show the location and size of the cache of compiled kernels, or clear it with --clear."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["cache", *sys.argv[1:]]))

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from cudatma.build.cache import Cache, default_root, size_limit_bytes
from cudatma.errors import CacheError

from .command_line import Parser

EXAMPLES = """examples:
  cudatma cache
  cudatma cache --clear
  CUDATMA_CACHE_DIR=/tmp/mine cudatma cache --json
"""

#: Folders below the root that contain one folder for each kernel.
_FOLDERS = ("entries", "failed")


@dataclass(frozen=True, slots=True)
class Usage:
    """Size of the cache.

    Attributes
    ----------
    path : str
        The cache's folder.
    entries, failures : int
        Number of compiled kernels, and number of kernels that did not compile.
    size_bytes, limit_bytes : int
        Size of the cache in bytes, and the size above which old kernels are removed.
    """

    path: str
    entries: int
    failures: int
    size_bytes: int
    limit_bytes: int


def folders(root: Path, kind: str) -> list[Path]:
    """Return the cache's folders of one kind, sorted by name."""
    parent = root / kind
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


def usage(root: Path) -> Usage:
    """Return the usage of the cache at ``root`` without creating it. Files that are being deleted count as 0 bytes."""
    size = 0
    for kind in _FOLDERS:
        for path in (file for folder in folders(root, kind) for file in folder.glob("*")):
            try:
                size += path.stat().st_size
            except FileNotFoundError:
                continue
    return Usage(str(root), len(folders(root, "entries")), len(folders(root, "failed")), size, size_limit_bytes())


def clear(root: Path) -> int:
    """Remove all compiled kernels and stored failures, and return their number. Loaded kernels keep working.

    Each folder is renamed before it is removed, so that a reader sees either the complete folder or no folder. Raise
    CacheError if the cache is not private to this user or cannot be written.
    """
    if not root.is_dir():
        return 0
    if Cache(root).folder is None:
        raise CacheError(f"{root} is not writable, so its kernels cannot be removed")
    removed = 0
    for path in (folder for kind in _FOLDERS for folder in folders(root, kind)):
        trash = tempfile.mkdtemp(dir=root / "tmp")
        try:
            path.rename(Path(trash) / path.name)
            removed += 1
        except FileNotFoundError:
            pass  # another process removed it first
        finally:
            shutil.rmtree(trash, ignore_errors=True)
    return removed


def megabytes(size_bytes: int) -> str:
    """Format a size in bytes as megabytes, for example ``"12.3 MB"``."""
    return f"{size_bytes / 1e6:.1f} MB"


def parser() -> Parser:
    """Return the parser of ``cudatma cache``."""
    result = Parser("cudatma cache", __doc__, EXAMPLES)
    result.add_argument("--clear", action="store_true", help="remove all compiled kernels")
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma cache`` and return the exit status."""
    options = parser().parse_args(argv)
    root = default_root()
    removed = clear(root) if options.clear else None
    result = usage(root)
    if options.json:
        print(json.dumps({**asdict(result), "removed": removed}, indent=2))
        return 0
    print(f"path      {result.path}")
    print(f"kernels   {result.entries} compiled, {result.failures} failed")
    print(f"size      {megabytes(result.size_bytes)} of {megabytes(result.limit_bytes)}")
    if removed is not None:
        print(f"removed   {removed}")
    return 0
