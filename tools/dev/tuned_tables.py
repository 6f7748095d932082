"""Add a tuner's entries for a kernel family to the family's table, which is part of the package.

An entry is added only if it is at least 2% faster than the untuned choice.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
from collections.abc import Sequence
from typing import Any

from cudatma.errors import CudaTmaError
from cudatma.kernels.family import Family
from cudatma.kernels.registry import FAMILIES, family
from cudatma.kernels.tuning import parse_entry, put_entry, read_sections, shipped, write_sections
from cudatma.target import get_target

#: Minimum speedup over the untuned choice.
MIN_GAIN = 1.02


def add(files: Sequence[Path], kernel_family: Family[Any, Any], table: Path) -> str:
    """Add a family's entries in these files to its table. The new entries replace entries for the same layer and M.

    If an entry cannot run, raise ArgumentError before writing anything. Raise OSError or ValueError if `cudatma tune`
    did not write a file.
    """
    additions = [
        (section["gpu"], raw)
        for file in files
        for section in read_sections(file)
        for raw in section["entries"]
        if raw["family"] == kernel_family.name
    ]
    if not additions:
        raise SystemExit(f"the files contain no entries of the family {kernel_family.name}")
    order: tuple[str, ...] = ()
    for gpu, raw in additions:
        order = tuple(parse_entry(raw, kernel_family, get_target(gpu["target"])).problem.as_json())
    sections = read_sections(table) if table.exists() else []
    for gpu, raw in additions:
        put_entry(sections, gpu, raw, order)
    for section in sections:
        kept = [raw for raw in section["entries"] if raw["rule_us"] >= MIN_GAIN * raw["us"]]
        section["entries"] = sorted(kept, key=lambda raw: tuple(raw[name] for name in order))
    write_sections(table, sections)
    table.chmod(0o644)  # every user must be able to read the package
    count = sum(len(section["entries"]) for section in sections)
    return f"{len(additions)} entries read, {count} in {table.name}"


def main(argv: Sequence[str] | None = None) -> int:
    """Update the table and return the exit status, which is 2 if an error occurred and the table is unchanged."""
    parser = argparse.ArgumentParser(prog="tuned_tables.py", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="file that cudatma tune wrote")
    names = [name for name in FAMILIES if shipped(family(name)) is not None]
    parser.add_argument("--family", choices=names, default="marlin", help="kernel family (default: marlin)")
    options = parser.parse_args(argv)
    chosen = family(options.family)
    try:
        print(add(options.files, chosen, shipped(chosen) or Path()))
    except (CudaTmaError, OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
