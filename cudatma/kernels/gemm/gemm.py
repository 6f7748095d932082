"""gemm: c = a b in fp16, bf16 or fp8."""

from __future__ import annotations

import math
import numbers
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import Arguments, Sizes
from cudatma.kernels.choice_table import choice_table, choose_again
from cudatma.kernels.engine import run
from cudatma.kernels.family import MAX_EXTENT
from cudatma.kernels.gemm.arguments import (
    arranged,
    copy_kernels,
    gemm_arguments,
    layouts_up_to,
    size_key,
    sizes_for,
)
from cudatma.kernels.gemm.choose import GEMM
from cudatma.kernels.gemm.matrices import letter_of
from cudatma.kernels.gemm.problem import NUMPY, SCALE_BLOCK, Problem, operands_of
from cudatma.kernels.gemm.request import Request, check_call
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.gemm.versions import chosen_version
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.host import host_array
from cudatma.kernels.operation import Checked, Operation
from cudatma.kernels.version import naming
from cudatma.target import get_target


def gemm(
    a: Any,
    b: Any,
    *,
    out: Any = None,
    bias: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation: str | None = None,
    out_dtype: Any = None,
    a_scale: Any = None,
    b_scale: Any = None,
    batch_invariant: bool = False,
    version: str | int = "auto",
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Compute c = activation(alpha a_scale b_scale a b + beta c + bias), summed in fp32 and rounded once.

    There is no backward pass: tensors that require grad raise while torch records.

    Parameters
    ----------
    a : array (M, K) or (batch, M, K)
        Left operand in fp16, bf16 or fp8 (float8_e4m3fn, float8_e5m2): CuPy, torch, DLPack or
        ``__cuda_array_interface__``; NumPy on the emulator.
    b : array (K, N) or (batch, K, N)
        Right operand of the same dtype, library and device. One matrix may serve the whole batch.
    out : array (M, N) or (batch, M, N), optional
        The result c, with contiguous rows. Default: a new array of a's library. ``beta`` needs it.
    bias : array (N,), optional
        Added to each row, of the result's dtype.
    alpha, beta : float
        Factors of the product and of the former values of ``out``.
    activation : str, optional
        ``"relu"``, ``"gelu"`` (by erf), ``"gelu_tanh"`` or ``"silu"``.
    out_dtype : dtype, optional
        float16, bfloat16 or float32. Default: that of ``out``, else of a, and bfloat16 for fp8.
    a_scale, b_scale : float or fp32 array, optional
        One number, or one for each row (M,) and column (N,). For fp8 on SM90 also one for each block:
        (M, ceil(K / 128)) and (ceil(K / 128), ceil(N / 128)), with the batch in front if they differ within it. TMA
        reads those of a if the scales of neighboring rows are adjacent and each block's begin at a multiple of 16
        bytes.
    batch_invariant : bool, default False
        Compute a row's bits independently of M.
    version : {"auto", 1, ..., 7, "p1"}
        Version of the kernel (docs/gemm.md). The environment or a file may set it, too (kernels/version.py).
    backend : str, optional
        As for ``marlin_gemm``.
    stream : stream, optional
        Default: the current stream of a's library.

    Returns
    -------
    array (M, N) or (batch, M, N)
        ``out``.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For arguments that do not fit each other.
    TargetError
        If no kernel serves the problem on the GPU.
    LaunchError
        In a graph capture, for a first call or an operand that has to be copied.
    CompileError, DriverError, HazardError
        If a kernel does not compile or load, or, on the emulator, has a hazard.

    Notes
    -----
    Kernels read row-major and column-major operands whose rows or columns begin at multiples of 16 bytes; for fp8, a
    row-major a and a column-major b. Other operands are copied first, as gemm_explain() reports.

    wgmma adds fp8 products with fewer bits than fp32 has; with block scales only within each 128 of K.
    """
    number, asked_by = chosen_version(version)
    a_factor, a_array = _factor(a_scale)
    b_factor, b_array = _factor(b_scale)
    options = alpha, beta, activation, out_dtype, batch_invariant, number, a_factor, b_factor
    kinds = alpha.__class__, beta.__class__, batch_invariant.__class__, a_factor.__class__, b_factor.__class__
    inputs = a, b, a_array, b_array, bias
    with naming(asked_by):
        return run(GEMM_CALL, inputs, out, (*options, kinds), stream, backend)


def _factor(scale: Any) -> tuple[Any, Any]:
    """Return a scale as a number or as an array."""
    return (scale, None) if scale is None or isinstance(scale, numbers.Real) else (None, scale)


class Gemm(Operation[Problem, GemmSpec]):
    """gemm as an operation. Its options are the factors, the activation, the result's dtype, and the version."""

    name: ClassVar[str] = "gemm"
    inputs: ClassVar[tuple[str, ...]] = ("a", "b", "a_scale", "b_scale", "bias")
    fixed_axes: ClassVar[tuple[int | None, ...]] = (1, None, 1, None, None, 1)

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], subject: Any) -> Checked[Problem]:
        """Validate a call."""
        a, b, a_scale, b_scale, bias = inputs
        alpha, beta, activation, out_dtype, batch_invariant, version, a_factor, b_factor, _ = options
        scales = a_factor if a_scale is None else a_scale, b_factor if b_scale is None else b_scale
        request, shape, result = check_call(
            a, b, out, bias, alpha, beta, activation, out_dtype, *scales, batch_invariant
        )
        if not request.batch or not request.sizes[0] or not request.sizes[1]:
            problem: Any = None  # there is nothing to compute
        else:
            problem = request.problem(version, result)
        infos = tuple(request.read.values())
        return Checked(problem, infos, result, shape, NUMPY[request.out_dtype], source=request)

    def resized(
        self, problem: Problem, shapes: Sequence[Any], strides_bytes: Sequence[Any], numbers: tuple[int, ...]
    ) -> tuple[Problem, tuple[int, ...], None] | None:
        """Return the problem with another M, if it is a product of two matrices without block scales."""
        a, b, a_scale, _, _, out = shapes
        if problem.batch > 1 or len(b) > 2 or problem.block_scales:
            return None
        m = a[0] if len(a) == 2 else a[0] * a[1]
        if m > MAX_EXTENT or (out is not None and out[:-1] != a[:-1]):
            return None
        if a_scale and a_scale[0] not in (1, m):
            return None
        return problem.with_m(m), (*a[:-1], problem.n), None

    def masks(self, problem: Problem) -> tuple[int, ...]:
        """TMA reads a and b, and A's scales if it can; the others are read by elements."""
        bias = NUMPY[problem.result_dtype].itemsize - 1
        return 15, 15, 15 if problem.block_scales else 3, 3, bias, 15

    def arranged(self, checked: Checked[Problem], backend: str, stream: int | None) -> Checked[Problem]:
        """Copy operands that the kernels cannot read."""
        request: Request = checked.source
        ready = arranged(request, backend, stream)
        if ready is request:
            return checked
        problem = ready.problem(checked.problem.version)
        operands = operands_of(problem)._replace(out=operands_of(checked.problem).out)
        return checked._replace(problem=replace(problem, operands=operands), arrays=tuple(ready.read.values()))

    def plan_key(self, problem: Problem) -> Hashable:
        """All but M."""
        return problem.fixed, problem.operands

    def configure(self, problem: Problem, gpu: Gpu, memo: dict[Any, Any]) -> GemmSpec:
        """Return the kernel for a problem."""
        return choose_again(GEMM, problem, gpu, memo)

    def kernels(self, problem: Problem, config: GemmSpec) -> tuple[tuple[str, Any], ...]:
        """Return the one kernel."""
        return ((config.template, config),)

    def kernels_up_to(self, checked: Checked[Problem], max_m: int, gpu: Gpu) -> Iterator[tuple[str, Any]]:
        """Yield the kernels of each choice table that such calls use, and the copies of operands."""
        request: Request = checked.source
        if checked.problem is None:
            raise ArgumentError("a.shape, b.shape", (request.a.shape, request.b.shape), "a result with elements")
        layouts = list(layouts_up_to(request.a, max_m))
        letters = {letter_of(layout, "R") for layout in layouts}
        for problem in _alike(checked.problem, letters, shares_b=not request.b.strides_bytes[0]):
            for spec in choice_table(GEMM, problem, gpu, max_m).specs_up_to(max_m):
                yield spec.template, spec
        yield from copy_kernels(layouts, "a", gpu)
        yield from copy_kernels([request.b], "b", gpu)

    def arguments(
        self, problem: Problem, config: GemmSpec, gpu: Gpu, resident: tuple[int, ...]
    ) -> tuple[Arguments, ...]:
        """Return the launch of a problem."""
        return (gemm_arguments(problem, config, get_target(gpu.target), gpu.sm_count),)

    def sizes(
        self, problem: Problem, config: GemmSpec, gpu: Gpu, resident: tuple[int, ...], memo: dict[Any, Any]
    ) -> tuple[Sizes, ...]:
        """Return the sizes of the launch. Two M with the same number of tiles differ in one or two words."""
        key = size_key(problem, config)
        of_m = memo.get(key)
        if of_m is None:
            of_m = memo[key] = sizes_for(problem, config, get_target(gpu.target), gpu.sm_count)
        return (of_m(problem.m),)

    def reference(self, problem: Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        """Compute the result in fp32, rounded once."""
        _reference(problem, {name: host_array(info) for name, info in arrays.items()})


GEMM_CALL = Gemm()


def _alike(problem: Problem, letters: Iterable[str], *, shares_b: bool) -> Iterator[Problem]:
    """Yield the problems, with one row, of calls that differ in M only.

    letters: layouts of a, which may be both for one row. shares_b: whether one b serves the batch, which is then
    computed as one matrix if the layout and the scales of its a allow it.
    """
    batches = {problem.batch, 1} if shares_b else {problem.batch}
    for letter, batch in product(sorted(letters), sorted(batches)):
        one = replace(problem, m=1, layout=letter + problem.layout[1], batch=batch, operands=None)
        # Whether TMA can read A's scales of blocks depends on M, unless the caller pads them.
        by_tma = (False, True) if problem.block_scales else (False,)
        yield from (replace(one, scales_by_tma=each) for each in by_tma)


def _reference(problem: Problem, arrays: dict[str, Any]) -> None:
    with np.errstate(all="ignore"):  # as the GPU: infinities and NaNs are results
        operands, n, k = operands_of(problem), problem.n, problem.k
        a, b, out = arrays["a"].astype(np.float32), arrays["b"].astype(np.float32), arrays["out"]
        scales = [arrays.get(name, np.ones((1, 1), np.float32)) for name in ("a_scale", "b_scale")]
        scales = [one.reshape(1, 1) if one.size == 1 else one for one in scales]
        if problem.block_scales:
            a_blocks, b_blocks = (_repeated(one, -1) for one in scales)
            a = a * a_blocks[..., :k]
            b = b * _repeated(b_blocks[..., :n], -2)[..., :k, :]
            values = np.float32(operands.alpha) * (a @ b)
        else:
            values = np.float32(operands.alpha) * (a @ b) * scales[0].reshape(-1, 1) * scales[1].reshape(1, -1)
        if operands.beta:
            values += np.float32(operands.beta) * out.astype(np.float32)
        if "bias" in arrays:
            values += arrays["bias"].astype(np.float32)
        out[...] = _activated(values, problem.epilogue).reshape(out.shape).astype(out.dtype)


def _repeated(scales: Any, axis: int) -> Any:
    """Return each scale for the elements of its block."""
    return np.repeat(scales, SCALE_BLOCK, axis=axis)


def _activated(x: Any, name: str) -> Any:
    if name == "relu":
        return np.where(x < 0, np.float32(0), x)
    if name == "gelu":
        scaled = np.float32(0.5) * x * (1 + np.vectorize(math.erf, otypes=[np.float32])(x * np.float32(math.sqrt(0.5))))
        return np.where(np.isneginf(x), np.float32(0), scaled)  # the limit, as the kernels have it
    if name == "gelu_tanh":
        return (
            np.float32(0.5) * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
        )
    return x / (1 + np.exp(-x)) if name == "silu" else x
