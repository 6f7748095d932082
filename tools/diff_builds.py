"""Compare two builds of kernels: registers, spills, shared memory, instructions, loops and code.

A and B are files or folders, as for `cudatma dump`, or kernels listed by `cudatma dump --list --json`. If A and B each
contain one kernel, these two kernels are compared. Otherwise, kernels are matched by name and target.

The exit status is 0 if the builds are equal, 1 if they differ, and 2 if the command line is invalid.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["diff", *sys.argv[1:]]))

import json
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from cudatma.build.kernel import default_target
from cudatma.errors import ArgumentError
from cudatma.kernels.registry import REGISTRY
from cudatma.review import KernelReport, assembled, compare, disassembled, reports
from cudatma.target import Target, get_target

from .command_line import DEFAULT_TARGET, Parser, add_source_options, source_arguments
from .dump_kernels import dump, jobs_for
from .review_files import images_of, is_file

EXAMPLES = """examples:
  cudatma diff before.cubin after.cubin
  cudatma diff out_before out_after                         compare folders written by cudatma dump
  cudatma diff kernel_v1.cu kernel_v2.cu --target sm_120a   compile and compare two files
  cudatma diff ~/.triton/cache/A... ~/.triton/cache/B...    compare two versions of a Triton kernel
  cudatma diff marlin_skinny_f16_g128_1x32x1024_k8_s3_d_sm_90a marlin_skinny_f16_g128_1x64x512_k4_s4_d_sm_90a
"""


def reports_of(argument: str, target: Target, source: Mapping[str, Any]) -> list[KernelReport]:
    """Return the reports of the kernels in a file or folder, or of a registered kernel."""
    for entry in REGISTRY.values():
        for job in jobs_for(entry, target, {}) if argument.startswith(entry.name) else ():
            if argument == job.name:
                with tempfile.TemporaryDirectory() as folder:
                    return [dump(job, Path(folder))]
    if not is_file(argument):
        allowed = f"a file, a folder, or a kernel that `cudatma dump --list --json --target {target.name}` lists"
        raise ArgumentError("A or B", argument, allowed)
    images = images_of(argument, [target], source)
    return [report for image in images for report in reports(disassembled(assembled(image)))]


def parser() -> Parser:
    """Return the parser of ``cudatma diff``."""
    result = Parser("cudatma diff", __doc__, EXAMPLES)
    result.add_argument("before", metavar="A", help="file, folder or kernel")
    result.add_argument("after", metavar="B", help="file, folder or kernel")
    result.add_argument("--target", metavar="NAME", help=f"architecture of kernels and sources ({DEFAULT_TARGET})")
    result.add_argument("--json", action="store_true", help="print JSON")
    add_source_options(result)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma diff`` and return the exit status."""
    options = parser().parse_args(argv)
    target = get_target(options.target) if options.target else default_target()
    before, after = (reports_of(name, target, source_arguments(options)) for name in (options.before, options.after))
    difference = compare(before, after)
    print(json.dumps(difference.as_dict(), indent=2) if options.json else difference)
    return 0 if difference.equal else 1
