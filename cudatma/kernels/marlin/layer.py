"""What a choice of configuration starts from: the layer, and the load paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from cudatma.kernels.marlin.spec import MarlinSpec
from cudatma.kernels.marlin.strip_spec import StripSpec
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.quantization import PackedWeight

#: Any of the kernels' specs; StagedTile holds what they have in common.
AnyMarlinSpec: TypeAlias = MarlinSpec | StripSpec | WgmmaSpec


@dataclass(frozen=True, slots=True)
class Feeds:
    """Load path of each operand of the mma.sync kernel, ``"tma"`` or ``"cp_async"``; the other kernels take TMA."""

    weight: str = "tma"
    scale: str = "tma"
    activation: str = "tma"


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


def weight_policy(m: int, block_m: int) -> str:
    """L2 policy of the weights' loads: those that several token tiles read should stay there."""
    return "evict_first" if m <= block_m else "evict_normal"


def resolve_fused(spec: AnyMarlinSpec, form: str) -> AnyMarlinSpec:
    """The spec, with scale and offset in one multiply-add where it can be, in the form that the weight's scales allow
    (``scale_fit.form``). The bits of a result do not depend on it, so that choices are made and kept without."""
    return spec.in_form(form) if isinstance(spec, WgmmaSpec) else spec
