"""CPU time of the emulator on one core, hazards on, one schedule: GEMMs, TMA operations, plain kernels, loading PTX."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    # One core: NumPy's matrix products would take more.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import argparse
import platform
import statistics
import time
from collections.abc import Sequence

from benchmarks.emulator_cases import Case, all_cases
from benchmarks.report import Cell, Result, Table, failure, machine_facts, print_table, shown

REPEATS = 5


def measure(case: Case, repeats: int) -> Cell:
    """Milliseconds of CPU time for one operation: in the first call, which compiles segments too, and in later ones."""
    call, error = case.prepare()
    times = []
    for _ in range(1 + repeats):
        begin = time.process_time()
        call()
        times.append((time.process_time() - begin) * 1e3 / case.operations)
    worst = error()
    cell: Cell = {"case": case.name, "first_ms": times[0], "ms": statistics.median(times[1:]), "bar_ms": case.bar_ms}
    if not worst <= case.tolerance:
        cell["error"] = f"the result is off by {worst:.3g}, allowed is {case.tolerance:.3g}"
    elif case.bar_ms is not None and cell["first_ms"] > case.bar_ms:
        cell["error"] = f"{cell['first_ms']:.3g} ms, the bar is {case.bar_ms:g} ms"
    return cell


def make_table(cells: Sequence[Cell]) -> Table:
    rows = tuple((c["case"], c.get("first_ms", "-"), c.get("ms", "-"), c.get("bar_ms") or "-") for c in cells)
    return Table(("one schedule, hazards on", "first call, ms", "later calls, ms", "bar, ms"), rows)


def processor() -> str:
    """The processor's model, as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench emulator``; exit status 1 where a result is wrong or a bar is missed."""
    parser = argparse.ArgumentParser(prog="cudatma bench emulator", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells as JSON")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"calls after the first one (default {REPEATS})")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this text")
    options = parser.parse_args(argv)
    repeats = max(1, options.repeats)
    machine = {**machine_facts(), "processor": processor()}
    result = Result({"repeats": repeats}, make_table, options.json, machine=machine)
    for case in all_cases():
        if options.only.lower() not in case.name.lower():
            continue
        try:
            cell = measure(case, repeats)
        except Exception as error:  # one case that fails does not end the run
            cell = {"case": case.name, "error": failure(error)}
        result.add(cell, f"{case.name:<44} {shown(cell.get('first_ms'))} {shown(cell.get('ms'))}")
    print_table(result.console, make_table(result.cells), "The emulator on one core")
    return 1 if any(cell.get("error") for cell in result.cells) else 0


if __name__ == "__main__":
    raise SystemExit(main())
