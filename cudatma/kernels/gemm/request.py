"""A call of gemm, checked: A, B and C as batches of matrices, bias, scales, factors."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.checks import as_fp32, check_out, check_place, checked_flag, real_number
from cudatma.kernels.gemm.matrices import (
    ALIGNMENT,
    as_rows,
    batched,
    dense_rows,
    folded,
    follows,
    letter_of,
    result_rows,
    why_copied,
)
from cudatma.kernels.gemm.problem import (
    ACTIVATIONS,
    NUMPY,
    OPERAND_TYPES,
    RESULT_TYPES,
    SCALE_BLOCK,
    Matrix,
    Operands,
    Problem,
    default_result,
    is_fp8,
)
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
    for field, info in arrays.items():
        if info is not None and not is_plain[field] and not is_of_blocks[field]:
            allowed = f"one element, {vectors[field][0]}, or {shapes[field]} for blocks, which both must be of then"
            raise ArgumentError(f"{field}.shape", info.shape, allowed)
    for field, info in arrays.items():
        if not is_of_blocks[field]:
            allowed = f"{shapes[field]}, for the other scale is of blocks"
            if info is None:
                raise ArgumentError(field, {"a_scale": a_scale, "b_scale": b_scale}[field], f"an array of {allowed}")
            raise ArgumentError(f"{field}.shape", info.shape, allowed)
    scales = Scales(a, b, factor, of_blocks=True)
    if a is not None and (m - 1) * scales.strides()["a_scale_row"] >= 1 << 32:  # the kernels' offsets have 32 bits
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


@dataclass(frozen=True, slots=True)
class Request:
    """a: (batch, M, K), b: (batch, K, N), of any strides; a matrix that serves the whole batch has stride 0. out_dtype:
    of the result. scales, bias and what follows: as gemm() takes them."""

    a: ArrayInfo
    b: ArrayInfo
    out_dtype: str
    scales: Scales
    bias: ArrayInfo | None = None
    alpha: float = 1.0
    beta: float = 0.0
    activation: str | None = None
    batch_invariant: bool = False

    @property
    def batch(self) -> int:
        return self.a.shape[0]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N, K."""
        return self.a.shape[1], self.b.shape[2], self.a.shape[2]

    @property
    def block_rows(self) -> ArrayInfo | None:
        """A's scales of blocks as (batch, ceil(K / 128), M), if each row has its own."""
        info = self.scales.a
        if info is None or not self.scales.of_blocks or info.size_elems == 1:
            return None
        return as_rows(batched(info, self.batch), "C")

    @property
    def has_scales_for_tma(self) -> bool:
        """Whether TMA can read A's scales of blocks: those of neighboring rows lie side by side, and those of each
        block of K begin at a multiple of 16 bytes."""
        rows = self.block_rows
        return rows is not None and not why_copied(rows)

    @property
    def epilogue(self) -> str:
        """Of Problem."""
        if self.activation:
            return self.activation
        is_scaled = not self.scales.of_blocks and (self.scales.a or self.scales.b)
        return "linear" if is_scaled or self.bias or self.alpha != 1 or self.beta else "none"

    def problem(self, version: int | str = 0, out: ArrayInfo | None = None) -> Problem:
        """Return what has to be computed. out: (batch, M, N), by default without gaps."""
        m, n, k = self.sizes
        letters = letter_of(self.a, "R"), letter_of(self.b, "C")
        return Problem(
            m,
            n,
            k,
            self.a.dtype.name,
            "".join(letters),
            version,
            self.batch,
            self.out_dtype,
            self.epilogue,
            self.scales.of_blocks,
            self.has_scales_for_tma,
            self.batch_invariant,
            self._operands(letters, out),
        )

    def _operands(self, letters: tuple[str, str], out: ArrayInfo | None) -> Operands:
        a, b = (
            _matrix(dense_rows(as_rows(info, letter))) for info, letter in zip((self.a, self.b), letters, strict=True)
        )
        if out is None:
            m, n, _ = self.sizes
            pitch = n * NUMPY[self.out_dtype].itemsize
            result = Matrix(pitch, m * pitch if self.batch > 1 else 0, pitch % ALIGNMENT == 0)
        else:
            result = _matrix(out)
        rows = self.block_rows if self.has_scales_for_tma else None
        scale_rows = None if rows is None else _matrix(dense_rows(rows))
        strides = tuple(self.scales.strides().items())
        return Operands(a, b, result, strides, scale_rows, self.alpha, self.beta)

    @property
    def read(self) -> dict[str, ArrayInfo | None]:
        """What a launch reads, by the names of gemm's arguments, with None for what this one does not."""
        return {"a": self.a, "b": self.b, "a_scale": self.scales.a, "b_scale": self.scales.b, "bias": self.bias}

    def arrays(self) -> dict[str, ArrayInfo]:
        """Those that a kernel reads."""
        return {name: info for name, info in self.read.items() if info is not None}


def _matrix(rows: ArrayInfo) -> Matrix:
    """Return the layout of (batch, rows, columns)."""
    step, pitch, _ = rows.strides_bytes
    is_aligned = not any(value % ALIGNMENT for value in (rows.pointer, step if rows.shape[0] > 1 else 0, pitch))
    return Matrix(pitch, step if rows.shape[0] > 1 else 0, is_aligned)


def check_call(
    a: Any,
    b: Any,
    out: Any = None,
    bias: Any = None,
    alpha: Any = 1.0,
    beta: Any = 0.0,
    activation: Any = None,
    out_dtype: Any = None,
    a_scale: Any = None,
    b_scale: Any = None,
    batch_invariant: Any = False,
) -> tuple[Request, tuple[int, ...], ArrayInfo | None]:
    """The request, the shape of the result as the caller sees it, and ``out`` as (batch, M, N) if there is one.

    Raises ArgumentError, ArgumentTypeError.
    """
    left, right = _operand(a, "a"), _operand(b, "b")
    if right.dtype != left.dtype:
        raise ArgumentTypeError("b.dtype", str(right.dtype), f"{left.dtype}, as a")
    batches = product_batch(left.shape, right.shape)
    batch = batches[0] if batches else 1
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
        raise ArgumentError("activation", activation, f"None, {', '.join(ACTIVATIONS)}")
    batch_invariant = checked_flag(batch_invariant, "batch_invariant")
    result = None if out is None else describe(out, "out")
    sizes = left.shape[-2], right.shape[-1], left.shape[-1]
    scales = check_scales(a_scale, b_scale, sizes, batch)
    if scales.of_blocks and not is_fp8(left.dtype.name):
        raise ArgumentError("a_scale.shape", "scales of blocks", f"scales of one or of rows for {left.dtype.name}")
    request = Request(
        batched(left, batch),
        batched(right, batch),
        _result_type(out_dtype, result, left),
        scales,
        None if bias is None else describe(bias, "bias"),
        real_number(alpha, "alpha") * scales.factor + 0.0,  # -0.0 is equal to 0.0, whose launch it may share
        real_number(beta, "beta") + 0.0,
        None if activation is None else str(activation),
        batch_invariant,
    )
    _check_bias(request)
    for name, info in request.arrays().items():
        check_place(info, name, left, "a", "gemm")
    shape = *batches, *sizes[:2]
    if result is None:
        if request.beta:
            raise ArgumentError("out", None, "an array, which beta multiplies", "give out, or beta=0")
        return _folded(request, None, shape)
    return _folded(request, _result(result, request, shape), shape)


def product_batch(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """(batch,) of the product of these shapes, () of two matrices. ArgumentError unless the shapes go together."""
    if b[-2] != a[-1]:
        remedy = "its transposed view would fit: b.T, or b.mT of a batch" if b[-1] == a[-1] else ""
        raise ArgumentError("b.shape", tuple(b), f"(.., {a[-1]}, N), for a of {tuple(a)}", remedy)
    batches = [shape[0] for shape in (a, b) if len(shape) == 3]
    several = [batch for batch in batches if batch != 1]
    if len(several) == 2 and several[0] != several[1]:
        raise ArgumentError("b.shape", tuple(b), f"a batch of {a[0]}, as a, or of one matrix")
    return tuple(several[:1] or batches[:1])


def _operand(array: Any, field: str) -> ArrayInfo:
    info = describe(array, field)
    if info.dtype.name not in OPERAND_TYPES or not info.dtype.isnative:
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), ", ".join(OPERAND_TYPES))
    if len(info.shape) not in (2, 3) or not info.shape[-1 if field == "a" else -2]:
        shape = "M, K" if field == "a" else "K, N"
        raise ArgumentError(f"{field}.shape", info.shape, f"({shape}) or (batch, {shape}), with K of 1 and more")
    if any(stride % info.dtype.itemsize for stride in info.strides_bytes):
        raise ArgumentError(f"{field}.strides", info.strides_bytes, "whole elements", "copy it")
    if info.pointer % info.dtype.itemsize:
        raise ArgumentError(f"{field}.pointer", hex(info.pointer), f"a multiple of {info.dtype.itemsize} bytes")
    return info


def _result_type(out_dtype: Any, out: ArrayInfo | None, left: ArrayInfo) -> str:
    """The name of out_dtype: a name, or a type of NumPy, CuPy or torch."""
    if out_dtype is None:
        name = out.dtype.name if out is not None else default_result(left.dtype.name)
        field = "out_dtype" if out is None else "out.dtype"
    else:
        name, field = str(out_dtype).removeprefix("torch."), "out_dtype"
        if name not in RESULT_TYPES:
            with contextlib.suppress(TypeError, ValueError):
                name = np.dtype(out_dtype).name
    if name not in RESULT_TYPES:
        raise ArgumentTypeError(field, name, ", ".join(RESULT_TYPES))
    return name


def _check_bias(request: Request) -> None:
    info, n = request.bias, request.sizes[1]
    if info is None:
        return
    if info.dtype != NUMPY[request.out_dtype]:
        raise ArgumentTypeError("bias.dtype", str(info.dtype), f"{request.out_dtype}, as the result")
    if info.shape != (n,):
        raise ArgumentError("bias.shape", info.shape, f"({n},)")
    if not info.is_contiguous:
        raise ArgumentError("bias.strides", info.strides_bytes, "contiguous elements", "copy it")
    if info.pointer % info.dtype.itemsize:
        raise ArgumentError("bias.pointer", hex(info.pointer), f"a multiple of {info.dtype.itemsize} bytes", "copy it")


def _result(info: ArrayInfo, request: Request, shape: tuple[int, ...]) -> ArrayInfo:
    """out as (batch, M, N), checked."""
    check_out(info, NUMPY[request.out_dtype], request.out_dtype, shape, request.arrays(), "gemm")
    return result_rows(info if len(shape) == 3 else batched(info, 1))


def _folded(
    request: Request, out: ArrayInfo | None, shape: tuple[int, ...]
) -> tuple[Request, tuple[int, ...], ArrayInfo | None]:
    """A batch that shares b as the rows of one matrix, where a and out lie like that: tiles of M are filled then."""
    a, b = request.a, request.b
    is_one = request.batch > 1 and b.strides_bytes[0] == 0 and request.scales.is_shared and follows(a)
    if not is_one or not (out is None or follows(out)):
        return request, shape, out
    request = replace(request, a=folded(a), b=replace(b, shape=(1, *b.shape[1:])))
    return request, shape, None if out is None else result_rows(folded(out))
