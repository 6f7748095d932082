"""Measure configurations of a kernel family on this GPU and store the fastest for later calls.

The cost model selects candidates for each layer and each M. The command compiles all candidates, checks their results
and measures their times with weights that are not in L2. As soon as a problem is measured, its fastest candidate is
written to the per-user tuning file, so an interrupted run can be continued with the same command.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["tune", *sys.argv[1:]]))

import argparse
import json
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cudatma.build.cache import default_root
from cudatma.build.kernel import default_target
from cudatma.build.prebuild import usable_cores
from cudatma.errors import ArgumentError, CudaTmaError, DriverError, counted, duration
from cudatma.kernels.family import Family
from cudatma.kernels.gpu import Gpu, gpu_of, imagined_gpu
from cudatma.kernels.registry import FAMILIES, family
from cudatma.kernels.tuning import FILE_VARIABLE, GpuClass, usable_entries, user_file
from cudatma.target import get_target

from .command_line import Parser, integer, output_file, seconds
from .model_layers import MODELS
from .problem_options import add_problem_options, meanings, problem_options
from .tune_compile import Kernels, compile_tasks, kernels_of
from .tune_plan import M_VALUES, Task, parse_m_values, parse_shape, plan, shapes_of
from .tune_run import Bench, Outcome, run

EXAMPLES = """examples:
  cudatma tune --model llama3-8b
  cudatma tune --shape 4096x14336 --shape 14336x4096 --m 1,16,64 --dtype bfloat16
  cudatma tune --model qwen2.5-7b --group-size 64 --zeros --candidates 24 --seconds 10
  cudatma tune --model llama3-70b --tensor-parallel 4
  cudatma tune --model llama3-70b --dry-run --target sm_90a --sm-count 132
  cudatma tune --model llama3-70b --compile-only --target sm_90a --sm-count 132
  cudatma tune gemm --shape 8192x8192 --m 4096 --dtype bfloat16
  cudatma tune attention --shape 4096x128 --q-length 4096 --heads 16 --batch 4 --causal
  cudatma tune experts --shape 2048x768 --experts 128 --top-k 8 --m 16,1024 --dtype bfloat16
"""


def main(argv: Sequence[str] | None = None, bench: Bench | None = None, gpu: Gpu | None = None) -> int:
    """Run ``cudatma tune``. Return 0 if all problems are measured (or compiled), 1 if some failed, 130 if interrupted.

    Tests pass ``bench`` and ``gpu`` to replace the installed GPU and its description. Raise ArgumentError for invalid
    options, GpuLostError if a candidate traps, and the errors of a missing GPU or compiler.
    """
    options = parser().parse_args(argv)
    measured = family(options.family)
    sizes = measured.sizes
    if not sizes.has_models:
        if options.model or not options.shape:
            field, allowed = ("--model", "omitted") if options.model else ("--shape", "passed")
            remedy = f"pass --shape KxN ({sizes.k} x {sizes.n}), and the {sizes.m} as --m"
            raise ArgumentError(field, ..., f"{allowed} for {measured.name}", remedy)
    elif not (options.shape or options.model):
        raise ArgumentError("--shape", ..., "passed unless --model is passed", f"the models are {', '.join(MODELS)}")
    shapes = shapes_of(options.shape, options.model, options.tensor_parallel)
    imagined = options.target is not None or options.sm_count is not None
    if imagined and not _needs_no_gpu(options):
        allowed = "combined with --dry-run or --compile-only"
        field = "--target" if options.target else "--sm-count"
        raise ArgumentError(field, ..., allowed, f"omit {field} to measure the installed GPU")
    gpu = gpu or _gpu(options, imagined)
    tasks = plan(measured, shapes, options.m, problem_options(measured.name, options), gpu, options.candidates)
    console = Console(stderr=True)
    if options.dry_run:
        _show_plan(tasks, gpu, options.json)
        return 0
    if options.compile_only:
        return _compile_only(tasks, gpu, options, console)
    path = _file(options.file)
    if bench is not None:
        return _tune(tasks, measured, bench, path, gpu, options, console)
    from .tune_measure import GpuBench  # needs CuPy

    with GpuBench(resolve_name(measured.trial)(options.device)).opened() as opened:
        return _tune(tasks, measured, opened, path, gpu, options, console)


def _tune(
    tasks: Sequence[Task],
    family: Family[Any, Any],
    bench: Bench,
    path: Path,
    gpu: Gpu,
    options: argparse.Namespace,
    console: Console,
) -> int:
    gpu_class, known = GpuClass.of(gpu), set()
    if not options.again:
        entries, problems = usable_entries(path, family, gpu)
        known = {entry.problem for entry in entries}
        for problem in problems:
            _say(console, f"{path}: not used: {problem}")
    _say(console, f"{counted(len(tasks), 'problem')} for {gpu_class}\ninto {path}")
    outcomes: list[Outcome] = []
    todo = [task for task in tasks if task.problem not in known]
    interrupted = False
    try:
        # If --jobs is 1, each kernel is compiled immediately before its measurement.
        kernels = _compile(todo, gpu, options, console) if options.jobs > 1 and todo else Kernels()
        with _progress(console, "tuning") as progress:
            bar = progress.add_task("", total=len(todo))

            def show(outcome: Outcome) -> None:
                outcomes.append(outcome)
                if outcome.status != "known":
                    progress.advance(bar)
                _say(progress.console, str(outcome))
                for label, why in outcome.dropped.items():
                    _say(progress.console, f"    dropped: {label}: {why}")

            run(
                tasks, bench, path, family, gpu_class,
                seconds=options.seconds, known=known, skip=options.skip, refused=kernels.refused, show=show,
            )  # fmt: skip
    except KeyboardInterrupt:
        interrupted = True
    measured = sum(outcome.status in ("tuned", "kept") for outcome in outcomes)
    end = (
        f"interrupted; {counted(measured, 'problem')} stored; run the same command again to continue"
        if interrupted
        else f"{counted(measured, 'problem')} measured"
    )
    _say(console, end)
    if options.json:
        record: dict[str, Any] = {"file": str(path), "gpu": str(gpu_class), "interrupted": interrupted}
        print(json.dumps(record | {"cells": [outcome.as_dict() for outcome in outcomes]}, indent=1))
    if interrupted:
        return 130
    return int(any(outcome.status == "failed" for outcome in outcomes))


def _compile(tasks: Sequence[Task], gpu: Gpu, options: argparse.Namespace, console: Console) -> Kernels:
    """Compile the kernels of all candidates into the cache."""
    users = kernels_of(tasks, options.skip)
    with _progress(console, "compiling") as progress:
        bar = progress.add_task("", total=len(users))
        kernels = compile_tasks(users, gpu.target, options.jobs, lambda: progress.advance(bar))
    _say(console, str(kernels))
    return kernels


def _compile_only(tasks: Sequence[Task], gpu: Gpu, options: argparse.Namespace, console: Console) -> int:
    """Fill the cache for a GPU that may be in another machine."""
    cache = default_root()
    try:
        _say(
            console,
            f"{counted(len(tasks), 'problem')} for {gpu.target}, {gpu.sm_count} SMs\ninto {cache}",
        )
        kernels = _compile(tasks, gpu, options, console)
    except KeyboardInterrupt:
        _say(console, "interrupted; the compiled kernels stay in the cache; run the same command again to continue")
        return 130
    for label, why in kernels.labels.items():
        _say(console, f"    does not compile: {label}: {why}")
    if options.json:
        record = {
            "target": gpu.target,
            "sm_count": gpu.sm_count,
            "cache": str(cache),
        }
        print(json.dumps(record | {"kernels": kernels.ready, "refused": kernels.labels}, indent=1))
    return int(any(task.candidates[0] in kernels.refused for task in tasks))


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _needs_no_gpu(options: argparse.Namespace) -> bool:
    return bool(options.dry_run or options.compile_only)


def _gpu(options: argparse.Namespace, imagined: bool) -> Gpu:
    if imagined:
        target = default_target() if options.target is None else get_target(options.target)
        return imagined_gpu(target, options.sm_count)
    try:
        return gpu_of(options.device)
    except (CudaTmaError, ImportError) as error:
        if isinstance(error, DriverError) and not _needs_no_gpu(options):
            remedy = "run cudatma tune on a machine with a GPU, or pass --dry-run or --compile-only"
            raise DriverError(error.call, error.code, error.detail, remedy) from error
        if not _needs_no_gpu(options):
            raise
        return imagined_gpu(default_target())


def _file(named: Path | None) -> Path:
    path = user_file() if named is None else named.absolute()
    if path is None:
        raise ArgumentError(FILE_VARIABLE, "none", "a path to write", f"unset {FILE_VARIABLE} or pass --file")
    return path


def _show_plan(tasks: Sequence[Task], gpu: Gpu, as_json: bool) -> None:
    if as_json:
        print(json.dumps([task.as_dict() for task in tasks], indent=1))
        return
    print(f"{counted(len(tasks), 'problem')} for {gpu.target}, {gpu.sm_count} SMs")
    for task in tasks:
        print(f"\n{task}: {counted(len(task.candidates), 'candidate')}, the untuned choice first")
        for candidate in task.candidates:
            print(f"  {duration(1e-6 * candidate.cost.us):>9} predicted, {candidate.cost.bound:<9} {candidate.label}")


def _progress(console: Console, name: str) -> Progress:
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


def parser() -> Parser:
    """Return the parser of ``cudatma tune``."""
    result = Parser("cudatma tune", __doc__, EXAMPLES)
    add = result.add_argument
    add("family", nargs="?", choices=FAMILIES, default="marlin", help="function to tune (default: marlin)")
    add(
        "--shape",
        type=parse_shape,
        action="append",
        default=[],
        metavar="KxN",
        help=f"sizes k and n, repeatable: {meanings('k', 'n')}",
    )
    help_models = f"measure the layers of this model, repeatable: {', '.join(MODELS)}"
    add("--model", choices=MODELS, action="append", default=[], metavar="NAME", help=help_models)
    help_gpus = (
        "number of GPUs across which the model is sharded: qkv and gate_up along N, o and down along K (default: 1)"
    )
    add("--tensor-parallel", type=integer(1, 10_000), default=1, metavar="GPUS", help=help_gpus)
    help_m = f"values of m: {meanings('m')} (default: {','.join(map(str, M_VALUES))})"
    add("--m", "--q-length", type=parse_m_values, default=list(M_VALUES), metavar="M,M,...", help=help_m)
    add_problem_options(add)
    add(
        "--candidates",
        type=integer(1, 10_000),
        default=12,
        metavar="N",
        help="number of candidates per problem (default: 12)",
    )
    add("--seconds", type=seconds, default=5.0, metavar="S", help="seconds of measurement per problem (default: 5)")
    add("--device", type=integer(0), default=0, metavar="N", help="ordinal of the GPU (default: 0)")
    add(
        "--file",
        type=output_file,
        metavar="FILE",
        help=f"output file (default: ${FILE_VARIABLE} or the per-user tuning file)",
    )
    add("--again", action="store_true", help="also measure the problems that are already in the file")
    add("--skip", action="append", default=[], metavar="LABEL", help="skip this candidate; repeatable")
    add("--json", action="store_true", help="print the results or the plan as JSON")
    cores = usable_cores()
    help_jobs = "number of compiler processes; 1: compile each kernel just before it runs (default: one per core)"
    add("--jobs", type=integer(1, 10_000), default=cores, metavar="N", help=help_jobs)
    instead = result.add_mutually_exclusive_group().add_argument
    instead("--dry-run", action="store_true", help="print the plan and exit (if there is no GPU, for an H200)")
    instead("--compile-only", action="store_true", help="fill the kernel cache without measuring; requires no GPU")
    add("--target", metavar="NAME", help="with --dry-run or --compile-only: target, such as sm_90a")
    help_sms = "with --target: number of SMs (default: 132; 170 for sm_120a)"
    add("--sm-count", type=integer(1, 10_000), metavar="N", help=help_sms)
    return result
