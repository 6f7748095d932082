"""Properties of the GPUs on which benchmarks/results was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from cudatma.kernels.gpu import H200, Gpu

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
_GPUS = {
    "NVIDIA H200": replace(H200, memory_bus_bits=6016),
    "NVIDIA H100 80GB HBM3": replace(H200, memory_clock_mhz=2619, memory_bus_bits=5120),
}


def readings(name: str) -> tuple[list[dict[str, Any]], Gpu]:
    """Return the cells of a result, and the GPU."""
    result = json.loads((RESULTS / name).read_text())
    return result["cells"], _GPUS[result["machine"]["card"]]
