"""Record a Python program's kernel launches on a machine with a GPU: `cudatma record program.py [ARGS]`.

`cudatma emulate FOLDER` runs the launches on the emulator, on any machine. Options before the program's name are for
the recording, and all words after it are the program's. The exit status is that of the program.
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

from .command_line import Parser
from .emulate_program import run_script

EXAMPLES = """examples:
  cudatma record train.py --steps 1
  cudatma record --out softmax.rec --only softmax --limit-mib 64 program.py
  cudatma emulate softmax.rec --launch 3 --tolerance 1e-3
"""


def _parser() -> Parser:
    parser = Parser("cudatma record", __doc__, EXAMPLES)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder to write (default: PROGRAM.rec)")
    parser.add_argument("--only", metavar="NAME", help="record only kernels whose name contains NAME")
    limit = f"maximum memory that a launch may reach; larger launches are only listed (default: {DEFAULT_LIMIT_MIB})"
    parser.add_argument("--limit-mib", type=int, default=DEFAULT_LIMIT_MIB, metavar="N", help=limit)
    parser.add_argument("program", metavar="PROGRAM.py", nargs="?", help="program, followed by its own arguments")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma record`` and return the exit status of the program."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = next((position for position, word in enumerate(words) if word.endswith(".py")), len(words))
    options = _parser().parse_args(words[: at + 1])
    if options.program is None or not os.path.isfile(options.program):
        raise ArgumentError("program", options.program, "a Python file, such as program.py")
    folder = options.out or Path(f"{Path(options.program).stem}.rec")
    with record(folder, limit_mib=options.limit_mib, only=options.only) as recorder:
        status = run_script(options.program, words[at + 1 :])
    print(f"{recorder}\nwrote {folder}; run it with: cudatma emulate {folder}", file=sys.stderr)
    return status
