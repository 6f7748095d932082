"""Explain a kind of hazard or the choice of a kernel for a problem.

NAME is a kernel family (marlin, gemm, attention or experts) with the sizes of a problem, or one or more kinds of
hazards. Without NAME, the command lists all kinds of hazards. No GPU is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["explain", *sys.argv[1:]]))

import argparse
import json
from collections.abc import Sequence

from cudatma.build.kernel import default_target
from cudatma.emulator.hazards.explanation import HazardExplanation, explain, groups
from cudatma.emulator.hazards.hazard import CAUSES
from cudatma.errors import ArgumentError, alternatives
from cudatma.kernels.explain import Explanation, explained
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.registry import FAMILIES, family

from .command_line import DEFAULT_TARGET, Parser, output_folder
from .emulate_run import write_text
from .problem_options import add_problem_options, add_size_options, given_sizes, problem_options

EXAMPLES = """examples:
  cudatma explain
  cudatma explain read_before_load
  cudatma explain read_before_load --out example
  cudatma explain marlin --m 16 --n 4096 --k 4096
  cudatma explain attention --q-length 4096 --k-length 4096 --head-dim 128 --heads 16 --causal --json
  cudatma explain experts --m 64 --k 2048 --n 768 --experts 128 --top-k 8
"""


def explain_problem(name: str, options: argparse.Namespace) -> Explanation:
    """Explain the choice of a kernel for the problem on the command line. Raise ArgumentError or TargetError."""
    sizes = given_sizes(options)
    if sizes is None:
        raise ArgumentError("--m", ..., f"passed with {name}", "pass --m, --n and --k")
    problem = family(name).read_problem(sizes | problem_options(name, options))
    gpu = imagined_gpu(default_target() if options.target is None else options.target, options.sm_count)
    return explained(family(name), problem, gpu)


def explain_kinds(options: argparse.Namespace) -> list[HazardExplanation]:
    """Return the explanations of the kinds on the command line. Raise ArgumentError for an unknown name."""
    for kind in options.names:
        if kind in FAMILIES:
            raise ArgumentError("NAME", " ".join(options.names), f"{kind} without other names")
        if kind not in CAUSES:
            raise ArgumentError(
                "NAME", kind, ", ".join([*CAUSES, *FAMILIES]), "run `cudatma explain` for a list of kinds"
            )
    if given_sizes(options) is not None or options.target is not None:
        option = "--m" if options.target is None else "--target"
        raise ArgumentError(option, ..., f"combined with {alternatives(FAMILIES)}")
    return [explain(kind) for kind in options.names]


def parser() -> Parser:
    """Return the parser of ``cudatma explain``."""
    result = Parser("cudatma explain", __doc__, EXAMPLES)
    result.add_argument("names", nargs="*", metavar="NAME", help=f"kinds of hazards, or {alternatives(FAMILIES)}")
    help_out = "write the broken and the fixed kernel of each kind to this folder"
    result.add_argument("--out", type=output_folder, metavar="DIR", help=help_out)
    result.add_argument("--json", action="store_true", help="print JSON")
    sizes = result.add_argument_group("problem options", f"Problem for {alternatives(FAMILIES)}.")
    add_size_options(sizes.add_argument)
    sizes.add_argument("--target", metavar="SM", help=f"architecture ({DEFAULT_TARGET})")
    add_problem_options(sizes.add_argument)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma explain`` and return the exit status."""
    options = parser().parse_args(argv)
    if len(options.names) == 1 and options.names[0] in FAMILIES:
        choice = explain_problem(options.names[0], options)
        print(json.dumps(choice.as_dict(), indent=2) if options.json else choice)
        return 0
    explanations = explain_kinds(options)
    if options.out is not None and not explanations:
        raise ArgumentError("--out", ..., "combined with a kind of hazard", "run `cudatma explain` for a list of kinds")
    if options.out is not None:
        for explanation in explanations:
            for name, code in (("broken", explanation.broken), ("fixed", explanation.fixed)):
                write_text(options.out / name / explanation.file, code, "--out")
    if options.json:
        print(json.dumps([explanation.as_dict() for explanation in explanations or map(explain, CAUSES)], indent=2))
    elif explanations:
        print("\n\n".join(map(str, explanations)))
    else:
        for group, members in groups().items():
            print(f"{group}:", *(f"  {member.kind:<24} {member.meaning}" for member in members), "", sep="\n")
    return 0
