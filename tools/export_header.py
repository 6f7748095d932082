"""Export all primitives and TmaPipeline as a self-contained header for CUDA code.

The header compiles with NVRTC and nvcc and includes no other files. It contains only the instructions that the target
supports.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["header", *sys.argv[1:]]))

from collections.abc import Sequence

from cudatma.build.kernel import default_target
from cudatma.build.render import render, template_root
from cudatma.target import TARGETS, Target, get_target

from .command_line import DEFAULT_TARGET, Parser, output_file
from .emulate_run import write_text

EXAMPLES = """examples:
  cudatma header --target sm_90a --out cudatma.cuh
  nvcc -arch=sm_90a my_kernel.cu
"""

#: Templates in the header in addition to ``primitives/``.
PARTS = ("parts/pipeline.cuh.j2",)


def header_templates() -> tuple[str, ...]:
    """Return the names of the header's templates, in order."""
    root = template_root()
    primitives = sorted(path.relative_to(root).as_posix() for path in (root / "primitives").glob("*.cuh.j2"))
    return (*primitives, *PARTS)


def export_header(target: str | Target) -> str:
    """Return the text of ``cudatma.cuh`` for a target. Raise TargetError if the target is unknown."""
    includes = "".join(f'//% include "{name}"\n' for name in header_templates())
    body = render(includes, None, target, is_source=True)
    opening = (
        f"// cudatma.cuh: TMA, mbarrier, ldmatrix, mma.sync and wgmma primitives for {get_target(target).name}.\n"
        "// Written by `cudatma header`. Each function wraps one PTX instruction and is named after it.\n"
        "#pragma once\n"
    )
    return opening + body.split("\n", 1)[1]  # replaces render's own first line


def parser() -> Parser:
    """Return the parser of ``cudatma header``."""
    result = Parser("cudatma header", __doc__, EXAMPLES)
    result.add_argument("--target", metavar="NAME", help=f"one of {', '.join(TARGETS)} ({DEFAULT_TARGET})")
    result.add_argument("--out", type=output_file, metavar="FILE", help="output file (default: standard output)")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma header`` and return the exit status."""
    options = parser().parse_args(argv)
    text = export_header(options.target or default_target())
    if options.out is None:
        print(text, end="")
        return 0
    write_text(options.out, text, "--out")
    print(f"wrote {options.out}")
    return 0
