"""What a call of marlin_gemm computes: the layer, M, and whether a row's bits may depend on M. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.family import MAX_EXTENT
from cudatma.quantization import PackedWeight

#: Elements of K that share a scale; -1: one scale for each column of N.
GROUP_SIZES = (32, 64, 128, -1)


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What a kernel must know of a weight.

    k, n: elements. group_size: elements of K that share a scale; -1: one scale for each column of N. has_zeros: whether
    the weight has zero points. dtype: ``"float16"`` or ``"bfloat16"``, of activations, scales and results. Raises
    ArgumentError, ArgumentTypeError.
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
            if not 1 <= getattr(self, name) <= MAX_EXTENT:
                raise ArgumentError(name, getattr(self, name), f"1 to {MAX_EXTENT}")
        if self.group_size not in GROUP_SIZES:
            raise ArgumentError("group_size", self.group_size, ", ".join(map(str, GROUP_SIZES)))
        if self.dtype not in ACTIVATION_TYPES:
            raise ArgumentTypeError("dtype", self.dtype, ", ".join(ACTIVATION_TYPES))

    @classmethod
    def of(cls, w: PackedWeight) -> LinearShape:
        """A weight's."""
        return cls(*w.shape, w.group_size, not w.symmetric, w.dtype)


@dataclass(frozen=True, slots=True)
class Problem:
    """One GEMM: M rows of x times a layer's weight.

    batch_invariant: the bits of a row must not depend on M (invariant.py). Raises ArgumentError, ArgumentTypeError.
    """

    layer: LinearShape
    m: int
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if type(self.m) is not int:
            raise ArgumentTypeError("m", type(self.m).__name__, "int, rows of x")
        if not 1 <= self.m <= MAX_EXTENT:
            raise ArgumentError("m", self.m, f"1 to {MAX_EXTENT} rows")

    @classmethod
    def of(cls, w: PackedWeight, m: int, *, batch_invariant: bool = False) -> Problem:
        """M rows of x times a weight."""
        return cls(LinearShape.of(w), m, batch_invariant)

    @property
    def n(self) -> int:
        return self.layer.n

    @property
    def k(self) -> int:
        return self.layer.k

    @property
    def fixed(self) -> tuple[LinearShape, bool]:
        """All but M: what stays from call to call."""
        return self.layer, self.batch_invariant

    @property
    def constraint(self) -> str:
        """Why only some configurations may serve, in words; empty where all may."""
        return "batch invariance: one order of additions, whatever M is" if self.batch_invariant else ""

    @property
    def description(self) -> str:
        """In words, for people."""
        layer = self.layer
        scales = "whole-column scales" if layer.group_size == -1 else f"groups of {layer.group_size}"
        points = "zero points" if layer.has_zeros else "symmetric"
        return f"M = {self.m}, K = {self.k}, N = {self.n}, int4 weights, {layer.dtype}, {scales}, {points}"

    def as_json(self) -> dict[str, Any]:
        """As a tuning entry keeps it."""
        return asdict(self.layer) | {"m": self.m}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Problem:
        """From a tuning entry. Raises KeyError, ArgumentError, ArgumentTypeError."""
        layer = LinearShape(*(raw[name] for name in ("k", "n", "group_size", "has_zeros", "dtype")))
        return cls(layer, raw["m"])


def weight_policy(m: int, block_m: int) -> str:
    """L2 policy of the weights' loads: weights that several tiles of M read should stay in L2."""
    return "evict_first" if m <= block_m else "evict_normal"
