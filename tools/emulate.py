"""What of a PTX file the emulator can run: every instruction by kind, and each one that it does not know.

Exit status 0 if all is covered, 1 if something is not.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # as a file it is the subcommand; the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["emulate", *sys.argv[1:]]))

import argparse
import json
from collections.abc import Sequence
from typing import Any

from cudatma.emulator.coverage import Coverage, coverage
from cudatma.emulator.lexer import MAX_CHARS
from cudatma.errors import ArgumentError

from .inspect_descriptor import open_source

EXAMPLES = """examples:
  cudatma emulate --coverage kernel.ptx
  cudatma emulate --coverage kernel.ptx --json
  nvcc -arch=sm_90a -ptx -o - kernel.cu | cudatma emulate --coverage -
"""


def read_ptx(source: str) -> str:
    """The text of a PTX file, or of standard input for ``-``. Raises ArgumentError where it cannot be read.

    PTX is ASCII; other bytes, which compilers copy into comments and file names, become backslash escapes.
    """
    with open_source(source, "--coverage") as stream:
        data = stream.read(MAX_CHARS + 1)
    if len(data) > MAX_CHARS:
        raise ArgumentError("--coverage", f"more than {MAX_CHARS} bytes", f"at most {MAX_CHARS} bytes of PTX")
    return data.decode("ascii", errors="backslashreplace")


def describe_coverage(found: Coverage) -> dict[str, Any]:
    """Coverage as plain data: counts, opcode -> count, and every instruction that is missing with its place."""
    return {
        "complete": not found.missing,
        "covered_instructions": sum(found.covered.values()),
        "missing_instructions": len(found.missing),
        "covered": dict(sorted(found.covered.items())),
        "missing": [
            {"function": function, "line": error.line, "source": error.source, "text": error.text, "why": error.message}
            for function, error in found.missing
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma emulate``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="cudatma emulate",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--coverage", metavar="FILE.ptx", required=True, help="PTX file to look through, or -")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    found = coverage(read_ptx(options.coverage))
    print(json.dumps(describe_coverage(found), indent=2) if options.json else found)
    return 1 if found.missing else 0
