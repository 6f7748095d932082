"""Every kernel is free of hazards, and the emulator reports its mutants: kernels with one synchronization removed or
changed.

A few mutants of each launch are tried, as different as possible. A new kernel takes part with the sample of its
registry entry; if too few of its mutants are reported, registry_subjects.py is the place for a launch in which its
rings wrap.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import probe_configs
import pytest
from trials import trials

from cudatma.kernels.registry import REGISTRY
from cudatma.mutants import EXEMPT, REPORTED, Mutant, Outcome, Trial
from cudatma.mutants.trial import by_verdict, reported_share

TRIALS = trials()
#: Number of schedules for a mutant. The emulator finds races in every schedule.
SCHEDULES = 1
#: Mutants of a kernel's first launch, and of its further ones, which share most of their code with it.
FIRST, FURTHER = 8, 4
#: The smallest allowed share of reported mutants among those that are not exempt.
MIN_REPORTED = 0.75
#: Probes without synchronization, the one that only takes requests of the hardware capture, and the one that reads a
#: barrier's bits, which are not data.
NOT_TRIED = {"mma", "every_primitive", "tma_case", "mbarrier_bits"}


def missed(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each mutant that was neither reported nor exempt."""
    return "\n".join(
        f"{outcome.verdict} {outcome.kinds}: {outcome.mutant.description} (line {outcome.mutant.line})"
        for outcome in outcomes
        if outcome.verdict not in (REPORTED, EXEMPT)
    )


def kernel_of(name: str) -> str:
    return name.partition("/")[0]


def test_every_kernel_and_probe_is_tried() -> None:
    kernels = set(map(kernel_of, TRIALS))
    assert set(REGISTRY) <= kernels
    assert {name for name, _, _ in probe_configs.PROBES} - NOT_TRIED <= kernels


def test_a_registry_entry_is_enough_to_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "new_copy", replace(REGISTRY["tile_copy"], name="new_copy"))
    trial = trials()["new_copy/sample"]()
    (dropped, *_) = (mutant for mutant in trial.mutants if mutant.operator == "drop_init")
    (outcome,) = trial.outcomes(SCHEDULES, [dropped])
    assert outcome.verdict == REPORTED


def drawn(name: str, trial: Trial, count: int) -> list[Mutant]:
    """Return random mutants, one of each operator before a second one of any."""
    earlier: Counter[str] = Counter()

    def turn(mutant: Mutant) -> int:
        earlier[mutant.operator] += 1
        return earlier[mutant.operator]

    mutants = random.Random(name).sample(trial.mutants, len(trial.mutants))
    return sorted(mutants, key=turn)[:count]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", TRIALS)
def test_a_kernel_is_clean_and_its_mutants_are_reported(name: str) -> None:
    trial = TRIALS[name]()
    is_first = next(other for other in TRIALS if kernel_of(other) == kernel_of(name)) == name
    report = trial.unchanged(3 if is_first else 2)  # in order, most delayed, and one that is drawn
    assert report.is_clean, str(report)
    count = FIRST if is_first else FURTHER
    outcomes = list(trial.outcomes(SCHEDULES, drawn(name, trial, count)))
    assert reported_share(by_verdict(outcomes)) >= MIN_REPORTED, missed(outcomes)
    exempt = [outcome for outcome in outcomes if outcome.verdict == EXEMPT]
    reasons = [outcome.note for outcome in exempt if "no warp reaches" not in outcome.note]
    assert all("`" in reason for reason in reasons), "an exemption names the instruction that keeps the order"
    assert len(exempt) <= 3
