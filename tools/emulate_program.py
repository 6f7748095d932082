"""Run a Python program's kernel launches on the emulator: `cudatma emulate program.py`.

Options before the program's name are for the emulator, and all words after it are the program's.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from cudatma.emulator.api import STEP_LIMIT
from cudatma.errors import ArgumentError, CudaTmaError
from cudatma.programs import LaunchEntry, LaunchLog, emulate_launches

from .command_line import DEFAULT_TARGET, Parser
from .emulate_run import add_report_options, hazard_data, write_reports


def run_program(words: Sequence[str], program: str, arguments: Sequence[str]) -> int:
    """Run a program under `emulate_launches`, print its launches, and return the exit status."""
    options = _parser().parse_args(words)
    if not os.path.isfile(program):
        raise ArgumentError("program", program, "a Python file")
    reported: set[tuple[Any, ...]] = set()
    with ExitStack() as stack:
        if options.json:
            stack.enter_context(redirect_stdout(sys.stderr))
        log = stack.enter_context(
            emulate_launches(
                target=options.target,
                schedules=options.schedules,
                seed=options.seed,
                replay=options.replay,
                hazards="collect",
                only=options.only,
                on_launch=None if options.json else lambda entry: _print(entry, reported),
                trace=options.html is not None,
                step_limit=options.step_limit,
            )
        )
        status = run_script(program, arguments)
    if not any(entry.is_checked for entry in log):
        which = f"a kernel whose name contains {options.only!r}" if options.only else "a kernel"
        print(f"cudatma: {program} did not launch {which} through a library that cudatma knows", file=sys.stderr)
        status = status or 1
    written = write_reports([entry.report for entry in log], options)
    if options.json:
        print(json.dumps({"passed": log.is_clean and not status, "launches": _data(log)}, indent=2))
    else:
        if not log.is_clean:
            print(f"  more: cudatma explain {' '.join(sorted({hazard.kind for hazard in log.hazards}))}")
        print(f"launches: {len(log)}, hazards: {len(log.hazards)}", *(f"wrote {path}" for path in written), sep="\n")
    return status or int(not log.is_clean)


def _parser() -> Parser:
    parser = Parser("cudatma emulate", __doc__)
    parser.add_argument("--schedules", type=int, default=2, metavar="N", help="number of schedules (default: 2)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the random schedules (default: 0)")
    parser.add_argument("--replay", type=int, metavar="K", help="run only schedule K of the seed")
    parser.add_argument(
        "--step-limit",
        type=int,
        default=STEP_LIMIT,
        metavar="N",
        help=f"maximum steps per schedule (default: {STEP_LIMIT})",
    )
    parser.add_argument("--target", metavar="SM", help=f"architecture ({DEFAULT_TARGET})")
    parser.add_argument("--only", metavar="NAME", help="check only kernels whose name contains NAME")
    add_report_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON; the program's output goes to stderr")
    return parser


def run_script(program: str, arguments: Sequence[str]) -> int:
    """Run a program as ``python program arguments`` does, and return its exit status."""
    saved = sys.argv, sys.path[:]
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).resolve().parent))
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except CudaTmaError as error:  # names the launch and its line
        print(f"cudatma: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        _print_traceback(error, program)
        return 1
    finally:
        sys.argv, sys.path[:] = saved
    return 0


def _print_traceback(error: Exception, program: str) -> None:
    """Print a traceback that begins in the program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != program:
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace or error.__traceback__))


def _print(entry: LaunchEntry, reported: set[tuple[Any, ...]]) -> None:
    """Print a line for a launch, followed by the hazards that no earlier launch had."""
    print(entry)
    for hazard in entry.report.hazards:
        key = hazard.kind, hazard.kernel, hazard.ptx_line, hazard.source
        if key not in reported:
            reported.add(key)
            print("  " + str(hazard).replace("\n", "\n  "))


def _data(log: LaunchLog) -> list[dict[str, Any]]:
    return [
        {
            "place": entry.launch.place,
            "library": entry.launch.library,
            "kernel": entry.launch.entry,
            "grid": entry.launch.grid,
            "block": entry.launch.block,
            "cluster": entry.launch.cluster,
            "shared_bytes": entry.launch.shared_bytes,
            "checked": entry.is_checked,
            "schedules": entry.report.schedules,
            "seconds": round(entry.seconds, 3),
            "hazards": [hazard_data(hazard) for hazard in entry.report.hazards],
            "warnings": [hazard_data(warning) for warning in entry.report.warnings],
        }
        for entry in log
    ]
