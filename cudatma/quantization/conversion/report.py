"""Report of a conversion, including the rounding errors of each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import WeightFileError
from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO
from cudatma.quantization.packed import PackedWeight, unpack
from cudatma.quantization.weight_format import weight_format


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Result of packing one layer.

    Errors are relative, and are 0.0 if nothing was rounded. If the layer was imported, they measure the rounding of the
    scales to the model's type. If the conversion quantized the layer, they measure the rounding of the weights:
    max_error is the largest absolute error divided by the largest absolute weight, and mean_error is the sum of the
    absolute errors divided by the sum of the absolute weights.

    Parameters
    ----------
    name : str
        The layer's name.
    shape : tuple of int
        The sizes (K, N), or (experts, K, N) for expert weights.
    group_size : int
        Number of rows per group, or -1 for a single group.
    symmetric : bool
        Whether the layer has no zero points.
    act_order : bool
        Whether the layer's rows are permuted.
    format : str
        Format of the codes; see ``PackedWeight``.
    source_bytes : int
        Size of the source tensors in bytes, without the bias.
    packed_bytes : int
        Size of the packed arrays in bytes, without the bias.
    max_error : float
        Largest relative error.
    mean_error : float
        Mean relative error.
    """

    name: str
    shape: tuple[int, ...]
    group_size: int
    symmetric: bool
    act_order: bool
    format: str
    source_bytes: int
    packed_bytes: int
    max_error: float
    mean_error: float

    @property
    def facts(self) -> dict[str, Any]:
        """Metadata needed to create the layer before reading its arrays."""
        return {name: getattr(self, name) for name in ("group_size", "symmetric", "act_order", "format")}

    @classmethod
    def from_dict(cls, value: Any, where: str) -> LayerReport:
        """Create a report from the result of asdict().

        Parameters
        ----------
        value : object
            Result of asdict().
        where : str
            Location of the value, for error messages.

        Returns
        -------
        LayerReport
            The report.

        Raises
        ------
        WeightFileError
            If the value has a different form.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(value, Mapping) or set(value) != names or not isinstance(value["name"], str):
            allowed = f"an object with the fields {', '.join(sorted(names))}"
            raise WeightFileError(where, repr(value)[:80], allowed, "convert to another folder")
        return cls(**{**value, "shape": tuple(value["shape"])})


@dataclass(frozen=True, slots=True)
class Conversion:
    """Result of a finished conversion.

    Parameters
    ----------
    source, out : str
        Folders of the source model and the converted model.
    method : str
        Format of the source. "float" means that the conversion quantized the layers.
    dtype : str
        Type of the scales.
    layers : tuple of LayerReport
        Packed layers, in the model's order.
    skipped : dict of str to str
        Maps each matrix that stays unchanged to the reason.
    ignored : tuple of str
        Packed layers that the model class does not load.
    not_compared : str
        Reason why the layers were not compared with the model class, or "".
    not_copied : dict of str to str
        Maps each entry of the source folder that was not copied to the reason.
    left_out : dict of str to str
        Maps each tensor that is missing from the new folder to the reason.
    notes : tuple of str
        Notes on unused keys in the source's configuration and on values with a special interpretation.
    source_bytes, out_bytes : int
        Total size of the tensors in bytes.
    shards : int
        Number of files with tensors.
    kept_shards : int
        Number of these files that an earlier run finished.
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
        """Return all fields as a dict that can be serialized to JSON.

        Returns
        -------
        dict
            The fields by name.
        """
        return asdict(self)


#: Number of rows of K to compare at a time.
_ROWS = 256


def weight_error(weights: Iterable[tuple[NDArray[Any], PackedWeight]]) -> tuple[float, float]:
    """Return the maximum and mean relative errors of quantized weights, as in LayerReport.

    ``weights`` yields pairs of a weight (N, K), in torch's orientation, and its packed weight, which must not have an
    activation order.
    """
    largest = worst = total = deviation = 0.0
    for weight, packed in weights:
        logical, k = unpack(packed), packed.shape[0]
        codes = weight_format(packed.format).values
        size = k if packed.group_size == -1 else packed.group_size
        for first in range(0, k, _ROWS):
            group = np.arange(first, min(first + _ROWS, k)) // size
            rows = slice(first, first + len(group))
            values = codes[logical.q[rows]]
            if logical.zeros is not None:
                values += SYMMETRIC_ZERO - logical.zeros[group].astype(np.float32)
            values *= logical.scales[group].astype(np.float32) * np.float32(packed.tensor_scale)
            expected = weight[:, rows].T.astype(np.float32)
            largest = max(largest, float(np.abs(expected).max()))
            total += float(np.abs(expected).sum(dtype=np.float64))
            np.abs(np.subtract(values, expected, out=values), out=values)
            worst = max(worst, float(values.max()))
            deviation += float(values.sum(dtype=np.float64))
    return (worst / largest, deviation / total) if largest else (0.0, 0.0)


def scale_error(scales: Iterable[NDArray[Any]], dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the maximum and mean relative errors of rounding nonzero scales to ``dtype``."""
    worst, total, count = 0.0, 0.0, 0
    for array in scales:
        if array.dtype != dtype:
            exact = array.astype(np.float64)
            exact = exact[exact != 0]
            relative = np.abs(exact.astype(dtype).astype(np.float64) - exact) / np.abs(exact)
            worst = max(worst, float(relative.max(initial=0)))
            total, count = total + float(relative.sum()), count + exact.size
    return worst, total / max(count, 1)
