"""The three Marlin kernels as one family, and the batch-invariant configurations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma import context
from cudatma.build.kernel import default_target
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError
from cudatma.kernels import choice
from cudatma.kernels.explain import Explanation, explained
from cudatma.kernels.family import Family, Times
from cudatma.kernels.gpu import Gpu, gpu_of, imagined_gpu
from cudatma.kernels.marlin.candidates import MAX_STAGES, TIMES, fitted, is_shared
from cudatma.kernels.marlin.config import PRESETS, MarlinConfig
from cudatma.kernels.marlin.problem import PROBLEM_FIELDS, WEIGHT_OPTIONS, LinearShape, Problem
from cudatma.kernels.schedule import Schedule, ceil_div, schedule
from cudatma.quantization import PackedWeight
from cudatma.target import Target, get_target

#: File of the measured exceptions.
SHIPPED = Path(__file__).with_name("tuned.json")
#: Values of tile_m. The smallest value that covers M is used; a larger M takes several tiles of the largest value.
_INVARIANT_TILE_MS, _MMA_SYNC_TILE_MS = (8, 16, 32, 64, 128, 256), (8, 16, 32, 64)


def times(problem: Problem, ms: NDArray[np.int64], gpu: Gpu) -> Times[MarlinConfig]:
    """Return configurations with their predicted times, all batch-invariant if the problem requires it."""
    if problem.batch_invariant:
        return _invariant_times(problem, ms, gpu)
    # The mma.sync kernel is slower than the wgmma kernel at every M.
    versions = ("skinny", "wgmma" if get_target(gpu.target).has_wgmma else "mma_sync")
    return [timed for version in versions for timed in TIMES[version](problem, ms, gpu)]


def launched(config: MarlinConfig) -> MarlinConfig:
    """Return the config that is compiled for weights whose scales allow one multiply-add.

    Most weights have such scales. quantization/scale_range.py defines their range.
    """
    return config.in_form("as_stored")


def _schedule(config: MarlinConfig, problem: Problem, gpu: Gpu) -> Schedule:
    resident = gpu.sm_count * config.ctas_per_sm
    return schedule(config, problem.m, problem.n, problem.k, resident, divide=not problem.batch_invariant)


MARLIN: Family[Problem, MarlinConfig] = Family(
    name="marlin",
    config=MarlinConfig,
    kernels=tuple(PRESETS),
    read_problem=Problem.from_json,
    times=times,
    schedule=_schedule,
    is_shared=is_shared,
    index=("k", "n"),
    problem_fields=PROBLEM_FIELDS,
    table=SHIPPED,
    options=WEIGHT_OPTIONS,
    launched=launched,
    trial="cudatma.kernels.marlin.sample:MarlinTrial",
)


#: The family for decide() and choose_untuned().
decide, choose_untuned = partial(choice.decide, MARLIN), partial(choice.choose_untuned, MARLIN)


def _invariant_times(problem: Problem, ms: NDArray[np.int64], gpu: Gpu) -> Times[MarlinConfig]:
    """Return configs whose rows are bitwise identical at every M, if the schedule divides no tile.

    A floating-point sum depends on the order of the additions. Every instance of these kernels adds over K in the same
    order: one warp or warpgroup computes its columns of W alone, from the first to the last element of K, 16 at a time,
    with weights that are already scaled. Tiles are not split among CTAs (``divide`` of schedule()), K is not split
    among warps, and only the target determines the kernel. These configs are slower than others if there are few tiles.
    """
    target, layer = get_target(gpu.target), problem.layer
    uses_wgmma = target.has_wgmma and target.has_setmaxnreg
    sizes, fields_of = (_INVARIANT_TILE_MS, _wgmma) if uses_wgmma else (_MMA_SYNC_TILE_MS, _mma_sync)
    tile_m = np.asarray(sizes)[np.minimum(np.searchsorted(sizes, ms), len(sizes) - 1)]
    has_tile_for_each_sm = ceil_div(ms, tile_m) * ceil_div(layer.n, 128) >= gpu.sm_count
    given = {name: getattr(layer, name) for name in PROBLEM_FIELDS}
    configs: list[tuple[MarlinConfig, NDArray[np.float64]]] = []
    for size in sizes:
        for is_wide in (False, True):
            serves = (tile_m == size) & (has_tile_for_each_sm == is_wide)
            if serves.any():
                fields = given | fields_of(layer, size, is_wide)
                config = fitted(MarlinConfig(tile_m=size, stages=2, **fields), target, MAX_STAGES)
                configs.append((config, np.where(serves, config.cost_at(ms, problem, gpu).us, np.inf)))
    return configs


def _wgmma(layer: LinearShape, tile_m: int, is_wide: bool) -> dict[str, Any]:
    return {
        "version": "wgmma",
        "tile_n": 128 if is_wide else 64,
        "tile_k": 256 if tile_m <= 64 else 128 if tile_m == 128 else 64,
        "warpgroups": 2 if is_wide else 1,
        "mmas_per_commit": 1,
        "commits_in_flight": 3,
        "consumer_registers": 232 if is_wide and tile_m == 256 else 0,
    }


def _mma_sync(layer: LinearShape, tile_m: int, is_wide: bool) -> dict[str, Any]:
    return {
        "version": "mma_sync",
        "tile_n": 128 if is_wide else 64,
        "tile_k": 256 if tile_m <= 16 else 128,
        "warps_n": 4,
        "scale_on": "epilogue" if layer.group_size == -1 else "weight",
    }


def marlin_explain(
    w: Any,
    m: int,
    *,
    target: str | Target | None = None,
    sm_count: int | None = None,
    device: int | None = None,
    batch_invariant: bool = False,
) -> Explanation:
    """Explain which kernel marlin_gemm() would run and its predicted time, without compiling or launching it.

    Parameters
    ----------
    w : PackedWeight, MarlinLinear or LinearShape
        The weight, or its shape. The scales of a weight determine whether a single multiply-add applies scale and
        offset (``_fused`` or ``_shifted`` in the kernel's name). A shape is assumed to have such scales, as most
        weights do.
    m : int
        Number of rows of x.
    target : str or Target, optional
        Target to assume. Default: the target of the GPU that holds the weight, otherwise of the first GPU of this
        machine. If there is no GPU, the default is $CUDATMA_TARGET, or an H200 if this variable is not set.
    sm_count : int, optional
        Number of SMs to assume. Default: that of the first known GPU of the target, 132 for sm_90a and 170
        for sm_120a.
    device : int, optional
        Ordinal of an installed GPU, instead of ``target`` and ``sm_count``.
    batch_invariant : bool, default False
        Whether to explain a call with ``batch_invariant=True``.

    Returns
    -------
    Explanation
        The explanation. ``str()`` returns readable text, and ``as_dict()`` returns a dict.

    Raises
    ------
    ArgumentError, ArgumentTypeError, TargetError
        If an argument is invalid, or if no kernel supports the target.
    DriverError, LaunchError
        If ``device`` does not exist.

    Examples
    --------
    >>> layer = cudatma.LinearShape(k=4096, n=4096, group_size=128, has_zeros=False, dtype="float16")
    >>> cudatma.marlin_explain(layer, 1, target="sm_90a").kernel
    'skinny'
    """
    layer, packed = _layer_of(w)
    if type(batch_invariant) is not bool:
        raise ArgumentTypeError("batch_invariant", type(batch_invariant).__name__, "bool")
    gpu = _gpu(packed, target, sm_count, device)
    problem = Problem(layer, m, batch_invariant)

    def launched_with(config: MarlinConfig) -> MarlinConfig:
        return launched(config) if packed is None else config.in_form(packed.scale_fit.form)

    explanation = explained(MARLIN, problem, gpu, launched=launched_with)
    work, is_divided = explanation.launches[0].schedule, explanation.prediction.reduction_us > 0
    alone = 0 < work.stream_tiles < min(work.work_ranges, work.tiles_m * work.tiles_n)
    if explanation.config.cluster_k > 1 or (is_divided == (work.stream_tiles > 0) and not alone):
        return explanation
    why = f"{explanation.decision.why}; the prediction assumes the work division of a single row of tiles"
    return replace(explanation, decision=replace(explanation.decision, why=why))


def _layer_of(w: Any) -> tuple[LinearShape, PackedWeight | None]:
    if isinstance(w, LinearShape):
        return w, None
    packed = getattr(w, "weight", w)  # A MarlinLinear has a weight.
    if not isinstance(packed, PackedWeight):
        got = f"{type(w).__module__}.{type(w).__qualname__}"
        allowed = "PackedWeight, cudatma.MarlinLinear or LinearShape"
        raise ArgumentTypeError("w", got, allowed, "describe a torch module with a LinearShape")
    return LinearShape.of(packed), packed


def _gpu(packed: PackedWeight | None, target: Any, sm_count: int | None, device: int | None) -> Gpu:
    named = target is not None or sm_count is not None
    if named and device is not None:
        raise ArgumentError(
            "device", device, "omitted if target or sm_count is passed", "pass either device, or target and sm_count"
        )
    if named:
        if sm_count is not None and (type(sm_count) is not int or sm_count < 1):
            raise ArgumentError("sm_count", sm_count, "at least 1")
        return imagined_gpu(default_target() if target is None else target, sm_count)
    if device is None and packed is not None:
        device = packed.device
    if device is not None:
        return gpu_of(device)
    try:
        return gpu_of(context.current_device())
    except (CudaTmaError, ImportError):
        return imagined_gpu(default_target())
