"""marlin_explain: which kernel a GEMM would run, why, how long it should take, and what else was considered.

Launches and compiles nothing, and needs no card: a target and a number of multiprocessors will do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from cudatma import context
from cudatma.build.kernel import default_target
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, counted
from cudatma.kernels.candidates import ranked
from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import H200, Gpu, gpu_of, imagined_gpu
from cudatma.kernels.marlin.choose import Decision, candidates, decide
from cudatma.kernels.marlin.problem import AnyMarlinSpec, LinearShape, resolve_fused
from cudatma.kernels.schedule import Schedule, schedule
from cudatma.kernels.shortlist import Listed
from cudatma.kernels.table_text import table_text
from cudatma.kernels.tuning_file import kernel_name
from cudatma.quantization import PackedWeight
from cudatma.target import Target

#: Candidates that an explanation lists.
_LISTED = 8
_MAX_M = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a GEMM runs as it does. ``str()`` is for people, as_dict() for programs.

    layer, m: the problem. card: what it runs on, or is thought to. decision: the configuration, where it comes from and
    why. schedule: how the work is divided. prediction: its cost by the cost model. candidates: the cheapest of all, and
    the configuration itself. considered: how many candidates there were.
    """

    layer: LinearShape
    m: int
    card: Gpu
    decision: Decision
    schedule: Schedule
    prediction: Cost
    candidates: tuple[Listed, ...]
    considered: int

    @property
    def kernel(self) -> str:
        """``"skinny"``, ``"wgmma"`` or ``"mma_sync"``."""
        return kernel_name(self.spec)

    @property
    def spec(self) -> AnyMarlinSpec:
        return self.decision.spec

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "layer": asdict(self.layer),
            "m": self.m,
            "card": asdict(self.card),
            "kernel": self.kernel,
            "entry": self.spec.entry,
            "spec": asdict(self.spec),
            "blocks_per_sm": self.spec.blocks_per_sm,
            "source": self.decision.source,
            "why": self.decision.why,
            "schedule": asdict(self.schedule),
            "prediction": self.prediction.as_dict(),
            "considered": self.considered,
            "candidates": [
                {
                    "kernel": kernel_name(one.spec),
                    "label": one.label,
                    "us": one.cost.us,
                    "bound": one.cost.bound,
                    "chosen": one.spec == self.spec,
                }
                for one in self.candidates
            ],
        }

    def __str__(self) -> str:
        layer, card, cost, work = self.layer, self.card, self.prediction, self.schedule
        scales = "whole-column scales" if layer.group_size == -1 else f"groups of {layer.group_size}"
        points = "zero points" if layer.has_zeros else "symmetric"
        divided = f"{counted(work.stream_tiles, 'tile')} divided"
        if self.spec.cluster_k > 1:
            divided = f"the K of each tile divided by a cluster of {self.spec.cluster_k}"
        shown = [
            f"M = {self.m}, K = {layer.k}, N = {layer.n}, int4 weights, {layer.dtype}, {scales}, {points}",
            f"on {card.target}, {counted(card.multiprocessors, 'SM')}, {card.sm_clock_mhz} MHz, "
            f"memory {card.memory_bytes_per_us / 1e6:.3g} TB/s",
            f"kernel     {self.kernel}: {self.spec.entry}",
            f"why        {self.decision.source}: {self.decision.why}",
            f"work       {work.tiles_m} x {work.tiles_n} tiles of {counted(work.k_iterations, 'stage')} "
            f"on {counted(work.blocks, 'CTA')}, {divided}",
            f"predicted  {cost.us:.4g} us: launch {cost.launch_us:.3g}, main loop of the busiest SM {cost.sm_us:.3g}, "
            f"partial sums {cost.reduction_us:.3g}, memory {cost.memory_us:.3g}, tensor cores {cost.tensor_us:.3g}",
            "",
        ]
        rows = [
            (
                "->" if one.spec == self.spec else "",
                f"{one.cost.us:.4g}",
                one.cost.bound,
                kernel_name(one.spec),
                one.label,
            )
            for one in self.candidates
        ]
        title = f"Cheapest of {counted(self.considered, 'candidate')}, as predicted"
        return "\n".join(shown) + table_text(title, ("", "us", "bound by", "kernel", "entry"), rows)


def marlin_explain(
    w: Any,
    m: int,
    *,
    target: str | Target | None = None,
    multiprocessors: int | None = None,
    device: int | None = None,
    batch_invariant: bool = False,
) -> Explanation:
    """What marlin_gemm would run for M rows of x, why, and how long that should take. Launches and compiles nothing.

    w: PackedWeight, MarlinLinear, or a LinearShape where there are no weights; only
    weights show whether scale and offset are one multiply-add (``_fused`` or ``_shifted`` in the entry).
    batch_invariant: as in marlin_gemm.
    The GPU is the weight's device, or ``device``; or an imagined one: ``target`` and ``multiprocessors`` (132, an
    H200's, unless given). With none of them: the first GPU of this machine, else an H200 is imagined
    ($CUDATMA_TARGET names another target).

    Raises ArgumentError, ArgumentTypeError, TargetError; DriverError or LaunchError for a device that is not there.
    """
    layer, packed = _layer_of(w)
    if type(m) is not int or not 1 <= m <= _MAX_M:
        raise ArgumentError("m", m, f"1 to {_MAX_M} rows")
    if type(batch_invariant) is not bool:
        raise ArgumentTypeError("batch_invariant", type(batch_invariant).__name__, "bool")
    card = _card(packed, target, multiprocessors, device)
    fused = "none" if packed is None else packed.scale_fit.form
    decision = decide(layer, m, card, batch_invariant=batch_invariant)
    decision = replace(decision, spec=resolve_fused(decision.spec, fused))
    spec, found = decision.spec, candidates(layer, m, card)
    cost = spec.cost(m, layer.n, layer.k, card)
    listed = [Listed(resolve_fused(one, fused), its) for one, its in islice(ranked(found), _LISTED)]
    if all(one.spec != spec for one in listed):
        listed.append(Listed(spec, cost))
    return Explanation(
        layer=layer,
        m=m,
        card=card,
        decision=decision,
        schedule=schedule(spec, m, layer.n, layer.k, card.multiprocessors * spec.blocks_per_sm, divide=decision.divide),
        prediction=cost,
        candidates=tuple(listed),
        considered=len(found),
    )


def _layer_of(w: Any) -> tuple[LinearShape, PackedWeight | None]:
    if isinstance(w, LinearShape):
        return w, None
    packed = getattr(w, "weight", w)  # a MarlinLinear's
    if not isinstance(packed, PackedWeight):
        raise ArgumentTypeError("w", type(w).__name__, "PackedWeight, MarlinLinear or LinearShape")
    return LinearShape.of(packed), packed


def _card(packed: PackedWeight | None, target: Any, multiprocessors: int | None, device: int | None) -> Gpu:
    named = target is not None or multiprocessors is not None
    if named and device is not None:
        raise ArgumentError("device", device, "None with a target or multiprocessors", "name a card or imagine one")
    if named:
        count = H200.multiprocessors if multiprocessors is None else multiprocessors
        if type(count) is not int or count < 1:
            raise ArgumentError("multiprocessors", multiprocessors, "1 and more")
        return imagined_gpu(default_target() if target is None else target, count)
    if device is None and packed is not None:
        device = packed.device
    if device is not None:
        return gpu_of(device)
    try:
        return gpu_of(context.current_device())
    except (CudaTmaError, ImportError):
        return imagined_gpu(default_target(), H200.multiprocessors)
