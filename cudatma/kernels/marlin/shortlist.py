"""The candidates that are worth measuring, best first as the model sees them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from cudatma.kernels.marlin.candidates import candidates, rules_best, variants
from cudatma.kernels.marlin.card import Card
from cudatma.kernels.marlin.layer import AnyMarlinSpec, Choice, Layer, resolve_fused
from cudatma.kernels.marlin.model import Prediction, kernel_name, predict
from cudatma.kernels.marlin.spec import MarlinSpec
from cudatma.target import Target

#: Parts of a short list that go to what the rules think best, and to shapes of tiles; the rest goes to variants of the
#: best.
_NEAR, _SHAPES = 1 / 4, 1 / 2
#: What is predicted to take so much longer than the rules' choice is not worth a place.
_HOPELESS = 1.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice and what the model says of it."""

    choice: Choice[AnyMarlinSpec]
    prediction: Prediction

    @property
    def label(self) -> str:
        """The kernel's entry, and what of the choice does not show in it: a name of its own for each of a cell's."""
        spec, choice = self.choice.spec, self.choice
        more = f" x{choice.blocks_per_sm}" if choice.blocks_per_sm > 1 else ""
        more += f", scales on the {spec.scale_on}" if isinstance(spec, MarlinSpec) else ""
        return f"{spec.entry}{more}"


def ranked(layer: Layer, m: int, target: Target, card: Card, *, fused: str = "none") -> list[Candidate]:
    """All shapes of tiles by predicted time, the fastest first; of equals the one that is generated first.

    fused: the form that the weight's scales allow (layer.resolve_fused()).
    """
    listed = candidates(layer, m, target, card.multiprocessors)
    found = (replace(choice, spec=resolve_fused(choice.spec, fused)) for choice in listed)
    return sorted(_predicted(found, layer, m, target, card), key=lambda candidate: candidate.prediction.us)


def shortlist(
    layer: Layer, m: int, target: Target, card: Card, rule: Choice[AnyMarlinSpec], limit: int
) -> list[Candidate]:
    """``rule`` (what is to be beaten), then up to ``limit`` - 1 others: what the rules think next best, shapes of
    tiles, one of each family, and variants of the rule's and of the best predicted."""
    first = next(_predicted([rule], layer, m, target, card))
    shapes = list(_one_of_each(ranked(layer, m, target, card)))
    best = [rule, *(candidate.choice for candidate in shapes[:1] if candidate.choice != rule)]
    turns = zip_longest(*(variants(choice, layer, target) for choice in best))
    others = list(_predicted((one for turn in turns for one in turn if one is not None), layer, m, target, card))
    near = list(_predicted(rules_best(layer, m, target, card.multiprocessors), layer, m, target, card))
    most_near = max(1, round((limit - 1) * _NEAR))
    most_shapes = max(1, round((limit - 1) * _SHAPES))
    # Where there are too few variants, more shapes take their places.
    wanted = [first, *near[:most_near], *shapes[:most_shapes], *others, *shapes[most_shapes:]]
    kept: dict[str, Candidate] = {}
    for candidate in wanted:
        if candidate.prediction.us <= _HOPELESS * first.prediction.us:
            kept.setdefault(candidate.label, candidate)
    return list(kept.values())[:limit]


def _predicted(
    choices: Iterable[Choice[AnyMarlinSpec]], layer: Layer, m: int, target: Target, card: Card
) -> Iterator[Candidate]:
    for choice in choices:
        yield Candidate(choice, predict(layer, m, choice, target, card))


def _one_of_each(found: Iterable[Candidate]) -> Iterator[Candidate]:
    """The first of each family, whose members the model hardly tells apart."""
    seen = set()
    for candidate in found:
        spec, blocks = candidate.choice.spec, candidate.choice.blocks_per_sm
        family = (kernel_name(spec), spec.block_m, spec.block_n, spec.block_k, spec.launch_cluster, blocks)
        if family not in seen:
            seen.add(family)
            yield candidate
