"""What a choice of configuration starts from, and what it gives: feeds, layer, choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.marlin.spec import ACTIVATION_FEEDS, FEEDS, MarlinSpec
from cudatma.kernels.marlin.stage import StagedTile
from cudatma.kernels.marlin.strip_spec import StripSpec
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.quantization import PackedWeight

#: Any of the kernels' specs; StagedTile holds what they have in common.
AnyMarlinSpec: TypeAlias = MarlinSpec | StripSpec | WgmmaSpec
Spec = TypeVar("Spec", bound=StagedTile, covariant=True)


@dataclass(frozen=True, slots=True)
class Feeds:
    """How each operand reaches shared memory: ``"tma"``, ``"cp_async"``; activations also ``"plain"``, ``"gather"``."""

    weight: str = "tma"
    scale: str = "tma"
    activation: str = "tma"

    @property
    def all_tma(self) -> bool:
        return self.weight == self.scale == self.activation == "tma"


@dataclass(frozen=True, slots=True)
class Layer:
    """What the kernel must know of a weight, beside the number of tokens. k, n: elements. Others as in MarlinSpec."""

    k: int
    n: int
    group_size: int
    has_zeros: bool
    dtype: str

    @classmethod
    def of(cls, w: PackedWeight) -> Layer:
        """A weight's."""
        return cls(*w.shape, w.group_size, not w.symmetric, w.dtype)


@dataclass(frozen=True, slots=True)
class Choice(Generic[Spec]):
    """A spec, and how many of its blocks to keep on one multiprocessor (at most what the card holds)."""

    spec: Spec
    blocks_per_sm: int


def weight_policy(m: int, block_m: int) -> str:
    """L2 policy of the weights' loads: those that several token tiles read should stay there."""
    return "evict_first" if m <= block_m else "evict_normal"


def resolve_fused(spec: AnyMarlinSpec, form: str) -> AnyMarlinSpec:
    """The spec, with scale and offset in one multiply-add where it can be, in the form that the weight's scales allow
    (``scale_fit.form``). The bits of a result do not depend on it, so that choices are made and kept without."""
    return spec.in_form(form) if isinstance(spec, WgmmaSpec) else spec


def parse_feeds(feed: str | Mapping[str, str]) -> Feeds:
    """``"tma"``, ``"cp_async"``, or a mapping with any of weight, scale, activation (the others by TMA).

    Raises ArgumentError for an unknown name or way.
    """
    if isinstance(feed, str):
        if feed not in FEEDS:
            raise ArgumentError("feed", feed, ", ".join(FEEDS))
        return Feeds(feed, feed, feed)
    if not isinstance(feed, Mapping):
        raise ArgumentTypeError("feed", type(feed).__name__, "a name, or a mapping from operand to name")
    for operand, way in feed.items():
        if operand not in ("weight", "scale", "activation"):
            raise ArgumentError("feed", operand, "weight, scale, activation")
        allowed = ACTIVATION_FEEDS if operand == "activation" else FEEDS
        if way not in allowed:
            raise ArgumentError(f"feed[{operand!r}]", way, ", ".join(allowed))
    return Feeds(**feed)
