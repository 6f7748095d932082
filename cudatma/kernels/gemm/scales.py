"""The scales of A and B: one for all, one for each row of A and column of B, or one for each block."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.checks import as_fp32
from cudatma.kernels.gemm.problem import SCALE_BLOCK
from cudatma.kernels.schedule import ceil_div

#: Their strides in the kernels' Problem, from the outermost dimension on.
_STRIDES = {
    "a_scale": ("a_scale_batch", "a_scale_row", "a_scale_k"),
    "b_scale": ("b_scale_batch", "b_scale_k", "b_scale_column"),
}


@dataclass(frozen=True, slots=True)
class Scales:
    """a, b: fp32 arrays, None: 1. factor: the product of those that are numbers. of_blocks: a is (M, ceil(K / 128)), b
    (ceil(K / 128), ceil(N / 128)), each with the batch in front if it differs; else a has one element or M, b one or N.
    """

    a: ArrayInfo | None = None
    b: ArrayInfo | None = None
    factor: float = 1.0
    of_blocks: bool = False

    @property
    def arrays(self) -> tuple[ArrayInfo | None, ArrayInfo | None]:
        return self.a, self.b

    @property
    def is_shared(self) -> bool:
        """Whether all rows of A, and all matrices of the batch, have the same."""
        of_matrices = self.b is not None and len(self.b.shape) > 2 and self.b.size_elems > 1
        return (self.a is None or self.a.size_elems == 1) and not of_matrices

    def strides(self) -> dict[str, int]:
        """Elements between neighbors, as the kernels' Problem names them; 0 along dimensions of one element."""
        values: dict[str, int] = {}
        for names, info in zip(_STRIDES.values(), (self.a, self.b), strict=True):
            steps = [0, 0, 0]
            if info is not None:
                found = zip(info.shape, info.strides_bytes, strict=True)
                own = [stride // info.dtype.itemsize if extent > 1 else 0 for extent, stride in found][-3:]
                if len(own) == 1:  # of rows, or of columns
                    own = [*own, 0] if names is _STRIDES["a_scale"] else [0, *own]
                steps[3 - len(own) :] = own
            values |= dict(zip(names, steps, strict=True))
        return values


def check_scales(a_scale: Any, b_scale: Any, sizes: tuple[int, int, int], batch: int) -> Scales:
    """The scales of a call with these M, N, K. Raises ArgumentError, ArgumentTypeError."""
    factor = 1.0
    arrays: dict[str, ArrayInfo | None] = {}
    for field, value in (("a_scale", a_scale), ("b_scale", b_scale)):
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            factor *= as_fp32(value, field)
            value = None
        arrays[field] = None if value is None else _array(value, field)
    (m, n, k), (a, b) = sizes, arrays.values()
    vectors = {"a_scale": ((m,), (m, 1)), "b_scale": ((n,), (1, n))}
    is_plain = {
        field: info is None or info.size_elems == 1 or info.shape in vectors[field] for field, info in arrays.items()
    }
    if all(is_plain.values()):
        return Scales(a, b, factor)
    blocks = ceil_div(k, SCALE_BLOCK), ceil_div(n, SCALE_BLOCK)
    shapes = {"a_scale": (m, blocks[0]), "b_scale": blocks}
    is_of_blocks = {
        field: info is not None and (info.shape in (shape, (batch, *shape)) or info.size_elems == math.prod(shape) == 1)
        for (field, info), shape in zip(arrays.items(), shapes.values(), strict=True)
    }
    # One that is neither is wrong; else the one that is not of blocks, as the other one is.
    neither = [field for field in arrays if not is_plain[field] and not is_of_blocks[field]]
    for field in neither or [field for field in arrays if not is_of_blocks[field]]:
        info = arrays[field]
        allowed = f"one element, {vectors[field][0]}, or {shapes[field]} for blocks, which both scales must be of then"
        raise ArgumentError(f"{field}.shape", None if info is None else info.shape, allowed)
    scales = Scales(a, b, factor, of_blocks=True)
    if a is not None and (m - 1) * scales.strides()["a_scale_row"] >= 1 << 32:  # the kernel's offsets have 32 bits
        raise ArgumentError("a_scale.strides", a.strides_bytes, "rows within 16 GiB", "copy it")
    return scales


def _array(value: Any, field: str) -> ArrayInfo:
    info = describe(value, field)
    if info.dtype != np.float32:
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), "float32")
    if any(stride < 0 or stride % info.dtype.itemsize for stride in info.strides_bytes):
        raise ArgumentError(f"{field}.strides", info.strides_bytes, "multiples of 4 bytes, 0 and up", "copy it")
    if info.pointer % info.dtype.itemsize:
        raise ArgumentError(f"{field}.pointer", hex(info.pointer), "a multiple of 4 bytes", "copy it")
    return info
