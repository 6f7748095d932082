"""Remove or change one synchronisation at a time in every kernel, and see what the emulator says of each mutant.

Kernels of the registry are always there; those of the probes where the tests of a checkout are.
Exit status 0 if 95 % are reported, at most 10 % exempt, and every unchanged kernel clean; 1 otherwise.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # as a file it is the subcommand; the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["mutants", *sys.argv[1:]]))

import importlib
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from typing import Any

from cudatma.errors import ArgumentError, counted
from cudatma.mutants import Trial
from cudatma.mutants.registry_subjects import registry_subjects
from cudatma.mutants.subject import Subject
from cudatma.mutants.tally import Result, is_enough, to_markdown

from .command_line import Parser

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
PAGE = ROOT / "docs" / "mutants.md"
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
#: Schedules of the unchanged kernels.
UNCHANGED_SCHEDULES = 50
#: Mutants that a process takes at a time.
_CHUNK = 8

EXAMPLES = """examples:
  cudatma mutants                       every kernel
  cudatma mutants marlin ring/3x4       these
  cudatma mutants --jobs 2 --update-docs
  cudatma mutants tile_copy --json
"""


@lru_cache(maxsize=1)
def all_subjects() -> dict[str, Subject]:
    """Name -> subject, of the registry and, in a checkout, of the probes."""
    found = registry_subjects()
    tests = ROOT / "tests" / "emulator"
    if (tests / "probe_subjects.py").is_file():
        for folder in (tests, tests.parent):
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
        found += importlib.import_module("probe_subjects").subjects()
    return {subject.name: subject for subject in found}


def chosen_subjects(names: Sequence[str]) -> list[Subject]:
    """Subjects by name, or all of a kernel. Raises ArgumentError for a name that none has."""
    subjects = all_subjects()
    known = {*subjects, *(subject.kernel for subject in subjects.values())}
    for name in names:
        if name not in known:
            raise ArgumentError("KERNEL", name, ", ".join(sorted(known)))
    return [s for s in subjects.values() if not names or s.name in names or s.kernel in names]


@lru_cache(maxsize=2)
def _trial(name: str) -> Trial:
    return all_subjects()[name].trial()


def _try_some(name: str, positions: Sequence[int], schedules: int) -> list[dict[str, Any]]:
    """What became of these mutants of a subject, as rows of Result."""
    trial = _trial(name)
    rows = []
    for outcome in trial.outcomes(schedules, [trial.mutants[position] for position in positions]):
        mutant = outcome.mutant
        rows.append(
            {
                "operator": mutant.operator,
                "verdict": outcome.verdict,
                "line": mutant.line,
                "text": mutant.text,
                "kinds": list(outcome.kinds),
                "note": outcome.note,
            }
        )
    return rows


def _unchanged(name: str, schedules: int) -> str:
    """The hazards of the kernel as it is; "" for none."""
    report = _trial(name).unchanged(schedules)
    return "" if report.is_clean else ", ".join(sorted(report.kinds))


def run(names: Sequence[str], schedules: int, jobs: int, *, show: bool) -> list[Result]:
    """Try all mutants of the subjects; a progress bar on stderr where ``show``."""
    from rich.console import Console
    from rich.progress import Progress

    subjects = chosen_subjects(names)
    results = {subject.name: Result(subject.name, UNCHANGED_SCHEDULES) for subject in subjects}
    with Progress(console=Console(stderr=True), disable=not show, transient=True) as progress:
        work = [(s.name, p) for s in subjects for p in [None, *_chunks(len(_trial(s.name).mutants))]]
        task = progress.add_task("mutants", total=len(work))
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in results}
        for name, found in _each(work, schedules, jobs):
            progress.update(task, advance=1, description=name)
            if isinstance(found, str):
                results[name].unclean = found
            else:
                rows[name] += found
        for name, some in rows.items():
            for row in sorted(some, key=lambda row: (row["line"], row["operator"], row["text"])):
                results[name].add(row)
    return list(results.values())


def _chunks(count: int) -> Iterator[range]:
    return (range(begin, min(begin + _CHUNK, count)) for begin in range(0, count, _CHUNK))


def _each(
    work: Sequence[tuple[str, range | None]], schedules: int, jobs: int
) -> Iterator[tuple[str, str | list[dict[str, Any]]]]:
    """(subject, what came of a piece of work), in any order."""
    if jobs == 1:
        for name, positions in work:
            yield name, _piece(name, positions, schedules)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_piece, name, positions, schedules): name for name, positions in work}
        for done in as_completed(running):
            yield running[done], done.result()


def _piece(name: str, positions: range | None, schedules: int) -> str | list[dict[str, Any]]:
    if positions is None:
        return _unchanged(name, UNCHANGED_SCHEDULES)
    return _try_some(name, positions, schedules)


def page_with(results: list[Result], schedules: int, page: str) -> str:
    """The documentation page with these tables between its marks. Raises ArgumentError where it has none."""
    if BEGIN not in page or END not in page:
        raise ArgumentError("docs/mutants.md", "a page without marks", f"{BEGIN} and {END}")
    head, rest = page.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    return f"{head}{BEGIN}\n\n{to_markdown(results, schedules)}\n{END}{tail}"


def stored_results(path: Path = RESULTS) -> tuple[list[Result], int]:
    """(results, schedules) of the last full run."""
    data = json.loads(path.read_text())
    return [Result.from_json(item) for item in data["results"]], int(data["schedules"])


def to_json(results: list[Result], schedules: int) -> dict[str, Any]:
    """What is stored and printed."""
    return {"schedules": schedules, "results": [result.to_json() for result in results]}


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma mutants``; returns the exit status."""
    parser = Parser("cudatma mutants", __doc__, EXAMPLES)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="a kernel or kernel/variant; default: all")
    parser.add_argument("--list", action="store_true", help="list kernels and how many mutants each has")
    parser.add_argument("--schedules", type=int, default=6, metavar="N", help="most schedules of a mutant (default 6)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--update-docs", action="store_true", help="write benchmarks/results/ and docs/mutants.md")
    options = parser.parse_args(argv)
    for field in ("schedules", "jobs"):
        if getattr(options, field) < 1:
            raise ArgumentError(f"--{field}", getattr(options, field), "1 and more")
    if options.update_docs and (options.kernels or not PAGE.is_file()):
        raise ArgumentError("--update-docs", options.kernels or "no docs/mutants.md", "a checkout, and every kernel")
    if options.list:
        counts = {subject.name: len(_trial(subject.name).mutants) for subject in chosen_subjects(options.kernels)}
        if options.json:
            print(json.dumps(counts, indent=1))
        for name, count in {} if options.json else counts.items():
            print(f"{name:<28} {counted(count, 'mutant'):>12}")
        return 0
    results = run(options.kernels, options.schedules, options.jobs, show=not options.json)
    if options.update_docs:
        data = json.dumps(to_json(results, options.schedules), indent=1)
        RESULTS.write_text(data + "\n")
        PAGE.write_text(page_with(results, options.schedules, PAGE.read_text()))
    if options.json:
        print(json.dumps(to_json(results, options.schedules), indent=1))
    else:
        print(to_markdown(results, options.schedules), end="")
    return 0 if is_enough(results) else 1
