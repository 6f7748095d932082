"""Outcomes of a trial, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from cudatma.mutants.operators import OPERATORS
from cudatma.mutants.trial import EXEMPT, REPORTED, SURVIVED, WRONG_KIND, Outcome

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
