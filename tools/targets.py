"""List the architectures for which cudatma generates code, with their features."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["targets", *sys.argv[1:]]))

import json
import shutil
from collections.abc import Sequence
from typing import Any

from cudatma.target import FEATURES, KIB, TARGETS, get_target

from .command_line import Parser

EXAMPLES = """examples:
  cudatma targets
  cudatma targets sm_120a sm_121a
  cudatma targets --json
"""


def describe_target(name: str) -> dict[str, Any]:
    """Return the sizes of a target in bytes, and whether it has each feature."""
    target = get_target(name)
    return {
        "name": target.name,
        "compute_capability": ".".join(map(str, target.compute_capability)),
        "ptx_isa": ".".join(map(str, target.ptx_isa)),
        "smem_per_block_bytes": target.smem_per_block_bytes,
        "smem_per_sm_bytes": target.smem_per_sm_bytes,
        "max_cluster_blocks": target.max_cluster_blocks,
        "mma": target.mma,
        "launched_on": target.runs_here,
        "features": {feature: target.has(feature) for feature in FEATURES},
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    lines: dict[str, list[str]] = {
        "compute capability": [row["compute_capability"] for row in rows],
        "minimum PTX ISA": [row["ptx_isa"] for row in rows],
        "smem per CTA, KiB": [str(row["smem_per_block_bytes"] // KIB) for row in rows],
        "CTAs per cluster": [str(row["max_cluster_blocks"]) for row in rows],
        "launched on": ["yes" if row["launched_on"] else "-" for row in rows],
    }
    lines |= {feature: ["yes" if row["features"][feature] else "-" for row in rows] for feature in FEATURES}
    # On a narrow terminal, print several tables, one below the other.
    widths = [len(row["name"]) + 1 for row in rows]
    first = max(map(len, lines))
    per_table = max(1, (shutil.get_terminal_size().columns - first) // max(widths))
    for begin in range(0, len(rows), per_table):
        part = range(begin, min(begin + per_table, len(rows)))
        print(" " * first + "".join(f"{rows[i]['name']:>{widths[i]}}" for i in part))
        for label, cells in lines.items():
            print(f"{label:<{first}}" + "".join(f"{cells[i]:>{widths[i]}}" for i in part))
        if part.stop < len(rows):
            print()


def parser() -> Parser:
    """Return the parser of ``cudatma targets``."""
    result = Parser("cudatma targets", __doc__, EXAMPLES)
    result.add_argument("names", nargs="*", metavar="NAME", help="targets to show (default: all)")
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma targets`` and return the exit status."""
    options = parser().parse_args(argv)
    rows = [describe_target(name) for name in options.names or TARGETS]
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)
    return 0
