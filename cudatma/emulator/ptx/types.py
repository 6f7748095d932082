"""Element types of the emulator, their PTX names, the values of unwritten registers, and special registers.

Source: PTX ISA, "Special Registers".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LANES = 32

NUMPY: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(np.bool_),
    "u8": np.dtype(np.uint8),
    "i8": np.dtype(np.int8),
    "u16": np.dtype(np.uint16),
    "i16": np.dtype(np.int16),
    "u32": np.dtype(np.uint32),
    "i32": np.dtype(np.int32),
    "u64": np.dtype(np.uint64),
    "i64": np.dtype(np.int64),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}

#: Maps each type to the vector of its unwritten registers. is_unwritten() tests the identity of this vector.
_UNWRITTEN: dict[str, Array] = {}
_UNWRITTEN_IDS: set[int] = set()


def unwritten(code: str) -> Array:
    """Return the initial value of a register of this type, which is a vector of zeros."""
    zeros = _UNWRITTEN.get(code)
    if zeros is None:
        zeros = np.zeros((2, LANES), np.uint64) if code == "b128" else np.zeros(LANES, NUMPY[code])
        zeros.flags.writeable = False
        _UNWRITTEN[code] = zeros
        _UNWRITTEN_IDS.add(id(zeros))
    return zeros


def lane_bits(mask: Array) -> int:
    """Return a lane mask as an integer."""
    return int(np.packbits(mask, bitorder="little").view(np.uint32)[0])


def lane_mask(bits: int) -> Array:
    """Return the lanes whose bits are set in an integer, as an array of 32 bools."""
    lanes: Array = np.unpackbits(np.array([bits], "<u4").view(np.uint8), bitorder="little").view(bool)
    return lanes


def active_lanes(mask: Array | None) -> list[int]:
    """Return the indices of the lanes in a mask. None selects all lanes."""
    return list(range(LANES)) if mask is None else np.flatnonzero(mask).tolist()


def is_unwritten(vector: Array) -> bool:
    """Return whether a vector, or the base of a view, is the initial value of a register."""
    if vector.flags.writeable:
        return False
    root = vector if vector.base is None else vector.base
    return id(root) in _UNWRITTEN_IDS


#: Maps each PTX type to the emulator type. bf16 and the 8-bit floats are stored as raw bits.
CODES: dict[str, str] = {
    "pred": "pred",
    **{f"{kind}{bits}": f"u{bits}" for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    "f16": "f16",
    "f32": "f32",
    "f64": "f64",
    "f16x2": "u32",
    "bf16x2": "u32",
    "f32x2": "u64",
    "bf16": "u16",
    "u16x2": "u32",
    "s16x2": "u32",
    "tf32": "u32",
    "e4m3": "u8",
    "e5m2": "u8",
    "e4m3x2": "u16",
    "e5m2x2": "u16",
    "b128": "b128",
}

BYTES: dict[str, int] = {**{code: dtype.itemsize for code, dtype in NUMPY.items()}, "b128": 16}


def unsigned(code: str) -> str:
    """Return the unsigned type of the same width."""
    return code if code in ("pred", "b128") else f"u{8 * BYTES[code]}"


#: Scopes of fences and strong accesses. The scope sys equals gpu because the emulator has one device.
SCOPES = {"cta": 0, "cluster": 1, "gpu": 2, "gl": 2, "sys": 2}


_AXES = ("x", "y", "z")
#: Maps each special register to the emulator type of its value.
WIDTHS: dict[str, str] = {
    **{
        f"{name}.{axis}": "u32"
        for name in ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
        for axis in _AXES
    },
    **dict.fromkeys(
        (
            "laneid",
            "warpid",
            "nwarpid",
            "smid",
            "nsmid",
            "cluster_ctarank",
            "cluster_nctarank",
            "lanemask_eq",
            "lanemask_le",
            "lanemask_lt",
            "lanemask_ge",
            "lanemask_gt",
            "dynamic_smem_size",
            "total_smem_size",
            "aggr_smem_size",
            "envreg1",
            "envreg2",
            "reserved_smem_offset_1",
        ),
        "u32",
    ),
    "gridid": "u64",
}
#: Special registers that are constant in the emulator. On a GPU, a driver or a profiler sets their values.
CONSTANTS: dict[str, int] = {
    **{f"envreg{k}": 0 for k in range(32) if k not in (1, 2)},
    **{f"pm{k}": 0 for k in range(8)},
    **{f"pm{k}_64": 0 for k in range(8)},
    "current_graph_exec": 0,
    "reserved_smem_offset_begin": 0,
    "reserved_smem_offset_end": 1024,
    "reserved_smem_offset_cap": 1024,
    "reserved_smem_offset_0": 0,
}
