"""Add a tuner's entries to the table that is part of the package.

An entry is added only if it is at least 2% faster than the cost model's choice.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
from collections.abc import Sequence

from cudatma.errors import CudaTmaError
from cudatma.kernels.marlin.choose import MARLIN, SHIPPED
from cudatma.kernels.tuning import parse_entry, put_entry, read_sections, write_sections
from cudatma.target import get_target

#: Minimum speedup over the cost model's choice.
MIN_GAIN = 1.02


def add(files: Sequence[Path], table: Path) -> str:
    """Add the entries in these files to the table. They replace older entries for the same layer and M.

    If an entry cannot run, raise ArgumentError before writing anything. Raise OSError or ValueError for a file that is
    not from a tuner.
    """
    additions = [
        (section["gpu"], raw) for file in files for section in read_sections(file) for raw in section["entries"]
    ]
    for gpu, raw in additions:
        parse_entry(raw, MARLIN, get_target(gpu["target"]))
    sections = read_sections(table) if table.exists() else []
    for gpu, raw in additions:
        put_entry(sections, gpu, raw, ("family", *_ORDER))
    for section in sections:
        kept = [raw for raw in section["entries"] if raw["rule_us"] >= MIN_GAIN * raw["us"]]
        section["entries"] = sorted(kept, key=lambda raw: tuple(raw[name] for name in _ORDER))
    write_sections(table, sections)
    table.chmod(0o644)  # everybody can read packages
    shipped = sum(len(section["entries"]) for section in sections)
    return f"{len(additions)} entries read, {shipped} in {table.name}"


_ORDER = ("k", "n", "dtype", "group_size", "has_zeros", "m")


def main(argv: Sequence[str] | None = None) -> int:
    """Update the table and return the exit status. If it is 2, nothing changed and the reason was printed."""
    parser = argparse.ArgumentParser(prog="tuned_tables.py", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="written by cudatma tune --file")
    try:
        print(add(parser.parse_args(argv).files, SHIPPED))
    except (CudaTmaError, OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
