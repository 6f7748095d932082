"""Run mutants on the emulator and summarize the outcomes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from cudatma.emulator import EmulatedModule, Report, StepLimitError, TrapError, load
from cudatma.errors import CudaTmaError
from cudatma.mutants.exemptions import Exemptions
from cudatma.mutants.launch_mutants import mutants_of_call
from cudatma.mutants.mutant import Call, Mutant
from cudatma.mutants.operators import OPERATORS, mutants_of

#: Verdicts on a mutant. Reported: an expected hazard was reported. Wrong kind: only other hazards were reported.
#: Exempt: no hazard was reported because another instruction enforces the same order or no warp reaches the
#: instruction. Survived: no hazard was reported, and no reason is known.
REPORTED, WRONG_KIND, EXEMPT, SURVIVED = "reported", "wrong_kind", "exempt", "survived"
_GUARD = re.compile(r"@\s*!?\s*[\w$%]+\s*")
#: Multiple of the original kernel's number of steps after which a mutant counts as an infinite loop.
_PATIENCE = 20
_MIN_STEPS = 20_000
#: Number of schedules in which an exempt mutant runs: one in order, and one with maximum delays.
_EXEMPT_SCHEDULES = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """Verdict on a mutant.

    ``kinds`` contains the reported hazard kinds in sorted order. ``note`` gives the reason for the exemption or the
    outcome of the run.
    """

    mutant: Mutant
    verdict: str
    kinds: tuple[str, ...]
    note: str = ""


#: Function of (PTX, mutant, schedule) that runs one schedule and returns a report that includes its hazards.
Runner = Callable[[str, Mutant, int], Report]


def try_mutants(
    ptx: str, mutants: Iterable[Mutant], run: Runner, schedules: int = 8, known: frozenset[str] = frozenset()
) -> Iterator[Outcome]:
    """Run each mutant under schedules 0, 1, ... until an expected hazard is reported.

    ``run`` is ``lambda text, mutant, schedule: emulator.load(text).launch(..., replay=schedule, hazards="collect")``.
    ``known`` contains the hazard kinds of the original kernel, which are ignored.
    """
    exemptions = Exemptions(ptx)
    for mutant in mutants:
        yield _try_one(ptx, mutant, run, schedules, exemptions, known)


def _try_one(
    ptx: str, mutant: Mutant, run: Runner, schedules: int, exemptions: Exemptions, known: frozenset[str]
) -> Outcome:
    kinds: set[str] = set()
    note = ""
    text = mutant.apply(ptx)
    reason = exemptions.reason(mutant)
    for schedule in range(min(schedules, _EXEMPT_SCHEDULES) if reason else schedules):
        try:
            kinds |= run(text, mutant, schedule).kinds - known
        except TrapError as error:
            kinds.add("trap")
            note = str(error)
        except StepLimitError:
            note = "it does not terminate"
        except CudaTmaError as error:
            note = f"{type(error).__name__}: {error}".partition("\n")[0]
            break
        if kinds & mutant.expected:
            return Outcome(mutant, REPORTED, tuple(sorted(kinds)))
    if kinds:
        return Outcome(mutant, WRONG_KIND, tuple(sorted(kinds)), note)
    if not (reason or note or _is_reached(ptx, mutant, run)):
        reason = "no warp reaches this instruction in this launch"
    return Outcome(mutant, EXEMPT if reason else SURVIVED, (), reason or note)


def _is_reached(ptx: str, mutant: Mutant, run: Runner) -> bool:
    """Replace the mutated instruction with a trap, and return whether a warp reaches it in schedule 0."""
    if mutant.at < 0 or len(mutant.edits) != 1:
        return True
    start, end, _ = mutant.edits[0]
    guard = _GUARD.match(ptx, start, end)
    trap = replace(mutant, edits=((start, end, f"{guard[0] if guard else ''}trap;"),), expected=frozenset({"trap"}))
    try:
        return "trap" in run(trap.apply(ptx), trap, 0).kinds
    except CudaTmaError:
        return True


class Trial:
    """Mutants of a kernel and its launch. ``make`` must return a new Call with new arrays every time."""

    def __init__(self, ptx: str, make: Callable[[], Call]) -> None:
        self.ptx, self.make = ptx, make
        self.mutants = mutants_of(ptx) + mutants_of_call(ptx, make())
        self._step_limit = 0
        #: Hazard kinds that the original kernel reports.
        self._known: frozenset[str] = frozenset()
        #: PTX and module of the last run, and the initial values of the module's variables.
        self._last: tuple[str, EmulatedModule, dict[str, bytes]] | None = None

    def unchanged(self, schedules: int, seed: int = 0, progress: Callable[[int, int], None] | None = None) -> Report:
        """Run the original kernel, which should have no hazards, under ``schedules`` schedules."""
        options = {"schedules": schedules, "seed": seed, "progress": progress}
        report = self.make().run(load(self.ptx), hazards="collect", **options)
        self._known = frozenset(report.kinds)
        self._step_limit = _MIN_STEPS + _PATIENCE * report.steps // schedules
        return report

    def run(self, text: str, mutant: Mutant, schedule: int) -> Report:
        if not self._step_limit:
            self.unchanged(2)
        call = mutant.changed(self.make())
        options = {"step_limit": self._step_limit, "stop_at": mutant.expected - self._known}
        return call.run(self._loaded(text), replay=schedule, hazards="collect", **options)

    def _loaded(self, text: str) -> EmulatedModule:
        """Return a mutant's module, which all schedules share, with its variables reset to their initial values."""
        if self._last is None or self._last[0] != text:
            module = load(text)
            self._last = text, module, {name: data.tobytes() for name, data in module.globals.items()}
        _, module, values = self._last
        for name, value in values.items():
            module.globals[name] = value
        return module

    def outcomes(self, schedules: int = 8, chosen: Iterable[Mutant] | None = None) -> Iterator[Outcome]:
        """Yield the outcome of each mutant, or only of those in ``chosen``."""
        if not self._step_limit:
            self.unchanged(2)
        return try_mutants(self.ptx, self.mutants if chosen is None else chosen, self.run, schedules, self._known)


VERDICTS = (REPORTED, WRONG_KIND, EXEMPT, SURVIVED)
#: Required fraction of reported mutants among those that are not exempt.
MIN_REPORTED = 0.95


def by_operator(outcomes: Iterable[Outcome]) -> dict[str, Counter[str]]:
    """Return the number of outcomes per operator and verdict, in the order of OPERATORS."""
    counts_by_operator: dict[str, Counter[str]] = {operator: Counter() for operator in OPERATORS}
    for outcome in outcomes:
        counts_by_operator[outcome.mutant.operator][outcome.verdict] += 1
    return {operator: counts for operator, counts in counts_by_operator.items() if counts}


def by_verdict(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Return the number of outcomes per verdict."""
    return Counter(outcome.verdict for outcome in outcomes)


def reported_share(counts: Mapping[str, int]) -> float:
    """Return the fraction of non-exempt mutants with the verdict "reported", or 1 if there are none."""
    tried = sum(counts.get(verdict, 0) for verdict in VERDICTS) - counts.get(EXEMPT, 0)
    return counts.get(REPORTED, 0) / tried if tried else 1.0
