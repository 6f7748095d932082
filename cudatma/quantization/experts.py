"""Quantize, pack, save and load the weights of a layer's experts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.dtypes import BFLOAT16
from cudatma.errors import ArgumentTypeError, QuantizationError, WeightFileError, alternatives
from cudatma.quantization.layout_v1 import BLOCK, SYMMETRIC_ZERO, blocks
from cudatma.quantization.namespaces import host_array, library_of, namespace_of, native_array, on_device_of
from cudatma.quantization.packed import LogicalWeight, PackedWeight, _Referable, pack, unpack
from cudatma.quantization.rounding import quantize
from cudatma.quantization.storage import StoredWeight, read_weight, write_weights
from cudatma.quantization.weight_format import weight_format

#: A gated weight alternates between this number of gate columns and the same number of up columns. The columns that a
#: thread holds in an MMA are this far apart.
GATE_COLUMNS = 8


def _silu_glu(gate: Any, up: Any) -> Any:
    return gate / (1 + np.exp(-gate)) * up


def _swiglu_oai(gate: Any, up: Any) -> Any:
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


#: Functions of arrays of gates and ups: the activations that marlin_moe supports after the first product.
GATES: dict[str, Callable[[Any, Any], Any]] = {"silu_glu": _silu_glu, "swiglu_oai": _swiglu_oai}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PackedExperts(_Referable):
    """The quantized weights (K, N) of all experts in a layer.

    Use ``quantize_experts`` or ``pack_experts`` to create them.

    Parameters
    ----------
    weight : PackedWeight
        One weight that contains the columns of all experts, one expert after another. The columns of each expert are
        padded to a multiple of 64.
    experts : int
        Number of experts.
    columns : int
        Number of columns N of each expert.
    gated : bool
        Whether the weights combine gate and up, with columns interleaved in groups of 8.
    tensor_scales : array of float32, shape (experts, 1), or (experts, 2) if ``gated``, optional
        Multipliers for each expert's weights, or for its gate and up, in addition to ``weight.tensor_scale``. Only
        nvfp4 weights have these multipliers.

    Attributes
    ----------
    shape : tuple of int
        The sizes (experts, K, N).
    attachments : dict
        Cache that kernels use for these weights. It is not saved or copied.

    Raises
    ------
    QuantizationError
        If a size does not match the weight.
    ArgumentTypeError
        If ``weight`` is not a PackedWeight, or if ``gated`` is not a bool.

    Examples
    --------
    >>> experts = cudatma.quantize_experts(np.ones((4, 128, 64), np.float32), group_size=64)
    >>> experts
    PackedExperts(shape=(4, 128, 64), group_size=64, float16, symmetric, host)
    >>> experts.dequantize().shape
    (4, 128, 64)
    """

    weight: PackedWeight
    experts: int
    columns: int
    gated: bool = False
    tensor_scales: Any = None
    attachments: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.weight, PackedWeight):
            raise ArgumentTypeError("weight", type(self.weight).__name__, "PackedWeight", "use pack_experts()")
        for name in ("experts", "columns"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise QuantizationError(name, value, "a positive int")
        expected = self.experts * self.padded_columns
        if self.weight.shape[1] != expected:
            allowed = f"{expected} for {self.experts} experts with {self.padded_columns} padded columns each"
            raise QuantizationError("weight.shape[1]", self.weight.shape[1], allowed, "use pack_experts()")
        if self.weight.perm is not None:
            remedy = "quantize without activation order (desc_act=False)"
            raise QuantizationError("weight.perm", "an activation order", "None for expert weights", remedy)
        if not isinstance(self.gated, bool):
            raise ArgumentTypeError("gated", repr(self.gated), "True, False")
        if self.gated and self.columns % (2 * GATE_COLUMNS):
            raise QuantizationError("columns", self.columns, f"a multiple of {2 * GATE_COLUMNS} if gated is True")
        if self.tensor_scales is not None:
            self._check_tensor_scales()

    def _check_tensor_scales(self) -> None:
        """Raise QuantizationError unless the tensor scales match the weight. Values on a GPU are not checked."""
        scales, shape = self.tensor_scales, (self.experts, 1 + self.gated)
        if not weight_format(self.format).has_tensor_scale:
            raise QuantizationError("tensor_scales", "an array", f"None for format {self.format!r}")
        if getattr(scales, "dtype", None) is None:
            raise ArgumentTypeError("tensor_scales", type(scales).__name__, "an array or None")
        if scales.dtype != np.float32 or scales.shape != shape:
            raise QuantizationError(
                "tensor_scales", f"{scales.dtype} {scales.shape}", f"an array with dtype float32 and shape {shape}"
            )
        weight = self.weight.qweight
        same_device = getattr(scales, "device", None) == getattr(weight, "device", None)
        if namespace_of(scales) is not namespace_of(weight) or not same_device:
            got = f"a {library_of(scales)} array on another device"
            raise QuantizationError("tensor_scales", got, "on the device of the weight")
        if isinstance(scales, np.ndarray) and not bool(np.isfinite(scales).all()):
            raise QuantizationError("tensor_scales", f"{scales[~np.isfinite(scales)][0]}", "finite")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes (experts, K, N)."""
        return self.experts, self.weight.shape[0], self.columns

    @property
    def padded_columns(self) -> int:
        """Number of columns of each expert in ``weight``."""
        return blocks(self.columns) * BLOCK

    @property
    def group_size(self) -> int:
        """Number of rows of K that share a scale, or -1 for all rows."""
        return self.weight.group_size

    @property
    def dtype(self) -> str:
        """Type of the scales, ``"float16"`` or ``"bfloat16"``."""
        return self.weight.dtype

    @property
    def format(self) -> str:
        """Format of the weights, such as ``"int4"``."""
        return self.weight.format

    @property
    def symmetric(self) -> bool:
        """Whether the weights have no zero points."""
        return self.weight.symmetric

    @property
    def nbytes(self) -> int:
        """Total size of all arrays in bytes."""
        return self.weight.nbytes + (0 if self.tensor_scales is None else int(self.tensor_scales.nbytes))

    @property
    def device(self) -> int | None:
        """CUDA device ordinal of the arrays, or None if they are on the host."""
        return self.weight.device

    def dequantize(self, *, dtype: Any = np.float64) -> NDArray[Any]:
        """Return the dequantized values of the weights; see ``PackedWeight.dequantize``.

        Parameters
        ----------
        dtype : dtype, default float64
            Type of the result. Values are rounded once.

        Returns
        -------
        numpy.ndarray, shape (experts, K, N)
            The values. In a gated weight, the columns of gate precede those of up.
        """
        values = self.weight.dequantize(dtype=dtype if self.tensor_scales is None else np.float64)
        split = values.reshape(values.shape[0], self.experts, self.padded_columns).transpose(1, 0, 2)
        stored = split[:, :, : self.columns]
        out: NDArray[Any] = np.empty_like(stored)
        out[:, :, stored_order(np.arange(self.columns)) if self.gated else slice(None)] = stored
        if self.tensor_scales is None:
            return out
        factors = host_array(self.tensor_scales, "tensor_scales")[:, None, :, None]
        exact = (out.reshape(*out.shape[:2], 1 + self.gated, -1) * factors).reshape(out.shape)
        with np.errstate(over="ignore"):  # Values beyond the range of dtype become infinite, as on the GPU.
            rounded: NDArray[Any] = exact.astype(BFLOAT16 if dtype == "bfloat16" else dtype)
        return rounded

    def to_device(self, device: int | None = None) -> PackedExperts:
        """Copy the weights to a GPU.

        Parameters
        ----------
        device : int, optional
            Device ordinal. Default: CuPy's current device.

        Returns
        -------
        PackedExperts
            The weights with CuPy arrays, or these weights if they are already on the device.

        Raises
        ------
        ArgumentTypeError, DriverError
            See ``PackedWeight.to_device``.
        """
        weight = self.weight.to_device(device)
        if weight is self.weight:
            return self
        with on_device_of(weight.qweight):
            scales = None if self.tensor_scales is None else namespace_of(weight.qweight).asarray(self.tensor_scales)
        return PackedExperts(weight, self.experts, self.columns, self.gated, scales)

    def to_host(self) -> PackedExperts:
        """Copy the weights to the host.

        Returns
        -------
        PackedExperts
            The weights with NumPy arrays, or these weights if they are on the host.
        """
        weight = self.weight.to_host()
        if weight is self.weight:
            return self
        scales = None if self.tensor_scales is None else host_array(self.tensor_scales, "tensor_scales")
        return PackedExperts(weight, self.experts, self.columns, self.gated, scales)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights to a safetensors file.

        Parameters
        ----------
        path : str or os.PathLike
            Path of the file.

        Raises
        ------
        WeightFileError
            If the file cannot be written.
        """
        write_weights(path, {"weight": self.stored("weight")})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PackedExperts:
        """Read the only weights from a file that save() or save_weights() wrote.

        Parameters
        ----------
        path : str or os.PathLike
            Path of the file.

        Returns
        -------
        PackedExperts
            The weights, on the host.

        Raises
        ------
        WeightFileError
            If the file cannot be read or is invalid, or if it contains a PackedWeight or several weights.
        """
        return cls.from_stored(path, read_weight(path))

    def stored(self, name: str) -> StoredWeight:
        """Return the content of a file that stores these weights.

        Parameters
        ----------
        name : str
            Name of the weights in the file.

        Returns
        -------
        StoredWeight
            The metadata, and the arrays on the host.
        """
        stored = self.weight.stored(name)
        arrays = stored.arrays
        if self.tensor_scales is not None:
            arrays = arrays | {"tensor_scales": host_array(self.tensor_scales, "tensor_scales")}
        return replace(stored, shape=self.shape, gated=self.gated, arrays=arrays)

    @classmethod
    def from_stored(cls, path: str | os.PathLike[str], stored: StoredWeight) -> PackedExperts:
        """Create weights from the content of a file.

        Parameters
        ----------
        path : str or os.PathLike
            Path of the file, for error messages.
        stored : StoredWeight
            Content of the file.

        Returns
        -------
        PackedExperts
            The weights, on the host.

        Raises
        ------
        WeightFileError
            If a field is invalid. The error names the file, the weight and the field.
        """
        field, shape = f"{os.fspath(path)}: {stored.name}", stored.shape
        remedy = "pack the weights again"
        if not stored.are_experts:
            raise WeightFileError(
                field, f"a weight of shape {shape}", "the weights of experts", "call PackedWeight.load()"
            )
        if any(type(extent) is not int or extent < 1 for extent in shape) or type(stored.gated) is not bool:
            got = f"shape {shape} and gated {stored.gated!r}"
            allowed = "expert weights with positive sizes (experts, K, N) and a bool for gated"
            raise WeightFileError(field, got, allowed, remedy)
        experts, k, columns = shape
        weight = PackedWeight.from_stored(path, replace(stored, shape=(k, experts * blocks(columns) * BLOCK)))
        try:
            return cls(weight, experts, columns, stored.gated, stored.arrays.get("tensor_scales"))
        except QuantizationError as error:
            raise WeightFileError(f"{field}.{error.field}", error.got, error.allowed, remedy) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.weight, self.experts, self.columns, self.gated, self.tensor_scales)

    def __repr__(self) -> str:
        where = "host" if self.device is None else f"device {self.device}"
        symmetry = "symmetric" if self.symmetric else "asymmetric"
        kind = symmetry if self.format == "int4" else f"format={self.format!r}"
        gated = ", gated" if self.gated else ""
        return f"PackedExperts(shape={self.shape}, group_size={self.group_size}, {self.dtype}, {kind}{gated}, {where})"


def quantize_experts(
    weights: Any,
    *,
    group_size: int | None = None,
    gated: bool = False,
    symmetric: bool = True,
    dtype: Any = "float16",
    clip_search: bool = False,
    format: str = "int4",
) -> PackedExperts:
    """Quantize the dense weights of all experts in a layer.

    Parameters
    ----------
    weights : array_like, shape (experts, K, N)
        Floating-point weights (in, out). The argument may be a NumPy or CuPy array, a torch tensor, or an object that
        supports DLPack.
    group_size : int, optional
        Number of rows of K that share a scale, as for ``quantize``.
    gated : bool, default False
        Whether the columns of gate precede the columns of up, as in the first weight of a gated layer.
    symmetric, dtype, clip_search, format : optional
        As for ``quantize``. In the format nvfp4, each expert has one tensor scale, or two (gate and up) if ``gated``.

    Returns
    -------
    PackedExperts
        The weights, on the same device as the input.

    Raises
    ------
    QuantizationError
        If a shape is wrong, or under the conditions that ``quantize`` lists. The error names the expert.
    ArgumentTypeError
        If ``weights`` is not an array.

    Examples
    --------
    >>> cudatma.quantize_experts(np.ones((8, 256, 512), np.float32), gated=True)
    PackedExperts(shape=(8, 256, 512), group_size=128, float16, symmetric, gated, host)
    """
    native = native_array(weights, "weights")
    if native.ndim != 3 or 0 in native.shape:
        raise QuantizationError("weights.shape", tuple(native.shape), "(experts, K, N), all positive")
    options = {"group_size": group_size, "symmetric": symmetric, "dtype": dtype, "clip_search": clip_search}
    order, half = _order(native.shape[2], gated), native.shape[2] // 2
    has_two_scales = order is not None and weight_format(format).has_tensor_scale
    packed: list[Any] = []
    for index in range(native.shape[0]):
        expert = native[index]
        try:
            if has_two_scales:
                halves = [quantize(part, format=format, **options) for part in (expert[:, :half], expert[:, half:])]
                packed.append(tuple(halves))
            else:
                packed.append(quantize(expert if order is None else expert[:, order], format=format, **options))
        except QuantizationError as error:
            field = f"weights[{index}]" if error.field == "weight" else f"weights[{index}]: {error.field}"
            raise QuantizationError(field, error.got, error.allowed) from error
    return pack_experts(packed, gated=True) if has_two_scales else _stacked(packed, gated)


def pack_experts(
    weights: Sequence[PackedWeight | tuple[PackedWeight, PackedWeight]], *, gated: bool = False
) -> PackedExperts:
    """Combine the packed weights of a layer's experts.

    Parameters
    ----------
    weights : sequence of PackedWeight, or of pairs of PackedWeight
        The weight (K, N) of each expert, all of the same shape, format, group size, dtype and device. With ``gated``,
        an element can also be a pair of weights (K, N / 2), gate and up. The tensor scales become ``tensor_scales`` of
        the result.
    gated : bool, default False
        Whether the columns of gate precede the columns of up.

    Returns
    -------
    PackedExperts
        The weights, on the same device. They have zero points if one of ``weights`` has zero points.

    Raises
    ------
    QuantizationError
        If the sequence is empty, the weights differ, or a weight has an activation order.
    ArgumentTypeError
        If ``weights`` is not a sequence, or if an element is not a PackedWeight.

    Examples
    --------
    >>> gate, up = (cudatma.quantize(np.ones((128, 64), np.float32)) for _ in range(2))
    >>> cudatma.quantization.pack_experts([(gate, up)] * 4, gated=True)
    PackedExperts(shape=(4, 128, 128), group_size=128, float16, symmetric, gated, host)
    """
    if not isinstance(weights, Sequence):
        allowed = "a sequence of PackedWeight, or of pairs of PackedWeight"
        raise ArgumentTypeError("weights", type(weights).__name__, allowed, "pass one weight per expert")
    experts = [weight if isinstance(weight, tuple) else (weight,) for weight in weights]
    if not experts or not all(experts):
        got = "an empty tuple" if experts else "an empty sequence"
        raise QuantizationError("weights", got, "a nonempty sequence with one weight per expert")
    if gated is not True and any(len(parts) > 1 for parts in experts):
        raise QuantizationError("weights", "pairs", "a sequence of single weights if gated is False")
    named = {
        f"weights[{index}]" + (f"[{part}]" if len(parts) > 1 else ""): weight
        for index, parts in enumerate(experts)
        for part, weight in enumerate(parts)
    }
    (first_name, first), *_ = named.items()
    for name, weight in named.items():
        if not isinstance(weight, PackedWeight):
            raise ArgumentTypeError(name, type(weight).__name__, "PackedWeight")
        if weight.perm is not None:
            remedy = "quantize without activation order (desc_act=False)"
            raise QuantizationError(name, "a weight with activation order", "a weight without activation order", remedy)
        for fact in ("shape", "format", "group_size", "dtype", "device"):
            if (value := getattr(weight, fact)) != (expected := getattr(first, fact)):
                raise QuantizationError(f"{name}.{fact}", value, f"{expected} (as in {first_name})")
    if any(len(parts) != len(experts[0]) for parts in experts) or len(experts[0]) > 2:
        lengths = alternatives(sorted({len(parts) for parts in experts}))
        allowed = "a sequence of weights or a sequence of pairs of weights"
        raise QuantizationError("weights", f"elements of {lengths} weights", allowed)
    symmetric = all(weight.symmetric for weight in named.values())
    order = _order(first.shape[1] * len(experts[0]), gated)
    scales = [[weight.tensor_scale for weight in parts] for parts in experts]
    if order is None and all(weight.symmetric == symmetric for weight in named.values()):
        return _stacked([parts[0] for parts in experts], gated, scales)
    return _stacked([_joined(parts, order, symmetric) for parts in experts], gated, scales)


def gate_then_up(columns: Any) -> Any:
    """Reorder the last axis of an array or tensor, in which gate and up alternate, so that gate precedes up."""
    return columns.reshape(*columns.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(columns.shape)


def stored_order(columns: Any) -> Any:
    """Reorder a vector or 1-D tensor, in which gate precedes up, as the columns of a gated weight are stored."""
    return columns.reshape(2, -1, GATE_COLUMNS).swapaxes(0, 1).reshape(-1)


def _order(columns: int, gated: bool) -> NDArray[np.int64] | None:
    if not isinstance(gated, bool):
        raise ArgumentTypeError("gated", repr(gated), "True, False")
    if not gated:
        return None
    if columns % (2 * GATE_COLUMNS):
        allowed = f"matrices with a multiple of {2 * GATE_COLUMNS} columns if gated is True"
        raise QuantizationError("weights", f"{columns} columns", allowed)
    order: NDArray[np.int64] = stored_order(np.arange(columns))
    return order


def _joined(weights: Sequence[PackedWeight], order: NDArray[np.int64] | None, symmetric: bool) -> PackedWeight:
    """Concatenate the columns of weights, reorder them, and add zero points unless ``symmetric`` is True.

    The result has no tensor scale.
    """
    first = weights[0]
    xp = namespace_of(first.qweight)
    with on_device_of(first.qweight):
        parts = [unpack(weight) for weight in weights]
        arrays = [[part.q for part in parts], [part.scales for part in parts]]
        if not symmetric:
            arrays.append([_zeros(part, xp) for part in parts])
        joined = [xp.concatenate(array, axis=1) for array in arrays]
        if order is not None:
            columns = xp.asarray(order)
            joined = [xp.ascontiguousarray(array[:, columns]) for array in joined]
        return pack(*joined, group_size=first.group_size, format=first.format)


def _zeros(part: LogicalWeight, xp: Any) -> Any:
    if part.zeros is not None:
        return part.zeros
    return xp.full(part.scales.shape, SYMMETRIC_ZERO, dtype=np.uint8)


def _stacked(
    weights: Sequence[PackedWeight], gated: bool, tensor_scales: Sequence[Sequence[float]] | None = None
) -> PackedExperts:
    """Combine weights of the same format and size whose columns are already in stored order.

    ``tensor_scales`` contains one or two multipliers for each expert. Default: the tensor scales of the weights.
    """
    first = weights[0]
    k, n = first.shape
    xp = namespace_of(first.qweight)
    factors = None
    with on_device_of(first.qweight):
        stacked = PackedWeight(
            qweight=xp.concatenate([weight.qweight for weight in weights]),
            scales=xp.concatenate([weight.scales for weight in weights], axis=1),
            zeros=None if first.zeros is None else xp.concatenate([weight.zeros for weight in weights], axis=1),
            perm=None,
            shape=(k, len(weights) * blocks(n) * BLOCK),
            group_size=first.group_size,
            dtype=first.dtype,
            format=first.format,
        )
        if weight_format(first.format).has_tensor_scale:
            rows = tensor_scales or [[weight.tensor_scale] for weight in weights]
            shape = len(weights), 1 + gated
            factors = xp.asarray(np.ascontiguousarray(np.broadcast_to(np.array(rows, np.float32), shape)))
    return PackedExperts(stacked, len(weights), n, gated, factors)
