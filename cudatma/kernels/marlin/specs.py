"""The specs of all Marlin kernels, by the kernels' names."""

from __future__ import annotations

from typing import TypeAlias

from cudatma.kernels.marlin.mma_sync import MmaSyncSpec
from cudatma.kernels.marlin.skinny import SkinnySpec
from cudatma.kernels.marlin.wgmma import WgmmaSpec

#: Any of the kernels' specs; StagedTile holds what they have in common.
AnyMarlinSpec: TypeAlias = MmaSyncSpec | SkinnySpec | WgmmaSpec
KERNELS: dict[str, type[AnyMarlinSpec]] = {"skinny": SkinnySpec, "wgmma": WgmmaSpec, "mma_sync": MmaSyncSpec}


def resolve_fused(spec: AnyMarlinSpec, form: str) -> AnyMarlinSpec:
    """The spec with scale and offset in one multiply-add if the kernel has that, in the form that the weight's scales
    allow (``scale_fit.form``). The bits of a result do not depend on it: choosing and tuning take specs without."""
    found: AnyMarlinSpec = spec.in_form(form)
    return found
