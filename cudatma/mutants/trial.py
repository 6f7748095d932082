"""Runs mutants one at a time, says what became of each, and counts the outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from cudatma.emulator import EmulatedModule, Report, StepLimitError, TrapError, load
from cudatma.errors import CudaTmaError
from cudatma.mutants.exemptions import Exemptions
from cudatma.mutants.launch_mutants import mutants_of_call
from cudatma.mutants.mutant import Call, Mutant
from cudatma.mutants.operators import OPERATORS, mutants_of

#: What becomes of a mutant: a hazard of an expected kind; only other kinds; none, but another instruction gives the
#: same order; none.
REPORTED, WRONG_KIND, EXEMPT, SURVIVED = "reported", "wrong_kind", "exempt", "survived"
#: A mutant may run so much longer than the kernel before it counts as endless.
_PATIENCE = 20
_LEAST_STEPS = 20_000
#: Schedules of a mutant for which another instruction gives the same order: in order, and most delayed.
_EXEMPT_SCHEDULES = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant. kinds: reported ones, sorted. note: the exemption's reason, or how the run ended."""

    mutant: Mutant
    verdict: str
    kinds: tuple[str, ...]
    note: str = ""


#: Runs one schedule of a mutant, (PTX, mutant, schedule), and gives the report; hazards are collected, not raised.
Runner = Callable[[str, Mutant, int], Report]


def try_mutants(ptx: str, mutants: Iterable[Mutant], run: Runner, schedules: int = 8) -> Iterator[Outcome]:
    """Run each mutant under schedules 0, 1, ... until one reports an expected kind.

    run: ``lambda text, mutant, schedule: emulator.load(text).launch(..., replay=schedule, hazards="collect")``.
    """
    exemptions = Exemptions(ptx)
    for mutant in mutants:
        yield _try_one(ptx, mutant, run, schedules, exemptions)


def _try_one(ptx: str, mutant: Mutant, run: Runner, schedules: int, exemptions: Exemptions) -> Outcome:
    kinds: set[str] = set()
    note = ""
    text = mutant.apply(ptx)
    reason = exemptions.reason(mutant)
    for schedule in range(min(schedules, _EXEMPT_SCHEDULES) if reason else schedules):
        try:
            kinds |= run(text, mutant, schedule).kinds
        except TrapError as error:
            kinds.add("trap")
            note = str(error)
        except StepLimitError:
            note = "it never ends"
        except CudaTmaError as error:
            note = f"{type(error).__name__}: {error}".partition("\n")[0]
            break
        if kinds & mutant.expected:
            return Outcome(mutant, REPORTED, tuple(sorted(kinds)))
    if kinds:
        return Outcome(mutant, WRONG_KIND, tuple(sorted(kinds)), note)
    return Outcome(mutant, EXEMPT if reason else SURVIVED, (), reason or note)


class Trial:
    """A kernel with a launch: its mutants, and how they are run. make: a fresh Call, its arrays as the kernel finds
    them."""

    def __init__(self, ptx: str, make: Callable[[], Call]) -> None:
        self.ptx, self.make = ptx, make
        self.mutants = mutants_of(ptx) + mutants_of_call(ptx, make())
        self._step_limit = 0
        #: The module of the last run, with what its variables held when it was loaded.
        self._last: tuple[str, EmulatedModule, dict[str, bytes]] | None = None

    def unchanged(self, schedules: int, seed: int = 0, progress: Callable[[int, int], None] | None = None) -> Report:
        """The kernel itself under ``schedules`` schedules; it should be clean. progress: of EmulatedModule.launch."""
        options = {"schedules": schedules, "seed": seed, "progress": progress}
        report = self.make().run(load(self.ptx), hazards="collect", **options)
        self._step_limit = _LEAST_STEPS + _PATIENCE * report.steps // schedules
        return report

    def run(self, text: str, mutant: Mutant, schedule: int) -> Report:
        if not self._step_limit:
            self.unchanged(2)
        call = mutant.changed(self.make())
        options = {"step_limit": self._step_limit, "stop_at": mutant.expected}
        return call.run(self._loaded(text), replay=schedule, hazards="collect", **options)

    def _loaded(self, text: str) -> EmulatedModule:
        """The module, the same for all schedules of a mutant, whose variables hold what they did at first."""
        if self._last is None or self._last[0] != text:
            module = load(text)
            self._last = text, module, {name: data.tobytes() for name, data in module.globals.items()}
        _, module, values = self._last
        for name, value in values.items():
            module.globals[name] = value
        return module

    def outcomes(self, schedules: int = 8, chosen: Iterable[Mutant] | None = None) -> Iterator[Outcome]:
        """What becomes of each mutant, or of those chosen."""
        return try_mutants(self.ptx, self.mutants if chosen is None else chosen, self.run, schedules)


VERDICTS = (REPORTED, WRONG_KIND, EXEMPT, SURVIVED)
#: What has to be reported of those that are not exempt.
LEAST_REPORTED = 0.95


def by_operator(outcomes: Iterable[Outcome]) -> dict[str, Counter[str]]:
    """Operator -> verdict -> how many, in the order of OPERATORS."""
    found: dict[str, Counter[str]] = {operator: Counter() for operator in OPERATORS}
    for outcome in outcomes:
        found[outcome.mutant.operator][outcome.verdict] += 1
    return {operator: counts for operator, counts in found.items() if counts}


def by_verdict(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Verdict -> how many."""
    return Counter(outcome.verdict for outcome in outcomes)


def reported_share(counts: Mapping[str, int]) -> float:
    """Reported with an expected kind, of those that are not exempt; 1 where there are none."""
    tried = sum(counts.get(verdict, 0) for verdict in VERDICTS) - counts.get(EXEMPT, 0)
    return counts.get(REPORTED, 0) / tried if tried else 1.0
