"""What a caller of gemm() asks for, and the members of the struct that tells it the kernel. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cudatma.dtypes import ACTIVATION_TYPES, BFLOAT16
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.family import MAX_EXTENT
from cudatma.kernels.launch_struct import MEMBERS as WORK_MEMBERS
from cudatma.kernels.launch_struct import Member

#: Of A and B: R is row-major, C column-major. RC, where elements along K lie side by side in both, is torch's linear.
LAYOUTS = ("RC", "RR", "CR", "CC")
#: Types of A and B, and their names in wgmma; the types of C.
OPERAND_TYPES = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
RESULT_TYPES = (*ACTIVATION_TYPES, "float32")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
#: What happens to the products before they are rounded: nothing; alpha, beta, bias, scales; the same and an activation.
EPILOGUES = ("none", "linear", *ACTIVATIONS)
#: Blocks of K, and of N, that have a scale of their own.
SCALE_BLOCK = 128
#: Rows of a wgmma.
WGMMA_M = 64


#: The result's, in NumPy.
NUMPY = {name: BFLOAT16 if name == "bfloat16" else np.dtype(name) for name in RESULT_TYPES}
#: Of the launch struct.
MEMBERS = WORK_MEMBERS | {
    member.name: member
    for member in (
        Member("output_by_tma", "u32", "1: TMA can write the result"),
        Member("alternates", "u32", "1: every other tile of a CTA goes through K backwards"),
        Member("matrix_tiles_m", "u32", "tiles along M of one matrix of the batch"),
        Member("alpha", "float", "factor of the products"),
        Member("beta", "float", "factor of what the result held before"),
        Member("by_matrix_tiles_m", "Divisor", "divides by matrix_tiles_m"),
        Member("output_batch", "u64", "elements from one matrix of the result to the next"),
        Member("a_box_rows", "u32", "rows of a box of A"),
        Member("stage_bytes", "u32", "that the boxes of a stage deliver"),
        Member("a_pitch", "u64", "elements from one row of A to the next, or from one column"),
        Member("b_pitch", "u64", "elements from one row of B to the next, or from one column"),
        Member("a_batch", "u64", "elements from one matrix of A to the next"),
        Member("b_batch", "u64", "elements from one matrix of B to the next"),
        Member("a_scale_row", "u64", "elements from one row's scale to the next; 0: one for all"),
        Member(
            "b_scale_column",
            "u64",
            "elements from the scale of one column, or block of them, to the next; 0: one for all",
        ),
        Member("a_scale_k", "u64", "elements from the scale of one block of K to the next"),
        Member("b_scale_k", "u64", "the same of B"),
        Member("a_scale_batch", "u64", "elements from the scales of one matrix to the next"),
        Member("b_scale_batch", "u64", "the same of B"),
    )
}


def is_fp8(dtype: str) -> bool:
    return dtype.startswith("float8")


def kernel_name(version: int | str) -> str:
    """Of a version's kernel, without the family's: ``"v3"``, ``"p1"``."""
    return f"v{version}" if isinstance(version, int) else version


def element_bytes(dtype: str) -> int:
    """Of A and B."""
    return 1 if is_fp8(dtype) else 2


def default_result(dtype: str) -> str:
    """The type of C where the caller does not say: the operands', for fp8 bf16."""
    return "bfloat16" if is_fp8(dtype) else dtype


def check_result(fields: Any) -> None:
    """Make ``fields.out_dtype``, of a frozen dataclass with a ``dtype``, "" where it is the default. ArgumentTypeError
    unless it is that or one of RESULT_TYPES."""
    if fields.out_dtype == default_result(fields.dtype):
        object.__setattr__(fields, "out_dtype", "")
    elif fields.out_dtype not in ("", *RESULT_TYPES):
        raise ArgumentTypeError("out_dtype", fields.out_dtype, ", ".join(RESULT_TYPES))


class Matrix(NamedTuple):
    """The layout of a batch of matrices whose rows are contiguous, or whose columns are.

    pitch_bytes: from one row, or column, to the next. batch_bytes: from one matrix to the next, 0 for a batch of one.
    is_aligned: whether every row begins at a multiple of 16 bytes.
    """

    pitch_bytes: int
    batch_bytes: int
    is_aligned: bool


class Operands(NamedTuple):
    """The facts of the operands, besides sizes and addresses, that a launch depends on.

    a, b, out: layouts. scale_strides: elements from one scale to the next, by the names of the struct's members.
    scale_rows: layout of A's scales of blocks where TMA reads them. alpha, beta: factors.
    """

    a: Matrix
    b: Matrix
    out: Matrix
    scale_strides: tuple[tuple[str, int], ...] = ()
    scale_rows: Matrix | None = None
    alpha: float = 1.0
    beta: float = 0.0


@dataclass(frozen=True, slots=True)
class Problem:
    """c (m, n) = a (m, k) b (k, n), ``batch`` times.

    dtype: one of OPERAND_TYPES. layout: one of LAYOUTS. version: of the kernel that has to run; 0: any. out_dtype: one
    of RESULT_TYPES, "" for default_result(). epilogue: one of EPILOGUES. block_scales: each 1 x 128 of a and 128 x 128
    of b has a scale. scales_by_tma: TMA can read those of a. batch_invariant: a row's bits must not
    depend on m. operands: layouts and factors, None where only the choice of a configuration matters. Raises
    ArgumentError, ArgumentTypeError.
    """

    m: int
    n: int
    k: int
    dtype: str
    layout: str = "RC"
    version: int | str = 0
    batch: int = 1
    out_dtype: str = ""
    epilogue: str = "none"
    block_scales: bool = False
    scales_by_tma: bool = False
    batch_invariant: bool = False
    operands: Operands | None = None

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            value = getattr(self, name)
            if type(value) is not int:
                raise ArgumentTypeError(name, type(value).__name__, "int")
            if not 1 <= value <= MAX_EXTENT:
                raise ArgumentError(name, value, f"1 to {MAX_EXTENT}")
        if not isinstance(self.dtype, str) or self.dtype not in OPERAND_TYPES:
            raise ArgumentTypeError("dtype", self.dtype, ", ".join(OPERAND_TYPES))
        check_result(self)
        allowed = {"layout": LAYOUTS, "epilogue": EPILOGUES}
        if is_fp8(self.dtype):
            allowed["layout"] = LAYOUTS[:1]
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ArgumentError(name, getattr(self, name), ", ".join(values))
        if self.block_scales and not is_fp8(self.dtype):
            raise ArgumentError("block_scales", True, f"False for {self.dtype}", "fp8 has scales of blocks")
        if self.scales_by_tma and not self.block_scales:
            raise ArgumentError("scales_by_tma", True, "False without block_scales")

    @property
    def result_dtype(self) -> str:
        """Of c."""
        return self.out_dtype or default_result(self.dtype)

    def with_m(self, m: int) -> Problem:
        """Return the problem of another m, which the caller has checked."""
        made = object.__new__(Problem)
        for read, write in _SLOTS:
            write(made, read(self))
        _SET_M(made, m)
        return made

    @property
    def split_rows(self) -> tuple[bool, bool]:
        """Whether every other row of a, and of b, begins in the middle of one of L2's 32-byte sectors.

        TMA reads such rows at half the speed. The rows are taken to be packed. False for a column-major a, of which it
        depends on m.
        """
        extents = (self.k if self.layout[0] == "R" else 0, self.k if self.layout[1] == "C" else self.n)
        vectors = (-(-extent * element_bytes(self.dtype) // 16) for extent in extents)
        a, b = (count % 2 > 0 for count in vectors)
        return a, b

    @property
    def fixed(self) -> tuple[Any, ...]:
        """All that decides the configuration, but m."""
        return tuple(getattr(self, name) for name in _FIELDS if name not in ("m", "operands"))

    @property
    def constraint(self) -> str:
        """Why only some configurations may serve, in words; empty where all may."""
        return f"version {self.version} is asked for" if self.version else ""

    @property
    def description(self) -> str:
        """In words, for people."""
        told = [f"M = {self.m}, N = {self.n}, K = {self.k}, {self.dtype}, {self.layout}"]
        told += [f"batch of {self.batch}"] if self.batch > 1 else []
        told += [f"to {self.out_dtype}"] if self.out_dtype else []
        told += [f"epilogue {self.epilogue}"] if self.epilogue != "none" else []
        told += [f"block scales{' by TMA' if self.scales_by_tma else ''}"] if self.block_scales else []
        told += ["batch-invariant"] if self.batch_invariant else []
        return ", ".join(told)

    def as_json(self) -> dict[str, Any]:
        """As a tuning entry keeps it."""
        return {name: getattr(self, name) for name in _FIELDS if name not in ("version", "operands")}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Problem:
        """From a tuning entry. Raises KeyError, ArgumentError, ArgumentTypeError."""
        known = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
        return cls(**{name: raw[name] for name in ("m", "n", "k", "dtype", "layout")} | known)


_FIELDS = tuple(Problem.__dataclass_fields__)
#: Functions that read and write a field of the frozen dataclass, which is how with_m() copies it.
_SLOTS = [(vars(Problem)[name].__get__, vars(Problem)[name].__set__) for name in _FIELDS]
_SET_M = vars(Problem)["m"].__set__


def operands_of(problem: Problem) -> Operands:
    """Return the layouts and factors of a problem that is to be launched."""
    if problem.operands is None:
        raise ArgumentError("problem.operands", None, "the layouts of the arrays")
    return problem.operands
