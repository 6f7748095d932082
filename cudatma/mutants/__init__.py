"""Mutants of a kernel, each with one synchronization removed or changed, and the hazards that result.

>>> trial = Trial(ptx, lambda: Call("kernel", grid, block, (array, 64)))
>>> for outcome in trial.outcomes(schedules=8):
...     print(outcome.mutant.name, outcome.verdict, outcome.kinds)
"""

from cudatma.mutants.launch_mutants import mutants_of_call
from cudatma.mutants.mutant import Call, Mutant
from cudatma.mutants.operators import OPERATORS, mutants_of
from cudatma.mutants.trial import EXEMPT, REPORTED, SURVIVED, WRONG_KIND, Outcome, Trial, try_mutants

__all__ = [
    "EXEMPT",
    "OPERATORS",
    "REPORTED",
    "SURVIVED",
    "WRONG_KIND",
    "Call",
    "Mutant",
    "Outcome",
    "Trial",
    "mutants_of",
    "mutants_of_call",
    "try_mutants",
]
