"""marlin_explain: which kernel a GEMM would run, why, how long it should take, and what else was considered.

Launches and compiles nothing, and needs no card: a target and a number of multiprocessors will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from cudatma import context
from cudatma.build import default_target
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError
from cudatma.kernels.marlin.card import H200, Card, card_of, imagined_card
from cudatma.kernels.marlin.config import Decision, Layer, decide, parse_feeds
from cudatma.kernels.marlin.explain_text import table_text
from cudatma.kernels.marlin.layer import AnyMarlinSpec, resolve_fused
from cudatma.kernels.marlin.model import Prediction, kernel_name, plan_of, predict
from cudatma.kernels.marlin.plan import resolve_feeds
from cudatma.kernels.marlin.problem import Schedule
from cudatma.kernels.marlin.shortlist import Candidate, ranked
from cudatma.quantization import PackedWeight
from cudatma.target import Target, get_target

#: Candidates that an explanation lists.
_LISTED = 8
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a GEMM runs as it does. ``str()`` is for people, as_dict() for programs.

    layer, m: the problem. card: what it runs on, or is thought to. decision: the choice, where it comes from and why.
    schedule: how the work is divided. prediction: the model's time of the choice. candidates: the shapes of tiles that
    the model finds fastest, and the choice. considered: how many shapes there were.
    """

    layer: Layer
    m: int
    card: Card
    decision: Decision
    schedule: Schedule
    prediction: Prediction
    candidates: tuple[Candidate, ...]
    considered: int

    @property
    def kernel(self) -> str:
        """``"strip"``, ``"wgmma"`` or ``"portable"``."""
        return kernel_name(self.spec)

    @property
    def spec(self) -> AnyMarlinSpec:
        return self.decision.choice.spec

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON."""
        spec, choice = self.spec, self.decision.choice
        return {
            "layer": asdict(self.layer),
            "m": self.m,
            "card": asdict(self.card),
            "kernel": self.kernel,
            "entry": spec.entry,
            "spec": asdict(spec),
            "blocks_per_sm": choice.blocks_per_sm,
            "band": choice.band,
            "divide": choice.divide,
            "source": self.decision.source,
            "why": self.decision.why,
            "schedule": asdict(self.schedule),
            "prediction": self.prediction.as_dict(),
            "considered": self.considered,
            "candidates": [
                {
                    "kernel": kernel_name(candidate.choice.spec),
                    "label": candidate.label,
                    "us": candidate.prediction.us,
                    "bound": candidate.prediction.bound,
                    "chosen": candidate.choice == choice,
                }
                for candidate in self.candidates
            ],
        }

    def __str__(self) -> str:
        layer, card, said, work = self.layer, self.card, self.prediction, self.schedule
        scales = "whole-column scales" if layer.group_size == -1 else f"groups of {layer.group_size}"
        points = "zero points" if layer.has_zeros else "symmetric"
        streams = ", ".join(f"{name} {us:.3g}" for name, us in said.streams.items())
        divided = f"{work.stream_tiles} tiles divided"
        if self.spec.blocks_k > 1:
            divided = f"each tile's depth divided by a cluster of {self.spec.blocks_k}"
        shown = [
            f"{self.m} tokens x ({layer.k}, {layer.n}) int4, {layer.dtype}, {scales}, {points}",
            f"on {card.target}, {card.multiprocessors} multiprocessors, {card.sm_clock_mhz} MHz, "
            f"memory {card.memory_bytes_per_us / 1e6:.3g} TB/s",
            f"kernel     {self.kernel}: {self.spec.entry}",
            f"why        {self.decision.source}: {self.decision.why}",
            f"work       {work.tiles_m} x {work.tiles_n} tiles of {work.k_iterations} stages on {work.blocks} blocks, "
            f"{divided}; {said.waves:.2f} waves, {said.fill:.0%} busy, "
            f"{said.blocks_per_sm} blocks a multiprocessor",
            f"bytes      {said.memory_bytes / 1e6:.4g} MB of memory, {said.l2_bytes / 1e6:.4g} MB through L2; "
            f"{said.operations / 1e9:.4g} G operations",
            f"predicted  {said.us:.4g} us, bound by {said.bound}",
            f"           by itself: {streams} us",
            f"           and launch {said.launch_us:.2g}, epilogue {said.epilogue_us:.2g}, partial sums "
            f"{said.partials_us:.2g} us",
            "",
        ]
        chosen = self.decision.choice
        rows = [
            ("->" if candidate.choice == chosen else "", f"{candidate.prediction.us:.4g}", candidate.prediction.bound,
             kernel_name(candidate.choice.spec), candidate.label)
            for candidate in self.candidates
        ]  # fmt: skip
        title = f"Fastest of {self.considered} shapes of tiles, as predicted"
        return "\n".join(shown) + table_text(title, ("", "us", "bound by", "kernel", "entry"), rows)


def marlin_explain(
    w: Any,
    m: int,
    *,
    feed: str | Mapping[str, str] = "tma",
    target: str | Target | None = None,
    multiprocessors: int | None = None,
    device: int | None = None,
    batch_invariant: bool = False,
) -> Explanation:
    """What marlin_gemm would run for ``m`` tokens, why, and how long that should take. Launches and compiles nothing.

    w: PackedWeight, MarlinLinear, or a Layer (k, n, group_size, has_zeros, dtype) where there are no weights; only
    weights show whether scale and offset are one multiply-add (``_fused`` or ``_shifted`` in the entry).
    feed, batch_invariant: as in marlin_gemm.
    The card is the weight's device, or ``device``; or an imagined one: ``target`` and ``multiprocessors`` (132, an
    H200's, unless given). With none of them: the first card of this machine, else an H200 is imagined
    ($CUDATMA_TARGET names another target).

    Raises ArgumentError, ArgumentTypeError, TargetError; DriverError or LaunchError for a device that is not there.
    """
    layer, packed = _layer_of(w)
    if type(m) is not int or not 1 <= m <= _MAX_TOKENS:
        raise ArgumentError("m", m, f"1 to {_MAX_TOKENS} tokens")
    card = _card(packed, target, multiprocessors, device)
    chosen, feeds = get_target(card.target), parse_feeds(feed)
    feeds = feeds if packed is None else resolve_feeds(feeds, packed)
    if type(batch_invariant) is not bool:
        raise ArgumentTypeError("batch_invariant", type(batch_invariant).__name__, "bool")
    decision = decide(layer, m, chosen, card.multiprocessors, feeds, card, batch_invariant=batch_invariant)
    fused = "none" if packed is None else packed.scale_fit.form
    choice = replace(decision.choice, spec=resolve_fused(decision.choice.spec, fused))
    decision = replace(decision, choice=choice)
    found = ranked(layer, m, chosen, card, feeds, fused=fused)
    said = predict(layer, m, decision.choice, chosen, card)
    listed = found[:_LISTED]
    if all(candidate.choice != decision.choice for candidate in listed):
        listed.append(Candidate(decision.choice, said))
    return Explanation(
        layer=layer,
        m=m,
        card=card,
        decision=decision,
        schedule=plan_of(decision.choice, layer, m, chosen, card.multiprocessors),
        prediction=said,
        candidates=tuple(listed),
        considered=len(found),
    )


def _layer_of(w: Any) -> tuple[Layer, PackedWeight | None]:
    if isinstance(w, Layer):
        return w, None
    packed = getattr(w, "weight", w)  # a MarlinLinear's
    if not isinstance(packed, PackedWeight):
        raise ArgumentTypeError("w", type(w).__name__, "PackedWeight, MarlinLinear or Layer")
    return Layer.of(packed), packed


def _card(packed: PackedWeight | None, target: Any, multiprocessors: int | None, device: int | None) -> Card:
    named = target is not None or multiprocessors is not None
    if named and device is not None:
        raise ArgumentError("device", device, "None with a target or multiprocessors", "name a card or imagine one")
    if named:
        count = H200.multiprocessors if multiprocessors is None else multiprocessors
        if type(count) is not int or count < 1:
            raise ArgumentError("multiprocessors", multiprocessors, "1 and more")
        return imagined_card(default_target() if target is None else target, count)
    if device is None and packed is not None:
        device = packed.device
    if device is not None:
        return card_of(device)
    try:
        return card_of(context.current_device())
    except (CudaTmaError, ImportError):
        return imagined_card(default_target(), H200.multiprocessors)
