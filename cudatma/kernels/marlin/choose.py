"""Which Marlin kernel serves a problem, with which configuration: the candidates of all three as one family."""

from __future__ import annotations

from pathlib import Path

from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.kernels import choosing
from cudatma.kernels.choosing import Decision
from cudatma.kernels.cost import Candidate
from cudatma.kernels.family import Family, Option
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.marlin.invariant import choose_invariant
from cudatma.kernels.marlin.mma_sync_candidates import mma_sync_candidates
from cudatma.kernels.marlin.problem import GROUP_SIZES, Problem
from cudatma.kernels.marlin.skinny_candidates import skinny_candidates
from cudatma.kernels.marlin.specs import KERNELS, AnyMarlinSpec, resolve_fused
from cudatma.kernels.marlin.wgmma_candidates import wgmma_candidates
from cudatma.target import get_target

#: The measured exceptions.
SHIPPED = Path(__file__).with_name("tuned.json")


def candidates(problem: Problem, gpu: Gpu) -> list[Candidate[AnyMarlinSpec]]:
    """Those of every kernel, in no order; the only one where rows must not depend on M."""
    if problem.batch_invariant:
        spec = choose_invariant(problem, gpu)
        return [Candidate(spec.cost(problem, gpu), lambda least_stages: spec)]
    found: list[Candidate[AnyMarlinSpec]] = [*skinny_candidates(problem, gpu), *wgmma_candidates(problem, gpu)]
    if not get_target(gpu.target).has_wgmma:  # where wgmma is, mma.sync is slower at every M
        found += mma_sync_candidates(problem, gpu)
    return found


def launched(spec: AnyMarlinSpec) -> AnyMarlinSpec:
    """What a chosen spec becomes for weights whose scales allow one multiply-add, as those of nearly all weights do
    (quantization/scale_range.py)."""
    return resolve_fused(spec, "as_stored")


MARLIN: Family[Problem, AnyMarlinSpec] = Family(
    name="marlin",
    kernels=KERNELS,
    read_problem=Problem.from_json,
    candidates=candidates,
    index=("k", "n"),
    spec_fields=("group_size", "has_zeros", "dtype"),
    table=SHIPPED,
    options=(
        Option("dtype", "float16", tuple(ACTIVATION_TYPES), "of activations and scales"),
        Option("group_size", 128, GROUP_SIZES, "elements of K that share a scale; -1: all of K"),
        Option("has_zeros", False, (False, True), "weights with zero points"),
    ),
    launched=launched,
    trial="cudatma.kernels.marlin.trial:MarlinTrial",
)


def decide(problem: Problem, gpu: Gpu) -> Decision[AnyMarlinSpec]:
    """The configuration for a problem on a GPU, and the reason."""
    return choosing.decide(MARLIN, problem, gpu)


def choose_by_cost(problem: Problem, gpu: Gpu) -> AnyMarlinSpec:
    """The cheapest candidate. Deterministic; looks at no device and no file."""
    return choosing.cheapest_of(MARLIN, problem, gpu)[0]
