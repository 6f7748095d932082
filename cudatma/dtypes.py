"""Element types, with their NumPy or CuPy dtype, CUDA C++ type, TMA enumeration value and size.

Source: CUDA driver API, CUtensorMapDataType; PTX ISA, "Tensor Data Types".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cudatma.errors import ArgumentTypeError, DescriptorError

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class TmaType:
    """One of the 16 element types of a tensor map.

    Attributes
    ----------
    name : str
        The driver's name without its prefix, in lower case.
    driver_value : int
        Value of CUtensorMapDataType.
    descriptor_format : int
        Value of bits 71 to 74 of the map. A tf32 map has the value of f32, and its bit 80 is set.
    element_bits : int
        Number of bits per element in global memory, which is 4 or 6 for the packed types.
    cuda : str
        CUDA C++ type.
    numpy : numpy.dtype or None
        Default dtype of arrays with this type, or None if NumPy has no corresponding dtype.
    packed : bool, default: False
        Whether elements are counted in groups of 16.
    """

    name: str
    driver_value: int
    descriptor_format: int
    element_bits: int
    cuda: str
    numpy: np.dtype[Any] | None
    packed: bool = False

    @property
    def element_bytes(self) -> int:
        """Number of bytes per element in shared memory and in strides, which is 1 for the packed types."""
        return max(1, self.element_bits // 8)

    @property
    def is_float(self) -> bool:
        return self.name.startswith(("float", "bfloat", "tfloat"))


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(name)


TMA_TYPES: dict[str, TmaType] = {
    t.name: t
    for t in (
        TmaType("uint8", 0, 0, 8, "unsigned char", _dtype("uint8")),
        TmaType("uint16", 1, 1, 16, "unsigned short", _dtype("uint16")),
        TmaType("uint32", 2, 2, 32, "unsigned int", _dtype("uint32")),
        TmaType("int32", 3, 3, 32, "int", _dtype("int32")),
        TmaType("uint64", 4, 4, 64, "unsigned long long", _dtype("uint64")),
        TmaType("int64", 5, 5, 64, "long long", _dtype("int64")),
        TmaType("float16", 6, 6, 16, "__half", _dtype("float16")),
        TmaType("float32", 7, 7, 32, "float", _dtype("float32")),
        TmaType("float64", 8, 9, 64, "double", _dtype("float64")),
        TmaType("bfloat16", 9, 10, 16, "__nv_bfloat16", BFLOAT16),
        TmaType("float32_ftz", 10, 8, 32, "float", None),
        TmaType("tfloat32", 11, 7, 32, "float", None),
        TmaType("tfloat32_ftz", 12, 8, 32, "float", None),
        TmaType("16u4_align8b", 13, 11, 4, "unsigned char", None, packed=True),
        TmaType("16u4_align16b", 14, 12, 4, "unsigned char", None, packed=True),
        TmaType("16u6_align16b", 15, 13, 6, "unsigned char", None, packed=True),
    )
}

#: Maps NumPy dtypes that have no TMA type to the unsigned TMA type of the same width.
_CARRIED = {"int8": "uint8", "bool": "uint8", "int16": "uint16"}
_BY_NUMPY = {t.numpy: t for t in TMA_TYPES.values() if t.numpy is not None}


def tma_type(dtype: object) -> TmaType:
    """Return the TmaType for a name (``"tfloat32"``), a TmaType or a NumPy dtype (bf16 through ml_dtypes).

    int8, bool and int16 map to the unsigned type of the same width. Raises DescriptorError for any other type.
    """
    if isinstance(dtype, TmaType):
        return dtype
    if isinstance(dtype, str) and dtype.lower() in TMA_TYPES:
        return TMA_TYPES[dtype.lower()]
    try:
        array_dtype = None if dtype is None else np.dtype(dtype)  # type: ignore[call-overload]
    except TypeError:
        array_dtype = None
    if array_dtype is not None:
        if array_dtype in _BY_NUMPY and array_dtype.isnative:
            return _BY_NUMPY[array_dtype]
        if array_dtype.name in _CARRIED:
            return TMA_TYPES[_CARRIED[array_dtype.name]]
    remedy = "convert the array or describe it as uint8"
    if array_dtype == np.complex64:
        remedy = 'pass dtype="uint64" to copy the bits, because TMA has no complex type'
    raise DescriptorError("dtype", dtype, ", ".join(TMA_TYPES), remedy)


@dataclass(frozen=True, slots=True)
class ActivationType:
    """Element type of a GEMM's activations, scales and result: fp16 or bf16."""

    name: str
    short: str
    cuda: str
    numpy: np.dtype[Any]


ACTIVATION_TYPES: dict[str, ActivationType] = {
    "float16": ActivationType("float16", "f16", "__half", np.dtype("float16")),
    "bfloat16": ActivationType("bfloat16", "bf16", "__nv_bfloat16", BFLOAT16),
}


def activation_type(dtype: object) -> ActivationType:
    """Return the ActivationType with this name or NumPy dtype.

    Raises ArgumentTypeError if the type is neither fp16 nor bf16.
    """
    if isinstance(dtype, ActivationType):
        return dtype
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name  # type: ignore[call-overload]
    except TypeError:
        name = str(dtype)
    if name in ACTIVATION_TYPES:
        return ACTIVATION_TYPES[name]
    raise ArgumentTypeError("dtype", name, ", ".join(ACTIVATION_TYPES), 'pass dtype="float16" or "bfloat16"')
