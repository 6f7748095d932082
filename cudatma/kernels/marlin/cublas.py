"""Dense products by cuBLAS: through torch for its tensors, through CuPy for everything else. out = x W + bias.

Sums are kept in fp32 and rounded once, the bias with them; cuBLAS itself chooses how it divides a product among CTAs,
and in which type it adds up their partial sums (torch's allow_fp16_reduced_precision_reduction, cuBLAS's math mode).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from cudatma.arrays import ArrayInfo, with_cupy
from cudatma.errors import DriverError, LaunchError
from cudatma.kernels.marlin.operands import Rows
from cudatma.kernels.workspace import is_capturing
from cudatma.library_streams import cupy_stream, working_on

Product: TypeAlias = Callable[[Rows, ArrayInfo, Rows, "ArrayInfo | None", int], None]

_ELEMENT_BYTES = 2
#: cublasOperation_t, cublasComputeType_t, cublasGemmAlgo_t and cudaDataType_t of cublas_api.h and library_types.h.
_NOT_TRANSPOSED, _COMPUTE_32F, _DEFAULT_ALGORITHM = 0, 68, -1
_DATA_TYPES = {"float16": 2, "bfloat16": 14}


def choose_product(x: Rows, out: Rows, bias: ArrayInfo | None, stream: int) -> Product:
    """The product for these arrays. Nothing is launched yet.

    Raises LaunchError inside a graph capture unless all are torch's (CuPy refuses cuBLAS there), DriverError where CuPy
    has no cuBLAS.
    """
    if all(info is None or info.kind == "torch" for info in (x.info, out.info, bias)):
        return by_torch
    if is_capturing(x.info.device or 0, stream):
        remedy = "capture with dense_bytes=0, or with torch tensors"
        raise LaunchError("stream", "a stream under graph capture", "one that is not: CuPy captures no cuBLAS", remedy)
    _cublas()
    return by_cupy


def by_torch(x: Rows, dense: ArrayInfo, out: Rows, bias: ArrayInfo | None, stream: int) -> None:
    """torch.mm or torch.addmm into out, on a stream by its handle."""
    torch = sys.modules["torch"]
    device = out.info.device or 0

    def matrix(rows: Rows) -> Any:
        tensor: Any = rows.info.owner
        shape = (rows.rows, rows.info.shape[-1])
        return tensor.detach().as_strided(shape, (rows.pitch_bytes // _ELEMENT_BYTES, 1))

    with torch.no_grad(), working_on("torch", device, stream):
        weight = torch.as_tensor(_Interface(dense), device=f"cuda:{device}").view(getattr(torch, dense.dtype.name))
        if bias is None:
            torch.mm(matrix(x), weight, out=matrix(out))
        else:
            added: Any = bias.owner
            torch.addmm(added.detach(), matrix(x), weight, out=matrix(out))


class _Interface:
    """Device memory as 16-bit integers: an interface without a stream, which may be read inside a capture."""

    def __init__(self, info: ArrayInfo) -> None:
        self.owner = info.owner
        self.__cuda_array_interface__ = {
            "shape": info.shape,
            "strides": info.strides_bytes,
            "typestr": "<i2",
            "data": (info.pointer, False),
            "version": 2,
        }


def by_cupy(x: Rows, dense: ArrayInfo, out: Rows, bias: ArrayInfo | None, stream: int) -> None:
    """cublasGemmEx, on a stream by its handle. [cuBLAS, cublasGemmEx]

    cuBLAS counts columns: it is told that out^T = W^T x^T, whose columns are the rows of our arrays.
    """
    cublas = _cublas()
    m, (k, n) = x.rows, dense.shape
    kind = _DATA_TYPES[dense.dtype.name]
    one = np.ones(1, np.float32)
    beta = np.full(1, 0 if bias is None else 1, np.float32)

    def run(cupy: Any) -> None:
        device = out.info.device or 0
        with cupy.cuda.Device(device), cupy_stream(cupy.cuda, stream, device):
            source, pitch = x.info.pointer, x.pitch_bytes
            if pitch < k * _ELEMENT_BYTES:  # rows that share elements, as cuBLAS takes none
                copied = cupy.ascontiguousarray(_bits(cupy, x))
                source, pitch = copied.data.ptr, k * _ELEMENT_BYTES
            if bias is not None:
                _bits(cupy, out)[...] = _bits(cupy, Rows(bias, 1, n * _ELEMENT_BYTES))
            handle = cupy.cuda.device.get_cublas_handle()
            cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)
            cublas.gemmEx(
                *(handle, _NOT_TRANSPOSED, _NOT_TRANSPOSED, n, m, k, one.ctypes.data),
                *(dense.pointer, kind, dense.strides_bytes[0] // _ELEMENT_BYTES),
                *(source, kind, pitch // _ELEMENT_BYTES, beta.ctypes.data),
                *(out.info.pointer, kind, out.pitch_bytes // _ELEMENT_BYTES, _COMPUTE_32F, _DEFAULT_ALGORITHM),
            )

    try:
        with_cupy("cublasGemmEx", run)
    except cublas.CUBLASError as error:
        raise DriverError("cublasGemmEx", getattr(error, "status", None), str(error)) from error


def _bits(cupy: Any, rows: Rows) -> Any:
    """Rows as a CuPy array of their bits, which needs no bf16 of CuPy's."""
    info, columns = rows.info, rows.info.shape[-1]
    size = (rows.rows - 1) * rows.pitch_bytes + columns * _ELEMENT_BYTES
    memory = cupy.cuda.UnownedMemory(info.pointer, size, info.owner, info.device or 0)
    at = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray((rows.rows, columns), np.uint16, at, strides=(rows.pitch_bytes, _ELEMENT_BYTES))


def _cublas() -> Any:
    """CuPy's cuBLAS module. DriverError where there is none."""
    try:
        return importlib.import_module("cupy_backends.cuda.libs.cublas")
    except ImportError as error:
        raise DriverError("cublasGemmEx", None, f"no cuBLAS for CuPy ({error}); use dense_bytes=0") from error
