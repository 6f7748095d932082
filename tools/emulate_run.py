"""Run a launch with a progress bar and print the result, for `cudatma emulate`."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cudatma.build.kernel import TEMPLATE_SUFFIX
from cudatma.build.ptx_source import PtxSource, ptx_source
from cudatma.emulator import Comparison, Report, Trace, load, report_page, report_sarif
from cudatma.emulator.progress import of_next
from cudatma.emulator.ptx.names import find_name
from cudatma.errors import ArgumentError, counted, duration, reason_of
from cudatma.kernels.sample import Sample
from cudatma.mutants.mutant import Call
from cudatma.programs import ProgramLaunch, RecordedLaunch
from cudatma.runtime.launch_args import Parameter, entries
from cudatma.target import Target

from .command_line import output_file, output_problem, source_arguments
from .emulate_launch import LaunchFile, Operands, load_array, make_operands, read_launch

#: Seconds before the first line of progress and between two lines, if stderr is not a terminal.
_FIRST_S, _PERIOD_S = 20.0, 60.0
_LAUNCH_FIELDS = ("entry", "grid", "block", "cluster", "shared_bytes", "programmatic", "target")


@dataclass(slots=True)
class Outcome:
    """Result of a run."""

    report: Report
    written: list[Path] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.report.passed

    def as_data(self) -> dict[str, Any]:
        """Return plain data, for --json."""
        return self.report.as_dict() | {"written": [str(path) for path in self.written]}


def launch_data(launch: ProgramLaunch | RecordedLaunch) -> dict[str, Any]:
    """Return the description of a program's launch, for --json."""
    return {name: getattr(launch, name) for name in ("place", "library", "grid", "block", "cluster", "shared_bytes")}


@contextmanager
def progress_bar(what: str, total: int, is_shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar with the remaining time on stderr, or print lines if stderr is not a terminal.

    Yield a function that takes the number of finished schedules and the number of steps in the running schedule.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rest = (TimeRemainingColumn(), TextColumn("left"))
    console = Console(stderr=True)
    hidden = not (is_shown and console.is_terminal)
    # A schedule may take minutes, so estimate the remaining time from a long period.
    with Progress(*columns, *rest, console=console, disable=hidden, transient=True, speed_estimate_period=3600) as bar:
        task = bar.add_task(what, total=total)
        bar.advance(task, 0)  # The estimate starts here.

        began = time.monotonic()
        next_at = began + _FIRST_S

        def show(done: int, steps: int) -> None:
            nonlocal next_at
            now = time.monotonic()
            if hidden and now >= next_at:
                next_at = now + _PERIOD_S
                print(f"cudatma: {done} of {total} {what}{of_next(steps)}, {duration(now - began)}", file=sys.stderr)
            bar.update(task, completed=done, description=what + of_next(steps))

        yield show


def _options(options: argparse.Namespace, trace: Trace | None) -> dict[str, Any]:
    """Return the options for EmulatedModule.launch."""
    settings = {"schedules": options.schedules, "seed": options.seed, "replay": options.replay, "trace": trace}
    if options.step_limit is not None:
        settings["step_limit"] = options.step_limit
    return settings | {"hazards": "collect"}


def _run_with_progress(run: Callable[..., Report], options: argparse.Namespace) -> Outcome:
    """Run with a progress bar, and write the traces."""
    for path in options.trace:
        if path.suffix not in (".svg", ".json"):
            raise ArgumentError("--trace", str(path), "a file with the suffix .svg or .json")
    trace = Trace() if options.trace or options.html else None
    schedules = 1 if options.replay is not None else options.schedules
    with progress_bar("schedules", schedules, not options.json) as progress:
        report = run(progress=progress, **_options(options, trace))
    if trace is not None:
        for path in options.trace:
            write_text(path, trace.to_svg() if path.suffix == ".svg" else trace.to_json(), "--trace")
    return Outcome(report, list(options.trace))


def add_report_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of write_reports()."""
    add = parser.add_argument
    add("--html", type=output_file, metavar="FILE", help="write the report as an HTML page")
    add("--sarif", type=output_file, metavar="FILE", help="write the hazards in SARIF 2.1.0 format for code scanning")


def check_report_files(options: argparse.Namespace) -> None:
    """Raise ArgumentError if two reports have the same file, or if a report would replace an input."""
    source = None if options.kernel is None else Path(options.kernel).resolve()
    files: dict[Path, str] = {}
    for option in ("html", "sarif"):
        if (path := getattr(options, option)) is None:
            continue
        file = path.resolve()
        if file in files:
            raise ArgumentError(f"--{option}", str(path), f"a file other than that of --{files[file]}")
        if source is not None and (file == source or source in file.parents) and source.exists():
            raise ArgumentError(f"--{option}", str(path), "a file that is not an input", "choose another name")
        files[file] = option


def write_reports(reports: Sequence[Report], options: argparse.Namespace) -> list[Path]:
    """Write the page (--html) and the SARIF file (--sarif) of some reports, and return their paths."""
    if options.html is not None:
        write_text(options.html, report_page(reports), "--html")
    if options.sarif is not None:
        write_text(options.sarif, report_sarif(reports), "--sarif")
    return [path for path in (options.html, options.sarif) if path is not None]


def write_text(path: Path, content: str, option: str) -> None:
    """Write a file and create its folder. Raise an ArgumentError with the name of the option."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(option, f"{path} ({reason_of(error)})", "a writable file") from error


def run_sample(
    make: Callable[..., Sample], target: Target, sizes: dict[str, Any], options: argparse.Namespace
) -> Outcome:
    """Run a registry kernel with generated operands and compare it with its reference."""
    sample = make(target, **sizes)
    outcome = _run_with_progress(sample.run, options)
    report = outcome.report
    report.title = f"{sample.title}, {target.name}"
    report.compared = [Comparison("result", sample.error(), sample.limit)] if report.is_clean else []
    return outcome


@dataclass(frozen=True, slots=True)
class FileLaunch:
    """A kernel in a file, and the description of its launch."""

    kernel: Path
    launch: LaunchFile
    source: PtxSource

    def call(self, operands: Operands) -> Call:
        """Return the launch with these operands. Raise ArgumentError unless one kernel matches the entry name."""
        fields, kernels = self.launch.launch, entries(self.source.ptx)
        entry = find_name(self.source.entry, list(kernels), "--entry", "kernels")
        parameters = kernels[entry]
        if len(operands.values) != len(parameters):
            listed = ", ".join(map(_parameter_text, parameters)) or "none"
            remedy = "pass one --arg per parameter, in order, such as --arg x:float32[64]=arange --arg n:int32=64"
            got = counted(len(operands.values), "argument")
            raise ArgumentError(
                "--arg", got, f"passed {counted(len(parameters), 'time')} for kernel {entry} ({listed})", remedy
            )
        # Arrays that are arguments already have names in the messages of hazards.
        others = [array for array in operands.arrays.values() if not any(array is value for value in operands.values)]
        return Call(
            entry,
            fields.get("grid", 1),
            fields.get("block", 32),
            tuple(operands.values),
            cluster=fields.get("cluster"),
            shared_bytes=fields.get("shared_bytes", 0),
            arrays=tuple(others),
            options=(
                ("target", fields.get("target") or self.source.target),
                ("programmatic", bool(fields.get("programmatic"))),
            ),
        )


def _parameter_text(parameter: Parameter) -> str:
    if parameter.is_pointer_wide:
        return f"{parameter.name}: a pointer or an 8-byte integer"
    kind = {"int": "integer", "float": "float"}.get(parameter.kind, "structure")
    return f"{parameter.name}: a {parameter.size_bytes}-byte {kind}"


def read_file_launch(options: argparse.Namespace) -> FileLaunch:
    """Return the kernel and the launch from the command line, which has precedence, and from a launch file.

    ``options`` has the options of emulate.add_launch_options(). Raise ArgumentError for an invalid description,
    CompileError if the kernel does not compile, and DriverError if NVRTC is missing.
    """
    path = Path(options.kernel)
    launch = read_launch(path) if path.suffix in (".toml", ".json") else LaunchFile()
    kernel = _kernel_of(path, launch)
    for name in _LAUNCH_FIELDS:
        if getattr(options, name) is not None:
            launch.launch[name] = getattr(options, name)
    for text in options.array:
        launch.add_array(text)
    for text in options.arg:
        launch.add_argument(text)
    fields = launch.launch
    arguments = source_arguments(options)
    folders, defines, flags = (_strings(fields, name) for name in ("include_dirs", "defines", "options"))
    arguments["include_dirs"] = [*arguments["include_dirs"], *(launch.folder / folder for folder in folders)]
    arguments["defines"], arguments["options"] = [*defines, *arguments["defines"]], [*flags, *arguments["options"]]
    source = ptx_source(kernel, entry=fields.get("entry"), target=fields.get("target"), **arguments)
    return FileLaunch(kernel, launch, source)


def _strings(fields: dict[str, Any], name: str) -> list[str]:
    """Return a field of a launch file that is a list of strings."""
    values = fields.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ArgumentError(f"launch file.{name}", str(values), "a list of strings")
    return values


def run_launch(options: argparse.Namespace) -> Outcome:
    """Run a kernel in a file, and compare and save its arrays."""
    file = read_file_launch(options)
    kernel, launch, source = file.kernel, file.launch, file.source
    for option in ("save", "expect"):
        for text in getattr(options, option):
            name, _, path = text.partition("=")
            if not path:
                raise ArgumentError(f"--{option}", text, "in the form NAME=FILE.npy")
            launch.check_array(name, f"--{option}")[option] = str(Path(path).absolute())
    operands = make_operands(launch)
    outputs, expected = _outputs(launch), _expected(launch, operands, options.tolerance)
    run = partial(file.call(operands).run, load(source.ptx, lines=source.lines))
    outcome = _run_with_progress(run, options)
    outcome.written += outputs.values()
    for name, path in outputs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as stream:
            np.save(stream, operands.arrays[name])
    report = outcome.report
    report.title = f"{kernel.name}, {report.kernel}"
    report.compared = [
        Comparison(name, _relative_error(operands.arrays[name], array), tolerance)
        for name, (array, tolerance) in expected.items()
    ]
    # Hazards refer to a template by its name without the suffix, and to a PTX file by the name "".
    name = kernel.name.removesuffix(TEMPLATE_SUFFIX) if source.lines else ""
    report.sources = replace(report.sources, paths={**report.sources.paths, name: str(kernel)})
    return outcome


def _kernel_of(path: Path, launch: LaunchFile) -> Path:
    """Return the file that contains the kernel. A launch file names it."""
    if path.suffix not in (".toml", ".json"):
        return path
    kernel = launch.launch.get("kernel")
    if not isinstance(kernel, str):
        raise ArgumentError("launch file.kernel", kernel, "the path of a .ptx or .cu file")
    return launch.folder / kernel


def _outputs(launch: LaunchFile) -> dict[str, Path]:
    """Return the file of each array that is saved. Raise ArgumentError if a file cannot be written."""
    paths = {name: launch.folder / array["save"] for name, array in launch.arrays.items() if "save" in array}
    for name, path in paths.items():
        if problem := output_problem(path):
            raise ArgumentError(f"arrays.{name}.save", f"{path} ({problem})", "a writable file")
    return paths


def _expected(launch: LaunchFile, operands: Operands, tolerance: float) -> dict[str, tuple[npt.NDArray[Any], float]]:
    """Return the expected value and the tolerance of each array that is compared."""
    expected = {}
    for name, described in launch.arrays.items():
        if "expect" not in described:
            continue
        array = load_array(launch.folder / described["expect"], f"arrays.{name}.expect")
        if array.shape != (shape := operands.arrays[name].shape):
            raise ArgumentError(f"arrays.{name}.expect", array.shape, f"an array of shape {shape}")
        maximum = described.get("tolerance", tolerance)
        if not isinstance(maximum, (int, float)) or not 0 <= maximum < math.inf:
            raise ArgumentError(f"arrays.{name}.tolerance", maximum, "a nonnegative, finite number")
        expected[name] = array, float(maximum)
    return expected


def _relative_error(array: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Return ||array - expected|| / ||expected||."""
    wide = expected.astype(np.float64)
    return float(np.linalg.norm(array.astype(np.float64) - wide)) / (float(np.linalg.norm(wide)) or 1.0)


# ---- output


def show(outcome: Outcome, as_json: bool) -> None:
    """Print an outcome as JSON, or as text with a list of hazards."""
    if as_json:
        print(json.dumps(outcome.as_data(), indent=2))
        return
    from rich.console import Console

    report = outcome.report
    # The terminal wraps long lines, because rich would split identifiers, paths and PTX.
    say = partial(Console().print, markup=False, highlight=False, soft_wrap=True)
    say(report.title)
    say(report.shape)
    for line in report.printed:
        say(f"printed   {line.rstrip()}")
    for number, hazard in enumerate(report.hazards, 1):
        first, *rest = str(hazard).splitlines()
        say(f"{number}. {first}", style="red")
        times = [f"  occurred {hazard.count} times"] if hazard.count > 1 else []
        for line in [*rest, *times, f"  reproduce with: --seed {hazard.seed} --replay {hazard.schedule}"]:
            say(f" {line}")
    for line in report.unchecked:
        say(f"unchecked: {line}")
    if report.hint:
        say(f"hint: {report.hint}")
    verdict = counted(len(report.hazards), "hazard") if report.hazards else "no hazards"
    run = ", ".join([counted(report.schedules, "schedule"), counted(report.steps, "step"), duration(report.seconds)])
    say(f"{verdict} in {run}", style="green" if report.is_clean else "red")
    for warning in report.warnings:
        say(f"warning: {warning}")
    if report.more:
        say(f"more: {report.more}")
    for comparison in report.compared:
        verdict = "within" if comparison.passed else "BEYOND"
        shown = f"{comparison.name}: relative error {comparison.error:.2e}, {verdict} {comparison.tolerance:g}"
        say(shown, style="green" if comparison.passed else "red")
    for path in outcome.written:
        say(f"wrote {path}")
