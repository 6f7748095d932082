"""Problems of marlin_gemm, and the values of the launch struct that depend on the weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from cudatma.dtypes import ACTIVATION_TYPES, activation_type
from cudatma.errors import ArgumentError, ArgumentTypeError, alternatives
from cudatma.kernels.family import MAX_EXTENT, Option, resized_copy
from cudatma.kernels.launch_struct import MEMBERS as WORK_MEMBERS
from cudatma.kernels.launch_struct import Member
from cudatma.kernels.schedule import ceil_div
from cudatma.quantization import PackedWeight
from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO, row_blocks
from cudatma.quantization.weight_format import WEIGHT_FORMATS, WeightFormat, weight_format

#: Supported group sizes in any format, in elements of K. -1 means one scale per column of N.
GROUP_SIZES = (*sorted({size for kind in WEIGHT_FORMATS.values() for size in kind.group_sizes} - {-1}), -1)
#: Command-line options for the weight of a problem.
WEIGHT_OPTIONS = (
    Option("dtype", "float16", tuple(ACTIVATION_TYPES), "dtype of activations and scales"),
    Option(
        "group_size",
        128,
        GROUP_SIZES,
        "elements of K that share a scale, or -1 for all of K; by default 32 for mxfp4 and 16 for nvfp4",
    ),
    Option("has_zeros", False, (False, True), "weights with zero points"),
    Option("format", "int4", tuple(WEIGHT_FORMATS), "format of the weights"),
)
#: Fields that a weight and the configs of its kernels have in common.
PROBLEM_FIELDS = ("group_size", "has_zeros", "dtype", "format")
#: Members of the launch struct.
MEMBERS = WORK_MEMBERS | {
    member.name: member
    for member in (
        Member("weight_rows", "u32", "number of 64 x 64 blocks of packed weights"),
        Member("weight_row_blocks", "u32", "number of blocks of weights along K"),
        Member("scale_rows", "u32", "number of scale groups along K"),
        Member("scale_pitch", "u32", "number of columns per row of scales, including padding"),
        Member("prefetch_stages", "u32", "number of stages of weights that a dependent launch loads before it waits"),
        Member("scale_offset", "u32", "multiplier for the scales, in both halves"),
        Member("scale_back", "float", "multiplier for the sums"),
        Member("activation_pitch", "u64", "stride between rows of activations, in elements"),
    )
}


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Shape and format of a weight.

    Parameters
    ----------
    k, n : int
        Number of rows and number of columns.
    group_size : int
        Number of elements of K that share a scale, or -1 for one scale per column of N.
    has_zeros : bool
        Whether the weight has zero points.
    dtype : {"float16", "bfloat16"}
        Dtype of activations, scales and results.
    format : str
        Format of the weight.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a field is invalid.
    """

    k: int
    n: int
    group_size: int
    has_zeros: bool
    dtype: str
    format: str = "int4"

    def __post_init__(self) -> None:
        kinds = {"k": int, "n": int, "group_size": int, "has_zeros": bool, "dtype": str}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if type(value) is not kind:
                raise ArgumentTypeError(name, repr(value), kind.__name__)
        for name in ("k", "n"):
            if not 1 <= getattr(self, name) <= MAX_EXTENT:
                raise ArgumentError(name, getattr(self, name), f"1 to {MAX_EXTENT}")
        check_format(self.format, self.group_size, self.has_zeros)
        if self.dtype not in ACTIVATION_TYPES:
            raise ArgumentTypeError("dtype", self.dtype, alternatives(ACTIVATION_TYPES))

    @classmethod
    def of(cls, w: PackedWeight) -> LinearShape:
        """Return the shape and format of a weight.

        Parameters
        ----------
        w : PackedWeight
            The weight.

        Returns
        -------
        LinearShape
            The shape and format of the weight.
        """
        return cls(*w.shape, w.group_size, not w.symmetric, w.dtype, w.format)

    @property
    def weight(self) -> WeightFormat:
        """Format of the weight."""
        return WEIGHT_FORMATS[self.format]


def weight_text(layer: LinearShape) -> str:
    """Return a description of a weight in words, without its sizes."""
    scales = "whole-column scales" if layer.group_size == -1 else f"groups of {layer.group_size}"
    points = ", zero points" if layer.has_zeros else ", symmetric" if layer.weight.has_zeros else ""
    return f"{layer.weight.title} weights, {layer.dtype}, {scales}{points}"


def check_format(name: str, group_size: int, has_zeros: bool) -> WeightFormat:
    """Return the format with this name.

    Raises ArgumentError or ArgumentTypeError if the format is unknown or does not allow the group size or zero points.
    """
    kind = weight_format(name)
    if group_size not in kind.group_sizes:
        raise ArgumentError("group_size", group_size, alternatives(kind.group_sizes))
    if has_zeros and not kind.has_zeros:
        raise ArgumentError("has_zeros", has_zeros, f"False for format {name!r}")
    return kind


@dataclass(frozen=True)  # without slots, as resized_copy() requires
class Problem:
    """Multiplication of M rows of x by a layer's weight.

    ``layer``, ``m`` and ``batch_invariant`` determine the configuration. The other fields affect only the launch.

    Parameters
    ----------
    layer : LinearShape
        The weight.
    m : int
        Number of rows of x.
    batch_invariant : bool
        Whether the result of a row must be bitwise identical for every M.
    x_pitch_bytes, out_pitch_bytes : int, optional
        Row pitch, or 0 to repeat one row. Default: dense rows.
    has_aligned_x, has_aligned_out : bool
        Whether every row begins at a multiple of 16 bytes.
    has_perm : bool
        Whether the weight was quantized in activation order.
    scale_form, scale_exponent : str, int
        The weight's ``scale_fit``.
    tensor_scale : float
        The weight's ``tensor_scale``.
    programmatic : bool
        Whether to use programmatic dependent launch.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If m is out of range.
    """

    layer: LinearShape
    m: int
    batch_invariant: bool = False
    x_pitch_bytes: int | None = None
    out_pitch_bytes: int | None = None
    has_aligned_x: bool = True
    has_aligned_out: bool = True
    has_perm: bool = False
    scale_form: str = "none"
    scale_exponent: int = 0
    tensor_scale: float = 1.0
    programmatic: bool = False

    def __post_init__(self) -> None:
        if type(self.m) is not int:
            raise ArgumentTypeError("m", type(self.m).__name__, "int")
        if not 1 <= self.m <= MAX_EXTENT:
            raise ArgumentError("m", self.m, f"1 to {MAX_EXTENT}")

    @classmethod
    def of(cls, w: PackedWeight, m: int, **others: Any) -> Problem:
        """Return the problem for M dense rows of x and a weight. ``others`` are values of other fields."""
        fit = w.scale_fit
        facts: dict[str, Any] = {"has_perm": w.perm is not None, "scale_form": fit.form, "scale_exponent": fit.exponent}
        facts["tensor_scale"] = w.tensor_scale
        return cls(LinearShape.of(w), m, **(facts | others))

    def with_m(self, m: int) -> Problem:
        """Return the problem with another M. The caller must have checked M."""
        return resized_copy(self, m=m)

    @property
    def plan_key(self) -> tuple[Any, ...]:
        """Fields that determine a launch.

        M and the scale multipliers are omitted because the struct passes them to the kernel.
        """
        return (
            self.layer,
            *(self.batch_invariant, self.x_pitch_bytes, self.out_pitch_bytes, self.has_aligned_x),
            *(self.has_aligned_out, self.has_perm, self.scale_form, self.programmatic),
        )

    @property
    def copies_x(self) -> bool:
        """Whether another kernel first copies x to aligned rows."""
        return self.has_perm or not self.has_aligned_x

    @property
    def n(self) -> int:
        return self.layer.n

    @property
    def k(self) -> int:
        return self.layer.k

    @property
    def fixed(self) -> tuple[LinearShape, bool]:
        """Fields other than M on which the choice depends."""
        return self.layer, self.batch_invariant

    @property
    def constraint(self) -> str:
        """Reason why only some configurations are allowed, or "" if all are allowed."""
        return "batch invariance requires the same order of additions for every M" if self.batch_invariant else ""

    @property
    def description(self) -> str:
        """Description of the problem in words."""
        return f"M = {self.m}, K = {self.k}, N = {self.n}, {weight_text(self.layer)}"

    def as_json(self) -> dict[str, Any]:
        """Return the problem in the form that tuning entries store."""
        return asdict(self.layer) | {"m": self.m}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Problem:
        """Return the problem of a tuning entry.

        Raises KeyError, ArgumentError or ArgumentTypeError for an invalid entry.
        """
        fields = {name: raw[name] for name in ("k", "n", "group_size", "has_zeros", "dtype")}
        layer = LinearShape(**fields, format=raw.get("format", "int4"))
        return cls(layer, raw["m"])


class WeightReader(Protocol):
    """Members of a config that weight_values() reads."""

    @property
    def dtype(self) -> str: ...
    @property
    def weight(self) -> WeightFormat: ...
    @property
    def scales_floats(self) -> bool: ...
    def prefetch_stages(self, weight_bytes: int) -> int: ...


def weight_values(
    config: WeightReader,
    n: int,
    k: int,
    scale_rows: int,
    *,
    activation_pitch: int = 0,
    programmatic: bool = False,
    scale_exponent: int = 0,
    tensor_scale: float = 1.0,
) -> dict[str, Any]:
    """Return the values of the struct members that do not depend on M, keyed by name.

    ``activation_pitch`` is the row pitch of the activations in elements. ``programmatic`` is True if the launch uses
    programmatic dependent launch. ``scale_exponent`` is p if the kernel multiplies scales by 2^-p
    (``PackedWeight.scale_fit``), and ``tensor_scale`` is the multiplier for the whole weight.
    """
    bits = config.weight.bits
    weight_row_blocks = row_blocks(k, bits)
    return scale_values(config, scale_exponent, tensor_scale) | {
        "weight_rows": ceil_div(n, 64) * weight_row_blocks,
        "weight_row_blocks": weight_row_blocks,
        "scale_rows": scale_rows,
        "scale_pitch": 64 * ceil_div(n, 64),
        "prefetch_stages": config.prefetch_stages(k * n * bits // 8) if programmatic else 0,
        "activation_pitch": activation_pitch,
    }


def scale_values(config: WeightReader, exponent: int, tensor_scale: float) -> dict[str, Any]:
    """Return the multipliers for scales and sums if the kernel multiplies scales by 2^-exponent."""
    factor = 2.0 ** config.weight.shift(config.dtype) if config.scales_floats else -float(SYMMETRIC_ZERO)
    offset = np.array(factor * 2.0**-exponent, activation_type(config.dtype).numpy).view(np.uint16)
    return {"scale_offset": int(offset) << 16 | int(offset), "scale_back": 2.0**exponent * tensor_scale}
