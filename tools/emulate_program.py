"""Run the kernel launches of a Python program on the emulator, for `cudatma emulate program.py`.

Options before the program's name apply to the emulator. Arguments after the name are passed to the program.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from cudatma.emulator.api import STEP_LIMIT
from cudatma.errors import ArgumentError, CudaTmaError
from cudatma.programs import LaunchEntry, LaunchLog, emulate_launches

from .emulate_run import launch_data, write_reports


def run_program(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run a program under `emulate_launches`, print its launches, and return the exit status."""
    program = options.kernel
    if not os.path.isfile(program):
        raise ArgumentError("program", program, "an existing Python file")
    process, folder = os.getpid(), Path.cwd()
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
                step_limit=STEP_LIMIT if options.step_limit is None else options.step_limit,
            )
        )
        status = run_script(program, arguments)
        if os.getpid() != process:  # The program has forked this process. The parent writes the reports.
            sys.stdout.flush()
            os._exit(status)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()  # Python also joins these threads at the end of a program.
    if not status and not any(entry.is_checked for entry in log):
        which = f" whose name contains {options.only!r}" if options.only else ""
        print(f"cudatma: {program} launched no kernel{which} through a supported library", file=sys.stderr)
        status = 1
    if log.child_processes:
        print(f"cudatma: child processes whose launches are not counted: {log.child_processes}", file=sys.stderr)
    os.chdir(folder)  # the paths of the reports are relative to this folder
    written = write_reports([entry.report for entry in log], options)
    if options.json:
        print(json.dumps({"passed": log.is_clean and not status, "launches": _data(log)}, indent=2))
    else:
        if not log.is_clean:
            print(f"  more: cudatma explain {' '.join(sorted({hazard.kind for hazard in log.hazards}))}")
        print(f"launches: {len(log)}, hazards: {len(log.hazards)}", *(f"wrote {path}" for path in written), sep="\n")
    return status or int(not log.is_clean)


class _SharedStream:
    """A stream that the program can close without closing it for cudatma."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None:
        self._stream.flush()


def run_script(program: str, arguments: Sequence[str]) -> int:
    """Run a program as ``python program arguments`` does, and return its exit status."""
    saved = sys.argv, sys.path[:]
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).resolve().parent))
    try:
        with redirect_stdout(_SharedStream(sys.stdout)):
            runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except CudaTmaError as error:  # the message names the launch and its line
        print(f"cudatma: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        _print_traceback(error, program)
        return 1
    finally:
        sys.argv, sys.path[:] = saved
    return 0


def _print_traceback(error: Exception, program: str) -> None:
    """Print a traceback without the frames before the program's first frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != program:
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace or error.__traceback__))


def _print(entry: LaunchEntry, reported: set[tuple[Any, ...]]) -> None:
    """Print a launch in one line, then those of its hazards that are not yet in ``reported``."""
    print(entry)
    for hazard in entry.report.hazards:
        key = hazard.kind, hazard.kernel, hazard.ptx_line, hazard.source
        if key not in reported:
            reported.add(key)
            print("  " + str(hazard).replace("\n", "\n  "))


def _data(log: LaunchLog) -> list[dict[str, Any]]:
    return [
        entry.report.as_dict()
        | launch_data(entry.launch)
        | {"checked": entry.is_checked, "seconds": round(entry.seconds, 3)}
        for entry in log
    ]
