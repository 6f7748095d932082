"""What a choice of configuration starts from: the layer, and the load paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.marlin.mma_sync import GROUP_SIZES, MmaSyncSpec
from cudatma.kernels.marlin.skinny import SkinnySpec
from cudatma.kernels.marlin.wgmma import WgmmaSpec
from cudatma.quantization import PackedWeight

#: Any of the kernels' specs; StagedTile holds what they have in common.
AnyMarlinSpec: TypeAlias = MmaSyncSpec | SkinnySpec | WgmmaSpec
_MAX_EXTENT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LoadPaths:
    """Load path of each operand of the mma.sync kernel, ``"tma"`` or ``"cp_async"``; the other kernels take TMA."""

    weight: str = "tma"
    scale: str = "tma"
    activation: str = "tma"


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What the kernel must know of a weight, besides M. k, n: elements. Others as in MmaSyncSpec.

    Raises ArgumentError, ArgumentTypeError.
    """

    k: int
    n: int
    group_size: int
    has_zeros: bool
    dtype: str

    def __post_init__(self) -> None:
        kinds = {"k": int, "n": int, "group_size": int, "has_zeros": bool, "dtype": str}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if type(value) is not kind:
                raise ArgumentTypeError(name, repr(value), kind.__name__)
        for name in ("k", "n"):
            if not 1 <= getattr(self, name) <= _MAX_EXTENT:
                raise ArgumentError(name, getattr(self, name), f"1 to {_MAX_EXTENT}")
        if self.group_size not in GROUP_SIZES:
            raise ArgumentError("group_size", self.group_size, ", ".join(map(str, GROUP_SIZES)))
        if self.dtype not in ACTIVATION_TYPES:
            raise ArgumentTypeError("dtype", self.dtype, ", ".join(ACTIVATION_TYPES))

    @classmethod
    def of(cls, w: PackedWeight) -> LinearShape:
        """A weight's."""
        return cls(*w.shape, w.group_size, not w.symmetric, w.dtype)


#: Former name of LinearShape, for one release.
Layer = LinearShape


def weight_policy(m: int, block_m: int) -> str:
    """L2 policy of the weights' loads: those that several token tiles read should stay there."""
    return "evict_first" if m <= block_m else "evict_normal"


def resolve_fused(spec: AnyMarlinSpec, form: str) -> AnyMarlinSpec:
    """The spec, with scale and offset in one multiply-add where it can be, in the form that the weight's scales allow
    (``scale_fit.form``). The bits of a result do not depend on it, so that choices are made and kept without."""
    found: AnyMarlinSpec = spec.in_form(form)
    return found
