"""Problems of gemm(), the checks of its arguments, and the members of the kernels' launch struct."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.dtypes import ACTIVATION_TYPES, BFLOAT16
from cudatma.errors import ArgumentError, ArgumentTypeError, alternatives, quoted
from cudatma.kernels.checks import check_field_types, check_out, check_place, checked_flag, real_number
from cudatma.kernels.family import MAX_EXTENT, resized_copy
from cudatma.kernels.gemm.matrices import (
    Matrix,
    batched,
    check_pointer,
    folded,
    follows,
    letter_of,
    matrix_of,
    result_rows,
    why_copied,
)
from cudatma.kernels.launch_struct import MEMBERS as WORK_MEMBERS
from cudatma.kernels.launch_struct import Member
from cudatma.kernels.operation import Checked
from cudatma.kernels.schedule import ceil_div

#: Layouts of A and B. R is row-major; C is column-major. With RC, K is contiguous in A and in B, as in torch's linear.
LAYOUTS = ("RC", "RR", "CR", "CC")
#: Dtypes of A and B, mapped to their names in wgmma, and dtypes of C.
OPERAND_TYPES = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
RESULT_TYPES = (*ACTIVATION_TYPES, "float32")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
#: Epilogues: "none", "linear" for alpha, beta, bias and scales, or "linear" followed by an activation.
EPILOGUES = ("none", "linear", *ACTIVATIONS)
#: Number of elements of K, and of N, that share a block scale.
SCALE_BLOCK = 128
#: Fields that a problem and the configs of its kernels have in common.
PROBLEM_FIELDS = ("dtype", "layout", "out_dtype", "epilogue", "block_scales", "scales_by_tma")
#: Number of rows of a wgmma.
WGMMA_M = 64
#: NumPy's dtypes of the result.
NUMPY = {name: BFLOAT16 if name == "bfloat16" else np.dtype(name) for name in RESULT_TYPES}
#: Members of the launch struct.
MEMBERS = WORK_MEMBERS | {
    member.name: member
    for member in (
        Member("output_by_tma", "u32", "1 if TMA can write the result"),
        Member("alternates", "u32", "1 if every other tile of a CTA traverses K backwards"),
        Member("matrix_tiles_m", "u32", "number of tiles along M per matrix of the batch"),
        Member("alpha", "float", "multiplier for the product"),
        Member("beta", "float", "multiplier for the previous values of the result"),
        Member("by_matrix_tiles_m", "Divisor", "divides by matrix_tiles_m"),
        Member("output_batch", "u64", "stride between matrices of the result, in elements"),
        Member("a_box_rows", "u32", "number of rows per box of A"),
        Member("stage_bytes", "u32", "bytes that the boxes of a stage deliver"),
        Member("a_pitch", "u64", "stride between rows (or columns) of A, in elements"),
        Member("b_pitch", "u64", "stride between rows (or columns) of B, in elements"),
        Member("a_batch", "u64", "stride between matrices of A, in elements"),
        Member("b_batch", "u64", "stride between matrices of B, in elements"),
        Member("a_scale_row", "u64", "stride between scales of rows, in elements, or 0 for one"),
        Member("b_scale_column", "u64", "stride between scales of columns or column blocks, in elements, or 0 for one"),
        Member("a_scale_k", "u64", "stride between the scales of A along K, in elements"),
        Member("b_scale_k", "u64", "stride between the scales of B along K, in elements"),
        Member("a_scale_batch", "u64", "stride between the scales of matrices of A, in elements"),
        Member("b_scale_batch", "u64", "stride between the scales of matrices of B, in elements"),
    )
}


def is_fp8(dtype: str) -> bool:
    return dtype.startswith("float8")


def element_bytes(dtype: str) -> int:
    """Return the bytes per element of A and B."""
    return 1 if dtype.startswith("float8") else 2


def default_result(dtype: str) -> str:
    """Return the default dtype of C, which is the operands' dtype, or bfloat16 for fp8."""
    return "bfloat16" if is_fp8(dtype) else dtype


def check_kind(fields: Any) -> None:
    """Check the PROBLEM_FIELDS of a frozen dataclass, and set ``out_dtype`` to "" if it is the default.

    Raises ArgumentError or ArgumentTypeError.
    """
    if not isinstance(fields.dtype, str) or fields.dtype not in OPERAND_TYPES:
        raise ArgumentTypeError("dtype", fields.dtype, alternatives(OPERAND_TYPES))
    if fields.out_dtype == default_result(fields.dtype):
        object.__setattr__(fields, "out_dtype", "")
    elif fields.out_dtype not in ("", *RESULT_TYPES):
        raise ArgumentTypeError("out_dtype", fields.out_dtype, alternatives(RESULT_TYPES))
    if fields.layout not in LAYOUTS:
        raise ArgumentError("layout", fields.layout, quoted(LAYOUTS))
    if fields.epilogue not in EPILOGUES:
        raise ArgumentError("epilogue", fields.epilogue, quoted(EPILOGUES))
    if is_fp8(fields.dtype) and fields.layout != "RC":
        raise ArgumentError("layout", fields.layout, '"RC" for fp8 (wgmma supports only K-major fp8 operands)')
    if fields.block_scales and not is_fp8(fields.dtype):
        raise ArgumentError("block_scales", True, f"False for {fields.dtype}", "pass fp8 operands")
    if fields.scales_by_tma and not fields.block_scales:
        raise ArgumentError("scales_by_tma", True, "False unless block_scales is True")


class Operands(NamedTuple):
    """Properties of a call's arrays on which a launch depends, except for sizes and addresses.

    Attributes
    ----------
    a, b, out : Matrix
        Layouts of the operands and the result.
    scale_strides : tuple[tuple[str, int], ...]
        Strides between scales, in elements, keyed by the names of the struct's members.
    scale_rows : Matrix or None
        Layout of A's block scales if TMA reads them.
    alpha, beta : float
        Scalars of the epilogue.
    """

    a: Matrix = Matrix()
    b: Matrix = Matrix()
    out: Matrix = Matrix()
    scale_strides: tuple[tuple[str, int], ...] = ()
    scale_rows: Matrix | None = None
    alpha: float = 1.0
    beta: float = 0.0


#: Operands of problems that are not launched.
NO_OPERANDS = Operands()


@dataclass(frozen=True, kw_only=True)  # without slots, as resized_copy() requires
class Problem:
    """A batch of matrix products c (m, n) = a (m, k) b (k, n).

    Attributes
    ----------
    dtype : str
        One of OPERAND_TYPES.
    layout : str
        One of LAYOUTS.
    version : str
        Version of the kernel, or "" for any.
    out_dtype : str
        One of RESULT_TYPES, or "" for default_result().
    epilogue : str
        One of EPILOGUES.
    block_scales : bool
        Whether each 1 x 128 block of a and each 128 x 128 block of b has a scale.
    scales_by_tma : bool
        Whether TMA can read the scales of a.
    batch_invariant : bool
        Whether the result of a row must be bitwise identical for every m.
    operands : Operands
        Other properties on which a launch depends, but not the choice of a configuration.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a field is invalid.
    """

    m: int
    n: int
    k: int
    dtype: str
    layout: str = "RC"
    version: str = ""
    batch: int = 1
    out_dtype: str = ""
    epilogue: str = "none"
    block_scales: bool = False
    scales_by_tma: bool = False
    batch_invariant: bool = False
    operands: Operands = NO_OPERANDS

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("m", "n", "k", "batch"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_EXTENT:
                raise ArgumentError(name, value, f"1 to {MAX_EXTENT}")
        check_kind(self)

    @property
    def result_dtype(self) -> str:
        """Name of c's dtype."""
        return self.out_dtype or default_result(self.dtype)

    def with_m(self, m: int) -> Problem:
        """Return the problem with another M. The caller must have checked M."""
        return resized_copy(self, m=m)

    @property
    def split_rows(self) -> tuple[bool, bool]:
        """Whether every other row of a, and of b, begins in the middle of a 32-byte L2 sector.

        TMA reads such rows at half the speed. Rows are assumed to be dense. The value is False for a column-major a.
        """
        vector = TMA_ALIGNMENT_BYTES // element_bytes(self.dtype)
        b_row = self.k if self.layout[1] == "C" else self.n
        return self.layout[0] == "R" and -(-self.k // vector) % 2 > 0, -(-b_row // vector) % 2 > 0

    @property
    def fixed(self) -> tuple[Any, ...]:
        """Fields other than m on which the choice depends."""
        return _FIXED(self)

    @property
    def constraint(self) -> str:
        """Reason why only some configurations are allowed, or "" if all are allowed."""
        return f"version {self.version} is selected" if self.version else ""

    @property
    def description(self) -> str:
        """Description of the problem in words."""
        parts = [f"M = {self.m}, N = {self.n}, K = {self.k}, {self.dtype}, {self.layout}"]
        parts += [f"batch of {self.batch}"] if self.batch > 1 else []
        parts += [f"to {self.out_dtype}"] if self.out_dtype else []
        parts += [f"epilogue {self.epilogue}"] if self.epilogue != "none" else []
        parts += [f"block scales{' by TMA' if self.scales_by_tma else ''}"] if self.block_scales else []
        parts += ["batch-invariant"] if self.batch_invariant else []
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return the problem in the form that tuning entries store."""
        return {name: getattr(self, name) for name in _FIELDS if name not in ("version", "operands")}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Problem:
        """Return the problem of a tuning entry.

        Raises KeyError, ArgumentError or ArgumentTypeError for an invalid entry.
        """
        known = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
        return cls(**{name: raw[name] for name in ("m", "n", "k", "dtype", "layout")} | known)


_FIELDS = tuple(Problem.__dataclass_fields__)
_FIXED: Callable[[Any], tuple[Any, ...]] = attrgetter(*(name for name in _FIELDS if name not in ("m", "operands")))
_SCALES = ("a_scale", "b_scale")
_SCALE_STRIDES = ("a_scale_batch", "a_scale_row", "a_scale_k", "b_scale_batch", "b_scale_k", "b_scale_column")


class GemmOptions(NamedTuple):
    """Options of gemm(), which are part of a call's key.

    Attributes
    ----------
    a_scale, b_scale : Any
        Numeric scales.
    kinds : tuple[type, ...]
        Types of the numeric options and of ``batch_invariant``. The key contains them because 1 and True compare
        equal.
    """

    alpha: Any
    beta: Any
    activation: Any
    out_dtype: Any
    batch_invariant: Any
    version: str
    a_scale: Any
    b_scale: Any
    kinds: tuple[type, ...]


def call_of(
    a: Any,
    b: Any,
    bias: Any = None,
    alpha: Any = 1.0,
    beta: Any = 0.0,
    activation: Any = None,
    out_dtype: Any = None,
    a_scale: Any = None,
    b_scale: Any = None,
    batch_invariant: Any = False,
    version: str = "",
) -> tuple[tuple[Any, ...], GemmOptions]:
    """Return the inputs and options of run() for a call to gemm(). Numeric scales are options."""
    a_factor = b_factor = None
    if a_scale is not None and isinstance(a_scale, numbers.Real):
        a_factor, a_scale = a_scale, None
    if b_scale is not None and isinstance(b_scale, numbers.Real):
        b_factor, b_scale = b_scale, None
    kinds = alpha.__class__, beta.__class__, batch_invariant.__class__, a_factor.__class__, b_factor.__class__
    options = GemmOptions(alpha, beta, activation, out_dtype, batch_invariant, version, a_factor, b_factor, kinds)
    return (a, b, a_scale, b_scale, bias), options


def check_call(inputs: tuple[Any, ...], out: Any, options: GemmOptions) -> Checked[Problem]:
    """Validate the arguments of gemm(), as call_of() returns them. Raises ArgumentError or ArgumentTypeError.

    The arrays of the result are a (batch, M, K), b (batch, K, N), the two scales, and bias. A matrix that the whole
    batch shares has stride 0. If possible, a batch that shares b is merged into one matrix with all rows of a, so that
    fewer tiles are partially filled. The problem is None if the result has no elements.
    """
    a, b, *scales, bias = inputs
    activation, factors = options.activation, (options.a_scale, options.b_scale)
    left, right = _operand(a, "a"), _operand(b, "b")
    if right.dtype != left.dtype:
        raise ArgumentTypeError("b.dtype", str(right.dtype), f"{left.dtype} (the dtype of a)")
    batches = product_batch(left.shape, right.shape)
    batch = batches[0] if batches else 1
    m, n, k = left.shape[-2], right.shape[-1], left.shape[-1]
    shape = *batches, m, n
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
        raise ArgumentError("activation", activation, f"None, {quoted(ACTIVATIONS)}")
    is_invariant = checked_flag(options.batch_invariant, "batch_invariant")
    result = None if out is None else describe(out, "out")
    a_scale, b_scale = (_scale(scale, field) for scale, field in zip(scales, _SCALES, strict=True))
    factor_fields = zip(factors, _SCALES, strict=True)
    factor = math.prod([real_number(value, field) for value, field in factor_fields if value is not None])
    has_block_scales = _are_of_blocks((a_scale, b_scale), factors, (m, n, k), batch)
    if has_block_scales and not is_fp8(left.dtype.name):
        raise ArgumentError(
            "a_scale.shape",
            "block scales",
            f"the shape of one scale, or of one scale per row or column, for {left.dtype.name} operands",
        )
    scale_strides = _scale_strides(a_scale, b_scale)
    if has_block_scales and (m - 1) * scale_strides["a_scale_row"] >= 1 << 32:  # The kernels' offsets have 32 bits.
        raise ArgumentError(
            "a_scale.strides",
            a_scale and a_scale.strides_bytes,
            "small enough that all rows are within 16 GiB",
            "pass a contiguous copy",
        )
    dtype = _result_type(options.out_dtype, result, left)
    bias = None if bias is None else describe(bias, "bias")
    # Adding 0.0 converts -0.0 to 0.0. Otherwise, equal options would have different meanings.
    alpha = real_number(options.alpha, "alpha") * factor + 0.0
    beta = real_number(options.beta, "beta") + 0.0
    if bias is not None:
        _check_bias(bias, dtype, n)
    left, right = batched(left, batch), batched(right, batch)
    arrays = {"a": left, "b": right, "a_scale": a_scale, "b_scale": b_scale, "bias": bias}
    given = {name: info for name, info in arrays.items() if info is not None}
    for name, info in given.items():
        check_place(info, name, left, "a", "gemm")
    if result is not None:
        check_out(result, NUMPY[dtype], dtype, shape, given, "gemm")
        result = result_rows(result if batches else batched(result, 1))
    elif beta:
        raise ArgumentError("out", None, "an array if beta is not 0", "pass out or beta=0")

    a_scale_is_one = a_scale is None or a_scale.size_elems == 1
    b_scale_is_shared = b_scale is None or b_scale.size_elems == 1 or len(b_scale.shape) < 3
    is_dense = follows(left) and (result is None or follows(result))
    if batch > 1 and not right.strides_bytes[0] and a_scale_is_one and b_scale_is_shared and is_dense:
        batch, m, left, right = 1, batch * m, folded(left), replace(right, shape=(1, k, n))
        result = None if result is None else result_rows(folded(result))
    problem: Any = None
    if batch and m and n:
        layout = letter_of(left, "a") + letter_of(right, "b")
        if result is None:
            pitch = n * NUMPY[dtype].itemsize
            c = Matrix(pitch, m * pitch if batch > 1 else 0, pitch % TMA_ALIGNMENT_BYTES == 0)
        else:
            c = matrix_of(result, "R", 1)
        scale_rows = None
        if has_block_scales and a_scale is not None and not a_scale_is_one:
            rows = batched(a_scale, batch)
            scale_rows = None if why_copied(rows, "C") else matrix_of(rows, "C")
        is_linear = bias is not None or alpha != 1 or beta or (not has_block_scales and (a_scale or b_scale))
        problem = Problem(
            m=m,
            n=n,
            k=k,
            dtype=left.dtype.name,
            layout=layout,
            version=options.version,
            batch=batch,
            out_dtype=dtype,
            epilogue=EPILOGUES[EPILOGUES.index(activation)] if activation else "linear" if is_linear else "none",
            block_scales=has_block_scales,
            scales_by_tma=scale_rows is not None,
            batch_invariant=is_invariant,
            operands=Operands(
                *(matrix_of(left, layout[0]), matrix_of(right, layout[1]), c),
                scale_strides=tuple(scale_strides.items()),
                scale_rows=scale_rows,
                alpha=alpha,
                beta=beta,
            ),
        )
    return Checked(problem, (left, right, a_scale, b_scale, bias), result, shape, NUMPY[dtype])


def product_batch(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """Return the batch shape of a product of arrays with these shapes: (batch,), or () for two matrices.

    Raises ArgumentError unless the shapes match each other.
    """
    if b[-2] != a[-1]:
        remedy = "pass the transposed view, b.T, or b.mT for a batch" if b[-1] == a[-1] else ""
        raise ArgumentError("b.shape", tuple(b), f"(..., {a[-1]}, N) for a of shape {tuple(a)}", remedy)
    batches = [shape[0] for shape in (a, b) if len(shape) == 3]
    several = [batch for batch in batches if batch != 1]
    if len(several) == 2 and several[0] != several[1]:
        raise ArgumentError("b.shape", tuple(b), f"({b[-2]}, {b[-1]}) or ({a[0]}, {b[-2]}, {b[-1]}) to match a")
    return tuple(several[:1] or batches[:1])


def _operand(array: Any, field: str) -> ArrayInfo:
    info = describe(array, field)
    if info.dtype.name not in OPERAND_TYPES or not info.dtype.isnative:
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), alternatives(OPERAND_TYPES))
    if len(info.shape) not in (2, 3) or not info.shape[-1 if field == "a" else -2]:
        shape = "M, K" if field == "a" else "K, N"
        raise ArgumentError(f"{field}.shape", info.shape, f"({shape}) or (batch, {shape}) with K > 0")
    if any(stride % info.dtype.itemsize for stride in info.strides_bytes):
        raise ArgumentError(
            f"{field}.strides", info.strides_bytes, "multiples of the element size", "pass a contiguous copy"
        )
    check_pointer(info, field)
    return info


def _result_type(out_dtype: Any, out: ArrayInfo | None, left: ArrayInfo) -> str:
    """Return the name of the result's dtype. ``out_dtype`` is a name or a NumPy, CuPy or torch dtype."""
    if out_dtype is None:
        name = out.dtype.name if out is not None else default_result(left.dtype.name)
        field = "out_dtype" if out is None else "out.dtype"
    else:
        name, field = str(out_dtype).removeprefix("torch."), "out_dtype"
        if name not in RESULT_TYPES:
            with contextlib.suppress(TypeError, ValueError):
                kind = np.dtype(out_dtype)
                name = kind.name if kind.isnative else str(kind)
    if name not in RESULT_TYPES:
        raise ArgumentTypeError(field, name, alternatives(RESULT_TYPES))
    return name


def _check_bias(info: ArrayInfo, dtype: str, n: int) -> None:
    if info.dtype != NUMPY[dtype]:
        raise ArgumentTypeError("bias.dtype", str(info.dtype), f"{dtype} (the dtype of the result)")
    if info.shape != (n,):
        raise ArgumentError("bias.shape", info.shape, f"({n},)")
    if not info.is_contiguous:
        raise ArgumentError("bias.strides", info.strides_bytes, "contiguous", "pass a contiguous copy")
    check_pointer(info, "bias")


def _scale(value: Any, field: str) -> ArrayInfo | None:
    if value is None:
        return None
    info = describe(value, field)
    if info.dtype != np.float32:
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), "float32")
    if any(stride < 0 or stride % 4 for stride in info.strides_bytes):
        raise ArgumentError(
            f"{field}.strides", info.strides_bytes, "nonnegative multiples of 4 bytes", "pass a contiguous copy"
        )
    check_pointer(info, field)
    return info


def _are_of_blocks(
    scales: Sequence[ArrayInfo | None], factors: Sequence[Any], sizes: tuple[int, int, int], batch: int
) -> bool:
    """Return whether the scales are block scales.

    Otherwise, each argument is a single scale or has one scale per row or column.

    Raises ArgumentError for a scale of another shape, or if only one of the two arguments has block scales.
    """
    m, n, k = sizes
    blocks = ceil_div(k, SCALE_BLOCK), ceil_div(n, SCALE_BLOCK)
    cases = [
        ("a_scale", scales[0], factors[0], ((m,), (m, 1)), (m, blocks[0])),
        ("b_scale", scales[1], factors[1], ((n,), (1, n)), blocks),
    ]
    plain = [info is None or info.size_elems == 1 or info.shape in vectors for _, info, _, vectors, _ in cases]
    if all(plain):
        return False
    # Report a scale whose shape is never allowed before a scale that does not match the other one.
    for is_plain, (field, info, factor, vectors, shape) in sorted(zip(plain, cases, strict=True), key=itemgetter(0)):
        if info is None:
            raise ArgumentError(field, factor, f"an array of shape {shape} (the other operand has block scales)")
        if info.shape not in (shape, (batch, *shape)) and not info.size_elems == math.prod(shape) == 1:
            any_shape = f"one element, {vectors[0]}, or {shape} if both arguments have block scales"
            allowed = f"{shape} (the other operand has block scales)" if is_plain else any_shape
            raise ArgumentError(f"{field}.shape", info.shape, allowed)
    return True


def _scale_strides(a_scale: ArrayInfo | None, b_scale: ArrayInfo | None) -> dict[str, int]:
    """Return the strides between scales, in elements, keyed by the names of the struct's members.

    The stride of an axis with one element is 0.
    """
    steps: list[int] = []
    for info in (a_scale, b_scale):
        axes = [(1, 0)] * 3 if info is None else [(1, 0)] * 3 + list(zip(info.shape, info.strides_bytes, strict=True))
        if len(axes) == 4 and not steps:  # one scale per row of a
            axes.append((1, 0))
        steps += [stride // 4 if extent > 1 else 0 for extent, stride in axes[-3:]]
    return dict(zip(_SCALE_STRIDES, steps, strict=True))
