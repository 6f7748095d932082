"""Every kernel is clean as it is, and the emulator reports its mutants: one synchronization removed or changed.

Of a kernel's first launch up to MOST mutants are tried, of its further ones a part; both are drawn by a seed. No result
is stored. A new kernel takes part with the sample of its registry entry; where too few of its mutants are reported,
registry_subjects.py is the place for a launch in which its rings wrap. What `make test` tries is drawn from all
mutants, by a seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import probe_configs
import pytest
from trials import trials

from cudatma.kernels.registry import REGISTRY
from cudatma.mutants import EXEMPT, REPORTED, Mutant, Outcome, Trial
from cudatma.mutants.trial import by_verdict, reported_share

TRIALS = trials()
#: Schedules of a mutant, at most.
SCHEDULES = 6
#: Mutants that are tried of a kernel's first launch, at most, and the part of them of its further ones, which share
#: most of their code with it.
MOST, FURTHER = 36, 0.3
#: Kernels of which `make test` tries a mutant.
KERNELS = 8
#: What has to be reported of a launch's mutants that are not exempt.
LEAST = 0.88
#: The same of a drawn part, in which few mutants decide.
LEAST_OF_PART = 0.7
#: Probes without a synchronization, the one that only takes requests of the hardware capture, and the one that looks at
#: a barrier's bits, which are no data.
_WITHOUT = {"mma", "every_primitive", "tma_case", "mbarrier_bits"}


def missed(outcomes: Sequence[Outcome]) -> str:
    """What was neither reported nor exempt, a line each."""
    return "\n".join(
        f"{outcome.verdict} {outcome.kinds}: {outcome.mutant.description} (line {outcome.mutant.line})"
        for outcome in outcomes
        if outcome.verdict not in (REPORTED, EXEMPT)
    )


def check_exemptions(outcomes: Sequence[Outcome]) -> None:
    """Each names the instruction that gives the same order, and they are few."""
    exempt = [outcome for outcome in outcomes if outcome.verdict == EXEMPT]
    assert all("`" in outcome.note for outcome in exempt)
    assert len(exempt) <= 3 + len(outcomes) // 8


def kernel_of(name: str) -> str:
    return name.partition("/")[0]


def test_every_kernel_and_probe_is_tried() -> None:
    kernels = set(map(kernel_of, TRIALS))
    assert set(REGISTRY) <= kernels
    assert {name for name, _, _ in probe_configs.PROBES} - _WITHOUT <= kernels


def test_a_registry_entry_is_enough_to_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "new_copy", replace(REGISTRY["tile_copy"], name="new_copy"))
    trial = trials()["new_copy/sample"]()
    assert trial.unchanged(2).is_clean
    (dropped, *_) = (mutant for mutant in trial.mutants if mutant.operator == "drop_init")
    (outcome,) = trial.outcomes(SCHEDULES, [dropped])
    assert outcome.verdict == REPORTED


def drawn(name: str, trial: Trial, count: int) -> list[Mutant]:
    return random.Random(name).sample(trial.mutants, min(count, len(trial.mutants)))


def test_mutants_drawn_from_some_kernels_are_reported() -> None:
    """Try one mutant of one launch of each of some kernels."""
    outcomes: list[Outcome] = []
    for kernel in random.Random(1).sample(sorted(set(map(kernel_of, TRIALS))), KERNELS):
        name = random.Random(kernel).choice([name for name in TRIALS if kernel_of(name) == kernel])
        trial = TRIALS[name]()
        report = trial.unchanged(1, seed=5)
        assert report.is_clean, f"{name}: {report}"
        outcomes += trial.outcomes(SCHEDULES, drawn(name, trial, 1))
    assert len(outcomes) > KERNELS // 2  # some have no mutants
    assert reported_share(by_verdict(outcomes)) >= LEAST_OF_PART, missed(outcomes)
    check_exemptions(outcomes)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a hundred mutants, on a busy machine
@pytest.mark.parametrize("name", TRIALS)
def test_the_mutants_of_a_launch_are_reported(name: str) -> None:
    trial = TRIALS[name]()
    report = trial.unchanged(8)
    assert report.is_clean, str(report)
    is_first = next(other for other in TRIALS if kernel_of(other) == kernel_of(name)) == name
    mutants = drawn(name, trial, MOST if is_first else round(FURTHER * min(MOST, len(trial.mutants))))
    outcomes = list(trial.outcomes(SCHEDULES, mutants))
    assert reported_share(by_verdict(outcomes)) >= (LEAST if is_first else LEAST_OF_PART), missed(outcomes)
    check_exemptions(outcomes)
