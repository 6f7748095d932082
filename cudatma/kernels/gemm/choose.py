"""Which version and configuration of the dense GEMM serves a problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError
from cudatma.kernels.candidates import Candidate
from cudatma.kernels.family import Family, Option
from cudatma.kernels.gemm.problem import LAYOUTS, Problem
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.gemm.versions import VERSIONS
from cudatma.kernels.gpu import Gpu
from cudatma.target import Target, get_target

#: (block_m, block_n, block_k, warpgroups)
_TILES = (
    (64, 64, 64, 1), (64, 64, 128, 1), (64, 128, 64, 1), (64, 128, 128, 1), (128, 64, 128, 2), (128, 128, 64, 2),
    (128, 256, 64, 2), (256, 128, 64, 2),
)  # fmt: skip
_MOST_STAGES = 8


def _tiles(problem: Problem) -> Iterator[GemmSpec]:
    """Every tile of every version that may serve, with the shortest ring; of equal ones the later version first."""
    for kind in [VERSIONS[problem.version]] if problem.version else reversed(VERSIONS.values()):
        for block_m, block_n, block_k, warpgroups in _TILES:
            yield kind(problem.dtype, problem.layout, block_m, block_n, block_k, 2, warpgroups)


def _deepest(spec: GemmSpec, target: Target, least_stages: int) -> GemmSpec | None:
    """With as many stages as shared memory holds."""
    for stages in range(_MOST_STAGES, least_stages - 1, -1):
        if (longer := replace(spec, stages=stages)).smem_bytes <= target.smem_per_block_bytes:
            return longer
    return None


def _runs(spec: GemmSpec, target: Target) -> bool:
    try:
        spec.check_target(target)
    except ArgumentError:
        return False
    return True


def candidates(problem: Problem, gpu: Gpu) -> list[Candidate[GemmSpec]]:
    """Each tile of each version with as deep a ring as shared memory holds. TargetError where there is no wgmma."""
    target = get_target(gpu.target)
    target.require("wgmma", "gemm")
    return [
        Candidate(spec.cost(problem, gpu), partial(_deepest, spec, target))
        for spec in _tiles(problem)
        if _runs(spec, target)
    ]


GEMM: Family[Problem, GemmSpec] = Family(
    name="gemm",
    kernels={f"v{version}": kind for version, kind in VERSIONS.items()},
    read_problem=Problem.from_json,
    candidates=candidates,
    index=("n", "k"),
    spec_fields=("dtype", "layout"),
    options=(
        Option("dtype", "float16", tuple(ACTIVATION_TYPES), "of operands and result"),
        Option("layout", "RC", LAYOUTS, "A and B, each row-major or column-major"),
    ),
    trial="cudatma.kernels.gemm.trial:GemmTrial",
)


def dump_specs(version: int, target: Target) -> list[GemmSpec]:
    """The instances of a version that stand for all in dumps and compile checks: each tile once, each layout and both
    dtypes."""
    if not target.has_wgmma:
        return []
    found = []
    for index, spec in enumerate(_tiles(Problem(1, 1, 1, "float16", version=version))):
        dtype, layout = ("float16", "bfloat16")[index % 2], LAYOUTS[index // 2 % len(LAYOUTS)]
        deepest = _deepest(replace(spec, dtype=dtype, layout=layout), target, 2)
        if deepest is not None and _runs(deepest, target):
            found.append(deepest)
    return found


v1_specs, v2_specs, v3_specs, v4_specs, v5_specs = (partial(dump_specs, version) for version in VERSIONS)
