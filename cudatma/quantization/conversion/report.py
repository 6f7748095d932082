"""What a conversion did to each layer, and how far the packed weights are from what they were made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import WeightFileError
from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO
from cudatma.quantization.packed import PackedWeight, unpack


@dataclass(frozen=True, slots=True)
class LayerReport:
    """A packed layer. shape: (K, N). source_bytes, packed_bytes: of its tensors, without its bias.

    Errors are relative, 0.0 where nothing was rounded. Of an imported layer they compare scales, each with its own
    value before it was rounded to the model's type. Of a quantized layer they compare weights: max_error is the
    largest deviation over the largest weight, mean_error the sum of all deviations over the sum of all weights.
    """

    name: str
    shape: tuple[int, int]
    group_size: int
    symmetric: bool
    act_order: bool
    source_bytes: int
    packed_bytes: int
    max_error: float
    mean_error: float

    @property
    def facts(self) -> dict[str, Any]:
        """What a reader of the packed arrays has to know before it sees them."""
        return {"group_size": self.group_size, "symmetric": self.symmetric, "act_order": self.act_order}

    @classmethod
    def from_dict(cls, value: Any, where: str) -> LayerReport:
        """The report that asdict() made, out of a file. WeightFileError where it is something else."""
        names = {field.name for field in fields(cls)}
        if not isinstance(value, Mapping) or set(value) != names or not isinstance(value["name"], str):
            raise WeightFileError(where, repr(value)[:80], ", ".join(sorted(names)), "convert into another folder")
        return cls(**{**value, "shape": tuple(value["shape"])})


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion that is done.

    source, out: folders. method: of the source, "float" where this conversion quantized it. dtype: of the scales.
    layers: in the model's order. skipped: matrices that stay as they are, with the reason. ignored: packed layers that
    the model class does not load. not_compared: why the layers were not compared with the model class, or "".
    not_copied: entries of the source's folder that the new one lacks, with the reason. left_out: tensors that the new
    folder lacks, with the reason. notes: sentences about the source's configuration: keys that were not used, values
    read otherwise than stated. source_bytes, out_bytes: of all tensors. kept_shards: how many an earlier run had
    finished.
    """

    source: str
    out: str
    method: str
    dtype: str
    layers: tuple[LayerReport, ...]
    skipped: dict[str, str]
    ignored: tuple[str, ...]
    not_compared: str
    not_copied: dict[str, str]
    left_out: dict[str, str]
    notes: tuple[str, ...]
    source_bytes: int
    out_bytes: int
    shards: int
    kept_shards: int

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)


#: Rows of K that are compared at once.
_ROWS = 256


def weight_error(weight: NDArray[Any], packed: PackedWeight) -> tuple[float, float]:
    """(largest deviation over the largest weight, sum of deviations over the sum of weights) of a quantized weight
    (N, K), as torch keeps it. The packed weight has no activation order."""
    logical, k = unpack(packed), packed.shape[0]
    size = k if packed.group_size == -1 else packed.group_size
    most = worst = total = deviation = 0.0
    for first in range(0, k, _ROWS):
        group = np.arange(first, min(first + _ROWS, k)) // size
        rows = slice(first, first + len(group))
        zero = SYMMETRIC_ZERO if logical.zeros is None else logical.zeros[group].astype(np.float32)
        values = (logical.q[rows].astype(np.float32) - zero) * logical.scales[group].astype(np.float32)
        wanted = weight[:, rows].T.astype(np.float32)
        most = max(most, float(np.abs(wanted).max()))
        total += float(np.abs(wanted).sum(dtype=np.float64))
        np.abs(np.subtract(values, wanted, out=values), out=values)
        worst = max(worst, float(values.max()))
        deviation += float(values.sum(dtype=np.float64))
    return (worst / most, deviation / total) if most else (0.0, 0.0)


def scale_error(scales: NDArray[Any], dtype: np.dtype[Any]) -> tuple[float, float]:
    """(largest, mean) relative error of scales other than 0 that are rounded to ``dtype``."""
    if scales.dtype == dtype:
        return 0.0, 0.0
    exact = scales.astype(np.float64)
    exact = exact[exact != 0]
    if not exact.size:
        return 0.0, 0.0
    relative = np.abs(exact.astype(dtype).astype(np.float64) - exact) / np.abs(exact)
    return float(relative.max()), float(relative.mean())
