"""Record the kernel launches of a Python program on a machine with a GPU.

`cudatma emulate FOLDER` runs the recorded launches on the emulator on any machine. Options for the recording precede
the program's name. All arguments after the name are passed to the program. The exit status is that of the program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["record", *sys.argv[1:]]))

from cudatma.errors import ArgumentError
from cudatma.programs import record
from cudatma.programs.recorder import DEFAULT_LIMIT_MIB

from .command_line import Parser, integer, output_folder
from .emulate_program import run_script

EXAMPLES = """examples:
  cudatma record train.py --steps 1
  cudatma record --out softmax.rec --only softmax --limit-mib 64 program.py
  cudatma emulate softmax.rec --launch 3 --tolerance 1e-3
"""


def parser() -> Parser:
    """Return the parser of ``cudatma record``."""
    result = Parser("cudatma record", __doc__, EXAMPLES)
    result.add_argument("--out", type=output_folder, metavar="FOLDER", help="output folder (default: PROGRAM.rec)")
    result.add_argument("--only", metavar="NAME", help="record only kernels whose names contain NAME")
    limit = f"maximum MiB per launch; larger launches are listed but not recorded (default: {DEFAULT_LIMIT_MIB})"
    result.add_argument("--limit-mib", type=integer(1), default=DEFAULT_LIMIT_MIB, metavar="N", help=limit)
    result.add_argument("program", metavar="PROGRAM.py", nargs="?", help="program, followed by its arguments")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma record`` and return the exit status of the program."""
    command, words = parser(), list(sys.argv[1:] if argv is None else argv)
    at = command.first_positional(words)
    end = len(words) if at is None else at + 1
    options = command.parse_args(words[:end])
    if options.program is None or not os.path.isfile(options.program):
        raise ArgumentError("program", options.program, "a Python file, such as program.py")
    folder = options.out or Path(f"{Path(options.program).stem}.rec")
    with record(folder, limit_mib=options.limit_mib, only=options.only) as recorder:
        status = run_script(options.program, words[end:])
    print(f"{recorder}\nwrote {folder}; run it with: cudatma emulate {folder}", file=sys.stderr)
    return status
