"""Run the launches of a recording on the emulator and compare the results, for `cudatma emulate FOLDER`.

`cudatma record` writes the folder. The exit status is 0 if no launch has a hazard and all results are correct.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cudatma.emulator import Comparison, Report, Trace
from cudatma.errors import ArgumentError, CudaTmaError, duration
from cudatma.programs import RecordedLaunch, Recording, Replay, read_recording

from .emulate_run import launch_data, write_reports


def run_recording(options: argparse.Namespace) -> int:
    """Run the launches of a recording, print a line for each launch, and return the exit status."""
    recording = read_recording(Path(options.kernel))
    launches = _selected(recording, options.launch)
    settings = {"schedules": options.schedules, "seed": options.seed, "replay": options.replay}
    results, reports, failures = [], list[Report](), len(launches) == 0
    for number, launch in launches:
        started = time.perf_counter()
        try:
            replay = launch.run(**settings, trace=Trace() if options.html else None)
        except CudaTmaError as error:
            failures = True
            results.append(_describe(number, launch) | {"passed": False, "error": str(error)})
            _say(options.json, f"{number}: {launch.entry} ({launch.library}): {error}")
            continue
        seconds, passed = time.perf_counter() - started, replay.passes(options.tolerance)
        report = _report(launch, replay, options.tolerance)
        reports.append(report)
        failures |= not passed
        compared = [
            result | asdict(memory)
            for result, memory in zip(report.as_dict()["compared"], replay.comparisons, strict=True)
        ]
        result = {"passed": passed, "seconds": round(seconds, 3), "compared": compared}
        results.append(report.as_dict() | _describe(number, launch) | result)
        verdict = "ok" if passed else "FAILED"
        lines = [f"{number}: {launch.entry} ({launch.library}), {launch.place}: {verdict}, {duration(seconds)}"]
        lines += [f"  {line}" for hazard in replay.report.hazards for line in str(hazard).splitlines()]
        lines += [f"  {comparison}" for comparison in replay.comparisons] or ["  the launch changed no memory"]
        _say(options.json, *lines)
    written = write_reports(reports, options)
    if options.json:
        refused = [{"launch": what, "reason": reason} for what, reason in recording.refused]
        data = {"passed": not failures, "launches": results, "refused": refused, "other": recording.other_kernels}
        print(json.dumps(data, indent=2))
    else:
        for line in (*recording.not_recorded(), *(f"wrote {path}" for path in written)):
            print(line)
    return int(failures)


def _report(launch: RecordedLaunch, replay: Replay, tolerance: float) -> Report:
    """Return the report of a launch with its place in the program and its results, for an HTML page."""
    report = replay.report
    report.title, report.place = f"{launch.entry} ({launch.library})", launch.place
    for result in replay.comparisons:
        error = result.relative if result.relative is not None else float(result.different > 0)
        report.compared.append(Comparison(result.name, error, 0.0 if result.is_exact else tolerance))
    return report


def _selected(recording: Recording, number: int | None) -> list[tuple[int, RecordedLaunch]]:
    if number is None:
        return list(enumerate(recording))
    if not 0 <= number < len(recording):
        allowed = f"0 to {len(recording) - 1}" if recording else "omitted (the recording is empty)"
        raise ArgumentError("--launch", number, allowed)
    return [(number, recording[number])]


def _describe(number: int, launch: RecordedLaunch) -> dict[str, Any]:
    return {"number": number, "kernel": launch.entry} | launch_data(launch)


def _say(is_json: bool, *lines: str) -> None:
    if not is_json:
        print(*lines, sep="\n")
