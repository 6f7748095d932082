"""Hardware counters of named cells: runs Nsight Compute on one launch each and keeps what explains its time."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import csv
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.plan import CellKey
from benchmarks.report import ROOT, Cell, Result, Table, failure, print_table, shown
from benchmarks.shapes import parse_shape
from benchmarks.subjects import SUBJECTS, TITLES, run_once

#: Sections of ncu that hold FIGURES. The full set takes more passes, and instruments each instruction.
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats", "LaunchStats")
#: Requested besides them: executed warp instructions in all and of two pipes. TMA does not go through the
#: load-store unit (lsu), cp.async does.
EXTRA_METRICS = (
    "smsp__inst_executed.sum",
    "sm__inst_executed_pipe_lsu.sum",
    "sm__inst_executed_pipe_alu.sum",
    "gpu__time_duration.sum",
)
#: Figure -> the columns that may hold it, of which the first that is there counts, and what to divide by.
FIGURES: dict[str, tuple[tuple[str, ...], float]] = {
    "us": (("gpu__time_duration.sum",), 1e3),
    "instructions": (("smsp__inst_executed.sum", "sm__inst_executed.sum"), 1),
    "lsu_instructions": (("sm__inst_executed_pipe_lsu.sum", "smsp__inst_executed_pipe_lsu.sum"), 1),
    "alu_instructions": (("sm__inst_executed_pipe_alu.sum", "smsp__inst_executed_pipe_alu.sum"), 1),
    "issue_slots_pct": (
        ("sm__inst_issued.avg.pct_of_peak_sustained_active", "smsp__issue_active.avg.pct_of_peak_sustained_active"),
        1,
    ),
    "dram_pct": (
        (
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        ),
        1,
    ),
    "l2_hit_pct": (("lts__t_sector_hit_rate.pct",), 1),
    "registers": (("launch__registers_per_thread",), 1),
}
#: The tensor pipe, whose columns are named after a GPU's kinds of instructions: cycles, or else instructions.
_TENSOR = (
    re.compile(r"sm__pipe_tensor\w*cycles_active\.avg\.pct_of_peak_sustained_active"),
    re.compile(r"sm__inst_executed_pipe_tensor\w*\.avg\.pct_of_peak_sustained_active"),
)
#: Cycles that a warp spends in this state for each instruction that it issues.
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(?!.*not_issued)(\w+?)_per_issue_active\.ratio")
_NO_STALL = "selected"
_TOP_STALLS = 3
_TIMEOUT_S = 240

Run = Callable[..., Any]


class ProfilerError(RuntimeError):
    """ncu is absent, ended with an error, or did not see the kernel."""


def command_of(ncu: str, child: Sequence[str], log: Path, *, extra: bool, kernels: str = "marlin") -> list[str]:
    """The command line that profiles a family's kernels of a child process into a CSV file.

    The clocks stay as they are: the benchmark does not change the settings of a GPU.
    """
    metrics = ["--metrics", ",".join(EXTRA_METRICS)] if extra else []
    how = ["--page", "raw", "--csv", "--print-units", "base", "--clock-control", "none", "--log-file", str(log)]
    sections = [word for section in SECTIONS for word in ("--section", section)]
    return [ncu, *sections, *metrics, *how, "--kernel-name", f"regex:{kernels}", *child]


def parse_csv(text: str) -> list[dict[str, str]]:
    """ncu's raw page: a row a kernel, by column. The row of units after the header and lines of ncu itself are
    dropped."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    return [row for row in rows if (row.get("ID") or "").strip()]


def number(text: str | None) -> float | None:
    """``"1,234.5"`` -> 1234.5; None for what is no number ("n/a")."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def figures(row: Mapping[str, str]) -> dict[str, Any]:
    """What is kept of one kernel. A figure whose columns this ncu or GPU does not have is None."""
    found: dict[str, Any] = {"kernel": row.get("Kernel Name", "")}
    for name, (columns, divisor) in FIGURES.items():
        value = next((value for column in columns if (value := number(row.get(column))) is not None), None)
        found[name] = None if value is None else value / divisor
    found["tensor_pct"] = _tensor_pct(row)
    stalls = {
        match[1]: value
        for column in row
        if (match := _STALL.fullmatch(column)) and (value := number(row[column])) and match[1] != _NO_STALL
    }
    found["stalls"] = dict(sorted(stalls.items(), key=lambda item: -item[1])[:_TOP_STALLS])
    return found


def _tensor_pct(row: Mapping[str, str]) -> float | None:
    """How busy the tensor pipe was: the busiest of its columns, as the one of all kinds includes the rest."""
    for pattern in _TENSOR:
        values = [value for name in row if pattern.fullmatch(name) and (value := number(row[name])) is not None]
        if values:
            return max(values)
    return None


def profile(child: Sequence[str], run: Run = subprocess.run, kernels: str = "marlin") -> list[dict[str, Any]]:
    """The figures of each kernel of a family, by a part of its name, that a child process launches, in order.

    Tried again without the extra metrics where this ncu does not know one of them. Raises ProfilerError.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise ProfilerError("ncu (Nsight Compute) is not on the PATH")
    said = ""
    with tempfile.TemporaryDirectory() as folder:
        for extra in (True, False):
            log = Path(folder) / f"ncu{extra:d}.csv"
            command = command_of(ncu, child, log, extra=extra, kernels=kernels)
            env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
            try:
                done = run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=env)
            except (OSError, subprocess.SubprocessError) as error:
                raise ProfilerError(failure(error)) from error
            text = log.read_text() if log.is_file() else ""
            if done.returncode == 0 and (rows := parse_csv(text)):
                return [figures(row) for row in rows]
            said = " ".join((*text.splitlines()[-3:], *done.stderr.splitlines()[-3:])) or "no kernel was profiled"
            if "ERR_NVGPUCTRPERM" in said:  # this user may not read counters
                break
    raise ProfilerError(said[:400])


def child_of(subject: str, key: CellKey) -> list[str]:
    """The process whose one GEMM ncu looks at."""
    script = str(Path(__file__).resolve())
    return [sys.executable, script, "--launch", subject, "--cells", f"{key.k}x{key.n}:{key.m}"]


def profile_cell(subject: str, key: CellKey, run: Run = subprocess.run) -> dict[str, Any]:
    """The figures of the longest Marlin kernel of one cell; ``{"error": why}`` where there are none."""
    try:
        found = profile(child_of(subject, key), run)
    except ProfilerError as error:
        return {"error": str(error)}
    return max(found, key=lambda each: each["us"] or 0.0)


def stalls_text(found: Mapping[str, Any]) -> str:
    """``"long_scoreboard 5.1, barrier 1.2"``: cycles for each issued instruction."""
    return ", ".join(f"{reason} {value:.1f}" for reason, value in found.get("stalls", {}).items()) or "-"


def counters_table(cells: Sequence[Cell]) -> Table:
    """A row a cell and subject."""
    rows = []
    for cell in cells:
        for subject, found in cell.get("ncu", {}).items():
            count = found.get("instructions")
            rows.append(
                (
                    *(f"{cell['k']} x {cell['n']}", cell["m"], TITLES[subject], shown(found.get("us"))),
                    *("-" if count is None else f"{count / 1e6:.2f}", shown(found.get("registers"), 0)),
                    *(shown(found.get(name), 1) for name in ("issue_slots_pct", "dram_pct", "tensor_pct")),
                    stalls_text(found),
                )
            )
    columns = ("K x N", "M", "kernel", "us", "M instructions", "registers", "issue %", "DRAM %", "tensor %", "stalls")
    note = (
        "Nsight Compute, one launch with cold caches, its time under the profiler. Instructions: of warps, millions; "
        "stalls: cycles that a warp waits for each instruction that it issues, the three longest reasons."
    )
    return Table(columns, tuple(rows), note)


def parse_cells(text: str) -> tuple[CellKey, ...]:
    """``"8192x28672:16,4096x4096:1"``. Raises ArgumentTypeError of argparse."""
    found = []
    for part in text.split(","):
        shape, _, m = part.partition(":")
        if not m.isdigit() or not int(m):
            raise argparse.ArgumentTypeError(f"{part!r}: write KxN:M, as in 8192x28672:16")
        found.append(CellKey(*parse_shape(shape), int(m)))
    return tuple(found)


DEFAULT_CELLS = "8192x28672:1,8192x28672:16,8192x28672:64,8192x28672:256,8192x28672:1024,8192x28672:4096"


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench ncu``; returns the exit status: 1 if a cell could not be profiled, 2 without ncu."""
    parser = argparse.ArgumentParser(prog="cudatma bench ncu", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    add("--cells", type=parse_cells, default=parse_cells(DEFAULT_CELLS), metavar="KxN:M,..", help="what to look at")
    add("--subjects", default="ours", metavar="S,..", help=f"of {', '.join(SUBJECTS)} (default: ours)")
    add("--launch", choices=SUBJECTS, help="launch the first cell once, for a profiler")
    options = parser.parse_args(argv)
    if options.launch:
        key = options.cells[0]
        run_once(options.launch, key.shape, key.m)
        return 0
    subjects = options.subjects.split(",")
    if unknown := set(subjects) - set(SUBJECTS):
        parser.error(f"--subjects {', '.join(sorted(unknown))}: of {', '.join(SUBJECTS)}")
    if shutil.which("ncu") is None:
        parser.exit(2, f"{parser.prog}: ncu (Nsight Compute) is not on the PATH\n")
    result = Result({"dtype": "float16", "group_size": 128}, counters_table, options.json)
    for key in options.cells:
        found = {subject: profile_cell(subject, key) for subject in subjects}
        cell: Cell = {"k": key.k, "n": key.n, "m": key.m, "ncu": found}
        if why := [f"{name}: {each['error']}" for name, each in found.items() if "error" in each]:
            cell["error"] = "; ".join(why)
        result.add(cell, f"{key}: " + "; ".join(f"{TITLES[name]} {stalls_text(each)}" for name, each in found.items()))
    print_table(result.console, counters_table(result.cells), "Counters")
    return int(any(cell.get("error") for cell in result.cells))


if __name__ == "__main__":
    raise SystemExit(main())
