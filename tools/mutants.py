"""Remove or change each synchronization of a kernel in turn and check that the emulator reports each mutant.

FILE is a .ptx or .cu file with launch options, or a launch file (.toml, .json), as for `cudatma emulate`. If a mutant
survives, this launch does not need the changed synchronization. To test the synchronization, choose a launch in which
rings wrap around or each CTA processes several tiles.

The exit status is 0 if the original kernel has no hazards and at least 95% of the nonexempt mutants are reported, 2 if
the command line is invalid, and 1 otherwise.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["mutants", *sys.argv[1:]]))

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cudatma.emulator import Report
from cudatma.errors import ArgumentError, counted
from cudatma.mutants import EXEMPT, REPORTED, SURVIVED, WRONG_KIND, Call, Mutant, Outcome, Trial
from cudatma.mutants.trial import MIN_REPORTED, VERDICTS, by_operator, by_verdict, reported_share

from .command_line import Parser, integer
from .emulate import add_launch_options
from .emulate_launch import make_operands
from .emulate_run import FileLaunch, progress_bar, read_file_launch

#: Number of schedules for the unchanged kernel.
UNCHANGED_SCHEDULES = 50
_TITLES = {REPORTED: "reported", WRONG_KIND: "other kind", EXEMPT: "exempt", SURVIVED: "survived"}

EXAMPLES = """examples:
  cudatma mutants launch.toml
  cudatma mutants kernel.ptx --grid 4 --block 160 --arg x:float32[512]=arange --arg y:float32[512] --arg n:int32=512
  cudatma mutants kernel.cu -I include -D STAGES=4 --block 160 --arg x:float32[512]=arange
  cudatma mutants launch.toml --list
  cudatma mutants launch.toml --json
"""


@dataclass(frozen=True, slots=True)
class Result:
    """Outcomes of a kernel's mutants, and the report of the unchanged kernel.

    No mutant runs if the unchanged kernel has hazards.
    """

    title: str
    unchanged: Report
    outcomes: list[Outcome]

    @property
    def passed(self) -> bool:
        return self.unchanged.is_clean and reported_share(by_verdict(self.outcomes)) >= MIN_REPORTED

    def as_data(self) -> dict[str, Any]:
        """Return plain data, for --json."""
        counts = by_verdict(self.outcomes)
        return {
            "kernel": self.title,
            "passed": self.passed,
            "unclean": sorted(self.unchanged.kinds),
            "counts": {verdict: counts[verdict] for verdict in VERDICTS},
            "mutants": [
                {**_described(outcome.mutant), "verdict": outcome.verdict, "kinds": outcome.kinds, "note": outcome.note}
                for outcome in self.outcomes
            ],
        }

    def as_text(self) -> str:
        """Return a table by operator, and a line for each mutant that was not reported as expected."""
        if not self.unchanged.is_clean:
            kinds = ", ".join(sorted(self.unchanged.kinds))
            return f"{self.title}: the unchanged kernel has hazards ({kinds}), so no mutant was run\n{self.unchanged}"
        counts = by_verdict(self.outcomes)
        rows = [*by_operator(self.outcomes).items(), ("all", counts)]
        lines = [f"{self.title}: {counted(len(self.outcomes), 'mutant')}; the unchanged kernel has no hazards", ""]
        lines.append(f"{'operator':<21}" + "".join(f"{_TITLES[verdict]:>11}" for verdict in VERDICTS))
        lines += [f"{name:<21}" + "".join(f"{row[verdict]:>11}" for verdict in VERDICTS) for name, row in rows]
        lines += ["", *(_missed(outcome) for outcome in self.outcomes if outcome.verdict != REPORTED)]
        if self.outcomes:
            lines.append(f"{100 * reported_share(counts):.0f}% of the mutants that are not exempt are reported")
        return "\n".join(lines)


def _described(mutant: Mutant) -> dict[str, Any]:
    return {name: getattr(mutant, name) for name in ("operator", "line", "text", "description")}


def _missed(outcome: Outcome) -> str:
    place = f"PTX line {outcome.mutant.line}: " if outcome.mutant.line else ""
    why = outcome.note or ", ".join(outcome.kinds)
    return f"{_TITLES[outcome.verdict]}: {place}{outcome.mutant.description}" + (f" ({why})" if why else "")


def trial_of(launch: FileLaunch) -> Trial:
    """Return the trial of the kernel in a file. Each mutant is launched with new arrays."""

    def make() -> Call:
        return launch.call(make_operands(launch.launch))

    return Trial(launch.source.ptx, make)


def run(launch: FileLaunch, schedules: int, *, show: bool) -> Result:
    """Run a clean kernel's mutants under up to ``schedules`` schedules. ``show`` enables a progress bar on stderr."""
    trial, outcomes = trial_of(launch), []
    with progress_bar("schedules of the kernel itself", UNCHANGED_SCHEDULES, show) as progress:
        report = trial.unchanged(UNCHANGED_SCHEDULES, progress=progress)
    chosen = trial.mutants if report.is_clean else []
    with progress_bar("mutants", len(chosen), show) as progress:
        for outcome in trial.outcomes(schedules, chosen):
            outcomes.append(outcome)
            progress(len(outcomes), 0)
    return Result(f"{launch.kernel.name}, {report.kernel}", report, outcomes)


def parser() -> Parser:
    """Return the parser of ``cudatma mutants``."""
    result = Parser("cudatma mutants", __doc__, EXAMPLES)
    result.add_argument("kernel", metavar="FILE", help=".ptx or .cu file, or launch file (.toml, .json)")
    add_launch_options(result)
    result.add_argument("--list", action="store_true", help="list the mutants without running them")
    help_schedules = "maximum number of schedules per mutant (default: 6)"
    result.add_argument("--schedules", type=integer(1), default=6, metavar="N", help=help_schedules)
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma mutants`` and return the exit status."""
    options = parser().parse_args(argv)
    if not options.kernel.endswith((".ptx", ".cu", ".j2", ".toml", ".json")):
        raise ArgumentError("FILE", options.kernel, "a .ptx, .cu, .toml or .json file")
    launch = read_file_launch(options)
    if options.list:
        mutants = trial_of(launch).mutants
        rows = [f"{mutant.operator:<21} {mutant.line or '':>5}  {mutant.text}" for mutant in mutants]
        print(json.dumps([_described(mutant) for mutant in mutants], indent=2) if options.json else "\n".join(rows))
        return 0
    result = run(launch, options.schedules, show=not options.json)
    print(json.dumps(result.as_data(), indent=2) if options.json else result.as_text())
    return 0 if result.passed else 1
