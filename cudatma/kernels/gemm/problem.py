"""What a caller of gemm() asks for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.family import MAX_EXTENT

#: Of A and B: R is row-major, C column-major. RC, where elements along K lie side by side in both, is torch's linear.
LAYOUTS = ("RC", "RR", "CR", "CC")


@dataclass(frozen=True, slots=True)
class Problem:
    """y (m, n) = a (m, k) b (k, n). dtype: ``"float16"`` or ``"bfloat16"``. layout: one of LAYOUTS. version: of the
    kernel that has to run; 0: any. Raises ArgumentError, ArgumentTypeError.
    """

    m: int
    n: int
    k: int
    dtype: str
    layout: str = "RC"
    version: int = 0

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            value = getattr(self, name)
            if type(value) is not int:
                raise ArgumentTypeError(name, type(value).__name__, "int")
            if not 1 <= value <= MAX_EXTENT:
                raise ArgumentError(name, value, f"1 to {MAX_EXTENT}")
        if not isinstance(self.dtype, str) or self.dtype not in ACTIVATION_TYPES:
            raise ArgumentTypeError("dtype", self.dtype, ", ".join(ACTIVATION_TYPES))
        if self.layout not in LAYOUTS:
            raise ArgumentError("layout", self.layout, ", ".join(LAYOUTS))

    @property
    def fixed(self) -> tuple[int, int, str, str, int]:
        """All but m."""
        return self.n, self.k, self.dtype, self.layout, self.version

    @property
    def constraint(self) -> str:
        """Why only some configurations may serve, in words; empty where all may."""
        return f"version {self.version} is asked for" if self.version else ""

    @property
    def description(self) -> str:
        """In words, for people."""
        return f"M = {self.m}, N = {self.n}, K = {self.k}, {self.dtype}, {self.layout}"

    def as_json(self) -> dict[str, Any]:
        """As a tuning entry keeps it."""
        return {name: value for name, value in asdict(self).items() if name != "version"}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Problem:
        """From a tuning entry. Raises KeyError, ArgumentError, ArgumentTypeError."""
        return cls(raw["m"], raw["n"], raw["k"], raw["dtype"], raw["layout"])
