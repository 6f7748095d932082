"""What a kernel is predicted to take, and what bounds it. Pure; each family has formulas of its own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted microseconds of one launch, operands cold in L2; their sum is ``us``.

    launch_us: launch, first loads, last stores. sm_us: the main loop of the busiest SM. reduction_us: partial sums that
    the CTAs of a grid or of a cluster exchange. memory_us: what the SMs' work does not hide of reading memory.
    tensor_us: the same of all tensor cores' operations.
    """

    launch_us: float
    sm_us: float
    reduction_us: float
    memory_us: float
    tensor_us: float

    @property
    def us(self) -> float:
        return self.launch_us + self.sm_us + self.reduction_us + self.memory_us + self.tensor_us

    @property
    def bound(self) -> str:
        """The largest term: ``"launch"``, ``"sm"``, ``"reduction"``, ``"memory"`` or ``"tensor"``."""
        return max((f.name for f in fields(self)), key=lambda name: float(getattr(self, name))).removesuffix("_us")

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"us": self.us, "bound": self.bound} | {f.name: getattr(self, f.name) for f in fields(self)}
