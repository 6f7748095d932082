"""Show where the compiled kernels are kept and how much space they take; ``--clear`` removes them."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # as a file it is the subcommand; the checkout need not be installed
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

#: The folders below the root that hold one folder a kernel.
_FOLDERS = ("entries", "failed")


@dataclass(frozen=True, slots=True)
class Usage:
    """The cache folder, its compiled kernels, kept failures, the bytes of both and the limit that pruning holds."""

    path: str
    entries: int
    failures: int
    size_bytes: int
    limit_bytes: int


def folders(root: Path, kind: str) -> list[Path]:
    """The folders of one kind in the cache, by name; empty where there is no cache yet."""
    inside = root / kind
    return sorted(path for path in inside.iterdir() if path.is_dir()) if inside.is_dir() else []


def usage(root: Path) -> Usage:
    """What the cache at ``root`` holds; creates nothing. A file that another process removes meanwhile counts 0."""
    size = 0
    for kind in _FOLDERS:
        for path in (file for folder in folders(root, kind) for file in folder.glob("*")):
            try:
                size += path.stat().st_size
            except FileNotFoundError:
                continue
    return Usage(str(root), len(folders(root, "entries")), len(folders(root, "failed")), size, size_limit_bytes())


def clear(root: Path) -> int:
    """Remove every compiled kernel and kept failure; returns how many. Processes that hold a loaded kernel keep it.

    Each folder is renamed away first, so that a reader meets it whole or not at all. Raises CacheError where the cache
    is not private to this user or cannot be written.
    """
    if not root.is_dir():
        return 0
    if Cache(root).folder is None:
        raise CacheError(f"{root} cannot be written, so it cannot be cleared")
    removed = 0
    for path in (folder for kind in _FOLDERS for folder in folders(root, kind)):
        grave = tempfile.mkdtemp(dir=root / "tmp")
        try:
            path.rename(Path(grave) / path.name)
            removed += 1
        except FileNotFoundError:
            pass  # another process was faster
        finally:
            shutil.rmtree(grave, ignore_errors=True)
    return removed


def megabytes(size_bytes: int) -> str:
    """``"12.3 MB"``."""
    return f"{size_bytes / 1e6:.1f} MB"


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma cache``; returns the exit status."""
    parser = Parser("cudatma cache", __doc__, EXAMPLES)
    parser.add_argument("--clear", action="store_true", help="remove every compiled kernel")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    root = default_root()
    removed = clear(root) if options.clear else None
    found = usage(root)
    if options.json:
        print(json.dumps({**asdict(found), "removed": removed}, indent=2))
        return 0
    print(f"path      {found.path}")
    print(f"kernels   {found.entries}, and {found.failures} that did not compile")
    print(f"size      {megabytes(found.size_bytes)} of {megabytes(found.limit_bytes)}")
    if removed is not None:
        print(f"removed   {removed}")
    return 0
