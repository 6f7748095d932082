"""What a caller of gemm() asks for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, ArgumentTypeError

_MAX_EXTENT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Problem:
    """y (m, n) = a (m, k) b (n, k)^T. dtype: ``"float16"`` or ``"bfloat16"``.

    Raises ArgumentError, ArgumentTypeError.
    """

    m: int
    n: int
    k: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            value = getattr(self, name)
            if type(value) is not int:
                raise ArgumentTypeError(name, type(value).__name__, "int")
            if not 1 <= value <= _MAX_EXTENT:
                raise ArgumentError(name, value, f"1 to {_MAX_EXTENT}")
        if not isinstance(self.dtype, str) or self.dtype not in ACTIVATION_TYPES:
            raise ArgumentTypeError("dtype", self.dtype, ", ".join(ACTIVATION_TYPES))

    @property
    def fixed(self) -> tuple[int, int, str]:
        """All but m."""
        return self.n, self.k, self.dtype

    @property
    def constraint(self) -> str:
        """Every configuration may serve."""
        return ""

    @property
    def description(self) -> str:
        """In words, for people."""
        return f"M = {self.m}, N = {self.n}, K = {self.k}, {self.dtype}"

    def as_json(self) -> dict[str, Any]:
        """As a tuning entry keeps it."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Problem:
        """From a tuning entry. Raises KeyError, ArgumentError, ArgumentTypeError."""
        return cls(raw["m"], raw["n"], raw["k"], raw["dtype"])
