"""The tensor map's enumerations that do not shape shared memory; Swizzle and Interleave are in cudatma.layout.

Source: CUDA driver API, CUtensorMapL2promotion, CUtensorMapFloatOOBfill, CUtensorMapIm2ColWideMode.
"""

from __future__ import annotations

from cudatma.layout import Mode


class L2Promotion(Mode):
    """Granularity at which L2 fetches from DRAM."""

    NONE = 0
    B64 = 1
    B128 = 2
    B256 = 3


class OobFill(Mode):
    """What loads put where the box leaves the tensor: zeros, or NaN (floats only; read as zero by FMA)."""

    ZEROS = 0
    NAN = 1


class Im2colWideMode(Mode):
    """Elements loaded along W: ``pixels_per_column`` of them, or always 128."""

    W = 0
    W128 = 1
