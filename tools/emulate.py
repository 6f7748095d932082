"""Run a kernel on the CPU under many schedules and report its hazards.

KERNEL is one of the following:

- a .ptx or .cu file, or a launch file (.toml, .json);
- one of cudatma's kernels, with generated operands (see `cudatma emulate KERNEL --help` for its options);
- a Python program (.py), whose kernel launches run on the emulator (later arguments are passed to the program);
- a folder written by `cudatma record`, whose launches run again.

With --coverage, the command does not run a kernel. It lists the supported and the unsupported instructions of a PTX
file.

The exit status is 0 if there are no hazards and the result is correct, 1 if there is a hazard, a wrong result or an
infinite loop, and 2 if the command line is invalid.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["emulate", *sys.argv[1:]]))

import argparse
import inspect
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from cudatma.build.kernel import default_target
from cudatma.emulator import StepLimitError
from cudatma.emulator.api import STEP_LIMIT
from cudatma.emulator.instructions import Coverage, coverage
from cudatma.emulator.ptx.lexer import MAX_CHARS
from cudatma.errors import ArgumentError
from cudatma.kernels.registry import REGISTRY
from cudatma.target import get_target

from .command_line import DEFAULT_TARGET, Parser, add_source_options, integer, output_file, tolerance
from .emulate_launch import __doc__ as launch_grammar
from .emulate_program import run_program
from .emulate_recording import run_recording
from .emulate_run import Outcome, add_report_options, check_report_files, run_launch, run_sample, show, write_reports
from .inspect_descriptor import open_source

#: Registered kernels with generated operands.
EMULATED = [entry.name for entry in REGISTRY.values() if entry.emulated]
#: Default number of schedules for a kernel, and for each launch of a program or a recording.
_SCHEDULES, _SCHEDULES_OF_LAUNCHES = 10, 2
#: Options for programs, and for recordings.
_FOR_LAUNCHES = ("schedules", "seed", "replay", "html", "sarif", "json")
_FOR_PROGRAMS = (*_FOR_LAUNCHES, "target", "only", "step_limit")
_FOR_RECORDINGS = (*_FOR_LAUNCHES, "launch", "tolerance")
EXAMPLES = f"""arguments of a kernel
{(launch_grammar or "").partition("On the command line, an argument is one of")[2].strip(chr(10))}

examples:
  cudatma emulate tile_copy --schedules 50
  cudatma emulate marlin_mma_sync --m 16 --n 256 --k 512 --target sm_120a --trace marlin.svg --trace marlin.json
  cudatma emulate copy.cu --grid 4 --block 128 --arg x:float32[512]=arange --arg y:float32[512] --arg n:int32=512 \\
      --expect y=x.npy
  cudatma emulate gemm.cu -I cutlass/include -D STAGES=4 --std c++20 --entry gemm --block 128 --arg c:float32[64,64]
  cudatma emulate launch.toml --schedules 100 --seed 7
  cudatma emulate kernel.ptx --entry gemm --block 160 --shared-bytes 49152 --replay 31 --trace gemm.svg
  cudatma emulate --schedules 4 --only softmax program.py --rows 100
  cudatma emulate --coverage kernel.ptx
  nvcc -arch=sm_90a -ptx -o - kernel.cu | cudatma emulate --coverage -
"""

#: Help for the sizes of the registry's kernels, which are the keyword arguments of their samples.
_SIZES = {
    "m": "number of rows of the activations and of the result",
    "n": "number of columns of the weight or of B, and of the result",
    "k": "number of rows of the weight or of B",
    "dtype": "type of the operands",
    "group_size": "number of elements of K that share a scale; -1: all, 0: the default of the format",
    "format": "format of the weight: int4, mxfp4, nvfp4, fp8 or int8",
    "sm_count": "number of SMs; with fewer SMs, each CTA has more work and rings wrap around",
    "layout": "layout of A and B, R for row-major and C for column-major: RC, RR, CR, CC",
    "tile_m": "number of rows of a result tile; 0: the default",
    "tile_n": "number of columns of a result tile; 0: the default",
    "stages": "number of ring stages",
    "experts": "number of experts",
    "ctas": "number of CTAs of the routing kernel, 1 or 8",
    "direct": "whether each (token, expert) pair forms its own block",
    "top_k": "number of experts per token",
    "intermediate": "number of columns of the gate projection, and of the up projection",
    "seed": "seed of the random operands",
    "batch": "number of sequences",
    "heads": "number of query heads",
    "kv_heads": "number of key and value heads",
    "q_length": "number of queries per sequence",
    "k_length": "number of keys per sequence, or its maximum",
    "head_dim": "number of elements per head",
    "causal": "whether queries attend only to keys up to their own position",
    "page_size": "number of keys per cache page; 0: a contiguous cache",
    "rows": "number of rows of the array",
    "columns": "number of columns of the array",
    "pad": "number of zeros on each side",
    "elements": "number of elements of the array",
    "tile": "number of elements along each side of a tile",
    "halo": "number of elements around a tile",
    "size": "height and width of an image",
    "channels": "number of channels of an image",
    "taps": "height and width of the filter",
    "stride": "stride of the filter",
    "copies": "number of copies of the array, and of CTAs per cluster: 2, 4 or 8",
    "clusters": "number of clusters among which the array is divided",
    "arrays": "number of arrays to copy, each with a different shape",
    "path": "staged: through shared memory; direct: from global memory; copy: not permuted",
    "zeros": "whether the weight has zero points",
    "permute": "whether the weight has an activation order",
    "ranks": "number of GPUs in the all-reduce",
    "rank": "rank of the emulated GPU",
    "blocks": "maximum number of CTAs",
}


def read_ptx(source: str) -> str:
    """Return the text of a PTX file, or of standard input for ``-``. Raise ArgumentError if it cannot be read.

    PTX is ASCII, but compilers copy other bytes into comments and file names. These bytes become backslash escapes.
    """
    with open_source(source, "--coverage") as stream:
        data = stream.read(MAX_CHARS + 1)
    if len(data) > MAX_CHARS:
        raise ArgumentError("--coverage", f"more than {MAX_CHARS} bytes", f"PTX of at most {MAX_CHARS} bytes")
    return data.decode("ascii", errors="backslashreplace")


def describe_coverage(result: Coverage) -> dict[str, Any]:
    """Return coverage as plain data: totals, a count per opcode, and unsupported instructions with their places."""
    return {
        "complete": not result.missing,
        "covered_instructions": sum(result.covered.values()),
        "missing_instructions": len(result.missing),
        "covered": dict(sorted(result.covered.items())),
        "missing": [
            {"function": function, "line": error.line, "source": error.source, "text": error.text, "why": error.message}
            for function, error in result.missing
        ],
    }


def extents(text: str) -> tuple[int, ...]:
    """Parse "4", "4,2" or "4,2,1"."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"must be one to three positive integers, such as 4 or 4,2,1, got {text}")
    return sizes


def parser() -> Parser:
    """Return the parser of ``cudatma emulate``."""
    result = Parser("cudatma emulate", __doc__, EXAMPLES)
    kinds = ".ptx, .cu, .j2, .toml, .json or .py file, folder"
    result.add_argument("kernel", nargs="?", metavar="KERNEL", help=f"{kinds}, {', '.join(EMULATED)}")
    result.add_argument("--coverage", metavar="FILE.ptx", help="PTX file to check, or - for standard input")
    add_launch_options(result)
    _add_run_options(result)
    launches = result.add_argument_group("options for programs and folders")
    launches.add_argument("--only", metavar="NAME", help="check only kernels whose names contain NAME (programs)")
    help_launch = "run only this launch (folders; default: all)"
    launches.add_argument("--launch", type=integer(0), metavar="N", help=help_launch)
    return result


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the source and the launch of a kernel in a file."""
    add_source_options(parser)
    add, extent = parser.add_argument_group("launch options").add_argument, "X[,Y[,Z]]"
    add("--entry", metavar="NAME", help="name of the kernel or a part of the name (default: the only kernel)")
    add("--grid", type=extents, metavar=extent, help="number of CTAs (default: 1)")
    add("--block", type=extents, metavar=extent, help="number of threads per CTA (default: 32)")
    add("--cluster", type=extents, metavar=extent, help="number of CTAs per cluster (default: no cluster)")
    add("--shared-bytes", type=integer(0), metavar="N", help="dynamic shared memory per CTA in bytes (default: 0)")
    help_programmatic = "launch the kernel as a programmatic dependent launch"
    add("--programmatic", action="store_true", default=None, help=help_programmatic)
    add("--target", metavar="SM", help=f"architecture ({DEFAULT_TARGET})")
    add("--arg", action="append", default=[], metavar="ARG", help="next argument of the kernel (see below)")
    add(
        "--array",
        action="append",
        default=[],
        metavar="ARRAY",
        help="array that the kernel accesses only through tensor maps",
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run options").add_argument
    default = f"{_SCHEDULES}, or {_SCHEDULES_OF_LAUNCHES} for each launch of a program or folder"
    add("--schedules", type=integer(1), metavar="N", help=f"number of schedules (default: {default})")
    add("--seed", type=integer(0), default=0, metavar="S", help="seed of the random schedules (default: 0)")
    add("--replay", type=integer(0), metavar="K", help="run only schedule K")
    help_limit = f"maximum number of steps per schedule (default: {STEP_LIMIT})"
    add("--step-limit", type=integer(1), metavar="N", help=help_limit)
    result = parser.add_argument_group("result options")
    add, file = result.add_argument, "NAME=FILE.npy"
    add("--save", action="append", default=[], metavar=file, help="after the run, write an array to a file")
    add("--expect", action="append", default=[], metavar=file, help="after the run, compare an array with a file")
    help_tolerance = "maximum ||difference|| / ||expected|| (default: 0)"
    add("--tolerance", type=tolerance, default=0.0, metavar="E", help=help_tolerance)
    help_trace = "write a trace as a picture (.svg) or for Perfetto (.json)"
    add("--trace", action="append", default=[], type=output_file, metavar="FILE", help=help_trace)
    add_report_options(result)
    add("--json", action="store_true", help="print JSON (the output of a program goes to stderr)")


def _sample_options(name: str, rest: Sequence[str]) -> dict[str, Any]:
    """Parse the sizes of a registry kernel, which are the keyword arguments of its sample."""
    sizes = sample_parser(name)
    options, unknown = sizes.parse_known_args(list(rest))
    if unknown:
        sizes.refuse(unknown, parser())
    return vars(options)


def sample_parser(name: str) -> Parser:
    """Return the parser of the sizes of a registry kernel."""
    make = _sample_of(name)
    parser = Parser(
        f"cudatma emulate {name}",
        f"{REGISTRY[name].summary}. `cudatma emulate --help` lists the options of every kernel.",
    )
    for parameter in list(inspect.signature(make).parameters.values())[1:]:
        if parameter.name == "seed":
            continue  # --seed belongs to the schedules
        kind, default = type(parameter.default), parameter.default
        flag = f"--{parameter.name.replace('_', '-')}"
        help = f"{_SIZES.get(parameter.name, '')} (default: {parameter.default})"
        if kind is bool:
            parser.add_argument(flag, type=_flag, nargs="?", const=True, default=default, metavar="true", help=help)
        else:
            parser.add_argument(flag, type=kind, default=default, metavar=kind.__name__, help=help)
    return parser


def _flag(text: str) -> bool:
    """Parse "true" or "false"."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text}")
    return text == "true"


def _sample_of(name: str) -> Callable[..., Any]:
    make = REGISTRY[name].sample
    if make is None:
        raise ArgumentError(
            "KERNEL",
            name,
            f"a file or one of {', '.join(EMULATED)}",
            f"dump its PTX with `cudatma dump {name}`, and pass the file and its launch",
        )
    return make


def _run(options: argparse.Namespace, rest: Sequence[str]) -> Outcome:
    name = options.kernel
    if name in REGISTRY:
        sizes = _sample_options(name, rest)
        file_options = [
            field for field in ("entry", "grid", "block", "cluster", "shared_bytes") if getattr(options, field)
        ]
        if file_options or options.arg or options.array or options.save or options.expect:
            given = (
                ", ".join(f"--{field.replace('_', '-')}" for field in file_options)
                or "--arg, --array, --save, --expect"
            )
            raise ArgumentError("KERNEL", name, f"a file if {given} is passed")
        target = get_target(options.target) if options.target else default_target()
        return run_sample(_sample_of(name), target, sizes, options)
    return run_launch(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma emulate`` and return the exit status."""
    command, words = parser(), list(sys.argv[1:] if argv is None else argv)
    at = command.first_positional(words)
    kernel = "" if at is None else words[at]
    if at is not None and kernel.endswith(".py"):
        options = command.parse_args(words[: at + 1])
        command.require_only(options, _FOR_PROGRAMS, "a program")
        _set_schedules(options, _SCHEDULES_OF_LAUNCHES)
        check_report_files(options)
        return run_program(options, words[at + 1 :])
    if kernel not in REGISTRY and (kernel.endswith(".rec") or os.path.isdir(kernel)):
        options = command.parse_args(words)
        command.require_only(options, _FOR_RECORDINGS, "a folder")
        _set_schedules(options, _SCHEDULES_OF_LAUNCHES)
        check_report_files(options)
        return run_recording(options)
    return _run_kernel(command, words)


def _set_schedules(options: argparse.Namespace, default: int) -> None:
    if options.schedules is None:
        options.schedules = default


def _run_kernel(command: Parser, words: Sequence[str]) -> int:
    """Run a kernel from a file or a registered kernel, or list the coverage of a PTX file. Return the exit status."""
    without_help = [word for word in words if word not in ("-h", "--help")]
    options, rest = command.parse_known_args(without_help)
    if len(without_help) < len(words):
        if options.kernel not in REGISTRY:
            command.parse_args(["--help"])
        sample_parser(options.kernel).print_help()
        return 0
    if (options.kernel is None) == (options.coverage is None):
        allowed = "passed if --coverage is omitted" if options.kernel is None else "omitted if --coverage is passed"
        raise ArgumentError("KERNEL", ..., allowed, "see `cudatma emulate --help` for examples")
    is_file = options.kernel is None or options.kernel.endswith((".ptx", ".cu", ".j2", ".toml", ".json"))
    if options.kernel not in REGISTRY and not is_file:
        raise ArgumentError(
            "KERNEL", options.kernel, f"{', '.join(EMULATED)}, a .py, .ptx, .cu, .j2, .toml or .json file, or a folder"
        )
    if rest and options.kernel not in REGISTRY:
        command.refuse(rest)
    check_report_files(options)
    not_here = ("only", "launch")
    command.require_only(options, [each.dest for each in command.options if each.dest not in not_here], "a kernel")
    _set_schedules(options, _SCHEDULES)
    if options.coverage is not None:
        result = coverage(read_ptx(options.coverage))
        print(json.dumps(describe_coverage(result), indent=2) if options.json else result)
        return 1 if result.missing else 0
    try:
        outcome = _run(options, rest)
    except StepLimitError as error:
        print(f"cudatma: {str(error).replace('step_limit=', '--step-limit')}", file=sys.stderr)
        return 1
    outcome.written += write_reports([outcome.report], options)
    show(outcome, options.json)
    return 0 if outcome.passed else 1
