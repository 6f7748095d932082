"""Which configuration of the dense GEMM serves a problem."""

from __future__ import annotations

from functools import partial

from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.kernels.candidates import Candidate
from cudatma.kernels.family import Family, Option
from cudatma.kernels.gemm.problem import Problem
from cudatma.kernels.gemm.wgmma import WgmmaSpec
from cudatma.kernels.gpu import Gpu
from cudatma.target import Target, get_target

#: (block_m, warpgroups)
_TILES = ((64, 1), (64, 2), (128, 1), (128, 2), (256, 2))
_MOST_STAGES = 8


def candidates(problem: Problem, gpu: Gpu) -> list[Candidate[WgmmaSpec]]:
    """Each tile with as deep a ring as shared memory holds. TargetError where there is no wgmma."""
    target = get_target(gpu.target)
    target.require("wgmma", "gemm")
    least = [WgmmaSpec(problem.dtype, block_m, warpgroups, 2) for block_m, warpgroups in _TILES]
    return [Candidate(spec.cost(problem, gpu), partial(_deepest, spec, target)) for spec in least]


def _deepest(spec: WgmmaSpec, target: Target, least_stages: int) -> WgmmaSpec | None:
    rings = (WgmmaSpec(spec.dtype, spec.block_m, spec.warpgroups, n) for n in range(_MOST_STAGES, least_stages - 1, -1))
    return next((one for one in rings if one.smem_bytes <= target.smem_per_block_bytes), None)


GEMM: Family[Problem, WgmmaSpec] = Family(
    name="gemm",
    kernels={"wgmma": WgmmaSpec},
    read_problem=Problem.from_json,
    candidates=candidates,
    index=("n", "k"),
    spec_fields=("dtype",),
    options=(Option("dtype", "--dtype", tuple(ACTIVATION_TYPES), "of operands and result"),),
    trial="cudatma.kernels.gemm.trial:GemmTrial",
)


def dump_specs(target: Target) -> list[WgmmaSpec]:
    """The instances that stand for all in dumps and compile checks: each tile, and both dtypes."""
    if not target.has_wgmma:
        return []
    tiles = [_deepest(WgmmaSpec("float16", block_m, warpgroups, 2), target, 2) for block_m, warpgroups in _TILES]
    return [spec for spec in tiles if spec is not None] + [WgmmaSpec("bfloat16")]
