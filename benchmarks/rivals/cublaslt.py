"""cuBLASLt through ctypes: list the algorithms that its heuristic proposes for a product, and launch them.

cuBLAS is column-major. A row-major product y (M, N) = a (M, K) b (K, N) is therefore y^T = b^T a^T, so that cuBLAS's A
is b, and its B is a. A row-major operand is not transposed, because it is the column-major matrix of its transpose. A
column-major operand is transposed. Source: cuBLAS library documentation, "Using the cuBLASLt API". The
constants come from cublasLt.h and library_types.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from pathlib import Path
from typing import Any

#: Values of cudaDataType.
_TYPES = {"float16": 2, "bfloat16": 14}
_FLOAT32 = 0
_COMPUTE_32F = 68
#: Values of cublasLtMatmulDescAttributes_t, cublasOperation_t and cublasLtMatmulPreferenceAttributes_t.
_TRANSA, _TRANSB, _TRANSPOSE = 3, 4, 1
_MAX_WORKSPACE_BYTES = 1
#: Values of cublasLtMatmulAlgoConfigAttributes_t. All of these attributes have at most 32 bits.
_CONFIG = {"id": 0, "tile": 1, "split_k": 2, "stages": 6, "cluster": 8}
_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so")
_MAPS = Path("/proc/self/maps")


class Algorithm(Structure):
    """The opaque struct cublasLtMatmulAlgo_t."""

    _fields_ = (("data", c_uint64 * 8),)


class HeuristicResult(Structure):
    """The struct cublasLtMatmulHeuristicResult_t: an algorithm, its workspace size in bytes, and its status."""

    _fields_ = (
        ("algo", Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (POINTER(c_void_p),),
    "cublasLtMatmulDescCreate": (POINTER(c_void_p), c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatmulPreferenceCreate": (POINTER(c_void_p),),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_int, POINTER(HeuristicResult), POINTER(c_int)),
    ),
    "cublasLtMatmulAlgoConfigGetAttribute": (POINTER(Algorithm), c_int, c_void_p, c_size_t, POINTER(c_size_t)),
    "cublasLtMatmul": (
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_void_p, c_void_p, c_void_p, c_void_p, POINTER(Algorithm), c_void_p, c_size_t, c_void_p),
    ),
}


class CublasLtError(RuntimeError):
    """Error of a call that did not return CUBLAS_STATUS_SUCCESS."""


def loaded_library(maps: Path = _MAPS) -> list[str]:
    """Return the paths of libcublasLt in this process (loaded by torch), followed by names for the loader."""
    lines = maps.read_text().splitlines() if maps.is_file() else []
    paths = [line.split(maxsplit=5)[-1] for line in lines if "libcublasLt.so" in line]
    return [*dict.fromkeys(paths), *_NAMES]


def load_library(names: Sequence[str]) -> Any:
    """Load the first of these libraries that works. Raises OSError with all reasons."""
    reasons = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    raise OSError(f"cuBLASLt cannot be loaded: {'; '.join(reasons)}")


class CublasLt:
    """The library and one handle. Raises OSError if the library is absent, and CublasLtError if a call fails.

    Descriptors, which take a few hundred bytes per product, are never freed.
    """

    def __init__(self, library: Any = None) -> None:
        self.library = load_library(loaded_library()) if library is None else library
        for name, arguments in _SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes, function.restype = arguments, c_int
        self.handle = self.create("cublasLtCreate")

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise CublasLtError(f"{name} returned {status}")

    def create(self, name: str, *arguments: Any) -> c_void_p:
        """Call a Create function and return the object that it creates."""
        created = c_void_p()
        self.call(name, byref(created), *arguments)
        return created

    def problem(self, m: int, n: int, k: int, dtype: str, layout: str) -> Problem:
        """Return the problem y (M, N) = a (M, K) b (K, N) with row-major y.

        ``layout`` contains the layouts of a and b: R for row-major, C for column-major. All operands are dense.
        """
        return Problem(self, m, n, k, dtype, layout)

    def describe(self, algorithm: Algorithm) -> str:
        """Return an algorithm's configuration with the numbers from cublasLt.h, such as ``"id 66, tile 20, ..."``."""
        parts = []
        for name, attribute in _CONFIG.items():
            value, written = c_uint64(0), c_size_t()  # Little-endian, so an attribute of any width fits.
            size = 2 if name == "cluster" else 4
            self.call(
                "cublasLtMatmulAlgoConfigGetAttribute",
                *(byref(algorithm), attribute, byref(value), size, byref(written)),
            )
            parts.append(f"{name} {value.value}")
        return ", ".join(parts)


class Problem:
    """One product: its descriptors, the heuristic's proposals, and its launch."""

    def __init__(self, lt: CublasLt, m: int, n: int, k: int, dtype: str, layout: str) -> None:
        self.lt, dtype_code = lt, _TYPES[dtype]
        self.operation = lt.create("cublasLtMatmulDescCreate", _COMPUTE_32F, _FLOAT32)
        for attribute, letter in ((_TRANSA, layout[1]), (_TRANSB, layout[0])):
            if letter == "C":
                flag = c_int(_TRANSPOSE)
                lt.call("cublasLtMatmulDescSetAttribute", self.operation, attribute, byref(flag), sizeof(flag))
        self.a, self.b = self._matrix(dtype_code, m, k, layout[0]), self._matrix(dtype_code, k, n, layout[1])
        self.output = self._matrix(dtype_code, m, n, "R")
        self._one, self._zero = c_float(1), c_float(0)

    def _matrix(self, dtype_code: int, rows: int, columns: int, letter: str) -> c_void_p:
        """Return the layout of a dense matrix that is column-major, or row-major and transposed."""
        if letter == "R":
            rows, columns = columns, rows
        return self.lt.create("cublasLtMatrixLayoutCreate", dtype_code, rows, columns, rows)

    def algorithms(self, count: int, workspace_bytes: int) -> list[Algorithm]:
        """Return at most ``count`` algorithms within the workspace, in the order of expected speed."""
        lt, limit = self.lt, c_uint64(workspace_bytes)
        preference = lt.create("cublasLtMatmulPreferenceCreate")
        lt.call("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE_BYTES, byref(limit), sizeof(limit))
        results, returned = (HeuristicResult * count)(), c_int()
        layouts = (self.b, self.a, self.output, self.output)
        lt.call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(lt.handle, self.operation, *layouts, preference, count, results, byref(returned)),
        )
        # Copy each algorithm, because a reference to an element would keep the whole array alive.
        return [Algorithm.from_buffer_copy(each.algo) for each in results[: returned.value] if each.state == 0]

    def run(
        self, algorithm: Algorithm, a: int, b: int, out: int, workspace: int, workspace_bytes: int, stream: int
    ) -> None:
        """Enqueue the product. Operands and workspace are device addresses."""
        self.lt.call(
            "cublasLtMatmul",
            *(self.lt.handle, self.operation, byref(self._one), b, self.b, a, self.a),
            *(byref(self._zero), out, self.output, out, self.output),
            *(byref(algorithm), workspace, workspace_bytes, stream),
        )
