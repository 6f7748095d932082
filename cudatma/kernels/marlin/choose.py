"""The three Marlin kernels as one family, and the batch-invariant configurations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from cudatma import context
from cudatma.build.kernel import default_target
from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError
from cudatma.kernels import choice_table, choosing
from cudatma.kernels.explain import Explanation, explained
from cudatma.kernels.family import Family, Option, Times
from cudatma.kernels.gpu import Gpu, gpu_of, imagined_gpu
from cudatma.kernels.marlin.mma_sync import MmaSyncSpec
from cudatma.kernels.marlin.mma_sync_candidates import mma_sync_times
from cudatma.kernels.marlin.problem import GROUP_SIZES, LinearShape, Problem
from cudatma.kernels.marlin.skinny import SkinnySpec
from cudatma.kernels.marlin.skinny_candidates import skinny_times
from cudatma.kernels.marlin.wgmma import WgmmaSpec
from cudatma.kernels.marlin.wgmma_candidates import is_shared, wgmma_times
from cudatma.kernels.schedule import ceil_div
from cudatma.quantization import PackedWeight
from cudatma.target import Target, get_target

#: The measured exceptions.
SHIPPED = Path(__file__).with_name("tuned.json")
#: Values of block_m: the least that holds all of M, else several tiles of the last.
_WGMMA_SIZES, _MMA_SYNC_SIZES = (8, 16, 32, 64, 128, 256), (8, 16, 32, 64)
_MAX_STAGES = 12
Spec = TypeVar("Spec", MmaSyncSpec, WgmmaSpec)
#: Any of the kernels' specs; StagedTile holds what they have in common.
AnyMarlinSpec: TypeAlias = MmaSyncSpec | SkinnySpec | WgmmaSpec
KERNELS: dict[str, type[AnyMarlinSpec]] = {"skinny": SkinnySpec, "wgmma": WgmmaSpec, "mma_sync": MmaSyncSpec}


def times(problem: Problem, ms: NDArray[np.int64], gpu: Gpu) -> Times[AnyMarlinSpec]:
    """Return ``Family.times`` of every kernel; of the only configuration for each M where rows must not depend on M."""
    if problem.batch_invariant:
        return _invariant_times(problem, ms, gpu)
    found: list[tuple[AnyMarlinSpec, NDArray[np.float64]]] = [
        *skinny_times(problem, ms, gpu),
        *wgmma_times(problem, ms, gpu),
    ]
    if not get_target(gpu.target).has_wgmma:  # where wgmma is, mma.sync is slower at every M
        found += mma_sync_times(problem, ms, gpu)
    return found


def launched(spec: AnyMarlinSpec) -> AnyMarlinSpec:
    """Return the spec to compile for weights whose scales allow one multiply-add, as most do.

    quantization/scale_range.py defines the range.
    """
    return resolve_fused(spec, "as_stored")


MARLIN: Family[Problem, AnyMarlinSpec] = Family(
    name="marlin",
    kernels=KERNELS,
    read_problem=Problem.from_json,
    times=times,
    is_shared=is_shared,
    index=("k", "n"),
    spec_fields=("group_size", "has_zeros", "dtype"),
    table=SHIPPED,
    options=(
        Option("dtype", "float16", tuple(ACTIVATION_TYPES), "of activations and scales"),
        Option("group_size", 128, GROUP_SIZES, "elements of K that share a scale; -1: all of K"),
        Option("has_zeros", False, (False, True), "weights with zero points"),
    ),
    launched=launched,
    trial="cudatma.kernels.marlin.sample:MarlinTrial",
)


#: The functions of every family, for (problem, gpu) of this one.
decide, choose_by_cost = partial(choosing.decide, MARLIN), partial(choice_table.choose_by_cost, MARLIN)


def _invariant_times(problem: Problem, ms: NDArray[np.int64], gpu: Gpu) -> Times[AnyMarlinSpec]:
    """Return the specs with which the bits of a result's row do not depend on M, for a schedule that divides no tile.

    A sum in floating point depends on its order. Here every instance of a kernel adds up K in the same order: one warp
    or warpgroup computes its columns of W alone, 16 of K at a time from the first to the last, with weights that are
    scaled already. No tile is divided among CTAs (``divide`` of schedule()), no K among warps, and the target alone
    decides which kernel serves. Where tiles are few this is slower.
    """
    target, layer = get_target(gpu.target), problem.layer
    uses_wgmma = target.has_wgmma and target.has_setmaxnreg
    sizes, build = (_WGMMA_SIZES, _wgmma) if uses_wgmma else (_MMA_SYNC_SIZES, _mma_sync)
    block_m = np.asarray(sizes)[np.minimum(np.searchsorted(sizes, ms), len(sizes) - 1)]
    has_tile_for_each_sm = ceil_div(ms, block_m) * ceil_div(layer.n, 128) >= gpu.sm_count
    found: list[tuple[AnyMarlinSpec, NDArray[np.float64]]] = []
    for size in sizes:
        for wide in (False, True):
            serves = (block_m == size) & (has_tile_for_each_sm == wide)
            if serves.any():
                spec = build(layer, size, wide, target)
                spec.check_target(target)
                found.append((spec, spec.times_at(ms, serves, problem, gpu)))
    return found


def _wgmma(layer: LinearShape, block_m: int, wide: bool, target: Target) -> WgmmaSpec:
    block_k = 256 if block_m <= 64 else 128 if block_m == 128 else 64
    warpgroups = 2 if wide else 1
    spec = WgmmaSpec(
        dtype=layer.dtype,
        group_size=layer.group_size,
        has_zeros=layer.has_zeros,
        block_m=block_m,
        block_k=block_k,
        warpgroups=warpgroups,
        stack=1,
        stages=2,
        mmas_per_commit=1,
        commits_in_flight=3,
        consumer_registers=232 if warpgroups * block_m == 512 else 0,
    )
    return _deepest(spec, target.smem_per_block_bytes)


def _mma_sync(layer: LinearShape, block_m: int, wide: bool, target: Target) -> MmaSyncSpec:
    spec = MmaSyncSpec(
        dtype=layer.dtype,
        group_size=layer.group_size,
        has_zeros=layer.has_zeros,
        block_m=block_m,
        block_n=128 if wide else 64,
        block_k=256 if block_m <= 16 else 128,
        warps_n=4,
        slice_k=1,
        stages=2,
        scale_on="epilogue" if layer.group_size == -1 else "weight",
    )
    return _deepest(spec, target.smem_per_block_bytes)


def _deepest(spec: Spec, smem_bytes: int) -> Spec:
    """The spec with as many stages as shared memory holds."""
    return replace(spec, stages=max(spec.stages, min(_MAX_STAGES, spec.max_stages(smem_bytes))))


def resolve_fused(spec: AnyMarlinSpec, form: str) -> AnyMarlinSpec:
    """The spec with scale and offset in one multiply-add if the kernel has that, in the form that the weight's scales
    allow (``scale_fit.form``). The bits of a result do not depend on it: choosing and tuning take specs without."""
    found: AnyMarlinSpec = spec.in_form(form)
    return found


def marlin_explain(
    w: Any,
    m: int,
    *,
    target: str | Target | None = None,
    sm_count: int | None = None,
    device: int | None = None,
    batch_invariant: bool = False,
) -> Explanation:
    """What marlin_gemm would run for M rows of x, why, and how long that should take. Launches and compiles nothing.

    w: PackedWeight, MarlinLinear, or a LinearShape where there are no weights; only weights show whether scale and
    offset are one multiply-add (``_fused`` or ``_shifted`` in the entry). batch_invariant: as in marlin_gemm.
    The GPU is the weight's device, or ``device``; or an imagined one: ``target`` and ``sm_count`` (None: of the first
    GPU of the target that is known, 132 of sm_90a, 170 of sm_120a). With none of them: the first GPU of this machine,
    else an H200 is imagined ($CUDATMA_TARGET names another target).

    Raises ArgumentError, ArgumentTypeError, TargetError; DriverError or LaunchError for a device that is not there.
    """
    layer, packed = _layer_of(w)
    if type(batch_invariant) is not bool:
        raise ArgumentTypeError("batch_invariant", type(batch_invariant).__name__, "bool")
    gpu = _gpu(packed, target, sm_count, device)
    problem = Problem(layer, m, batch_invariant)
    form = "none" if packed is None else packed.scale_fit.form
    found = explained(MARLIN, problem, gpu, launched=lambda spec: resolve_fused(spec, form), divide=not batch_invariant)
    work, is_divided = found.schedule, found.prediction.reduction_us > 0
    alone = 0 < work.stream_tiles < min(work.work_ranges, work.tiles_m * work.tiles_n)
    if found.spec.cluster_k > 1 or (is_divided == (work.stream_tiles > 0) and not alone):
        return found
    why = f"{found.decision.why}; predicted as if tiles were divided as in one row of them"
    return replace(found, decision=replace(found.decision, why=why))


def _layer_of(w: Any) -> tuple[LinearShape, PackedWeight | None]:
    if isinstance(w, LinearShape):
        return w, None
    packed = getattr(w, "weight", w)  # a MarlinLinear's
    if not isinstance(packed, PackedWeight):
        got = f"{type(w).__module__}.{type(w).__qualname__}"
        allowed = "PackedWeight, cudatma.MarlinLinear or LinearShape"
        raise ArgumentTypeError("w", got, allowed, "describe a torch module by LinearShape")
    return LinearShape.of(packed), packed


def _gpu(packed: PackedWeight | None, target: Any, sm_count: int | None, device: int | None) -> Gpu:
    named = target is not None or sm_count is not None
    if named and device is not None:
        raise ArgumentError("device", device, "None with a target or sm_count", "name a GPU or imagine one")
    if named:
        if sm_count is not None and (type(sm_count) is not int or sm_count < 1):
            raise ArgumentError("sm_count", sm_count, "1 and more")
        return imagined_gpu(default_target() if target is None else target, sm_count)
    if device is None and packed is not None:
        device = packed.device
    if device is not None:
        return gpu_of(device)
    try:
        return gpu_of(context.current_device())
    except (CudaTmaError, ImportError):
        return imagined_gpu(default_target())
